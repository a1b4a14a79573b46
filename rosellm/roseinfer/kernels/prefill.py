"""Prefill attention over a paged KV cache, packed without padding; it also writes the new tokens' KV.

N new tokens of several sequences are packed back to back. A sequence has ``start`` cached tokens and
``count`` new ones (a chunk of its prompt, or all of it); each new token attends to the cached ones and,
causally, to the new ones, whose keys and values are stored into the cache along the way. H query heads, H_kv
key/value heads (H a multiple of H_kv), D head size; a layer's caches are ``[N_BLOCKS, H_kv, BLOCK_SIZE, D]``,
and a row of the block table lists the blocks of a sequence in order, those of new tokens included.

The work is cut into tiles of consecutive new tokens of one sequence (:class:`Tiles`), once per prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rosellm.errors import OptionError
from rosellm.models.attention import in_window, masked_attention
from rosellm.roseinfer.kernels.paged_cache import layer_arguments, slot_offset
from rosellm.triton_or_none import tl, triton

ROLES = {"_prefill_attention_kernel": "attention"}
BLOCK_M, BLOCK_N = 64, 64  # queries and keys per tile
NUM_WARPS, NUM_STAGES = 4, 3
FP32_BLOCK_N, FP32_NUM_WARPS, FP32_NUM_STAGES = 16, 8, 1  # products in registers, which 64 keys would spill
SMALLEST_DOT = 16  # of each dimension of a Triton matrix product
LOG2_E = math.log2(math.e)
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Tiles:
    """The programs of one prefill: ``columns`` is :func:`tile_columns` on the device, ``size`` its tile size.

    The rows of ``columns`` may be strided; an empty tile does nothing.
    """

    columns: Tensor
    size: int


def tile_columns(starts, counts, rows, tile_size: int) -> np.ndarray:
    """Cut sequences into tiles of at most ``tile_size`` new tokens → ``[6, n_tiles]`` int32, on the host.

    starts and counts: cached and new tokens, one integer per sequence, in packed order; rows: their rows of
    the block table, None for 0, 1, 2 … A tile's six numbers: its first packed row, its number of rows, the
    position of its first token in the sequence, the sequence's first packed row, its start, its table row.
    Tiles that attend to more tokens come first, so that no long tile is left running at the end.
    """
    starts, counts = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    rows = np.arange(len(counts)) if rows is None else np.asarray(rows, np.int64)
    n_tiles = -(-counts // tile_size)  # [B]
    sequence = np.repeat(np.arange(len(counts)), n_tiles)  # [n_tiles]
    first_tile, first_row = np.cumsum(n_tiles) - n_tiles, np.cumsum(counts) - counts  # [B]
    before = (np.arange(len(sequence)) - first_tile[sequence]) * tile_size  # new tokens of earlier tiles
    size = np.minimum(tile_size, counts[sequence] - before)
    position = starts[sequence] + before
    columns = np.stack(
        (first_row[sequence] + before, size, position, first_row[sequence], starts[sequence], rows[sequence])
    )
    return columns[:, np.argsort(-(position + size), kind="stable")].astype(np.int32, order="C")


def make_tiles(starts, counts, rows, tile_size: int, device: torch.device | str) -> Tiles:
    """The tiles of :func:`tile_columns`, sent to ``device`` in one copy."""
    return Tiles(torch.from_numpy(tile_columns(starts, counts, rows, tile_size)).to(device), tile_size)


def prefill_attention_ref(
    *,
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache_layer: Tensor,
    v_cache_layer: Tensor,
    block_table: Tensor,
    tiles: Tiles,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """The specification in plain torch, in fp32 arithmetic, one sequence at a time.

    q ``[N, H, D]``, k_new and v_new ``[N, H_kv, D]``, block_table ``[rows, W]`` int32 (entries past a
    sequence's blocks may be anything) → ``[N, H, D]`` of q's dtype. The caches get k_new and v_new. window:
    the tokens that each attends to, itself included; None: all before it.
    """
    sequences = _sequences(tiles)
    _store_new(k_new, v_new, k_cache_layer, v_cache_layer, block_table, sequences)
    out = q.new_empty(q.shape)
    for first, count, start, row in sequences:
        new = slice(first, first + count)
        blocks = block_table[row, : -(-start // k_cache_layer.shape[2])]
        k = _with_prefix(k_cache_layer, blocks, start, k_new[new])  # [H_kv, start + count, D]
        v = _with_prefix(v_cache_layer, blocks, start, v_new[new])
        out[new] = _causal_attention(q[new].transpose(0, 1).float(), k, v, start, scale, window).transpose(
            0, 1
        )
    return out


def _sequences(tiles: Tiles) -> list[tuple[int, int, int, int]]:
    """First packed row, count, start and table row of each sequence, in packed order."""
    counts: dict[tuple[int, int, int], int] = {}
    for _, n_rows, _, first, start, row in tiles.columns.T.tolist():
        counts[first, start, row] = counts.get((first, start, row), 0) + n_rows
    return sorted((first, count, start, row) for (first, start, row), count in counts.items() if count)


def _store_new(k_new, v_new, k_cache, v_cache, block_table, sequences) -> None:
    block_size = k_cache.shape[2]
    first, count, start, row = np.array(sequences).reshape(-1, 4).T  # [B]
    rows = np.repeat(row, count)  # [N]
    positions = np.arange(len(rows)) - np.repeat(first - start, count)
    rows, positions = torch.from_numpy(np.stack((rows, positions))).to(k_cache.device)
    block_idx, slots = block_table[rows, positions // block_size], positions % block_size
    k_cache[block_idx, :, slots], v_cache[block_idx, :, slots] = k_new, v_new


def _with_prefix(cache: Tensor, blocks: Tensor, start: int, new: Tensor) -> Tensor:
    """The ``start`` cached tokens and the new ones ``[T, H_kv, D]`` → ``[H_kv, start + T, D]`` in fp32."""
    cached = cache[blocks].transpose(0, 1).flatten(1, 2)[:, :start]  # [H_kv, start, D]
    return torch.cat((cached, new.transpose(0, 1)), dim=1).float()


def _causal_attention(
    q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int | None
) -> Tensor:
    """q ``[H, T, D]``, k and v ``[H_kv, start + T, D]`` → ``[H, T, D]``; token t sees keys to start + t."""
    mask = None
    if start or window is not None:
        key = torch.arange(k.shape[1], device=q.device)
        mask = in_window(key[start:, None], key[None, :], window)
    return masked_attention(q[None], k[None], v[None], mask, is_causal=mask is None, scale=scale)[0]


@triton.jit
def _absorb(scores, v, m_i, l_i, acc, scale_log2, WINDOW: tl.constexpr):
    """One more tile of keys in the online softmax (Milakov & Gimelshein 2018), in base 2.

    scores ``[BLOCK_M, BLOCK_N]`` fp32, unscaled, v ``[BLOCK_N, D]``; m_i and l_i ``[BLOCK_M]``, acc
    ``[BLOCK_M, D]``: running maximum of scaled scores, sum of weights and weighted sum of values.
    """
    m_new = tl.maximum(m_i, tl.max(scores, axis=1) * scale_log2)
    finite = m_new
    if WINDOW > 0:  # all keys of a tile may be out of a query's window
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores * scale_log2 - finite[:, None])
    alpha = tl.exp2(m_i - finite)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i * alpha + tl.sum(p, axis=1), acc


@triton.jit(
    do_not_specialize=["tiles_stride", "table_stride"],
    do_not_specialize_on_alignment=["tiles_ptr", "table_ptr"],
)
def _prefill_attention_kernel(
    out_ptr, new, cache, table_ptr, table_stride, tiles_ptr, tiles_stride, scale_log2,
    shape: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """One program per (tile, query head): cached prefix, new tokens before the tile, the tile itself.

    The first query head of a group stores the tile's keys and values. The loop over the tile itself has few
    iterations: pipelining it would only cost registers.
    """
    D_PADDED: tl.constexpr = shape.D_PADDED
    tile = tl.program_id(0) // shape.H
    head = tl.program_id(0) % shape.H
    kv_head = head // shape.GROUP
    first = tl.load(tiles_ptr + tile)
    n_rows = tl.load(tiles_ptr + tiles_stride + tile)
    position = tl.load(tiles_ptr + 2 * tiles_stride + tile)
    sequence_first = tl.load(tiles_ptr + 3 * tiles_stride + tile)
    start = tl.load(tiles_ptr + 4 * tiles_stride + tile)
    table_ptr += tl.load(tiles_ptr + 5 * tiles_stride + tile).to(tl.int64) * table_stride

    i = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_PADDED)
    in_head = d < shape.D
    mine = (i < n_rows)[:, None] & in_head[None, :]
    q_tile = (first + i).to(tl.int64)[:, None] * new.q_stride + head * shape.D + d[None, :]
    q = tl.load(new.q + q_tile, mask=mine, other=0.0).to(DOT)  # [BLOCK_M, D]
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D_PADDED), tl.float32)

    first_cached = 0
    if WINDOW > 0:
        first_cached = tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    for begin in range(first_cached, start, BLOCK_N):
        cached = begin + j
        held = cached < start
        block = tl.load(table_ptr + cached // shape.BLOCK_SIZE, mask=held, other=0)
        slot = slot_offset(cache, block, cached % shape.BLOCK_SIZE, kv_head, shape)
        loaded = held[:, None] & in_head[None, :]
        k = tl.load(cache.k + slot[:, None] + d[None, :], mask=loaded, other=0.0).to(DOT)
        v = tl.load(cache.v + slot[:, None] + d[None, :], mask=loaded, other=0.0).to(DOT)
        seen = held[None, :]
        if WINDOW > 0:
            seen = seen & (cached[None, :] > (position + i)[:, None] - WINDOW)
        scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
        m_i, l_i, acc = _absorb(scores, v, m_i, l_i, acc, scale_log2, WINDOW)

    before = first - sequence_first
    new_tile = sequence_first.to(tl.int64) * new.kv_stride + kv_head * shape.D + d[None, :]
    first_new = 0
    if WINDOW > 0:
        first_new = tl.maximum(before - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    for begin in range(first_new, before, BLOCK_N):
        token = new_tile + (begin + j).to(tl.int64)[:, None] * new.kv_stride
        k = tl.load(new.k + token, mask=in_head[None, :], other=0.0).to(DOT)
        v = tl.load(new.v + token, mask=in_head[None, :], other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if WINDOW > 0:
            seen = (begin + j)[None, :] > (before + i)[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        m_i, l_i, acc = _absorb(scores, v, m_i, l_i, acc, scale_log2, WINDOW)

    n_stored = tl.where(head % shape.GROUP == 0, n_rows, 0)
    for begin in tl.range(0, n_rows, BLOCK_N, num_stages=1):
        own = begin + j
        token = new_tile + (before + own).to(tl.int64)[:, None] * new.kv_stride
        loaded = (own < n_rows)[:, None] & in_head[None, :]
        k = tl.load(new.k + token, mask=loaded, other=0.0)
        v = tl.load(new.v + token, mask=loaded, other=0.0)
        place = position + own
        stored = own < n_stored
        block = tl.load(table_ptr + place // shape.BLOCK_SIZE, mask=stored, other=0)
        slot = slot_offset(cache, block, place % shape.BLOCK_SIZE, kv_head, shape)
        target = stored[:, None] & in_head[None, :]
        tl.store(cache.k + slot[:, None] + d[None, :], k, mask=target)
        tl.store(cache.v + slot[:, None] + d[None, :], v, mask=target)
        seen = own[None, :] <= i[:, None]  # rows past n_rows see zeros and are not stored
        if WINDOW > 0:
            seen = seen & (own[None, :] > i[:, None] - WINDOW)
        scores = tl.where(seen, tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee"), float("-inf"))
        m_i, l_i, acc = _absorb(scores, v.to(DOT), m_i, l_i, acc, scale_log2, WINDOW)

    out_tile = (first + i).to(tl.int64)[:, None] * (shape.H * shape.D) + head * shape.D + d[None, :]
    tl.store(out_ptr + out_tile, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=mine)


def make_prefill_attention(
    block_m: int = BLOCK_M, block_n: int = BLOCK_N, num_warps: int = NUM_WARPS, num_stages: int = NUM_STAGES
) -> Callable[..., Tensor]:
    """FlashAttention (Dao et al. 2022, arXiv:2205.14135), called like :func:`prefill_attention_ref`.

    Each program multiplies ``block_m`` queries (``Tiles.size``) with tiles of ``block_n`` keys; both are
    powers of two, 16 or more, block_m a multiple of block_n.

    Caches and out are contiguous; q, k_new and v_new may be slices of a fused projection (rows strided,
    ``[H, D]`` contiguous, k_new and v_new alike); block_table rows are contiguous; all of one dtype; scale is
    positive. No two new tokens may share a slot, and no new token a slot of a prefix that is read. Slots are
    written in no particular order: programs read new tokens from k_new and v_new only. Products of fp16 and
    bf16 run on tensor cores, those of fp32 in full fp32; the softmax is always fp32.
    """
    if block_n < SMALLEST_DOT or block_m % block_n:
        raise OptionError(
            f"block_m={block_m}, block_n={block_n}: block_n must divide block_m and be {SMALLEST_DOT} or more"
        )
    launch = {"num_warps": num_warps, "num_stages": num_stages}

    def prefill_attention(
        *, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, tiles, scale, window=None
    ) -> Tensor:
        if tiles.size != block_m:
            raise OptionError(f"tiles of size {tiles.size} do not fit this kernel, made for size {block_m}")
        out = q.new_empty(q.shape)
        new, cache, shape = layer_arguments(q, k_new, v_new, k_cache_layer, v_cache_layer, SMALLEST_DOT)
        table, columns = (block_table, block_table.stride(0)), (tiles.columns, tiles.columns.stride(0))
        blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "DOT": _dot_dtype(q), "WINDOW": window or 0}
        _prefill_attention_kernel[(tiles.columns.shape[1] * shape.H,)](
            out, new, cache, *table, *columns, scale * LOG2_E, shape, **blocks, **launch
        )
        return out

    return prefill_attention


def _dot_dtype(q: Tensor):
    """Operand dtype of matrix products; fp32 in Triton's interpreter, which gets bf16 products wrong."""
    return TRITON_DTYPES[q.dtype] if q.is_cuda else tl.float32


_half_prefill_attention = make_prefill_attention()
_fp32_prefill_attention = make_prefill_attention(BLOCK_M, FP32_BLOCK_N, FP32_NUM_WARPS, FP32_NUM_STAGES)


def prefill_attention(*, q: Tensor, **arguments) -> Tensor:
    """The kernel of :func:`make_prefill_attention` at the launch configuration of q's dtype."""
    launch = _fp32_prefill_attention if q.dtype == torch.float32 else _half_prefill_attention
    return launch(q=q, **arguments)
