"""The block manager against a plain dictionary of what every holder cached."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

from rosellm.errors import KVCacheExhausted, RoseError
from rosellm.roseinfer.cache.kv_blocks import KVBlockInfo, KVBlockManager, MutableKVBlockInfo, blocks_for

LAYERS, HEADS, DIM, BLOCK, POOL = 2, 2, 3, 4, 9


def make_manager(block_info: str = "slots", **changes) -> KVBlockManager:
    sizes = {
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "head_dim": DIM,
        "block_size": BLOCK,
        "max_blocks_per_layer": POOL,
        "device": "cpu",
        "dtype": torch.float32,
    }
    return KVBlockManager(**(sizes | changes), block_info=block_info)


def books(manager: KVBlockManager) -> tuple:
    """Everything that a failed call must leave alone."""
    ids = range(manager.num_pools * manager.max_blocks_per_layer)
    held = {b: (manager.ref_count(b), copy.copy(manager.info(b))) for b in ids if manager.ref_count(b)}
    free = [manager.num_free_blocks(pool) for pool in range(manager.num_pools)]
    return held, free, manager.k_cache.clone(), manager.v_cache.clone()


def same_books(a: tuple, b: tuple) -> bool:
    return a[:2] == b[:2] and torch.equal(a[2], b[2]) and torch.equal(a[3], b[3])


def keys_of(tokens: list[float], layer: int) -> torch.Tensor:
    """The keys ``[n, H, D]`` of these tokens in a layer; values are their negatives."""
    element = torch.arange(HEADS * DIM).view(HEADS, DIM) / 16
    return torch.tensor(tokens)[:, None, None] + element + 10_000 * layer


def token(value: float, n: int = 1) -> torch.Tensor:
    return torch.full((n, HEADS, DIM), float(value))


@pytest.mark.parametrize(("block_info", "kind"), [("tuple", KVBlockInfo), ("slots", MutableKVBlockInfo)])
def test_block_info_is_a_tuple_rebuilt_or_a_record_incremented_in_place(block_info, kind):
    manager, ids = make_manager(block_info), []
    manager.append_token(0, ids, token(1)[0], token(1)[0])
    first = manager.info(ids[0])
    manager.append_token(0, ids, token(2)[0], token(2)[0])
    assert type(first) is kind
    assert (manager.info(ids[0]) is first) == (kind is MutableKVBlockInfo)
    assert manager.info(ids[0]).length == 2


@pytest.mark.parametrize("block_info", ["tuple", "slots"])
def test_positions_are_those_before_the_increment(block_info):
    manager, ids = make_manager(block_info), [[]]
    assert [manager.reserve_tokens(1, ids).pos for _ in range(BLOCK + 1)] == [[0], [1], [2], [3], [0]]


def test_a_full_shared_block_is_followed_by_a_new_one_and_not_cloned():
    manager, mine = make_manager(), []
    manager.reserve_prompt(0, mine, BLOCK)
    theirs = list(mine)
    manager.incref_blocks(theirs)
    manager.append_token(0, mine, token(1)[0], token(1)[0])
    assert mine[0] == theirs[0] and len(mine) == 2
    assert manager.ref_count(mine[0]) == 2


def test_a_shared_partial_block_is_cloned_before_the_write_so_the_other_holder_sees_nothing():
    manager, mine = make_manager(), []
    manager.append_token(0, mine, token(1)[0], token(1)[0])
    theirs = list(mine)
    manager.incref_blocks(theirs)
    before = manager.k_cache[0, manager.info(theirs[0]).block_index].clone()
    manager.append_token(0, mine, token(2)[0], token(2)[0])
    assert mine != theirs
    assert torch.equal(manager.k_cache[0, manager.info(theirs[0]).block_index], before)
    assert manager.info(theirs[0]).length == 1 and manager.info(mine[0]).length == 2


def test_a_shared_pool_is_one_pool_of_which_a_block_is_the_same_index_in_every_layer():
    separate, shared = make_manager(), make_manager(pool="shared")
    assert (separate.num_pools, separate.pool_of) == (LAYERS, tuple(range(LAYERS)))
    assert (shared.num_pools, shared.pool_of) == (1, (0,) * LAYERS)
    assert shared.k_cache.shape == separate.k_cache.shape
    ids = []
    shared.reserve_prompt(0, ids, POOL * BLOCK)
    assert sorted(ids) == list(range(POOL)) and shared.num_free_blocks() == 0
    assert [shared.info(i).block_index for i in ids] == ids


@pytest.mark.parametrize("pool", ["per_layer", "shared"])
def test_a_clone_copies_the_block_in_every_layer_of_its_pool_and_in_no_other(pool):
    manager, mine = make_manager(pool=pool), []
    for cache in (manager.k_cache, manager.v_cache):
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(len(pool))))
    last = manager.num_pools - 1
    manager.reserve_prompt(last, mine, BLOCK + 2)
    manager.incref_blocks(mine)
    source = manager.info(mine[1]).block_index
    before = [manager.k_cache.clone(), manager.v_cache.clone()]
    target = manager.info(manager.clone_block(mine[1], 2)).block_index
    of_pool = [layer for layer in range(LAYERS) if manager.pool_of[layer] == last]
    for cache, old in zip((manager.k_cache, manager.v_cache), before, strict=True):
        expected = old.clone()
        expected[of_pool, target] = old[of_pool, source]
        assert torch.equal(cache, expected) and not torch.equal(cache, old)


def test_appends_layer_by_layer_are_refused_in_a_shared_pool_and_change_nothing():
    manager, ids = make_manager(pool="shared"), []
    before = books(manager)
    with pytest.raises(
        RoseError, match="pool='shared' reserves slots once for all 2 layers; call reserve_tokens"
    ):
        manager.append_token(0, ids, token(1)[0], token(1)[0])
    with pytest.raises(RoseError, match="pool='shared'"):
        manager.append_token_batch(0, [ids], token(1), token(1))
    assert same_books(before, books(manager)) and ids == []


def test_exhaustion_of_a_shared_pool_says_so():
    manager = make_manager(max_blocks_per_layer=2, pool="shared")
    with pytest.raises(KVCacheExhausted, match="the shared pool needs 3 more KV blocks and 2 of 2 are free"):
        manager.reserve_prompt(0, [], 3 * BLOCK)


def test_an_append_writes_its_slots_only():
    manager = make_manager()
    manager.k_cache.fill_(float("nan"))
    manager.v_cache.fill_(float("nan"))
    lists = [[], []]
    manager.append_token_batch(1, lists, token(1, 2), token(2, 2))
    written = torch.zeros(LAYERS, POOL, HEADS, BLOCK, DIM, dtype=torch.bool)
    for ids in lists:
        written[1, ids[0] - POOL, :, 0] = True
    assert torch.equal(manager.k_cache.isnan(), ~written)
    assert torch.equal(manager.v_cache.isnan(), ~written)


def test_exhaustion_names_the_layer_and_the_counts():
    manager = make_manager(max_blocks_per_layer=2)
    with pytest.raises(KVCacheExhausted, match="layer 1 needs 3 more KV blocks and 2 of 2 are free"):
        manager.reserve_prompt(1, [], 3 * BLOCK)


def test_a_prompt_counts_the_clone_of_a_shared_block_among_its_needs():
    manager, mine = make_manager(max_blocks_per_layer=2), []
    manager.reserve_prompt(0, mine, 1)
    manager.incref_blocks(mine)
    before, old = books(manager), list(mine)
    with pytest.raises(KVCacheExhausted, match="layer 0 needs 2 more KV blocks and 1 of 2 are free"):
        manager.reserve_prompt(0, mine, BLOCK)
    assert same_books(before, books(manager)) and mine == old


@pytest.mark.parametrize("holders", [1, 2])
def test_blocks_that_more_would_leave_than_hold_them_stay_as_they_are(holders):
    manager, mine = make_manager(), []
    manager.reserve_prompt(0, mine, 2 * BLOCK)
    for _ in range(holders - 1):
        manager.incref_blocks(mine)
    before = books(manager)
    with pytest.raises(
        KeyError, match=f"block {mine[1]} has {holders} holders; {holders + 1} cannot be removed"
    ):
        manager.free_blocks([mine[0]] + [mine[1]] * (holders + 1))
    assert same_books(before, books(manager))
    manager.free_blocks(mine * holders)
    manager.check_integrity()
    assert manager.num_free_blocks() == POOL


def test_info_of_a_free_block_is_an_error():
    with pytest.raises(KeyError):
        make_manager().info(0)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(tokens, blocks):
    assert blocks_for(tokens, 4) == blocks


RESIDENT = """
import psutil, torch
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager
resident = lambda: psutil.Process().memory_info().rss
before = resident()
blocks = KVBlockManager(8, 8, 64, 16, 2048, "cpu", torch.{dtype})
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
