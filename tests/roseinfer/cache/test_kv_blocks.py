"""The block manager beside ``tests/soak``: a pool for each layer, and its memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rosellm.errors import KVCacheExhausted
from rosellm.roseinfer.engine import KVBlockManager

LAYERS, HEADS, DIM, BLOCK = 2, 2, 3, 4


def append(layered: KVBlockManager, layer: int, ids: list[int], *values: float) -> None:
    for value in values:
        token = torch.full((HEADS, DIM), float(value))
        layered.append_token(layer, ids, token, -token)


def test_each_layer_has_all_its_blocks_whatever_the_others_hold():
    layered = KVBlockManager(LAYERS, HEADS, DIM, BLOCK, 2, "cpu", torch.float32)
    lists: list[list[int]] = [[], []]
    for layer, ids in enumerate(lists):
        append(layered, layer, ids, *range(2 * BLOCK))
    assert sorted(lists[0] + lists[1]) == list(range(LAYERS * 2))
    for layer, ids in enumerate(lists):
        infos = [layered.info(block_id) for block_id in ids]
        assert [(one.layer, one.start) for one in infos] == [(layer, 0), (layer, BLOCK)]
        with pytest.raises(KVCacheExhausted):
            append(layered, layer, ids, 5.0)
        keys = torch.cat([layered.k_cache[layer, one.block_index, 0, :, 0] for one in infos])
        assert keys.tolist() == list(range(2 * BLOCK))
        assert torch.equal(layered.v_cache[layer], -layered.k_cache[layer])


# Memory.

RESIDENT = """
import psutil, torch
from rosellm.roseinfer.cache.kv_blocks import KVBlocks
from rosellm.roseinfer.engine import KVBlockManager
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
