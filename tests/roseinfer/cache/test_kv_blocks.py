"""The block manager beside ``tests/soak``: whose slots are written, what its errors say, and its memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rosellm.errors import KVCacheExhausted
from rosellm.roseinfer.cache.kv_blocks import KVBlocks

LAYERS, HEADS, DIM, BLOCK, POOL = 2, 2, 3, 4, 9


def make_manager(n_blocks: int = POOL) -> KVBlocks:
    return KVBlocks(LAYERS, HEADS, DIM, BLOCK, n_blocks, "cpu", torch.float32)


def test_an_append_writes_its_slots_only():
    manager, lists = make_manager(), [[], []]
    manager.k_cache.fill_(float("nan"))
    manager.v_cache.fill_(float("nan"))
    for _ in range(2):
        manager.append_token_batch(1, lists, torch.ones(2, HEADS, DIM), torch.ones(2, HEADS, DIM))
    written = torch.zeros(LAYERS, POOL, HEADS, BLOCK, DIM, dtype=torch.bool)
    for ids in lists:
        written[1, ids[0], :, :2] = True
    assert torch.equal(manager.k_cache.isnan(), ~written)
    assert torch.equal(manager.v_cache.isnan(), ~written)


def test_an_error_names_the_counts():
    with pytest.raises(KVCacheExhausted, match="needs 3 more blocks and 2 of 2 are free"):
        make_manager(2).reserve_prompt([], 3 * BLOCK)


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
