"""How many KV blocks there can be."""

from __future__ import annotations

import torch

from rosellm.models.model import GPT

CPU_KV_BYTES = 2 << 30


GPU_KV_SHARE = 0.6


def kv_blocks_within_memory(gpt: GPT, wanted: int, block_size: int) -> int:
    """``wanted`` blocks a layer, or as many as the KV cache may take; at least 1.

    It may take ``GPU_KV_SHARE`` of a GPU's free memory, ``CPU_KV_BYTES`` on a CPU.
    """
    budget = CPU_KV_BYTES
    if gpt.device.type == "cuda":
        budget = int(GPU_KV_SHARE * torch.cuda.mem_get_info(gpt.device)[0])
    block_bytes = block_size * gpt.config.kv_bytes_per_token(gpt.dtype.itemsize)
    return max(1, min(wanted, budget // block_bytes))
