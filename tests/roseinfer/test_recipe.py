"""Recipes: one difference a rung, every possible one builds, what a device or ranks cannot run is refused."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from functools import cache
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from rosellm import LLM
from rosellm.errors import DeviceError, OptionError, RecipeError
from rosellm.roseinfer import tensor_parallel
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import (
    BEFORE,
    BEST_RUNG,
    LADDER,
    RECIPES,
    Recipe,
    best_rung,
    check_launch,
    get_rung,
    recipe_choices,
)
from tests.helpers import CPU, FAMILIES, generate, random_model, random_prompts, small_config, small_engine

CHOICES = recipe_choices()
ALONE_IMPOSSIBLE = (
    {"activation": "epilogue"},
    {"gemm": "small_m"},
    {"all_reduce": "one_shot"},
    {"exhibit": "persistent_layers"},
    {"numerics": "invariant"},
)
CUDA = torch.device("cuda")
GPU_MODEL = SimpleNamespace(device=CUDA, config=small_config(), whole=small_config())


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
    outputs = []
    for recipe in recipes:
        draft = gpt if recipe.speculation == "draft" else None
        outputs.append(generate(small_engine(gpt, recipe=recipe, num_kv_blocks=4, draft=draft), prompts, 3))
    assert all(output == outputs[0] for output in outputs)


def test_an_unknown_rung_or_one_that_cannot_run_the_model_is_refused_with_the_reason():
    config = small_config(**FAMILIES["qwen3"] | {"family": "qwen3"})
    with pytest.raises(RecipeError, match="'persistent_layers' cannot run a model of family qwen3: its one"):
        Engine(random_model(0, config), recipe="persistent_kernel", num_kv_blocks=4)
    with pytest.raises(RecipeError, match="'fastest'") as caught:
        get_rung("fastest")
    assert all(rung in str(caught.value) for rung in LADDER)


# What a device can run.


@pytest.fixture
def gpu_of(monkeypatch):
    def pretend(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return pretend


@pytest.mark.parametrize(
    ("capability", "rung"),
    [((7, 0), "small_gemm"), ((8, 9), "small_gemm"), ((9, 0), "split_kv"), ((12, 0), "split_kv")],
    ids=str,
)
def test_the_best_rung_has_dependent_launches_from_hopper_on_and_a_cpus_does_not_ask_its_gpu(
    capability, rung, gpu_of
):
    gpu_of(*capability)
    assert best_rung(CUDA) == get_rung(None, CUDA) == rung
    check_launch(LADDER[rung], CUDA)
    assert best_rung(CPU) == get_rung(None, CPU) == BEST_RUNG
    check_launch(LADDER[BEST_RUNG], CPU)


@pytest.mark.parametrize(
    ("capability", "rung", "error", "message"),
    [
        *(
            ((8, 6), name, RecipeError, r"9\.0 or more, cuda has 8\.6: use rung='small_gemm'")
            for name in LADDER
            if LADDER[name].launch == "dependent"
        ),
        ((6, 1), None, DeviceError, r"has compute capability 6\.1; kernels need 7\.0"),
    ],
)
def test_a_gpu_that_cannot_run_a_rung_refuses_it(capability, rung, error, message, gpu_of):
    gpu_of(*capability)
    with pytest.raises(error, match=message) as raised:
        Engine(GPU_MODEL, recipe=rung)
    assert "\n" not in str(raised.value)


# What several ranks can run: the rest is refused in a line, before any process starts.

WRONG_HEADS = "does not divide the model's {} attention heads"
EARLY = (RecipeError, "needs rung 'fused_append' or a later one")
REFUSED = [
    (OptionError, WRONG_HEADS.format(4), {"tensor_parallel_size": 3}),
    (OptionError, WRONG_HEADS.format(6), {"tensor_parallel_size": 4, "model": "rose-tiny-qwen3"}),
    (*EARLY, {"rung": "cuda_graph"}),
    (*EARLY, {"rung": "resident_step"}),
    (*EARLY, {"recipe": LADDER["packed_prefill"]}),
    (RecipeError, "needs exhibit='none'", {"rung": "persistent_kernel"}),
    (RecipeError, "needs numerics='fast'", {"deterministic": True}),
    (RecipeError, "is a Triton kernel", {"recipe": replace(LADDER["split_kv"], all_reduce="one_shot")}),
    (RecipeError, "rung 'fast' is unknown", {"rung": "fast"}),
    (DeviceError, "device 'tpu' is unknown", {"device": "tpu"}),
    *((OptionError, "whole number from 1 to 64", {"tensor_parallel_size": n}) for n in (0, 65, 2.0, None)),
]


@pytest.mark.parametrize(("error", "message", "options"), REFUSED)
def test_what_ranks_cannot_run_is_refused_before_any_starts(error, message, options, monkeypatch):
    monkeypatch.setattr(tensor_parallel, "start_ranks", lambda *_: pytest.fail("a process would be started"))
    with pytest.raises(error, match=message) as raised:
        LLM(**{"tensor_parallel_size": 2, "device": "cpu"} | options)
    assert "\n" not in str(raised.value)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="tensor_parallel_size 2 needs as many GPUs; this machine has 1"):
        LLM(tensor_parallel_size=2, device="cuda")


@pytest.mark.parametrize(
    ("rung", "n_ranks", "device", "kernels", "reaches", "chosen"),
    [
        ("split_kv", 2, "cuda", "triton", {(0, 1), (1, 0)}, "one_shot"),
        ("split_kv", 3, "cuda", "triton", {(0, 1), (1, 0)}, "library"),
        ("split_kv", 2, "cuda", "torch", {(0, 1), (1, 0)}, "library"),
        ("fused_append", 2, "cuda", "triton", {(0, 1), (1, 0)}, "library"),
        ("split_kv", 1, "cuda", "triton", set(), "library"),
        ("split_kv", 2, "cpu", "triton", set(), "library"),
    ],
)
def test_gpus_that_reach_one_another_sum_in_one_shot(
    monkeypatch, rung, n_ranks, device, kernels, reaches, chosen
):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair in reaches)
    assert LADDER[rung].on_ranks(n_ranks, torch.device(device), kernels).all_reduce == chosen
