"""The prefix cache beside ``tests/soak``: an engine evicts for what it has to write."""

from __future__ import annotations

import pytest

from tests.helpers import (
    decode_all,
    generate,
    greedy_sequences,
    random_model,
    random_prompts,
    small_engine,
    uncached_greedy,
)

MODEL = random_model(seed=5)


def test_a_step_evicts_for_a_shared_last_block_that_it_has_to_clone():
    engine = small_engine(MODEL, recipe="resident_step", prefix_cache=True, num_kv_blocks=3)
    generate(engine, random_prompts([9], seed=1), 1)
    (one,) = greedy_sequences(engine, random_prompts([5]), 4)
    engine.prefill([one])
    assert (engine.blocks.num_free_blocks(), len(engine.prefix_cache)) == (0, 2)
    engine.decode([one])
    assert list(engine.prefix_cache._entries) == [tuple(one.prompt)]
    assert decode_all(engine, [one]) == [uncached_greedy(MODEL, one.prompt, 4)]


@pytest.mark.parametrize("rung", ["resident_step", "split_kv"])
def test_a_prompt_evicts_for_the_blocks_that_its_match_does_not_bring(rung):
    engine = small_engine(MODEL, recipe=rung, prefix_cache=True, num_kv_blocks=6)
    stem, other = random_prompts([16, 9])
    generate(engine, [other], 1)
    generate(engine, [stem], 1)
    sequences = greedy_sequences(engine, [[*stem, 1], [*stem, 2]], 1)
    engine.prefill(sequences)
    assert len(engine.prefix_cache) == 3 and engine.blocks.num_free_blocks() == 0
    assert [s.output for s in sequences] == [uncached_greedy(MODEL, s.prompt, 1) for s in sequences]
