"""Every rung draws alike and keeps engines apart; a museum rung refuses what it cannot do."""

from __future__ import annotations

import pytest
import torch

from rosellm.roseinfer.recipe import BEST_RUNG, LADDER
from rosellm.roseinfer.sampling import SamplingParams
from tests.helpers import (
    MODERN,
    ON_GPU,
    WINDOWED,
    decode_all,
    greedy_sequences,
    random_model,
    random_prompts,
    small_config,
    small_engine,
    uncached_greedy,
)

PROMPTS = random_prompts([1, 2, 7, 8, 9, 17, 30], seed=1)
COUNTS = [16, 3, 9, 1, 12, 5, 16]  # tokens each
MODEL = random_model(3)
ON_TORCH = [name for name, rung in LADDER.items() if rung.launch != "autotuned"]
MODELS = {
    "tied": (0, small_config(eos_token_ids=(3,))),
    "modern": (0, small_config(eos_token_ids=(3,), **MODERN)),
    "windowed": (1, small_config(eos_token_ids=(3,), **WINDOWED)),
}


@pytest.mark.parametrize("rung", ON_TORCH)
def test_draws_by_temperature_beside_greedy_rows_are_those_of_the_resident_step(rung):
    def drawn(name: str) -> list[list[int]]:
        engine = small_engine(MODEL, recipe=name)
        params = (SamplingParams(temperature=t, seed=9, max_tokens=8, ignore_eos=True) for t in (0, 0.7, 1.5))
        sequences = [engine.make_sequence(PROMPTS[i], own) for i, own in enumerate(params)]
        engine.prefill(sequences)
        return decode_all(engine, sequences)

    assert drawn(rung) == drawn("resident_step")


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize(
    "rungs",
    [
        ("dense", BEST_RUNG),
        ("paged", "cuda_graph"),
        (BEST_RUNG, BEST_RUNG),
        ("identity_pos", "full_batch"),
        ("resident_tables", "one_table"),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", MODELS)
def test_two_engines_that_take_turns_at_every_step_do_not_disturb_each_other(model, rungs, device):
    gpt = random_model(*MODELS[model]).to(device)
    engines = [small_engine(gpt, recipe=rung) for rung in rungs]
    batches = [greedy_sequences(engine, PROMPTS, COUNTS) for engine in engines]
    for engine, sequences in zip(engines, batches, strict=True):
        engine.prefill(sequences)
    while any(not s.is_finished for sequences in batches for s in sequences):
        for engine, sequences in zip(engines, batches, strict=True):
            engine.decode([s for s in sequences if not s.is_finished])
    gpt = random_model(*MODELS[model])
    tokens = [uncached_greedy(gpt, prompt, n) for prompt, n in zip(PROMPTS, COUNTS, strict=True)]
    assert [[s.output for s in sequences] for sequences in batches] == [tokens, tokens]


@pytest.mark.parametrize("recipe", ["dense", "paged", "one_table", "resident_step", "dependent_launch"])
def test_what_free_blocks_and_the_unused_ends_of_blocks_hold_changes_no_token(recipe):
    """Of three sequences, one far shorter than the others, whose prompts are cached in two chunks."""
    tokens, logits = [], []
    for fill in (0.0, float("nan")):
        engine = small_engine(MODEL, recipe=recipe)
        engine.blocks.k_cache.fill_(fill)
        engine.blocks.v_cache.fill_(fill)
        sequences = greedy_sequences(engine, random_prompts([3, 14, 23]), 5)
        engine.begin_prefill(sequences, [2, 9, 11])
        engine.prefill(sequences)
        tokens.append(decode_all(engine, sequences))
        logits.append(engine.step.last_logits())
    assert tokens[0] == tokens[1] and torch.equal(*logits)
