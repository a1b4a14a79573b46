"""Batch invariance: a request's logits are bitwise the same whatever else is in its batch.

Floating-point sums depend on their order, and the fastest order depends on the number of rows: other tiles,
other ranges of K, a separate kernel for few rows. Here every sum has a fixed order (He et al. 2025,
"Defeating nondeterminism in LLM inference"): a GEMM's K is split into the same ranges for any number of rows,
attention reads keys in tiles that start at multiples of ``ALIGNMENT`` from the sequence's first token, and
what a prefill has computed is never recomputed by a decode step, nor vice versa (``Sequence.replays``). Tiles
may differ in their numbers of rows and columns: that reorders no sum.

On a GPU these are the usual kernels at fixed sizes. On a CPU the torch references below process rows in
groups of one size: slow, but with the same result on any machine that runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.models.model import Transformer
from rosellm.roseinfer.kernels.attention import append_and_attend_ref
from rosellm.roseinfer.kernels.attention_plan import Variant
from rosellm.roseinfer.kernels.filtered_head import filtered_tiles
from rosellm.roseinfer.kernels.head import best_tokens
from rosellm.roseinfer.kernels.linear import Shape, some_rows_linear, some_rows_linear_ref
from rosellm.roseinfer.kernels.norm import add_norm
from rosellm.roseinfer.kernels.prefill import BLOCK_M, prefill_attention_ref
from rosellm.roseinfer.kernels.prefill_tiles import make_tiles
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.kernels.tile_tables import best
from rosellm.roseinfer.layers.attention import AppendAndAttend
from rosellm.roseinfer.layers.choosers import Chooser, FusedChooser, LogitsChooser
from rosellm.roseinfer.layers.fused import FusedLayers, Layers
from rosellm.roseinfer.layers.products import Parts, SomeRowsProducts, whole_blocks

ALIGNMENT = BLOCK_M  # tokens; prompt chunks and cached prefixes end at multiples of it
DECODE = Variant(tile=32, warps=1)
DECODE_PARTS, PARTS_FROM = 4, 2  # ranges of K, if inputs are at least PARTS_FROM times as wide as outputs
GROUP = 16  # rows per GEMM on a CPU


def linear_shape(rows: int, n: int, k: int, dtype: torch.dtype, parts: int) -> Shape:
    """Return a GEMM's tile sizes, warps and stages; any number of rows uses the same matrix instruction.

    The instruction takes 64 rows of a 16-bit type and adds 16 products at a time, in order of k.
    """
    return best("invariant_linear", rows=rows, n=n, k=k, bits=8 * dtype.itemsize)


def head_shape(table: str, rows: int, dtype: torch.dtype) -> Shape:
    """Return the LM head's tile sizes, warps and stages; any number of rows uses the same matrix instruction.

    table: the name of a table in ``tile_tables``. A filtered row's masses are sums over a tile's columns, so
    tiles always have the same number of columns.
    """
    return best(table, rows=rows, bits=8 * dtype.itemsize)


def decode_parts(rows: int, n: int, k: int) -> int:
    """Return the number of ranges of K in a decode step's GEMM, the same for any number of rows."""
    return DECODE_PARTS if k >= PARTS_FROM * n and k % (64 * DECODE_PARTS) == 0 else 1


def whole(rows: int, n: int, k: int) -> int:
    """Return 1: a prefill's GEMMs have enough rows, so K is not split into ranges."""
    return 1


def linear_by_groups(*, x: Tensor, **arguments) -> Tensor:
    """Run ``linear.some_rows_linear_ref`` on ``GROUP`` rows at a time, with zeros added to the last group."""
    groups = F.pad(x, (0, 0, 0, -len(x) % GROUP)).split(GROUP)
    return torch.cat([some_rows_linear_ref(x=rows, **arguments) for rows in groups], dim=-2)[..., : len(x), :]


def append_and_attend_by_rows(*, q, k_new, v_new, block_table, positions, **arguments) -> Tensor:
    """Run ``attention.append_and_attend_ref`` one row at a time, reading only that row's blocks."""
    block_size = arguments["k_cache_layer"].shape[2]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            continue
        own = slice(row, row + 1)
        table = block_table[own, : position // block_size + 1]
        mine = _copied(own, q=q, k_new=k_new, v_new=v_new)
        out[own] = append_and_attend_ref(**mine, block_table=table, positions=positions[own], **arguments)
    return out


def prefill_attention_by_tokens(*, q, k_new, v_new, tiles, **arguments) -> Tensor:
    """Run ``prefill.prefill_attention_ref`` one token at a time."""
    out = q.new_empty(q.shape)
    order = sorted(tiles.columns.T.tolist(), key=lambda tile: tile[0])
    for first, n_rows, position, _, _, table_row, *_ in order:
        for i in range(n_rows):
            own = slice(first + i, first + i + 1)
            tile = make_tiles([position + i], [1], [table_row], tiles.size, "cpu")
            mine = _copied(own, q=q, k_new=k_new, v_new=v_new)
            out[own] = prefill_attention_ref(**mine, tiles=tile, **arguments)
    return out


def _copied(own: slice, **new: Tensor) -> dict[str, Any]:
    """Copy the rows ``own`` of each tensor into the layout that they would have alone in a batch."""
    return {name: rows[own].clone() for name, rows in new.items()}


def invariant_kernels(kernels: Kernels, dependent: bool) -> Kernels:
    """Return these kernels with a fixed summation order.

    dependent: whether to use programmatic dependent launch.
    """
    if kernels.name == "torch":
        return replace(
            kernels,
            some_rows_linear=linear_by_groups,
            append_and_attend=append_and_attend_by_rows,
            prefill_attention=prefill_attention_by_tokens,
        )
    return replace(
        kernels,
        add_norm=partial(add_norm, dependent=dependent, warps=8),
        some_rows_linear=partial(some_rows_linear, dependent=dependent, shape=linear_shape, copies=False),
        best_tokens=partial(best_tokens, dependent=dependent, shape=partial(head_shape, "invariant_head")),
        filtered_tiles=partial(
            filtered_tiles, dependent=dependent, shape=partial(head_shape, "invariant_filtered_head")
        ),
    )


class InvariantAppendAndAttend(AppendAndAttend):
    """An :class:`AppendAndAttend` with one tile size for any batch and context, and no split contexts."""

    def variant(self, rows: int, longest: int, mean: float) -> str:
        return str(DECODE)


def invariant_chooser(model: Transformer, kernels: Kernels, counts: Tensor) -> Chooser:
    """Return a chooser whose full logits, too, have a fixed summation order."""
    weight, linear = model.lm_head.weight, kernels.some_rows_linear
    if kernels.name == "torch":
        return LogitsChooser(lambda hidden: linear(x=hidden, weight=weight), kernels, counts)
    return FusedChooser(
        model, kernels, counts, lambda hidden: linear(x=hidden, weight=weight, parts=2).sum(dim=0)
    )


def invariant_layers(
    model: Transformer, kernels: Kernels
) -> tuple[Callable[[int], Layers], Callable[[int], Layers]]:
    """Return two functions, each from a number of rows to the layers: for decode steps, and for prefills.

    The GEMMs read codes of 8 bits; weights of 4 bits are dequantised first.
    """

    def layers(parts: Parts) -> Layers:
        products = SomeRowsProducts(model, kernels, parts)
        if model.quantization == "int4":
            products.blocks = whole_blocks(model, kernels.dequantize)
        return FusedLayers(model, products, kernels)

    decode, prefill = layers(decode_parts), layers(whole)
    return lambda rows: decode, lambda rows: prefill
