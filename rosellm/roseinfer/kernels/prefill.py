"""Prefill attention over a paged KV cache, packed without padding; also stores the new tokens' KV.

N new tokens of several sequences are packed back to back. A sequence has ``start`` cached tokens and
``count`` new ones (a chunk of its prompt, or all of it); each new token attends to the cached ones and,
causally, to the new ones, whose keys and values are stored in the cache along the way. H query heads, H_kv
key/value heads (H a multiple of H_kv), D head size; a layer's caches are ``[N_BLOCKS, H_kv, BLOCK_SIZE, D]``,
and a row of the block table lists a sequence's blocks in order, including those of new tokens.

The work is split into tiles of consecutive new tokens of one sequence (``prefill_tiles``), once per prefill.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosellm.errors import OptionError
from rosellm.models.attention import in_window, masked_attention
from rosellm.models.quantized import AnyHeads, QuantizedHeads, full, rounded_like
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.online_softmax import new_partial
from rosellm.roseinfer.kernels.paged_cache import (
    LOG2_E,
    SMALLEST_DOT,
    AttentionShape,
    NewTokens,
    PagedCache,
    described_rows,
    dot_dtype,
    head_slot,
    layer_arguments,
    load_scales,
    slot_offset,
)
from rosellm.roseinfer.kernels.prefill_pieces import combine_tiles, store_piece
from rosellm.roseinfer.kernels.prefill_ring import ring_prefill, takes
from rosellm.roseinfer.kernels.prefill_tiles import Tiles
from rosellm.roseinfer.kernels.quantize import round_heads
from rosellm.roseinfer.kernels.tile_tables import best
from rosellm.roseinfer.kernels.wide_prefixes import Prefixes, widen
from rosellm.triton_or_none import TensorDescriptor, tl, triton

ROLES = {"_prefill_attention_kernel": "attention"}
BLOCK_M = 64  # queries per tile
PROGRAMS_OF_SM = 2  # concurrent programs per SM: with heads of size 128, each takes 113 of the SM's 228 KiB


def prefill_attention_ref(
    *,
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache_layer: AnyHeads,
    v_cache_layer: AnyHeads,
    block_table: Tensor,
    tiles: Tiles,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend with new prompt tokens, and store their keys and values (torch reference, in fp32 arithmetic).

    q: ``[N, H, D]``.
    k_new, v_new: ``[N, H_kv, D]``, which are stored in the caches.
    k_cache_layer, v_cache_layer: the layer's caches; if they are quantised, so are new keys and values before
        they are attended to.
    block_table: ``[rows, W]`` int32; entries past a sequence's blocks may hold anything.
    tiles: the sequences' tiles. Tokens past the last tile are padding, whose outputs are undefined.
    scale: factor on the scores.
    window: number of tokens that each query attends to, including its own; None for all up to its own.

    Returns ``[N, H, D]`` in q's dtype.
    """
    sequences = _sequences(tiles)
    k_new, v_new = rounded_like(k_cache_layer, k_new), rounded_like(v_cache_layer, v_new)
    _store_new(k_new, v_new, k_cache_layer, v_cache_layer, block_table, sequences)
    out = q.new_empty(q.shape)
    for first, count, start, row in sequences:
        new = slice(first, first + count)
        blocks = block_table[row, : -(-start // k_cache_layer.shape[2])].long()
        k = _with_prefix(k_cache_layer, blocks, start, k_new[new])  # [H_kv, start + count, D]
        v = _with_prefix(v_cache_layer, blocks, start, v_new[new])
        out[new] = _causal_attention(q[new].transpose(0, 1).float(), k, v, start, scale, window).transpose(
            0, 1
        )
    return out


def _sequences(tiles: Tiles) -> list[tuple[int, int, int, int]]:
    """Return each sequence's first packed row, number of new tokens, start and table row, in packed order."""
    counts: dict[tuple[int, int, int], int] = {}
    for _, n_rows, _, first, start, row, piece, _ in tiles.columns.T.tolist():
        if piece == 0:
            counts[first, start, row] = counts.get((first, start, row), 0) + n_rows
    return sorted((first, count, start, row) for (first, start, row), count in counts.items() if count)


def _store_new(k_new, v_new, k_cache, v_cache, block_table, sequences) -> None:
    block_size = k_cache.shape[2]
    first, count, start, row = np.array(sequences, np.int64).reshape(-1, 4).T  # [B]
    within = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)  # [N], the sequences' tokens
    table_rows, tokens, positions = (np.repeat(x, count) for x in (row, first, start))
    arrays = np.stack((table_rows, tokens + within, positions + within))
    rows, new, positions = torch.from_numpy(arrays).to(k_cache.device)
    block_idx, slots = block_table[rows, positions // block_size], positions % block_size
    k_cache[block_idx, :, slots], v_cache[block_idx, :, slots] = k_new[new], v_new[new]


def _with_prefix(cache: AnyHeads, blocks: Tensor, start: int, new: Tensor) -> Tensor:
    """Append the new tokens ``[T, H_kv, D]`` to ``start`` cached ones → ``[H_kv, start + T, D]`` in fp32.

    blocks: the sequence's blocks that hold the cached tokens.
    """
    cached = full(cache[blocks]).transpose(0, 1).flatten(1, 2)[:, :start]  # [H_kv, start, D]
    return torch.cat((cached, new.transpose(0, 1)), dim=1).float()


def _causal_attention(
    q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int | None
) -> Tensor:
    """Attend causally with q ``[H, T, D]`` to k and v ``[H_kv, start + T, D]`` (fp32).

    Query t attends to keys up to ``start + t``; with a window, only to the last ``window`` of them.
    """
    mask = None
    if start or window is not None:
        key = torch.arange(k.shape[1], device=q.device)
        mask = in_window(key[start:, None], key[None, :], window)
    return masked_attention(q[None], k[None], v[None], mask, is_causal=mask is None, scale=scale)[0]


class Launch(NamedTuple):
    """A launch configuration of prefill attention.

    block_n: keys per tile.
    num_warps: warps per program.
    num_stages: pipeline stages.
    heads: query heads per program.
    """

    block_n: int
    num_warps: int
    num_stages: int
    heads: int = 1


def launch_for(dtype: torch.dtype, head_dim: int, group: int) -> Launch:
    """Return the launch configuration that is fastest on an H200 for ``group`` query heads per KV head.

    Tiles have 64 keys, or 16 in fp32: sums then have the same order for any chunks and cached prefixes that
    are multiples of 64 tokens. With heads of size 64, a program has registers for two query heads, and keys
    and values are then read from the L2 cache half as often.
    """
    return Launch(*best("prefill", bits=8 * dtype.itemsize, head_dim=head_dim, group=group))


def room_for(dtype: torch.dtype, head_dim: int, n_heads: int, group: int, num_sms: int) -> int:
    """Return how many tiles, with all of their query heads, can run at once on a GPU with ``num_sms`` SMs.

    A piece of a split tile counts as a tile. group: query heads per KV head.
    """
    together = math.gcd(launch_for(dtype, head_dim, group).heads, group)
    return PROGRAMS_OF_SM * num_sms * together // n_heads


@triton.jit
def _attend(q, loaded, key, query, m_i, l_i, acc, scale_log2, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Add one tile of keys to the online softmax (Milakov & Gimelshein 2018), in base 2; return its state.

    q: ``[ROWS, D]``.
    loaded: keys and values ``[BLOCK_N, D]``, and the scales of quantised ones ``[BLOCK_N]``.
    key, query: ``[BLOCK_N]`` and ``[ROWS]``, positions, which are compared if CAUSAL or with a window.
    m_i: ``[ROWS]``, running maximum of the scaled scores.
    l_i: ``[ROWS]``, running sum of weights.
    acc: ``[ROWS, D]``, running weighted sum of values.
    scale_log2: factor on the scores, times log2(e).
    """
    k, v = loaded[0], loaded[1]
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if len(loaded) == 4:
        scores *= loaded[2][None, :]
    if CAUSAL:
        scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
    if WINDOW > 0:
        scores = tl.where(key[None, :] > query[:, None] - WINDOW, scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, axis=1) * scale_log2)
    finite = m_new
    if WINDOW > 0:  # all keys of a tile may be out of a query's window
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores * scale_log2 - finite[:, None])
    alpha = tl.exp2(m_i - finite)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    DOT: tl.constexpr = tl.bfloat16 if len(loaded) == 4 and q.dtype == tl.float16 else q.dtype
    if len(loaded) == 4:  # in fp16, weights times the scales of values could be too large or too small
        p *= loaded[3][None, :]
    acc = tl.dot(p.to(DOT), v.to(DOT), acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i, acc


@triton.jit
def _load_pair(source, place, held, shape: tl.constexpr, MASKED: tl.constexpr):
    """Load keys and values ``[BLOCK_N, D]`` at offsets ``place``.

    Both are 0 past D and, if MASKED, in rows where ``held`` is false.
    """
    if shape.D == shape.D_PADDED and not MASKED:
        return tl.load(source.k + place), tl.load(source.v + place)
    loaded = (tl.arange(0, shape.D_PADDED) < shape.D)[None, :]
    if MASKED:
        loaded = held[:, None] & loaded
    return tl.load(source.k + place, mask=loaded, other=0.0), tl.load(
        source.v + place, mask=loaded, other=0.0
    )


@triton.jit
def _load_cached(cache, table_ptr, key, start, kv_head, shape: tl.constexpr, MASKED: tl.constexpr):
    """Load the cached keys and values ``[BLOCK_N, D]`` of the tokens at positions ``key``.

    If MASKED, they are 0 at positions from ``start`` on, which are not cached. Of a quantised cache, returns
    codes of keys and values, and their scales.
    """
    held = key < start
    if MASKED:
        block = tl.load(table_ptr + key // shape.BLOCK_SIZE, mask=held, other=0)
    else:
        block = tl.load(table_ptr + key // shape.BLOCK_SIZE)
    slot = slot_offset(cache, block, key % shape.BLOCK_SIZE, kv_head, shape)
    place = slot[:, None] + tl.arange(0, shape.D_PADDED)[None, :]
    loaded = _load_pair(cache, place, held, shape, MASKED)
    if shape.DTYPE is not None:
        slots = head_slot(block, key % shape.BLOCK_SIZE, kv_head, shape)
        loaded = loaded + load_scales(cache, slots, held if MASKED else None)
    return loaded


@triton.jit
def _store_pair(cache, table_ptr, place, stored, k, v, kv_head, shape: tl.constexpr):
    """Store keys and values ``[BLOCK_N, D]`` in the slots of positions ``place``, where ``stored``."""
    d = tl.arange(0, shape.D_PADDED)
    block = tl.load(table_ptr + place // shape.BLOCK_SIZE, mask=stored, other=0)
    slot = slot_offset(cache, block, place % shape.BLOCK_SIZE, kv_head, shape)[:, None] + d[None, :]
    target = stored[:, None] & (d < shape.D)[None, :]
    tl.store(cache.k + slot, k, mask=target)
    tl.store(cache.v + slot, v, mask=target)


@triton.jit
def _harmless(k, v):
    """Return keys and values in which a value that is not finite is 0, and its token's key NaN.

    Otherwise a refused draft's value, times a weight of 0, would give NaN for the tokens before it.
    """
    zero = v.to(tl.float32) * 0
    return k + tl.sum(zero, axis=1)[:, None].to(k.dtype), tl.where(zero == 0, v, 0.0)


@triton.jit(
    do_not_specialize=["tiles_stride", "table_stride"],
    do_not_specialize_on_alignment=["tiles_ptr", "table_ptr", "firsts_ptr"],
)
def _prefill_attention_kernel(
    out_ptr, partial, new, k_new, v_new, cache, k_cached, v_cached, firsts_ptr, table_ptr, table_stride,
    tiles_ptr, tiles_stride, scale_log2, shape: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, DOT: tl.constexpr, WINDOW: tl.constexpr, DRAFTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend with HEADS query heads of a tile per program: to the prefix, earlier new tokens, and the tile.

    The HEADS x BLOCK_M rows, one head after another, are multiplied by the same keys. Of the programs of one
    KV head, the first stores the tile's keys and values, unless they are quantised. Tiles of keys to which
    all rows attend are neither masked nor compared with positions; loops of few iterations are not pipelined,
    which would only cost registers.

    If ``partial`` is given, the keys before a tile may be split among several programs, in whole tiles of
    keys. Each program processes the cached keys of its share; the last program also processes all other keys,
    and it alone stores the new ones.

    If ``firsts_ptr`` is given, k_cached and v_cached are copies of prefixes in the model's dtype.

    DRAFTS: whether new tokens are drafts, some of which will be refused.
    """
    ROWS: tl.constexpr = HEADS * BLOCK_M
    D_PADDED: tl.constexpr = shape.D_PADDED
    tile = tl.program_id(0) // (shape.H // HEADS)
    head = tl.program_id(0) % (shape.H // HEADS) * HEADS
    kv_head = head // shape.GROUP
    first = tl.load(tiles_ptr + tile)
    n_rows = tl.load(tiles_ptr + tiles_stride + tile)
    position = tl.load(tiles_ptr + 2 * tiles_stride + tile)
    sequence_first = tl.load(tiles_ptr + 3 * tiles_stride + tile)
    start = tl.load(tiles_ptr + 4 * tiles_stride + tile)
    table_row = tl.load(tiles_ptr + 5 * tiles_stride + tile).to(tl.int64)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    if n_rows == 0:
        return
    copied = 0
    if firsts_ptr is not None:
        copied = tl.load(firsts_ptr + table_row)
    table_ptr += table_row * table_stride

    i = tl.arange(0, ROWS) % BLOCK_M
    heads = head + tl.arange(0, ROWS) // BLOCK_M
    j = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_PADDED)
    mine = (i < n_rows)[:, None] & (d < shape.D)[None, :]
    q_rows = first.to(tl.int64) * new.q_stride + (i * new.q_stride + heads * shape.D)[:, None] + d[None, :]
    q = tl.load(new.q + q_rows, mask=mine, other=0.0).to(DOT)  # [ROWS, D]
    query = position + i
    m_i = tl.full((ROWS,), float("-inf"), tl.float32)
    l_i = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D_PADDED), tl.float32)

    begin_cached = 0
    if WINDOW > 0:
        begin_cached = tl.minimum(tl.maximum(position - WINDOW + 1, 0), start) // BLOCK_N * BLOCK_N
    whole = start // BLOCK_N * BLOCK_N
    end_cached, end_rest, before, n_own = whole, start, first - sequence_first, n_rows
    if partial is not None:
        piece = tl.load(tiles_ptr + 6 * tiles_stride + tile)
        pieces = tl.load(tiles_ptr + 7 * tiles_stride + tile)
        share = tl.cdiv(position - begin_cached, pieces * BLOCK_N) * BLOCK_N
        begin_cached = tl.minimum(begin_cached + piece * share, whole)
        if piece < pieces - 1:
            end_cached, end_rest, before, n_own = tl.minimum(begin_cached + share, whole), 0, 0, 0
    block = tl.load(table_ptr + begin_cached // shape.BLOCK_SIZE, mask=begin_cached < end_cached, other=0)
    for begin in range(begin_cached, end_cached, BLOCK_N):
        if k_cached is None:
            loaded = _load_cached(cache, table_ptr, begin + j, start, kv_head, shape, False)
        elif firsts_ptr is not None:
            place = [copied + begin, kv_head * shape.D]
            loaded = k_cached.load(place), v_cached.load(place)
        else:
            row = (block * shape.H_KV + kv_head) * shape.BLOCK_SIZE + begin % shape.BLOCK_SIZE
            loaded = k_cached.load([row, 0]), v_cached.load([row, 0])
            if shape.DTYPE is not None:
                loaded = loaded + load_scales(cache, row + j, None)
            following = begin + BLOCK_N
            block = tl.load(table_ptr + following // shape.BLOCK_SIZE, mask=following < end_cached, other=0)
        m_i, l_i, acc = _attend(q, loaded, begin + j, query, m_i, l_i, acc, scale_log2, False, WINDOW)
    for begin in tl.range(tl.maximum(whole, begin_cached), end_rest, BLOCK_N, num_stages=1):
        loaded = _load_cached(cache, table_ptr, begin + j, start, kv_head, shape, True)
        key = tl.where(begin + j < start, begin + j, position + BLOCK_M)
        m_i, l_i, acc = _attend(q, loaded, key, query, m_i, l_i, acc, scale_log2, True, WINDOW)

    new_tile = (j * new.kv_stride + kv_head * shape.D)[:, None] + d[None, :]
    begin_new = 0
    if WINDOW > 0:
        begin_new = tl.maximum(before - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    for begin in range(begin_new, before, BLOCK_N):
        if k_new is None:
            place = (sequence_first + begin).to(tl.int64) * new.kv_stride + new_tile
            k, v = _load_pair(new, place, None, shape, False)
        else:
            column = kv_head * shape.D
            k, v = k_new.load([sequence_first + begin, column]), v_new.load([sequence_first + begin, column])
        key = start + begin + j
        m_i, l_i, acc = _attend(q, (k, v), key, query, m_i, l_i, acc, scale_log2, False, WINDOW)

    n_stored = tl.where(head % shape.GROUP == 0, n_rows, 0)
    for begin in tl.range(0, n_own, BLOCK_N, num_stages=1):
        own = begin + j
        place = (first + begin).to(tl.int64) * new.kv_stride + new_tile
        k, v = _load_pair(new, place, own < n_rows, shape, True)
        if shape.DTYPE is None:
            _store_pair(cache, table_ptr, position + own, own < n_stored, k, v, kv_head, shape)
        if DRAFTS:
            k, v = _harmless(k, v)
        key = position + own  # rows past n_rows read zeros and are not stored
        m_i, l_i, acc = _attend(q, (k, v), key, query, m_i, l_i, acc, scale_log2, True, WINDOW)

    if partial is not None:
        row = (tile.to(tl.int64) * BLOCK_M + i) * shape.H + heads
        if pieces > 1:
            store_piece(partial, row, i < n_rows, m_i, l_i, acc, shape)
            return
    l_i = tl.where(i < n_rows, l_i, 1.0)
    out_rows = first.to(tl.int64) * (shape.H * shape.D)
    out_rows += (i * (shape.H * shape.D) + heads * shape.D)[:, None] + d[None, :]
    tl.store(out_ptr + out_rows, (acc * (1.0 / l_i)[:, None]).to(out_ptr.dtype.element_ty), mask=mine)


def prefill_attention(
    *, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, tiles, scale, window=None,
    dependent: int = False, launch: Launch | None = None,
) -> Tensor:  # fmt: skip
    """Compute :func:`prefill_attention_ref` in Triton, as FlashAttention (Dao et al. 2022, arXiv:2205.14135).

    q, k_new, v_new: may be slices of a fused projection (strided rows, contiguous ``[H, D]``; k_new and v_new
        with one stride).
    k_cache_layer, v_cache_layer: contiguous. No two new tokens may share a slot, and no new token may use a
        slot of a prefix that is read. If they are quantised, other kernels round k_new and v_new in place,
        store their codes, and copy ``tiles.prefixes``.
    block_table: each row is contiguous.
    tiles: like block_table, written at least two kernels earlier.
    scale: must be positive.
    dependent: the launch mode, as in ``launch_options``.
    launch: by default the result of :func:`launch_for`, or :mod:`prefill_ring` runs where it is faster.
        Raises ``OptionError`` unless ``block_n`` is at least 16, and divides ``tiles.size`` if a sequence may
        have several tiles.

    Each program multiplies ``tiles.size`` queries of ``launch.heads`` query heads of a group (fewer if heads
    does not divide the group) by tiles of ``launch.block_n`` keys; all three are powers of two. All tensors
    have one dtype, except for block_table and tiles. Slots are written in no particular order: programs read
    new tokens from k_new and v_new only. GEMMs of fp16 and bf16 run on tensor cores, and those of fp32 in
    full precision; the softmax is always fp32.
    """
    new, cache, shape = layer_arguments(q, k_new, v_new, k_cache_layer, v_cache_layer, SMALLEST_DOT)
    block_n, num_warps, num_stages, heads = launch or launch_for(q.dtype, shape.D, shape.GROUP)
    if block_n < SMALLEST_DOT or (tiles.size % block_n and not tiles.are_drafts):
        raise OptionError(f"block_n={block_n} must divide the tiles' {tiles.size} and be >= {SMALLEST_DOT}")
    copies, firsts = None, None
    if isinstance(k_cache_layer, QuantizedHeads):
        round_heads(
            new=new, cache=cache, block_table=block_table, tiles=tiles, shape=shape, dependent=dependent
        )
        copies, firsts = _copied_prefixes(new, cache, shape, tiles.prefixes, dependent)
    if launch is None and takes(q, shape, tiles, window):
        return ring_prefill(
            new=new, cache=cache, copies=copies, firsts=firsts, block_table=block_table, tiles=tiles,
            scale=scale, shape=shape, dependent=dependent,
        )  # fmt: skip
    out = q.new_empty(q.shape)
    partial = new_partial(q, tiles.columns.shape[1] * tiles.size) if tiles.in_pieces else None
    table, columns = (block_table, block_table.stride(0)), (tiles.columns, tiles.columns.stride(0))
    together = math.gcd(heads, shape.GROUP)
    blocks = {
        "BLOCK_M": tiles.size,
        "BLOCK_N": block_n,
        "DOT": dot_dtype(k_cache_layer),
        "WINDOW": window or 0,
    }
    blocks["DRAFTS"] = tiles.are_drafts
    copied = _described(new.k, new.v, block_n, shape)
    cached = (None, None) if copies is None else _described(*copies, block_n, shape)
    if copies is None and copied[0] is not None and shape.BLOCK_SIZE % block_n == 0:
        cached = described_rows(cache, block_n)
    _prefill_attention_kernel[(tiles.columns.shape[1] * shape.H // together,)](
        out, partial, new, *copied, cache, *cached, firsts, *table, *columns, scale * LOG2_E, shape,
        together, **blocks, num_warps=num_warps, num_stages=num_stages, **launch_options(dependent),
    )  # fmt: skip
    if partial is not None:
        combine_tiles(out, partial, tiles, dependent)
    return out


def _copied_prefixes(
    new: NewTokens, cache: PagedCache, shape: AttentionShape, prefixes: Prefixes | None, dependent: int
) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
    """Return copies of quantised prefixes, and where each begins; None for both if codes are to be read.

    If there is no prefix, return the new tokens in place of copies, since TMA takes no empty tensor.
    """
    if prefixes is None:
        return None, None
    if not len(prefixes.blocks):
        return (new.k, new.v), prefixes.firsts
    blocks, dtype = prefixes.blocks, new.q.dtype
    return widen(cache=cache, shape=shape, blocks=blocks, dtype=dtype, dependent=dependent), prefixes.firsts


def _described(k: Tensor, v: Tensor, rows: int, shape: AttentionShape):
    """Return TMA descriptors of keys and values, ``rows`` tokens of one head at a time, or (None, None).

    TMA cannot be used for fp32, whose GEMMs take their operands from registers, or if the head size is not a
    power of two, because the padded copy of a head would overlap the next head.
    """
    if k.dtype == torch.float32 or shape.D != shape.D_PADDED:
        return None, None
    return tuple(
        TensorDescriptor(x, [len(x), x.shape[1:].numel()], [x.stride(0), 1], [rows, shape.D]) for x in (k, v)
    )
