"""The block manager with a pool for each layer, as callers without an engine use it."""

from __future__ import annotations

import pytest
import torch

from rosellm.errors import KVCacheExhausted
from rosellm.roseinfer.engine import KVBlockManager

LAYERS, HEADS, DIM, BLOCK, POOL = 2, 2, 3, 4, 2


@pytest.fixture
def manager() -> KVBlockManager:
    return KVBlockManager(LAYERS, HEADS, DIM, BLOCK, POOL, "cpu", torch.float32)


def append(manager: KVBlockManager, layer: int, ids: list[int], *values: float) -> None:
    for value in values:
        token = torch.full((HEADS, DIM), float(value))
        manager.append_token(layer, ids, token, -token)


def test_each_layer_has_all_its_blocks_whatever_the_others_hold(manager):
    lists: list[list[int]] = [[], []]
    for layer, ids in enumerate(lists):
        append(manager, layer, ids, *range(POOL * BLOCK))
    assert sorted(lists[0] + lists[1]) == list(range(LAYERS * POOL))
    for layer, ids in enumerate(lists):
        infos = [manager.info(block_id) for block_id in ids]
        assert [(one.layer, one.start) for one in infos] == [(layer, 0), (layer, BLOCK)]
        with pytest.raises(KVCacheExhausted):
            append(manager, layer, ids, 5.0)
        keys = torch.cat([manager.k_cache[layer, one.block_index, 0, :, 0] for one in infos])
        assert keys.tolist() == list(range(POOL * BLOCK))
        assert torch.equal(manager.v_cache[layer], -manager.k_cache[layer])


def test_a_block_is_cloned_and_freed_in_its_own_layer(manager):
    mine: list[int] = []
    append(manager, 1, mine, 1.0, 2.0)
    theirs = list(mine)
    manager.incref_blocks(theirs)
    append(manager, 1, mine, 3.0)
    assert mine != theirs and [manager.info(ids[0]).length for ids in (theirs, mine)] == [2, 3]
    manager.free_blocks(theirs + mine)
    assert manager.num_free_blocks(1) == POOL
    with pytest.raises(KeyError):
        manager.free_blocks(theirs)
