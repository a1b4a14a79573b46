"""Recipes: one difference a rung, impossible ones refused in a sentence, every possible one builds."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from functools import cache
from itertools import combinations

import pytest

from rosellm.errors import RecipeError
from rosellm.ladder.museum import AXES, MUSEUM
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import BEFORE, BEST_RUNG, LADDER, RECIPES, Recipe, get_rung, recipe_choices
from tests.helpers import FAMILIES, generate, random_model, random_prompts, small_config, small_engine

CHOICES = recipe_choices()
ALONE_IMPOSSIBLE = (
    {"activation": "epilogue"},
    {"gemm": "small_m"},
    {"all_reduce": "one_shot"},
    {"exhibit": "persistent_layers"},
    {"numerics": "invariant"},
)


def built(**fields) -> Recipe | str:
    """The recipe, or the sentence that refuses it."""
    try:
        return Recipe(**fields)
    except RecipeError as error:
        return str(error)


N_DRAWN, N_BUILT = 4_000, 12


@cache
def drawn_fields() -> list[dict[str, str]]:
    """Combinations drawn with a seed, and those one or two fields away from a rung."""
    draw = random.Random(0)
    drawn = [{name: draw.choice(values) for name, values in CHOICES.items()} for _ in range(N_DRAWN)]
    changes = [(name, value) for name, values in CHOICES.items() for value in values]
    near = [asdict(recipe) | dict(pair) for recipe in RECIPES.values() for pair in combinations(changes, 2)]
    return drawn + near


@cache
def possible_recipes() -> list[Recipe]:
    made = (built(**fields) for fields in drawn_fields())
    return list(dict.fromkeys(one for one in made if isinstance(one, Recipe)))


def test_the_ladder_is_the_museum_and_then_the_recipes_each_described_along_every_axis():
    assert list(LADDER) == [*MUSEUM, *RECIPES]
    assert {tuple(rung.as_dict()) for rung in LADDER.values()} == {tuple(AXES)}
    assert list(LADDER)[0] == "dense" and LADDER[BEST_RUNG].exhibit == "none"
    assert [name for name, rung in LADDER.items() if rung.launch == "autotuned"] == ["autotune"]


@pytest.mark.parametrize("rung", BEFORE)
def test_a_rung_differs_from_the_one_before_in_exactly_one_field(rung):
    assert len(LADDER[BEFORE[rung]].difference(LADDER[rung])) == 1


@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_variant_is_refused_with_what_is_allowed(name):
    with pytest.raises(RecipeError) as caught:
        Recipe(**{name: "wrong"})
    assert all(word in str(caught.value) for word in (name, "'wrong'", *CHOICES[name]))


def test_an_impossible_combination_is_refused_in_one_sentence_that_names_a_field_as_it_was_given():
    refused = [(fields, built(**fields)) for fields in drawn_fields() if isinstance(built(**fields), str)]
    refused += [(one, built(**one)) for one in ALONE_IMPOSSIBLE]
    assert len(refused) > len(ALONE_IMPOSSIBLE) and possible_recipes()
    for fields, sentence in refused:
        assert "\n" not in sentence and len(sentence) < 200 and " needs " in sentence
        assert any(f"{name}={value!r}" in sentence for name, value in fields.items())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_possible_recipes_build_and_give_the_same_tokens(device):
    gpt, prompts = random_model(0).to(device), random_prompts([3, 8])
    recipes = random.Random(1).sample(possible_recipes(), N_BUILT)
    outputs = [generate(small_engine(gpt, recipe=r, num_kv_blocks=4), prompts, 3) for r in recipes]
    assert all(output == outputs[0] for output in outputs)


def test_an_engine_takes_a_rung_by_name_or_any_recipe():
    recipe = replace(RECIPES[BEST_RUNG], gemm="library")
    named, own = (Engine(random_model(0), num_kv_blocks=4, recipe=r) for r in ("paged", recipe))
    assert (named.rung, named.recipe) == ("paged", LADDER["paged"])
    assert (own.rung, own.recipe) == (None, recipe)


def test_an_unknown_rung_or_one_that_cannot_run_the_model_is_refused_with_the_reason():
    config = small_config(**FAMILIES["qwen3"] | {"family": "qwen3"})
    with pytest.raises(RecipeError, match="'persistent_layers' cannot run a model of family qwen3: its one"):
        Engine(random_model(0, config), recipe="persistent_kernel", num_kv_blocks=4)
    with pytest.raises(RecipeError, match="'fastest'") as caught:
        get_rung("fastest")
    assert all(rung in str(caught.value) for rung in LADDER)
