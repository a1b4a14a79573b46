"""The block manager: shared blocks, copies on write, exhaustion, and whose slots are written."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rosellm.errors import KVCacheExhausted
from rosellm.roseinfer.cache.kv_blocks import KVBlocks, blocks_for

LAYERS, HEADS, DIM, BLOCK, POOL = 2, 2, 3, 4, 9


def make_manager(n_blocks: int = POOL) -> KVBlocks:
    return KVBlocks(LAYERS, HEADS, DIM, BLOCK, n_blocks, "cpu", torch.float32)


def books(manager: KVBlocks) -> tuple:
    """Everything that a failed call must leave alone."""
    held = {
        b: (n, manager.length(b)) for b in range(manager.max_blocks_per_layer) if (n := manager.ref_count(b))
    }
    return held, manager.num_free_blocks(), manager.k_cache.tolist(), manager.v_cache.tolist()


def token(value: float, n: int = 1) -> torch.Tensor:
    return torch.full((n, HEADS, DIM), float(value))


def test_a_shared_partial_block_is_cloned_before_the_write_and_a_full_one_is_followed():
    manager, mine = make_manager(), []
    manager.append_token(0, mine, token(1)[0], token(1)[0])
    theirs = list(mine)
    manager.incref_blocks(theirs)
    before = manager.k_cache[0, theirs[0]].clone()
    manager.append_token(0, mine, token(2)[0], token(2)[0])
    assert mine != theirs
    assert torch.equal(manager.k_cache[0, theirs[0]], before)
    assert manager.length(theirs[0]) == 1 and manager.length(mine[0]) == 2
    manager.reserve_prompt(mine, BLOCK - 2)
    theirs = list(mine)
    manager.incref_blocks(theirs)
    manager.append_token(0, mine, token(1)[0], token(1)[0])
    assert mine[:1] == theirs and len(mine) == 2 and manager.ref_count(mine[0]) == 2


def test_a_clone_copies_the_block_in_every_layer_and_no_other():
    manager, mine = make_manager(), []
    for cache in (manager.k_cache, manager.v_cache):
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(0)))
    manager.reserve_prompt(mine, BLOCK + 2)
    manager.incref_blocks(mine)
    before = [manager.k_cache.clone(), manager.v_cache.clone()]
    target = manager.clone_block(mine[1], 2)
    for cache, old in zip((manager.k_cache, manager.v_cache), before, strict=True):
        expected = old.clone()
        expected[:, target] = old[:, mine[1]]
        assert torch.equal(cache, expected) and not torch.equal(cache, old)


def test_an_append_writes_its_slots_only():
    manager = make_manager()
    manager.k_cache.fill_(float("nan"))
    manager.v_cache.fill_(float("nan"))
    lists = [[], []]
    for _ in range(2):
        manager.append_token_batch(1, lists, token(1, 2), token(2, 2))
    written = torch.zeros(LAYERS, POOL, HEADS, BLOCK, DIM, dtype=torch.bool)
    for ids in lists:
        written[1, ids[0], :, :2] = True
    assert torch.equal(manager.k_cache.isnan(), ~written)
    assert torch.equal(manager.v_cache.isnan(), ~written)


def test_exhaustion_names_the_counts_and_changes_nothing():
    manager, mine = make_manager(2), []
    with pytest.raises(KVCacheExhausted, match="needs 3 more blocks and 2 of 2 are free"):
        manager.reserve_prompt(mine, 3 * BLOCK)
    manager.reserve_prompt(mine, 1)
    manager.incref_blocks(mine)
    before, old = books(manager), list(mine)
    with pytest.raises(KVCacheExhausted, match="needs 2 more blocks and 1 of 2 are free"):  # one is a clone
        manager.reserve_prompt(mine, BLOCK)
    with pytest.raises(KVCacheExhausted, match="needs 2 more blocks"):
        manager.append_token_batch(0, [mine, []], token(1, 2), token(1, 2))
    assert before == books(manager) and mine == old


def test_blocks_that_more_would_leave_than_hold_them_stay_as_they_are_and_a_free_one_has_no_length():
    manager, mine = make_manager(), []
    manager.reserve_prompt(mine, 2 * BLOCK)
    manager.incref_blocks(mine)
    before = books(manager)
    with pytest.raises(KeyError, match="has 2 holders; 3 cannot be removed"):
        manager.free_blocks([mine[0]] + [mine[1]] * 3)
    assert before == books(manager)
    manager.free_blocks(mine * 2)
    manager.check_integrity()
    assert manager.num_free_blocks() == POOL
    with pytest.raises(KeyError):
        manager.length(mine[0])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(tokens, blocks):
    assert blocks_for(tokens, 4) == blocks


RESIDENT = """
import psutil, torch
from rosellm.roseinfer.cache.kv_blocks import KVBlocks
resident = lambda: psutil.Process().memory_info().rss
before = resident()
blocks = KVBlocks(8, 8, 64, 16, 2048, "cpu", torch.{dtype})
n_bytes = blocks.k_cache.nbytes + blocks.v_cache.nbytes
assert blocks.k_cache.dtype == torch.{dtype} and blocks.k_cache.shape == (8, 2048, 8, 16, 64)
assert not blocks.k_cache[:, :2].any() and n_bytes >= 2**29, n_bytes
blocks.k_cache[:, 0] = 1
assert resident() - before < n_bytes / 4, (resident() - before, n_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_s_cache_takes_no_memory_before_it_is_written(dtype):
    subprocess.run([sys.executable, "-c", RESIDENT.format(dtype=dtype)], check=True, timeout=120)
