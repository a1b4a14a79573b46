"""A rung's step by itself: a small model, and blocks that no sequence holds."""

from __future__ import annotations

from rosellm.ladder.dense import Dense
from rosellm.ladder.museum import STEPS
from rosellm.ladder.pools import PooledBlocks
from rosellm.roseinfer.kernels.table import TORCH, Kernels
from tests.helpers import random_model, small_config

LAYERS, BLOCK, WIDTH, N_BLOCKS = 3, 4, 6, 20
CONFIG = small_config(n_layers=LAYERS)


def make_step(rung: str, device: str = "cpu", kernels: Kernels = TORCH) -> Dense:
    model, kind = random_model(0, CONFIG).to(device), STEPS[rung]
    sizes = LAYERS, N_BLOCKS, CONFIG.n_kv_heads, BLOCK, CONFIG.head_dim
    blocks = PooledBlocks(sizes, model.device, model.dtype, kind.pool_kind, kind.pool_of(LAYERS))
    return kind(model, blocks, kernels, 16, WIDTH * BLOCK)
