"""The prefix cache beside ``tests/soak``: what it looks at; an engine evicts no more than it must."""

from __future__ import annotations

import pytest
import torch

from rosellm.roseinfer.cache.kv_blocks import KVBlocks
from rosellm.roseinfer.cache.prefix_cache import PrefixCache
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


def test_lookup_compares_a_query_with_few_entries():
    compared = []

    class Token(int):
        __hash__ = int.__hash__

        def __eq__(self, other):
            compared.append(other)
            return int(self) == int(other)

    cache = PrefixCache(KVBlocks(1, 1, 1, 4, 1001, "cpu", torch.float32))
    for rest in random_prompts([4] * 500):
        block_ids: list[int] = []
        cache.blocks.reserve_prompt(block_ids, 7)
        cache.insert([1, 2, 3, *rest], block_ids)
    n_matched, _ = cache.match([Token(t) for t in (1, 2, 3, 200, 201)])
    assert n_matched == 3
    assert len(compared) < 100


def test_entries_survive_decode_steps_that_need_no_block():
    engine = small_engine(MODEL, recipe="resident_step", prefix_cache=True, num_kv_blocks=5)  # of 8 tokens
    engine.budget.run_ahead = 0
    (one,) = greedy_sequences(engine, random_prompts([8]), 20)
    generate(engine, random_prompts([9], seed=1), 1)
    engine.prefill([one])
    left = []
    for _ in range(17):
        engine.decode([one])
        left.append((engine.blocks.num_free_blocks(), len(engine.prefix_cache)))
    assert left == [(1, 2)] * 8 + [(0, 2)] * 8 + [(1, 1)]
    assert one.output == uncached_greedy(MODEL, one.prompt, one.n_output)


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
    assert len(engine.prefix_cache) == 4 and engine.blocks.num_free_blocks() == 0
    assert [s.output for s in sequences] == [uncached_greedy(MODEL, s.prompt, 1) for s in sequences]
