"""Random arguments of attention over a paged cache, and attention by its definition."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
from torch import Tensor

from rosellm.roseinfer.cache.device_state import DeviceState
from tests.roseinfer.kernels.kernel_checks import far_apart, normals

NAN, WILD = float("nan"), 2**30
CACHES = ("k_cache_layer", "v_cache_layer")


def paged_case(
    starts: list[int],
    counts: list[int] | None = None,
    rows: list[int] | None = None,
    *,
    window: int | None = None,
    n_heads: int = 2,
    n_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    scale: float = 1.0,
    far: bool = False,
    parts: int = 1,
) -> dict:
    """Sequences whose first ``starts`` tokens are cached and whose next ``counts`` (1 each) are new.

    q, k_new and v_new are slices of a projection, table and positions those of a device state, whose ``rows``
    the sequences are. Cache slots that hold no token of a sequence's window are NaN. Table entries past its
    blocks and before the window are wild; so are those of an inert row, which has a negative start. far: rows
    of the projection lie far apart. parts: if more than 1, q, k_new and v_new are that many fp32 summands.
    """
    counts, rng, normal = counts or [1] * len(starts), random.Random(seed), normals(seed)
    n_rows = len(starts) if rows is None else max(rows) + 2
    rows = list(range(n_rows)) if rows is None else rows
    n_blocks = [-(-(a + n) // block_size) if a >= 0 else 0 for a, n in zip(starts, counts, strict=True)]
    order = rng.sample(range(sum(n_blocks) + 2), sum(n_blocks) + 2)
    held = torch.zeros(len(order), block_size, dtype=torch.bool)
    table = torch.full((n_rows, max(n_blocks) + 2), WILD, dtype=torch.int32)
    for row, start, n in zip(rows, starts, n_blocks, strict=True):
        first = 0 if window is None else max(0, start - window + 1)
        for i in range(n):
            block, left = order.pop(), first - i * block_size
            held[block, max(0, left) : max(0, start - i * block_size)] = True
            table[row, i] = block if left < block_size else WILD
    state = DeviceState(n_rows, table.shape[1], torch.device(device))
    state.table.copy_(table)
    state.positions[rows] = torch.tensor(starts, dtype=torch.int32, device=device)
    cache = normal(2, len(held), n_kv_heads, block_size, head_dim)
    cache = torch.where(held[None, :, None, :, None], cache, NAN).to(device, dtype)
    heads = n_heads, n_kv_heads, n_kv_heads
    fused = normal(parts, sum(counts), sum(heads), head_dim)
    fused = fused.to(device, dtype if parts == 1 else torch.float32)
    fused = fused if parts > 1 else far_apart(fused[0]) if far else fused[0]
    case = dict(zip(("q", "k_new", "v_new"), fused.split(heads, dim=-2), strict=True))
    case |= {"k_cache_layer": cache[0], "v_cache_layer": cache[1], "block_table": state.table}
    return case | {"positions": state.positions, "scale": scale * head_dim**-0.5}


def attention_by_loops(case: dict, rows: Iterable[int], positions: Iterable[int], window=None) -> Tensor:
    """Each token of ``q`` is written to its row's block, then attends in fp64, head by head; in order."""
    q, out, block_size = case["q"], torch.zeros_like(case["q"]), case["k_cache_layer"].shape[2]
    group = q.shape[1] // case["k_new"].shape[1]
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        if position < 0:
            continue
        blocks, first = case["block_table"][row].tolist(), max(0, position - window + 1) if window else 0
        slots = [(blocks[j // block_size], j % block_size) for j in range(first, position + 1)]
        for head in range(q.shape[1]):
            held = []
            for cache, new in ((case[name], case[name[:2] + "new"]) for name in CACHES):
                cache[slots[-1][0], head // group, slots[-1][1]] = new[i, head // group]
                held.append(torch.stack([cache[block, head // group, j] for block, j in slots]).double())
            scores = held[0] @ q[i, head].double() * case["scale"]
            out[i, head] = scores.softmax(dim=0) @ held[1]
    return out
