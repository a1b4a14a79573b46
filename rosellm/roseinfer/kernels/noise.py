"""Counter-based random numbers: a draw's noise is a function of seed, position and vocabulary index.

There is no generator state: a draw can be captured in a CUDA graph, and a preempted request that is
recomputed gets the same noise.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rosellm.triton_or_none import tl, triton

ROLES = {"_gumbel_noise_kernel": "sampling"}
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
COLUMNS = 1024
BELOW_ONE = 1 - 2**-24


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    counter, key: words 0..2**32-1 in int64 tensors that broadcast together → four such words of random bits.
    """
    shape = np.broadcast_shapes(*(word.shape for word in (*counter, *key)))  # torch's imports sympy
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


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, the specification: seeds ``[B]`` int64, positions ``[B]`` int → ``[B, V]`` fp32.

    A row's noise depends only on its own seed and position. Key: the seed's low and high word; counter:
    (vocabulary index, position, 0, 0). The first output word gives a uniform number of 32 bits, halfway
    between multiples of 2**-32, through its distance from 1, which fp32 holds exactly where noise is large:
    values from -2.8 to 22.9.
    """
    column = torch.arange(vocab_size, device=seeds.device)  # [V]
    seeds, position = seeds[:, None], positions.long()[:, None]  # [B, 1]
    zero = torch.zeros_like(position)
    word = philox4x32((column, position, zero, zero), (seeds & WORD, (seeds >> 32) & WORD))[0]  # [B, V]
    from_one = (WORD - word).float().add_(0.5).mul_(2**-32).clamp_max_(BELOW_ONE)
    return from_one.neg_().log1p_().neg_().log_().neg_()


@triton.jit
def gumbel(seed, position, column):
    """:func:`gumbel_noise` inside a kernel: seed int64, position and column any integers, all broadcast."""
    column = column.to(tl.uint32)
    word, _, _, _ = tl.philox(seed, column, position.to(tl.uint32), column * 0, column * 0, n_rounds=10)
    v = tl.minimum((~word).to(tl.float32) * (1 / 4294967296) + (0.5 / 4294967296), 1 - 1 / 16777216)
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5)))))
    return -tl.log(tl.where(v < 1 / 32, series, -tl.log(1 - v)))  # -log1p(-v), which has no operator


@triton.jit
def _gumbel_noise_kernel(
    out_ptr, seeds_ptr, positions_ptr, seed_stride, position_stride, vocab_size, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    seed, position = tl.load(seeds_ptr + row * seed_stride), tl.load(positions_ptr + row * position_stride)
    noise = gumbel(seed, position, column)
    tl.store(out_ptr + row * vocab_size + column, noise, mask=column < vocab_size)


def gumbel_noise_triton(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """:func:`gumbel_noise` in one kernel: the same random words; logarithms may differ in their last bits.

    seeds and positions, with any stride, are on the device where Triton runs.
    """
    out = torch.empty(len(seeds), vocab_size, device=seeds.device)
    grid = (len(seeds), triton.cdiv(vocab_size, COLUMNS))
    strides = seeds.stride(0), positions.stride(0)
    _gumbel_noise_kernel[grid](out, seeds, positions, *strides, vocab_size, COLUMNS=COLUMNS)
    return out
