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

BLOCK = 4
MODEL = random_model(seed=5)
BOTH_RUNGS = pytest.mark.parametrize("rung", ["resident_step", "split_kv"])


def serve_and_release(prompts: list[list[int]]) -> PrefixCache:
    """A cache that holds these prompts, whose requests have ended."""
    blocks = KVBlocks(1, 1, 1, BLOCK, 1000, "cpu", torch.float32)
    cache = PrefixCache(blocks)
    for prompt in prompts:
        n_matched, block_ids = cache.match(prompt)
        blocks.reserve_prompt(block_ids, len(prompt) - n_matched)
        cache.insert(prompt, block_ids)
        blocks.free_blocks(block_ids)
    return cache


def test_evictable_blocks_are_known_without_looking_at_any(monkeypatch):
    class Untouched(dict):
        """Entries that may not be gone through."""

        def values(self):
            raise AssertionError("the entries are gone through")

        items = __iter__ = values

    cache, looked_at = serve_and_release([[start] * 8 for start in range(20)]), []
    monkeypatch.setattr(cache.blocks, "ref_count", looked_at.append)
    monkeypatch.setattr(cache, "holdings", lambda: looked_at.append("all"))
    cache._entries = Untouched(cache._entries)
    assert cache.num_evictable() == 40
    assert looked_at == []


def test_lookup_compares_a_query_with_few_entries():
    compared = []

    class Token(int):
        __hash__ = int.__hash__

        def __eq__(self, other):
            compared.append(other)
            return int(self) == int(other)

    cache = serve_and_release([[1, 2, 3, *rest] for rest in random_prompts([4] * 500)])
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


@BOTH_RUNGS
def test_a_prompt_evicts_for_the_blocks_that_its_match_does_not_bring(rung):
    engine = small_engine(MODEL, recipe=rung, prefix_cache=True, num_kv_blocks=6)
    stem, other = random_prompts([16, 9])
    generate(engine, [other], 1)
    generate(engine, [stem], 1)
    sequences = greedy_sequences(engine, [[*stem, 1], [*stem, 2]], 1)
    engine.prefill(sequences)
    assert len(engine.prefix_cache) == 4 and engine.blocks.num_free_blocks() == 0
    assert [s.output for s in sequences] == [uncached_greedy(MODEL, s.prompt, 1) for s in sequences]
