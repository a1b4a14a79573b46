"""Pools of blocks: slots in order, and exhaustion that changes nothing."""

from __future__ import annotations

import copy
import random

import pytest

from rosellm.errors import KVCacheExhausted
from rosellm.ladder.pools import SlotPool, TuplePool

BLOCK = 4
KINDS = pytest.mark.parametrize("kind", [TuplePool, SlotPool])


@KINDS
def test_exhaustion_names_the_pool_and_the_counts_and_changes_nothing(kind):
    pool, tables = kind(1, 2, BLOCK), [[], []]
    with pytest.raises(KVCacheExhausted, match="pool 1 needs 3 more KV blocks and 2 of 2 are free"):
        pool.reserve_prompt([], 3 * BLOCK)
    pool.reserve_prompt(tables[0], BLOCK)
    pool.reserve_prompt(tables[1], 1)
    before = copy.deepcopy((pool.infos, pool.free))
    with pytest.raises(KVCacheExhausted, match="pool 1 needs 1 more KV blocks and 0 of 2 are free"):
        pool.reserve_tokens(tables)
    assert (pool.infos, pool.free) == before and list(map(len, tables)) == [1, 1]


@KINDS
@pytest.mark.parametrize("seed", range(3))
def test_random_sequences_have_the_blocks_of_their_tokens_and_give_them_back(kind, seed):
    rng, pool, held = random.Random(seed), kind(0, 12, BLOCK), []
    for _ in range(200):
        kind_of, n = rng.choice(["start", "prompt", "step", "step", "end"]), rng.randrange(9)
        free = len(pool.free)
        if kind_of == "start" and len(held) < 4:
            held.append(([], 0))
        elif kind_of == "prompt" and held and n <= BLOCK * free:
            table, tokens = held.pop()
            pool.reserve_prompt(table, n)
            held.append((table, tokens + n))
        elif kind_of == "step" and len(held) <= free:
            slots = pool.reserve_tokens([table for table, _ in held])
            wanted = [(table[-1], tokens % BLOCK) for table, tokens in held]
            assert list(zip(*slots, strict=True)) == wanted
            held = [(table, tokens + 1) for table, tokens in held]
        elif kind_of == "end" and held:
            pool.release(held.pop(n % len(held))[0])
        blocks = [block for table, _ in held for block in table]
        assert sorted(blocks + pool.free) == list(range(12))
        assert all(pool.tokens_in(table) == tokens for table, tokens in held)
