"""All layers of a decode step in one kernel, for few rows: one program a multiprocessor, and barriers.

A small batch's step is a chain of short kernels, each of which ends before all of the next has begun. Here
the programs stay. A barrier of the whole grid stands between the phases of a layer (qkv, attention, out, up,
down); a program asks for the weights of its next phase after it has arrived there and before it waits. (Grid
barrier: Xiao & Feng 2010. One kernel for a whole model: Spector et al. 2025, "Look Ma, No Bubbles!".)

All programs must run at once, or those that do would wait for ever: the launch is a cooperative one, which
the driver refuses where that cannot be. A program gives up after ``PATIENCE`` looks; its results are NaN.

It is slower than the kernels it replaces. The rung ``persistent_kernel`` loads it. Its models are like GPT-2:
LayerNorms, GELU, learned positions, no window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rosellm.errors import RecipeError
from rosellm.models.arch import PROJECTIONS, Arch
from rosellm.models.model import Projection as Matrix, Transformer
from rosellm.roseinfer.kernels.linear import gelu
from rosellm.roseinfer.kernels.paged_cache import (
    AttentionShape,
    PagedCache,
    append_token,
    rows_of,
    slot_offset,
)
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.attention import PagedAttention
from rosellm.roseinfer.layers.fused import Layers, embedded, norm_arguments
from rosellm.roseinfer.steps.resident import ResidentStep
from rosellm.roseinfer.steps.worker import Worker
from rosellm.triton_or_none import tl, triton

PERSISTENT_ROWS = 8
PATIENCE = 1 << 24
LARGEST_TILE = 128
BUSY = 128
WARPS = 8
CHUNK = 1024


class Projection(NamedTuple):
    """All layers' weights ``[L, N, K]``, biases ``[L, N]`` and sums of weights over K ``[L, N]``.

    Of one layer, without L. A norm's scale is in the weights, its shift in the bias.
    """

    weight: Tensor
    bias: Tensor
    sums: Tensor

    @classmethod
    def of(cls, matrix: Matrix, norm: nn.LayerNorm | None = None) -> Projection:
        """One layer's, copied."""
        weight = matrix.weight.float()
        bias = weight.new_zeros(len(weight)) if matrix.bias is None else matrix.bias.float()
        if norm is not None:
            weight, bias = weight * norm.weight.float(), bias + weight @ norm.bias.float()
        weight, bias = weight.to(matrix.weight.dtype), bias.to(matrix.weight.dtype)
        return cls(weight, bias, weight.float().sum(dim=1))

    @classmethod
    def stacked(cls, layers: list[Projection]) -> Projection:
        """All layers', of each layer's."""
        return cls(*map(torch.stack, zip(*layers, strict=True)))


class Scratch(NamedTuple):
    """What phases hand each other, of M rows: residual stream x, qkv, the results of attention, the MLP's.

    lse and acc are ``[NUM_SPLITS, M, C]`` fp32: of each range, the log2 of its sum and its output.
    """

    x: Tensor
    qkv: Tensor
    lse: Tensor
    acc: Tensor
    hidden: Tensor
    count: Tensor


class Tile(NamedTuple):
    """A projection's sizes: a program holds BLOCK_N of N columns, in slices of BLOCK_K of K."""

    N: int
    K: int
    BLOCK_N: int
    BLOCK_K: int


class Plan(NamedTuple):
    """What the kernel is compiled for, besides the shape of attention."""

    PROGRAMS: int
    PATIENCE: int
    PREFETCH: bool
    BLOCK_M: int
    SLICES: int
    NUM_SPLITS: int
    TILE: int
    qkv: Tile
    out: Tile
    up: Tile
    down: Tile


@triton.jit
def _arrive(count_ptr):
    """The program's part in a barrier of the grid: what it has stored is visible to whoever waits for it."""
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1, sem="release", scope="gpu")


