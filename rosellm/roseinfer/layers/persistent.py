"""All layers of a decode step in one kernel, for few rows: one program a multiprocessor, and barriers.

A small batch's step is a chain of short kernels, each of which ends before all of the next has begun. Here
the programs stay. A barrier of the whole grid stands between the phases of a layer (qkv, attention, out, up,
down); a program asks for the weights of its next phase after it has arrived there and before it waits. (Grid
barrier: Xiao & Feng 2010. One kernel for a whole model: Spector et al. 2025, "Look Ma, No Bubbles!".)

All programs must run at once, or those that do would wait for ever: the launch is a cooperative one, which
the driver refuses where that cannot be. A program gives up after ``PATIENCE`` looks; its results are NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosellm.models.model import GPT
from rosellm.roseinfer.kernels.attention import _tile
from rosellm.roseinfer.kernels.linear import _gelu
from rosellm.roseinfer.kernels.split import _attend_range, _range_of
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.attention import PagedAttention
from rosellm.roseinfer.layers.fused import Layers, embedded
from rosellm.roseinfer.layers.products import LayerWeights, RowWeights

ROLES = {"_persistent_layers_kernel": "layers"}
PERSISTENT_ROWS = 8
PATIENCE = 1 << 24
LARGEST_TILE = 128
BUSY = 128
WARPS = 8
CHUNK = 1024


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
def _prefetch(weight_ptr, N: tl.constexpr, K: tl.constexpr, PROGRAMS: tl.constexpr, PREFETCH: tl.constexpr):
    """Asks the second-level cache for the program's share of weights ``[N, K]``, 64 elements at a time."""
    if PREFETCH:
        SHARE: tl.constexpr = (N + PROGRAMS - 1) // PROGRAMS * K
        WIDTH: tl.constexpr = triton.next_power_of_2((SHARE + 63) // 64)
        first = tl.program_id(0) * SHARE
        place = tl.minimum(first + tl.minimum(tl.arange(0, WIDTH) * 64, SHARE - 1), N * K - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [(weight_ptr + place).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _own_columns(N: tl.constexpr, BLOCK_N: tl.constexpr, PROGRAMS: tl.constexpr):
    """The program's share of N columns, in a tile of BLOCK_N, and which of the tile these are."""
    SHARE: tl.constexpr = (N + PROGRAMS - 1) // PROGRAMS
    n = tl.arange(0, BLOCK_N)
    columns = tl.program_id(0) * SHARE + n
    return columns, (n < SHARE) & (columns < N)


@triton.jit
def _weights(weight_ptr, columns, mine, K: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr):
    """Weights ``[N, K]`` of the columns, as a tuple of chunks ``[SLICES, BLOCK_N, BLOCK_K]``."""
    inner = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    chunks = ()
    for chunk in tl.static_range((K + SLICES * BLOCK_K - 1) // (SLICES * BLOCK_K)):
        k = chunk * SLICES * BLOCK_K + inner
        place = weight_ptr + columns[None, :, None].to(tl.int64) * K + k
        chunks = chunks + (tl.load(place, mask=mine[None, :, None] & (k < K), other=0.0),)
    return chunks


@triton.jit
def _inputs(x_ptr, M, K: tl.constexpr, BLOCK_M: tl.constexpr, SLICES: tl.constexpr, BLOCK_K: tl.constexpr):
    """All of x ``[M, K]``, as a tuple of chunks ``[SLICES, BLOCK_M, BLOCK_K]``, past the first level."""
    inner = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    rows = tl.arange(0, BLOCK_M)[None, :, None]
    chunks = ()
    for chunk in tl.static_range((K + SLICES * BLOCK_K - 1) // (SLICES * BLOCK_K)):
        k = chunk * SLICES * BLOCK_K + inner
        held = (rows < M) & (k < K)
        chunks = chunks + (tl.load(x_ptr + rows * K + k, mask=held, other=0.0, cache_modifier=".cg"),)
    return chunks


@triton.jit
def _attended(
    lse_ptr,
    acc_ptr,
    M,
    dtype: tl.constexpr,
    K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As :func:`_inputs`: the mean of ``[NUM_SPLITS, M, K]``, weighted by ``exp2(lses)``."""
    if NUM_SPLITS == 1:
        chunks = _inputs(acc_ptr, M, K, BLOCK_M, SLICES, BLOCK_K)
    else:
        inner = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
        rows = tl.arange(0, BLOCK_M)[None, :, None]
        chunks = ()
        for chunk in tl.static_range((K + SLICES * BLOCK_K - 1) // (SLICES * BLOCK_K)):
            k = chunk * SLICES * BLOCK_K + inner
            held = (rows < M) & (k < K)
            lses = ()
            parts = ()
            for split in tl.static_range(NUM_SPLITS):
                place = (split * M + rows) * K + k
                lses = lses + (tl.load(lse_ptr + place, mask=held, other=0.0, cache_modifier=".cg"),)
                parts = parts + (tl.load(acc_ptr + place, mask=held, other=0.0, cache_modifier=".cg"),)
            m_i = lses[0]
            for split in tl.static_range(1, NUM_SPLITS):
                m_i = tl.maximum(m_i, lses[split])
            l_i = tl.zeros((SLICES, BLOCK_M, BLOCK_K), tl.float32)
            acc = tl.zeros((SLICES, BLOCK_M, BLOCK_K), tl.float32)
            for split in tl.static_range(NUM_SPLITS):
                weight = tl.exp2(lses[split] - m_i)
                l_i += weight
                acc += weight * parts[split]
            chunks = chunks + (acc / l_i,)
    rounded = ()
    for chunk in tl.static_range(len(chunks)):
        rounded = rounded + (chunks[chunk].to(dtype),)
    return rounded


@triton.jit
def _product(x, weights, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr):
    """``x @ weights.T``, ``[BLOCK_M, BLOCK_N]`` fp32; slices are products of their own, one a warp."""
    if BLOCK_M == 1:
        products = weights[0].to(tl.float32) * x[0].to(tl.float32)
        for chunk in tl.static_range(1, len(weights)):
            products += weights[chunk].to(tl.float32) * x[chunk].to(tl.float32)
        y = tl.sum(tl.sum(products, axis=2), axis=0)[None, :]
    else:
        WEIGHTS_FIRST: tl.constexpr = BLOCK_N >= 16  # the hardware takes 16 rows of the first operand
        acc = tl.zeros(
            (SLICES, BLOCK_N, BLOCK_M) if WEIGHTS_FIRST else (SLICES, BLOCK_M, BLOCK_N), tl.float32
        )
        for chunk in tl.static_range(len(weights)):
            if WEIGHTS_FIRST:
                acc = tl.dot(weights[chunk], tl.permute(x[chunk], (0, 2, 1)), acc, input_precision="ieee")
            else:
                acc = tl.dot(x[chunk], tl.permute(weights[chunk], (0, 2, 1)), acc, input_precision="ieee")
        y = tl.sum(acc, axis=0)
        if WEIGHTS_FIRST:
            y = tl.trans(y)
    return y


@triton.jit
def _normed(y, x, sums, eps, K: tl.constexpr, BLOCK_M: tl.constexpr):
    """The product y of x as if each row of x had been brought to mean 0 and variance 1."""
    wide = x[0].to(tl.float32)
    sums_of_x = wide
    squares_of_x = wide * wide
    for chunk in tl.static_range(1, len(x)):
        wide = x[chunk].to(tl.float32)
        sums_of_x += wide
        squares_of_x += wide * wide
    l_i = tl.sum(tl.sum(sums_of_x, axis=2), axis=0)
    squares = tl.sum(tl.sum(squares_of_x, axis=2), axis=0)
    mean = l_i / K
    variance = tl.maximum(squares / K - mean * mean, 0.0)
    return (y - mean[:, None] * sums[None, :]) * tl.rsqrt(variance + eps)[:, None]


@triton.jit
def _task(
    task,
    M,
    positions_ptr,
    position_stride,
    H: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Row, head and range of a task of attention, the row's context, and the range's first and last token."""
    split = task % NUM_SPLITS
    head = task // NUM_SPLITS % H
    row = task // (NUM_SPLITS * H)
    context_len = tl.load(positions_ptr + row * position_stride, mask=row < M, other=-1)
    first, stop = _range_of(split, tl.maximum(context_len, 0), NUM_SPLITS, TILE)
    return row, head, split, context_len, first, stop


@triton.jit
def _persistent_layers_kernel(
    x_ptr,
    qkv_ptr,
    lse_ptr,
    acc_ptr,
    hidden_ptr,
    count_ptr,
    qkv_weight_ptr,
    qkv_bias_ptr,
    qkv_sums_ptr,
    out_weight_ptr,
    out_bias_ptr,
    up_weight_ptr,
    up_bias_ptr,
    up_sums_ptr,
    down_weight_ptr,
    down_bias_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    positions_ptr,
    scale,
    eps,
    M,
    n_layers,
    layer_stride,
    block_stride,
    table_stride,
    position_stride,
    C: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N_QKV: tl.constexpr,
    BLOCK_N_C: tl.constexpr,
    BLOCK_N_F: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_K_C: tl.constexpr,
    BLOCK_K_F: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PATIENCE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Each program multiplies by its own columns of each weight and attends for its own (row, head, range)s.

    What a phase reads of weights and of cached tokens is asked for before the wait for its inputs; the
    weights are fetched into the second-level cache a layer ahead. What other programs wrote is read past the
    first level.
    """
    WIDTH: tl.constexpr = (H + 2 * H_KV) * D
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = tl.arange(0, BLOCK_M)[:, None]
    d = tl.arange(0, D_PADDED)
    in_head = d < D
    qkv_columns, qkv_mine = _own_columns(WIDTH, BLOCK_N_QKV, PROGRAMS)
    c_columns, c_mine = _own_columns(C, BLOCK_N_C, PROGRAMS)
    f_columns, f_mine = _own_columns(F, BLOCK_N_F, PROGRAMS)
    residual_ptr = x_ptr + rows * C + c_columns[None, :]
    c_inside = (rows < M) & c_mine[None, :]
    _prefetch(out_weight_ptr, C, C, PROGRAMS, PREFETCH)
    _prefetch(up_weight_ptr, F, C, PROGRAMS, PREFETCH)
    _prefetch(down_weight_ptr, C, F, PROGRAMS, PREFETCH)
    qkv_weights = _weights(qkv_weight_ptr, qkv_columns, qkv_mine, C, SLICES, BLOCK_K_C)
    first_row, first_head, first_split, first_context, first_start, first_stop = _task(
        tl.program_id(0), M, positions_ptr, position_stride, H, NUM_SPLITS, TILE
    )
    looks = 0
    awaited = tl.atomic_add(count_ptr, 0, sem="acquire", scope="gpu") // PROGRAMS * PROGRAMS + PROGRAMS
    for layer in range(n_layers):
        at = tl.full((), layer, tl.int64)
        ahead = tl.minimum(at + 1, n_layers - 1)
        k_layer_ptr = k_cache_ptr + at * layer_stride
        v_layer_ptr = v_cache_ptr + at * layer_stride

        # qkv
        x = _inputs(x_ptr, M, C, BLOCK_M, SLICES, BLOCK_K_C)
        bias = tl.load(qkv_bias_ptr + at * WIDTH + qkv_columns, mask=qkv_mine, other=0.0).to(tl.float32)
        sums = tl.load(qkv_sums_ptr + at * WIDTH + qkv_columns, mask=qkv_mine, other=0.0)
        y = (
            _normed(_product(x, qkv_weights, BLOCK_M, BLOCK_N_QKV, SLICES), x, sums, eps, C, BLOCK_M)
            + bias[None, :]
        )
        inside = (rows < M) & qkv_mine[None, :]
        tl.store(qkv_ptr + rows * WIDTH + qkv_columns[None, :], y.to(dtype), mask=inside)
        _arrive(count_ptr)
        _prefetch(qkv_weight_ptr + ahead * WIDTH * C, WIDTH, C, PROGRAMS, PREFETCH)
        row, head, split, context_len = first_row, first_head, first_split, first_context
        start, stop = first_start, first_stop
        table_ptr = block_table_ptr + row * table_stride
        kv_head = head // (H // H_KV)
        k, v = _tile(
            k_layer_ptr,
            v_layer_ptr,
            table_ptr,
            start,
            stop,
            kv_head,
            block_stride,
            D,
            D_PADDED,
            BLOCK_SIZE,
            TILE,
        )
        out_weights = _weights(out_weight_ptr + at * C * C, c_columns, c_mine, C, SLICES, BLOCK_K_C)
        looks = _wait(count_ptr, awaited, looks, PATIENCE)
        awaited += PROGRAMS

        # attention
        for task in range(tl.program_id(0), M * H * NUM_SPLITS, PROGRAMS):
            new_ptr = qkv_ptr + row * WIDTH + d
            q = tl.load(new_ptr + head * D, mask=in_head, other=0.0, cache_modifier=".cg").to(tl.float32)
            q = q * (scale * 1.4426950408889634)
            new_ptr += (H + kv_head) * D
            k_new = tl.load(new_ptr, mask=in_head, other=0.0, cache_modifier=".cg")
            v_new = tl.load(new_ptr + H_KV * D, mask=in_head, other=0.0, cache_modifier=".cg")
            if (split == 0) & (context_len >= 0) & (head % (H // H_KV) == 0):
                block = tl.load(table_ptr + context_len // BLOCK_SIZE).to(tl.int64)
                slot = block * block_stride + kv_head * BLOCK_SIZE * D + (context_len % BLOCK_SIZE) * D + d
                tl.store(k_layer_ptr + slot, k_new, mask=in_head)
                tl.store(v_layer_ptr + slot, v_new, mask=in_head)
            own = tl.sum(q * k_new.to(tl.float32), axis=0)
            m_i, l_i, acc = _attend_range(
                q,
                k,
                v,
                tl.where(split == 0, own, float("-inf")),
                tl.where(split == 0, 1.0, 0.0),
                tl.where(split == 0, v_new.to(tl.float32), 0.0),
                start,
                stop,
                k_layer_ptr,
                v_layer_ptr,
                table_ptr,
                kv_head,
                block_stride,
                D,
                D_PADDED,
                BLOCK_SIZE,
                TILE,
            )
            part = split * M + row
            lse = tl.where(l_i > 0.0, m_i + tl.log2(tl.maximum(l_i, 1e-30)), float("-inf"))
            acc = tl.where(context_len >= 0, acc / tl.maximum(l_i, 1e-30), 0.0)
            place = part * C + head * D + d
            tl.store(lse_ptr + place, tl.zeros((D_PADDED,), tl.float32) + lse, mask=in_head)
            tl.store(acc_ptr + place, acc, mask=in_head)
            row, head, split, context_len, start, stop = _task(
                task + PROGRAMS, M, positions_ptr, position_stride, H, NUM_SPLITS, TILE
            )
            table_ptr = block_table_ptr + row * table_stride
            kv_head = head // (H // H_KV)
            k, v = _tile(
                k_layer_ptr,
                v_layer_ptr,
                table_ptr,
                start,
                stop,
                kv_head,
                block_stride,
                D,
                D_PADDED,
                BLOCK_SIZE,
                TILE,
            )
        _arrive(count_ptr)
        _prefetch(out_weight_ptr + ahead * C * C, C, C, PROGRAMS, PREFETCH)
        up_weights = _weights(up_weight_ptr + at * F * C, f_columns, f_mine, C, SLICES, BLOCK_K_C)
        residual = tl.load(residual_ptr, mask=c_inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        bias = tl.load(out_bias_ptr + at * C + c_columns, mask=c_mine, other=0.0).to(tl.float32)
        looks = _wait(count_ptr, awaited, looks, PATIENCE)
        awaited += PROGRAMS

        # out
        x = _attended(lse_ptr, acc_ptr, M, dtype, C, NUM_SPLITS, BLOCK_M, SLICES, BLOCK_K_C)
        y = _product(x, out_weights, BLOCK_M, BLOCK_N_C, SLICES) + bias[None, :] + residual
        tl.store(residual_ptr, y.to(dtype), mask=c_inside)
        _arrive(count_ptr)
        _prefetch(up_weight_ptr + ahead * F * C, F, C, PROGRAMS, PREFETCH)
        down_weights = _weights(down_weight_ptr + at * C * F, c_columns, c_mine, F, SLICES, BLOCK_K_F)
        bias = tl.load(up_bias_ptr + at * F + f_columns, mask=f_mine, other=0.0).to(tl.float32)
        sums = tl.load(up_sums_ptr + at * F + f_columns, mask=f_mine, other=0.0)
        looks = _wait(count_ptr, awaited, looks, PATIENCE)
        awaited += PROGRAMS

        # up
        x = _inputs(x_ptr, M, C, BLOCK_M, SLICES, BLOCK_K_C)
        y = (
            _normed(_product(x, up_weights, BLOCK_M, BLOCK_N_F, SLICES), x, sums, eps, C, BLOCK_M)
            + bias[None, :]
        )
        inside = (rows < M) & f_mine[None, :]
        tl.store(hidden_ptr + rows * F + f_columns[None, :], _gelu(y).to(dtype), mask=inside)
        _arrive(count_ptr)
        _prefetch(down_weight_ptr + ahead * C * F, C, F, PROGRAMS, PREFETCH)
        more = qkv_mine & (qkv_columns < (n_layers - 1 - layer) * WIDTH)
        qkv_weights = _weights(qkv_weight_ptr + (at + 1) * WIDTH * C, qkv_columns, more, C, SLICES, BLOCK_K_C)
        residual = tl.load(residual_ptr, mask=c_inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        bias = tl.load(down_bias_ptr + at * C + c_columns, mask=c_mine, other=0.0).to(tl.float32)
        looks = _wait(count_ptr, awaited, looks, PATIENCE)
        awaited += PROGRAMS

        # down
        x = _inputs(hidden_ptr, M, F, BLOCK_M, SLICES, BLOCK_K_F)
        y = _product(x, down_weights, BLOCK_M, BLOCK_N_C, SLICES) + bias[None, :] + residual
        y = tl.where(looks < PATIENCE, y, float("nan"))
        tl.store(residual_ptr, y.to(dtype), mask=c_inside)
        _arrive(count_ptr)
        looks = _wait(count_ptr, awaited, looks, PATIENCE)
        awaited += PROGRAMS


class PersistentLayers:
    """The layers of up to ``PERSISTENT_ROWS`` rows as one kernel, attention included.

    Called as other layers are, with a ``PagedAttention``, of which it uses caches and state; the caches of a
    layer are contiguous. One call at a time: calls share a counter. weights: copied, into one tensor for all
    layers. programs: run at once; in the interpreter, which runs one after the other, there can be one. The
    tiles are those of GPT-2's small shape in half precision; in fp32, or for wider models, registers spill.
    """

    def __init__(self, model: GPT, weights: list[LayerWeights], kernels: Kernels, programs: int) -> None:
        self.model, self.programs, self.on_gpu = model, programs, model.device.type == "cuda"
        self.embed, self.add_norm = kernels.embed, kernels.add_norm
        self.qkv, self.out, self.up, self.down = (
            _stacked([getattr(layer, name) for layer in weights]) for name in ("qkv", "out", "up", "down")
        )
        self.count = torch.zeros(1, dtype=torch.int64, device=model.device)

    def __call__(self, ids: Tensor, positions: Tensor, attend: PagedAttention) -> Tensor:
        model = self.model
        x = embedded(self.embed, model, ids, positions)  # [N, C]
        self._run(x, attend)
        return self.add_norm(x=x, scale=model.ln_f.weight, shift=model.ln_f.bias, eps=model.config.norm_eps)

    def _run(self, x: Tensor, attend: PagedAttention) -> None:
        """All layers, in place."""
        config, blocks, state = self.model.config, attend.blocks, attend.state
        rows, width = x.shape
        n_heads, head_dim, hidden = config.n_heads, config.head_dim, config.d_ff
        num_splits = num_splits_for(rows * n_heads)
        slices = 1 if rows == 1 else WARPS
        _persistent_layers_kernel[(self.programs,)](
            x,
            x.new_empty(rows, config.qkv_width),
            x.new_empty(num_splits, rows, width, dtype=torch.float32),
            x.new_empty(num_splits, rows, width, dtype=torch.float32),
            x.new_empty(rows, hidden),
            self.count,
            self.qkv.weight,
            self.qkv.bias,
            self.qkv.sums,
            self.out.weight,
            self.out.bias,
            self.up.weight,
            self.up.bias,
            self.up.sums,
            self.down.weight,
            self.down.bias,
            blocks.k_cache,
            blocks.v_cache,
            state.table,
            state.positions,
            head_dim**-0.5,
            config.norm_eps,
            rows,
            config.n_layers,
            blocks.k_cache.stride(0),
            blocks.k_cache.stride(1),
            state.table.stride(0),
            state.positions.stride(0),
            C=width,
            F=hidden,
            H=n_heads,
            H_KV=config.n_kv_heads,
            D=head_dim,
            D_PADDED=triton.next_power_of_2(head_dim),
            BLOCK_SIZE=blocks.block_size,
            TILE=min(attend.tile, LARGEST_TILE),
            NUM_SPLITS=num_splits,
            BLOCK_M=1 if rows == 1 else PERSISTENT_ROWS,
            BLOCK_N_QKV=_columns(config.qkv_width, self.programs),
            BLOCK_N_C=_columns(width, self.programs),
            BLOCK_N_F=_columns(hidden, self.programs),
            SLICES=slices,
            BLOCK_K_C=_slice(width, slices),
            BLOCK_K_F=_slice(hidden, slices),
            PROGRAMS=self.programs,
            PATIENCE=PATIENCE,
            PREFETCH=self.on_gpu,
            num_warps=WARPS,
            launch_cooperative_grid=True,
        )


def num_splits_for(heads: int) -> int:
    """Ranges of each context where that many heads of all rows attend: as many as keep the programs busy."""
    return min(8, 1 << max(0, (BUSY // heads).bit_length() - 1))


def _columns(n: int, programs: int) -> int:
    """The tile that holds a program's share of n columns."""
    return max(8, triton.next_power_of_2(triton.cdiv(n, programs)))


def _slice(k: int, slices: int) -> int:
    """Elements of K in a slice: one chunk for inputs up to CHUNK, more beyond."""
    return max(16, min(triton.next_power_of_2(k), CHUNK) // slices)


def _stacked(layers: list[RowWeights]) -> RowWeights:
    """``[L, N, K]``, ``[L, N]``, ``[L, N]``."""
    return RowWeights(*(torch.stack([getattr(w, f.name) for w in layers]) for f in fields(RowWeights)))


def persistent_for_few(
    layers_for: Callable[[int], Layers], model: GPT, kernels: Kernels
) -> Callable[[int], Layers]:
    """``layers_for`` with one kernel for up to ``PERSISTENT_ROWS`` rows; of torch twins, as it is.

    For decode steps only: their attention is a ``PagedAttention``.
    """
    if kernels.name == "torch":
        return layers_for
    on_gpu = model.device.type == "cuda"
    programs = torch.cuda.get_device_properties(model.device).multi_processor_count if on_gpu else 1
    few = PersistentLayers(model, layers_for(PERSISTENT_ROWS).weights, kernels, programs)
    return lambda rows: few if rows <= PERSISTENT_ROWS else layers_for(rows)
