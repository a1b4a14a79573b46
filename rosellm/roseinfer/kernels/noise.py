"""Counter-based random numbers: the noise of a draw is a function of seed, position and vocabulary index.

There is no generator state: sampling can be captured in a CUDA graph, and a preempted request that is
recomputed draws with the same noise. A row's seed and position are mixed once, by Philox, into two key words
(32-bit integers). Each vocabulary index is then mixed with them by a hash with two multiplications, because
ten rounds of Philox for each of 50,000 tokens would take longer than the GEMM that computes their logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rosellm.triton_or_none import cdiv, has_triton, tl, triton

ROLES = {"_gumbel_noise_kernel": "sampling"}
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
SPREAD, MIXERS = 0x9E3779B1, (0x21F0AAAD, 0x735A2D97)
COLUMNS = 1024
BELOW_ONE = 1 - 2**-24
INTERPRETED = has_triton and tl.constexpr(triton.knobs.runtime.interpret)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    counter, key: int64 tensors that hold 0..2**32-1 and broadcast together. Returns four such tensors of
    random bits.
    """
    shape = np.broadcast_shapes(*(word.shape for word in (*counter, *key)))  # torch's function imports sympy
    c0, c1, c2, c3 = (word.expand(shape).clone() for word in counter)
    k0, k1 = key
    product0, product2 = torch.empty_like(c0), torch.empty_like(c0)
    for _ in range(ROUNDS):
        # int64 products wrap, and c1 and c3 carry junk above bit 31; every use is masked.
        torch.mul(c0, MULTIPLIERS[0], out=product0)
        torch.mul(c2, MULTIPLIERS[1], out=product2)
        torch.bitwise_right_shift(product2, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(WORD)
        torch.bitwise_right_shift(product0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(WORD)
        c1, c3, product0, product2 = product2, product0, c3, c1
        k0, k1 = k0 + KEY_STEPS[0], k1 + KEY_STEPS[1]
    return c0, c1 & WORD, c2, c3 & WORD


def hashed_words(column: Tensor, key: tuple[Tensor, Tensor]) -> Tensor:
    """Hash vocabulary indices with a two-word key into pseudorandom 32-bit words.

    column: vocabulary indices.
    key: two words.

    All are int64 tensors that hold 0..2**32-1 and broadcast together, as does the result. The hash uses
    shifts, exclusive ors and odd multipliers (Steele et al. 2014, "Fast splittable pseudorandom number
    generators") with constants from Wellons' search (hash-prospector); the second key word is added between
    the multiplications.
    """
    word = (column * SPREAD + key[0]) & WORD
    word = ((word ^ (word >> 16)) * MIXERS[0]) & WORD
    word = (((word ^ (word >> 15)) + key[1]) * MIXERS[1]) & WORD
    return word ^ (word >> 15)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise ``[B, V]`` fp32 (torch reference).

    seeds: ``[B]`` int64.
    positions: ``[B]`` int, the new token's index in its sequence.
    vocab_size: V.

    A row's noise depends only on its own seed and position. Its key is the first two words of Philox for the
    counter (position, 0, 0, 0), keyed by the seed's low and high words. The hash of a vocabulary index gives
    a uniform number, halfway between two multiples of 2**-32. It is represented by its distance from 1, which
    fp32 holds exactly where noise is large. Values range from -2.8 to 22.9.
    """
    column = torch.arange(vocab_size, device=seeds.device)  # [V]
    seeds, position = seeds[:, None], positions.long()[:, None]  # [B, 1]
    zero = torch.zeros_like(position)
    first, second, _, _ = philox4x32((position, zero, zero, zero), (seeds & WORD, (seeds >> 32) & WORD))
    from_one = hashed_words(column, (first, second)).float()  # [B, V]
    from_one = from_one.add_(0.5).mul_(2**-32).clamp_max_(BELOW_ONE)
    return from_one.neg_().log1p_().neg_().log_().neg_()


@triton.jit
def row_key(seed, position):
    """Return the two key words of a row's noise.

    seed is int64, and position any integer type; both have the same shape.
    """
    position = position.to(tl.uint32)
    first, second, _, _ = tl.philox(seed, position, position * 0, position * 0, position * 0, n_rounds=10)
    return first, second


@triton.jit
def log2(x):
    """Return the base-2 logarithm in one instruction; ``tl.log2``, which handles subnormals, takes twenty."""
    return tl.log2(x) if INTERPRETED else tl.extra.cuda.libdevice.fast_log2f(x)


@triton.jit
def gumbel(first, second, column):
    """Return the Gumbel noise of vocabulary indices ``column``, under the key words ``first`` and ``second``.

    All arguments are uint32 and broadcast together.
    """
    word = column * 0x9E3779B1 + first
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = ((word ^ (word >> 15)) + second) * 0x735A2D97
    word = word ^ (word >> 15)
    v = tl.minimum(word.to(tl.float32) * (1 / 4294967296) + (0.5 / 4294967296), 1 - 1 / 16777216)
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5)))))
    exponential = tl.where(v < 1 / 32, series, -0.6931471805599453 * log2(1 - v))  # -log1p(-v)
    return -0.6931471805599453 * log2(exponential)


@triton.jit
def _gumbel_noise_kernel(
    out_ptr, seeds_ptr, positions_ptr, seed_stride, position_stride, vocab_size, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    seed, position = tl.load(seeds_ptr + row * seed_stride), tl.load(positions_ptr + row * position_stride)
    first, second = row_key(seed, position)
    noise = gumbel(first, second, column.to(tl.uint32))
    tl.store(out_ptr + row * vocab_size + column, noise, mask=column < vocab_size)


def gumbel_noise_triton(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return the noise of :func:`gumbel_noise`, computed in one kernel.

    The hashed words are the same; logarithms may differ in their last bits. seeds and positions may have any
    stride and must be on the device where Triton runs.
    """
    out = torch.empty(len(seeds), vocab_size, dtype=torch.float32, device=seeds.device)
    grid = (len(seeds), cdiv(vocab_size, COLUMNS))
    strides = seeds.stride(0), positions.stride(0)
    _gumbel_noise_kernel[grid](out, seeds, positions, *strides, vocab_size, COLUMNS=COLUMNS)
    return out
