"""What free blocks and the unused ends of blocks hold, be it NaN, changes no token."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import greedy_sequences, random_model, random_prompts, small_engine

NAN = float("nan")
N_NEW = 5


def tokens(recipe: str, fill: float) -> tuple[list[list[int]], torch.Tensor]:
    """Of three sequences, one far shorter than the others, whose prompts are cached in two chunks."""
    engine = small_engine(random_model(0), recipe=recipe)
    engine.blocks.k_cache.fill_(fill)
    engine.blocks.v_cache.fill_(fill)
    sequences = greedy_sequences(engine, random_prompts([3, 14, 23]), N_NEW)
    engine.begin_prefill(sequences, [2, 9, 11])
    engine.prefill(sequences)
    for _ in range(N_NEW - 1):
        engine.decode(sequences)
    return [s.output for s in sequences], engine.step.last_logits()


@pytest.mark.parametrize("recipe", ["dense", "paged", "one_table", "resident_step", "dependent_launch"])
def test_blocks_full_of_nan_change_no_token(recipe):
    expected, found = tokens(recipe, 0.0), tokens(recipe, NAN)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])