@triton.jit
def _wait(count_ptr, awaited, looks, PATIENCE: tl.constexpr):
    """Returns once the count is as awaited; ``looks``, counted on, is how often the program has looked."""
    while (tl.atomic_add(count_ptr, 0, sem="acquire", scope="gpu") < awaited) & (looks < PATIENCE):
        looks += 1
    tl.debug_barrier()
    return looks


@triton.jit
def _own_columns(tile: tl.constexpr, plan: tl.constexpr):
    """The program's share of N columns, in a tile of BLOCK_N, and which of the tile these are."""
    SHARE: tl.constexpr = (tile.N + plan.PROGRAMS - 1) // plan.PROGRAMS
    n = tl.arange(0, tile.BLOCK_N)
    columns = tl.program_id(0) * SHARE + n
    return columns, (n < SHARE) & (columns < tile.N)


@triton.jit
def _inner(tile: tl.constexpr, plan: tl.constexpr):
    """Indices along K of each chunk, ``[SLICES, 1, BLOCK_K]``."""
    WIDTH: tl.constexpr = plan.SLICES * tile.BLOCK_K
    inner = (
        tl.arange(0, plan.SLICES)[:, None, None] * tile.BLOCK_K + tl.arange(0, tile.BLOCK_K)[None, None, :]
    )
    chunks = ()
    for chunk in tl.static_range((tile.K + WIDTH - 1) // WIDTH):
        chunks = chunks + (chunk * WIDTH + inner,)
    return chunks


@triton.jit
def _prefetch(projection, layer, tile: tl.constexpr, plan: tl.constexpr):
    """Asks the second-level cache for the program's share of a layer's weights, 64 elements at a time."""
    if plan.PREFETCH:
        SHARE: tl.constexpr = (tile.N + plan.PROGRAMS - 1) // plan.PROGRAMS * tile.K
        WIDTH: tl.constexpr = triton.next_power_of_2((SHARE + 63) // 64)
        first = tl.program_id(0) * SHARE
        place = tl.minimum(first + tl.minimum(tl.arange(0, WIDTH) * 64, SHARE - 1), tile.N * tile.K - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [(projection.weight + layer * tile.N * tile.K + place).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _ask(projection, layer, n_layers, tile: tl.constexpr, plan: tl.constexpr):
    """Of the program's columns: weights, as chunks ``[SLICES, BLOCK_N, BLOCK_K]``, bias, and sums of weights.

    Zeros past the last layer.
    """
    columns, mine = _own_columns(tile, plan)
    mine = mine & (columns < (n_layers - layer) * tile.N)
    weight_ptr = projection.weight + layer * tile.N * tile.K + columns[None, :, None].to(tl.int64) * tile.K
    inner = _inner(tile, plan)
    chunks = ()
    for i in tl.static_range(len(inner)):
        held = mine[None, :, None] & (inner[i] < tile.K)
        chunks = chunks + (tl.load(weight_ptr + inner[i], mask=held, other=0.0),)
    bias = tl.load(projection.bias + layer * tile.N + columns, mask=mine, other=0.0).to(tl.float32)
    return chunks, bias, tl.load(projection.sums + layer * tile.N + columns, mask=mine, other=0.0)


@triton.jit
def _inputs(x_ptr, M, tile: tl.constexpr, plan: tl.constexpr):
    """All of x ``[M, K]``, as chunks ``[SLICES, BLOCK_M, BLOCK_K]``; past the first level."""
    rows = tl.arange(0, plan.BLOCK_M)[None, :, None]
    inner = _inner(tile, plan)
    chunks = ()
    for i in tl.static_range(len(inner)):
        held = (rows < M) & (inner[i] < tile.K)
        x = tl.load(x_ptr + rows * tile.K + inner[i], mask=held, other=0.0, cache_modifier=".cg")
        chunks = chunks + (x,)
    return chunks


@triton.jit
def _attended(scratch, M, tile: tl.constexpr, plan: tl.constexpr):
    """As :func:`_inputs`: the mean of the ranges' outputs, weighted by ``exp2(lse)``."""
    NUM_SPLITS: tl.constexpr = plan.NUM_SPLITS
    all_lse = ()
    all_acc = ()
    for split in tl.static_range(NUM_SPLITS):
        all_lse = all_lse + (_inputs(scratch.lse + split * M * tile.K, M, tile, plan),)
        all_acc = all_acc + (_inputs(scratch.acc + split * M * tile.K, M, tile, plan),)
    chunks = ()
    for i in tl.static_range(len(all_acc[0])):
        m_i = all_lse[0][i]
        for split in tl.static_range(1, NUM_SPLITS):
            m_i = tl.maximum(m_i, all_lse[split][i])
        l_i = tl.zeros_like(m_i)
        acc = tl.zeros_like(m_i)
        for split in tl.static_range(NUM_SPLITS):
            p = tl.exp2(all_lse[split][i] - m_i)
            l_i += p
            acc += p * all_acc[split][i]
        acc = all_acc[0][i] if NUM_SPLITS == 1 else acc / l_i
        chunks = chunks + (acc.to(scratch.x.dtype.element_ty),)
    return chunks


@triton.jit
def _product(x, weights, tile: tl.constexpr, plan: tl.constexpr):
    """``x @ weights.T``, ``[BLOCK_M, BLOCK_N]`` fp32; slices are products of their own, one a warp."""
    SLICES: tl.constexpr = plan.SLICES
    BLOCK_M: tl.constexpr = plan.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    if BLOCK_M == 1:
        products = weights[0].to(tl.float32) * x[0].to(tl.float32)
        for chunk in tl.static_range(1, len(weights)):
            products += weights[chunk].to(tl.float32) * x[chunk].to(tl.float32)
        y = tl.sum(tl.sum(products, axis=2), axis=0)[None, :]
    elif BLOCK_N >= 16:  # the hardware takes 16 rows of the first operand
        acc = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
        for chunk in tl.static_range(len(weights)):
            acc = tl.dot(weights[chunk], tl.permute(x[chunk], (0, 2, 1)), acc, input_precision="ieee")
        y = tl.trans(tl.sum(acc, axis=0))
    else:
        acc = tl.zeros((SLICES, BLOCK_M, BLOCK_N), tl.float32)
        for chunk in tl.static_range(len(weights)):
            acc = tl.dot(x[chunk], tl.permute(weights[chunk], (0, 2, 1)), acc, input_precision="ieee")
        y = tl.sum(acc, axis=0)
    return y


@triton.jit
def _normed(y, x, sums, eps, tile: tl.constexpr):
    """The product y of x as if each row of x had been brought to mean 0 and variance 1."""
    wide = x[0].to(tl.float32)
    sums_of_x = wide
    squares_of_x = wide * wide
    for chunk in tl.static_range(1, len(x)):
        wide = x[chunk].to(tl.float32)
        sums_of_x += wide
        squares_of_x += wide * wide
    mean = tl.sum(tl.sum(sums_of_x, axis=2), axis=0) / tile.K
    mean_square = tl.sum(tl.sum(squares_of_x, axis=2), axis=0) / tile.K
    variance = tl.maximum(mean_square - mean * mean, 0.0)
    return (y - mean[:, None] * sums[None, :]) * tl.rsqrt(variance + eps)[:, None]


@triton.jit
def _own_place(ptr, M, tile: tl.constexpr, plan: tl.constexpr):
    """Where the program's columns of ``[M, N]`` lie, ``[BLOCK_M, BLOCK_N]``, and which of these there are."""
    rows = tl.arange(0, plan.BLOCK_M)[:, None]
    columns, mine = _own_columns(tile, plan)
    return ptr + rows * tile.N + columns[None, :], (rows < M) & mine[None, :]


@triton.jit
def _norm_phase(x_ptr, out_ptr, asked, M, eps, GELU: tl.constexpr, tile: tl.constexpr, plan: tl.constexpr):
    """LayerNorm and product, and GELU perhaps."""
    weights, bias, sums = asked
    x = _inputs(x_ptr, M, tile, plan)
    y = _normed(_product(x, weights, tile, plan), x, sums, eps, tile) + bias[None, :]
    if GELU:
        y = gelu(y)
    place, inside = _own_place(out_ptr, M, tile, plan)
    tl.store(place, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_phase(x, x_ptr, asked, good, M, tile: tl.constexpr, plan: tl.constexpr):
    """Product and residual sum; NaN where all is not good."""
    weights, bias, _ = asked
    place, inside = _own_place(x_ptr, M, tile, plan)
    residual = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    y = _product(x, weights, tile, plan) + bias[None, :] + residual
    tl.store(place, tl.where(good, y, float("nan")).to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_tile(cache, table_ptr, start, stop, kv_head, shape: tl.constexpr, TILE: tl.constexpr):
    """Keys and values of TILE cached tokens from ``start`` on, ``[TILE, D]`` each; zero from ``stop`` on."""
    position = start + tl.arange(0, TILE)
    d = tl.arange(0, shape.D_PADDED)
    held = position < stop
    if shape.BLOCK_SIZE % TILE == 0:
        block = tl.load(table_ptr + start // shape.BLOCK_SIZE, mask=start < stop, other=0)
        first = slot_offset(cache, block, start % shape.BLOCK_SIZE, kv_head, shape)
        place = first + tl.arange(0, TILE)[:, None] * shape.D + d[None, :]
    else:
        block = tl.load(table_ptr + position // shape.BLOCK_SIZE, mask=held, other=0)
        place = slot_offset(cache, block, position % shape.BLOCK_SIZE, kv_head, shape)[:, None] + d[None, :]
    mask = held[:, None] & (d < shape.D)[None, :]
    return tl.load(cache.k + place, mask=mask, other=0.0), tl.load(cache.v + place, mask=mask, other=0.0)


@triton.jit
def _attend_tile(q, k, v, held, m_i, l_i, acc):
    """One more tile of the online softmax (Milakov & Gimelshein 2018), in base 2: q is scaled by log2(e)."""
    scores = tl.where(held, tl.sum(k.to(tl.float32) * q[None, :], axis=1), float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, axis=0))
    p = tl.exp2(scores - m_new)
    alpha = tl.exp2(m_i - m_new)
    acc = acc * alpha + tl.sum(v.to(tl.float32) * p[:, None], axis=0)
    return m_new, l_i * alpha + tl.sum(p, axis=0), acc


@triton.jit
def _attend_range(
    q, k, v, m_i, l_i, acc, first, stop, cache, table_ptr, kv_head, shape: tl.constexpr, TILE: tl.constexpr
):
    """The online softmax over cached tokens ``first`` to ``stop``; k and v are the first of their tiles.

    The next tile is loaded before the current one is processed.
    """
    for start in range(first, stop, TILE):
        k_next, v_next = _load_tile(cache, table_ptr, start + TILE, stop, kv_head, shape, TILE)
        held = start + tl.arange(0, TILE) < stop
        m_i, l_i, acc = _attend_tile(q, k, v, held, m_i, l_i, acc)
        k, v = k_next, v_next
    return m_i, l_i, acc


@triton.jit
def _range_of(split, context_len, NUM_SPLITS: tl.constexpr, TILE: tl.constexpr):
    """First and last token (exclusive) of a range: equal numbers of tiles, fewer or none in the last."""
    size = tl.cdiv(tl.cdiv(context_len, NUM_SPLITS), TILE) * TILE
    first = split * size
    return first, tl.minimum(first + size, context_len)


@triton.jit
def _task(number, M, rows, cache, shape: tl.constexpr, plan: tl.constexpr):
    """Of a task of attention: row, head, range, context, first and last token, first keys and values."""
    split = number % plan.NUM_SPLITS
    head = number // plan.NUM_SPLITS % shape.H
    row = number // (plan.NUM_SPLITS * shape.H)
    context_len = tl.load(rows.positions + row * rows.position_stride, mask=row < M, other=-1)
    first, stop = _range_of(split, tl.maximum(context_len, 0), plan.NUM_SPLITS, plan.TILE)
    table_ptr = rows.table + row * rows.table_stride
    k, v = _load_tile(cache, table_ptr, first, stop, head // shape.GROUP, shape, plan.TILE)
    return row, head, split, context_len, first, stop, k, v


@triton.jit
def _attend(task, scratch, M, rows, cache, scale, shape: tl.constexpr, plan: tl.constexpr):
    """One task; the first head of each group writes the new key and value."""
    row, head, split, context_len, first, stop, k, v = task
    table_ptr = rows.table + row * rows.table_stride
    kv_head = head // shape.GROUP
    d = tl.arange(0, shape.D_PADDED)
    in_head = d < shape.D
    new_ptr = scratch.qkv + row * plan.qkv.N + d
    q = tl.load(new_ptr + head * shape.D, mask=in_head, other=0.0, cache_modifier=".cg").to(tl.float32)
    q = q * (scale * 1.4426950408889634)
    new_ptr += (shape.H + kv_head) * shape.D
    k_new = tl.load(new_ptr, mask=in_head, other=0.0, cache_modifier=".cg")
    v_new = tl.load(new_ptr + shape.H_KV * shape.D, mask=in_head, other=0.0, cache_modifier=".cg")
    if (split == 0) & (context_len >= 0) & (head % shape.GROUP == 0):
        append_token(cache, table_ptr, context_len, kv_head, k_new, v_new, shape)
    m_i = tl.where(split == 0, tl.sum(q * k_new.to(tl.float32), axis=0), float("-inf"))
    l_i = tl.where(split == 0, 1.0, 0.0)
    acc = tl.where(split == 0, v_new.to(tl.float32), 0.0)
    m_i, l_i, acc = _attend_range(
        q, k, v, m_i, l_i, acc, first, stop, cache, table_ptr, kv_head, shape, plan.TILE
    )
    lse = tl.where(l_i > 0.0, m_i + tl.log2(tl.maximum(l_i, 1e-30)), float("-inf"))
    acc = tl.where(context_len >= 0, acc / tl.maximum(l_i, 1e-30), 0.0)
    place = (split * M + row) * plan.out.K + head * shape.D + d
    tl.store(scratch.lse + place, tl.zeros_like(acc) + lse, mask=in_head)
    tl.store(scratch.acc + place, acc, mask=in_head)


@triton.jit
def _persistent_layers_kernel(
    weights,
    scratch,
    cache,
    layer_stride,
    rows,
    scale,
    eps,
    M,
    n_layers,
    shape: tl.constexpr,
    plan: tl.constexpr,
):
    """Each program multiplies by its own columns of each weight and attends for its own (row, head, range)s.

    What a phase reads of weights and of cached tokens is asked for before the wait for its inputs; the
    weights are fetched into the second-level cache a layer ahead. What other programs wrote is read past the
    first level.
    """
    w_qkv, w_out, w_up, w_down = weights
    QKV: tl.constexpr = plan.qkv
    OUT: tl.constexpr = plan.out
    UP: tl.constexpr = plan.up
    DOWN: tl.constexpr = plan.down
    PROGRAMS: tl.constexpr = plan.PROGRAMS
    program = tl.program_id(0)
    _prefetch(w_out, 0, OUT, plan)
    _prefetch(w_up, 0, UP, plan)
    _prefetch(w_down, 0, DOWN, plan)
    qkv = _ask(w_qkv, tl.full((), 0, tl.int64), n_layers, QKV, plan)
    looks = 0
    awaited = tl.atomic_add(scratch.count, 0, sem="acquire", scope="gpu") // PROGRAMS * PROGRAMS + PROGRAMS
    for layer in range(n_layers):
        at = tl.full((), layer, tl.int64)
        ahead = tl.minimum(at + 1, n_layers - 1)
        k, v = cache.k + at * layer_stride, cache.v + at * layer_stride
        here = PagedCache(k, v, k, v, cache.stride)

        # qkv
        _norm_phase(scratch.x, scratch.qkv, qkv, M, eps, False, QKV, plan)
        _arrive(scratch.count)
        _prefetch(w_qkv, ahead, QKV, plan)
        task = _task(program, M, rows, here, shape, plan)
        out = _ask(w_out, at, n_layers, OUT, plan)
        looks = _wait(scratch.count, awaited, looks, plan.PATIENCE)

        # attention
        for number in range(program, M * shape.H * plan.NUM_SPLITS, PROGRAMS):
            _attend(task, scratch, M, rows, here, scale, shape, plan)
            task = _task(number + PROGRAMS, M, rows, here, shape, plan)
        _arrive(scratch.count)
        _prefetch(w_out, ahead, OUT, plan)
        up = _ask(w_up, at, n_layers, UP, plan)
        looks = _wait(scratch.count, awaited + PROGRAMS, looks, plan.PATIENCE)

        # out
        _add_phase(_attended(scratch, M, OUT, plan), scratch.x, out, True, M, OUT, plan)
        _arrive(scratch.count)
        _prefetch(w_up, ahead, UP, plan)
        down = _ask(w_down, at, n_layers, DOWN, plan)
        looks = _wait(scratch.count, awaited + 2 * PROGRAMS, looks, plan.PATIENCE)

        # up
        _norm_phase(scratch.x, scratch.hidden, up, M, eps, True, UP, plan)
        _arrive(scratch.count)
        _prefetch(w_down, ahead, DOWN, plan)
        qkv = _ask(w_qkv, at + 1, n_layers, QKV, plan)
        looks = _wait(scratch.count, awaited + 3 * PROGRAMS, looks, plan.PATIENCE)

        # down
        x = _inputs(scratch.hidden, M, DOWN, plan)
        _add_phase(x, scratch.x, down, looks < plan.PATIENCE, M, DOWN, plan)
        _arrive(scratch.count)
        looks = _wait(scratch.count, awaited + 4 * PROGRAMS, looks, plan.PATIENCE)
        awaited += 5 * PROGRAMS


class PersistentLayers:
    """The layers of up to ``PERSISTENT_ROWS`` rows as one kernel, attention included.

    Called as other layers are, with a ``PagedAttention``, of which it uses caches and state; the caches of a
    layer are contiguous. One call at a time: calls share a counter. The model's weights are copied, into one
    tensor for all layers. programs: run at once; in the interpreter, which runs one after the other, there
    can be one. The tiles are those of GPT-2's small shape in half precision; in fp32, or for wider models,
    registers spill.
    """

    def __init__(self, model: Transformer, kernels: Kernels, programs: int) -> None:
        self.model, self.programs, self.on_gpu = model, programs, model.device.type == "cuda"
        self.embed, self.add_norm = kernels.embed, kernels.add_norm
        self.weights, self.norm = _weights_of(model), norm_arguments(model.norm)
        self.count = torch.zeros(1, dtype=torch.int64, device=model.device)

    def __call__(
        self, ids: Tensor, positions: Tensor, attend: PagedAttention, n_layers: int | None = None
    ) -> Tensor:
        x = embedded(self.embed, self.model, ids, positions)  # [N, C]
        self._run(x, attend)
        return self.add_norm(x=x, **self.norm)

    def _run(self, x: Tensor, attend: PagedAttention) -> None:
        """All layers, in place."""
        config, blocks, state = self.model.config, attend.blocks, attend.state
        plan = self._plan(len(x), min(attend.plan.variant.tile, LARGEST_TILE))
        parts = (x.new_empty(plan.NUM_SPLITS, *x.shape, dtype=torch.float32) for _ in range(2))
        qkv, hidden = x.new_empty(len(x), config.qkv_width), x.new_empty(len(x), config.d_ff)
        caches = blocks.k_cache, blocks.v_cache
        cache = PagedCache(*caches, *caches, blocks.k_cache.stride(1))
        heads = config.n_heads, config.n_kv_heads, config.group
        sizes = config.head_dim, triton.next_power_of_2(config.head_dim), blocks.block_size
        scratch, rows = Scratch(x, qkv, *parts, hidden, self.count), rows_of(state.table, state.positions)
        numbers = config.scale, config.norm.eps, len(x), config.n_layers
        constants = AttentionShape(*heads, *sizes), plan
        where = self.weights, scratch, cache, blocks.k_cache.stride(0), rows
        launch = {"num_warps": WARPS, "launch_cooperative_grid": True}
        _persistent_layers_kernel[(self.programs,)](*where, *numbers, *constants, **launch)

    def _plan(self, rows: int, tile: int) -> Plan:
        block_m, slices = (1, 1) if rows == 1 else (PERSISTENT_ROWS, WARPS)
        tiles = (self._tile(*projection.weight.shape[1:], slices) for projection in self.weights)
        num_splits = num_splits_for(rows * self.model.config.n_heads)
        return Plan(self.programs, PATIENCE, self.on_gpu, block_m, slices, num_splits, tile, *tiles)

    def _tile(self, n: int, k: int, slices: int) -> Tile:
        """The program's share of n columns; one chunk for inputs up to CHUNK, more beyond."""
        block_n = max(8, triton.next_power_of_2(triton.cdiv(n, self.programs)))
        return Tile(n, k, block_n, max(16, min(triton.next_power_of_2(k), CHUNK) // slices))


def num_splits_for(heads: int) -> int:
    """Ranges of each context where that many heads of all rows attend: as many as keep the programs busy."""
    return min(8, 1 << max(0, (BUSY // heads).bit_length() - 1))


def _weights_of(model: Transformer) -> tuple[Projection, ...]:
    """Those of qkv, out, up and down."""
    layers = (
        (
            Projection.of(block.qkv, block.norm_1),
            Projection.of(block.out),
            Projection.of(block.up, block.norm_2),
            Projection.of(block.down),
        )
        for block in model.blocks
    )
    return tuple(Projection.stacked(list(each)) for each in zip(*layers, strict=True))


def check_serves(config: Arch) -> None:
    """Raise ``RecipeError`` unless the model has only the components of ``Arch``'s defaults, of any size."""
    parts = config.norm.kind, config.rope, config.mlp, config.biases, config.qk_norm, config.window
    if parts != ("layer", None, "gelu", PROJECTIONS, False, None):
        raise RecipeError(
            f"exhibit='persistent_layers' cannot run a model of family {config.family}: its one kernel has "
            "LayerNorm, GELU and biases, and no rotary embeddings"
        )


def persistent_for_few(
    layers_for: Callable[[int], Layers], model: Transformer, kernels: Kernels
) -> Callable[[int], Layers]:
    """Return ``layers_for`` with one kernel for up to ``PERSISTENT_ROWS`` rows; of torch versions, as it is.

    For decode steps only: their attention is a ``PagedAttention``.
    """
    if kernels.name == "torch":
        return layers_for
    on_gpu = model.device.type == "cuda"
    programs = torch.cuda.get_device_properties(model.device).multi_processor_count if on_gpu else 1
    few = PersistentLayers(model, kernels, programs)
    return lambda rows: few if rows <= PERSISTENT_ROWS else layers_for(rows)


def build_step(
    model: Transformer, kernels: Kernels, layers_for: Callable[[int], Layers], **parts: Any
) -> ResidentStep:
    """See ``exhibits.load_exhibit``."""
    worker = Worker(layers_for=persistent_for_few(layers_for, model, kernels), **parts)
    return ResidentStep.on(worker, model)
