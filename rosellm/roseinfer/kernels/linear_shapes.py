"""Tile sizes and split-K of GEMMs for some rows, and the number of rows up to which they beat cuBLAS.

Chosen on an H200 by whole decode steps of GPT-2 small, Qwen3-0.6B, Llama-3.2-1B and Llama-3.1-8B, in
alternating runs that are not recorded. Every program rereads its rows of x from the L2 cache: at the same
number of programs, wide tiles over short ranges of K read less, and narrow tiles over long ones leave fewer
partial sums.
"""

from __future__ import annotations

import torch

Shape = tuple[int, int, int, int, int]  # rows, columns and K of a tile, warps, pipeline stages
SOME_ROWS = ((2**24, 256), (2**26, 128))  # parameters per layer, rows up to which ours beat cuBLAS
LARGE = 2**24  # elements of a weight; gpt2-xl has up to 10 million
PART = 128  # ranges of K are multiples of it


def some_rows(layer_parameters: int) -> int:
    """Return the number of rows up to which ``linear`` beats cuBLAS: fewer for larger layers."""
    return next((rows for most, rows in SOME_ROWS if layer_parameters <= most), 64)


def is_narrow(n: int, k: int) -> bool:
    """Return whether a model is as narrow as GPT-2 small.

    Attention and GEMMs then take so little time that they overlap, and tiles compete for shared memory.
    """
    return min(n, k) < 1024


def parts_of(rows: int, n: int, k: int) -> int:
    """Return the number of ranges of K (split-K), chosen to keep more programs busy.

    K is split if inputs are no narrower than outputs; in narrow models, if they are at least twice as wide.
    """
    if is_narrow(n, k):
        parts = 2 if rows > 128 else 8 if rows > 32 and n < 1024 else 4
        return parts if k >= 2 * n and k % (64 * parts) == 0 else 1
    parts = _wide_parts(rows, n, k) if k >= n else 1
    while k % (PART * parts) and parts > 1:
        parts //= 2
    return parts


def _wide_parts(rows: int, n: int, k: int) -> int:
    if rows <= 16:
        return 8 if k > 2 * n else 2
    if rows <= 32:
        return 2 if n < 2048 and k <= 2 * n else 4
    if rows <= 64:
        return 2 if n >= 4096 else 4
    return 4 if rows <= 128 and (n < 2048 or n * k >= LARGE) else 2


def some_rows_shape(rows: int, n: int, k: int, dtype: torch.dtype, parts: int) -> Shape:
    """Return the tile of a GEMM ``[M, K]`` x ``[N, K]``, over one of ``parts`` ranges of K."""
    if dtype == torch.float32:
        return 32, 32, 32, 4, 3
    if is_narrow(n, k):
        return _narrow_shape(rows, n, k)
    if rows <= 16:
        return 16, 128 if n * k > 2 * LARGE else 64 if parts > 1 else 32, 128, 4, 4
    if rows <= 32:
        return 32, 128 if parts > 1 and n >= 2048 else 32, 128, 4, 4
    if parts == 1 and k >= n:
        return 64, 16 if n < 2048 or k <= 2 * n else 32, 128, 4, 4
    if rows <= 64:
        return _up_to_64_shape(n, k, parts)
    return _up_to_128_shape(n, k, parts) if rows <= 128 else _more_rows_shape(n, k)


def _narrow_shape(rows: int, n: int, k: int) -> Shape:
    if rows <= 32:
        return 32, 16 if n == k else 32, 128, 4, 4
    if rows <= 128:
        return (64, 64, 64, 4, 5) if k > 2 * n else (64, 16, 128, 4, 4) if n <= k else (64, 32, 64, 4, 6)
    if n > k:
        return (64, 32 if n >= 4 * k else 64, 128, 4, 3) if n * k < LARGE // 4 else (128, 128, 64, 8, 6)
    return 64, 32, 128, 4, 4


def _up_to_64_shape(n: int, k: int, parts: int) -> Shape:
    if parts > 1:
        return 64, 64 if n >= 2048 and k > 2 * n else 32, 128, 4, 4
    if n * k > 2 * LARGE:
        return 64, 128, 64, 4, 4
    return (64, 64, 128, 4, 3) if n * k > LARGE else (64, 64 if n > 4096 else 32, 128, 4, 4)


def _up_to_128_shape(n: int, k: int, parts: int) -> Shape:
    if parts > 1:
        return (128, 64, 64, 4, 6) if n * k >= LARGE else (64, 64, 128, 4, 4)
    if n * k >= LARGE:
        return 128, 128, 64, 8, 6
    return (64, 64, 64, 4, 6) if n > 4096 else (64, 64, 128, 4, 4)


def _more_rows_shape(n: int, k: int) -> Shape:
    if k >= n:
        return 64, 64, 128, 4, 4
    if n * k > LARGE // 4:
        return 128, 128, 64, 8, 6
    return (128, 64, 64, 4, 6) if n >= 4096 else (64, 32 if n >= 4 * k else 64, 128, 4, 3)
