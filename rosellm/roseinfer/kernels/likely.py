"""Log-probabilities of the chosen and of the most likely tokens: torch reference and kernels.

One kernel finds the largest logit of each tile of the vocabulary. The other takes the largest of these, as
often as most likely tokens are wanted, and each time replaces it by the next logit of the same tile. A row
thus pays for a log-sum-exp and for the tokens that it asks for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rosellm.roseinfer.kernels.candidates import float_of, ordered_bits
from rosellm.roseinfer.sampling import MOST_LOGPROBS
from rosellm.triton_or_none import cdiv, next_power_of_2, tl, triton

ROLES = {"_tile_maxima_kernel": "sampling", "_store_likely_kernel": "sampling"}
TILE = 1024


def likely_words(vocab_size: int) -> int:
    """Return W, the number of 32-bit integers per row that :func:`likely_tokens` returns."""
    return 2 * (1 + min(MOST_LOGPROBS, vocab_size)) + 1


def likely_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the logprobs and ranks of tokens, and the most likely tokens with theirs, as ``[n, W]`` int32.

    logits: ``[n, V]`` from the model.
    tokens: ``[n]``; negative in a row without a token, whose results are then meaningless.

    The W integers of a row are as follows, where m is ``MOST_LOGPROBS``, or V if that is less:

    ids, 1 + m integers: the given token, then the m most likely tokens in order.
    logprobs, 1 + m integers: the bits of these tokens' logprobs in fp32.
    rank, 1 integer: 1 plus the number of tokens that are more likely than the given one.
    """
    logits, tokens = logits.float(), tokens.long().clamp_min(0)[:, None]
    own = logits.gather(1, tokens)
    most, indices = logits.topk(min(MOST_LOGPROBS, logits.shape[1]), dim=-1)
    ranks = 1 + (logits > own).sum(dim=-1, keepdim=True)
    logprobs = torch.cat((own, most), dim=1) - logits.logsumexp(dim=-1, keepdim=True)
    bits = logprobs.view(torch.int32)
    return torch.cat((tokens.int(), indices.int(), bits, ranks.int()), dim=1)


def store_likely_ref(
    *, logits: Tensor, tokens: Tensor, rounds: Tensor, slots: Tensor, wanted: Tensor, ring: Tensor
) -> None:
    """Store the result of :func:`likely_tokens` for each row in a ring (torch reference).

    logits: ``[n, V]`` fp32.
    tokens, rounds: ``[S]`` int32, each slot's latest token, and its number of tokens so far, which may be
        modulo R.
    slots: ``[n]`` int64, the slot of each row; the result of a row with a negative slot is not stored.
    wanted: ``[n]`` int64, how many most likely tokens are stored; more may be, and their order is undefined
        among equal logits.
    ring: ``[R, S, W]`` int32; the entry of a slot's r-th token, from 0, is ``ring[r % R, slot]``.
    """
    rows = slots >= 0
    own = slots[rows]
    rounds = (rounds[own].long() + len(ring) - 1) % len(ring)
    ring[rounds, own] = likely_tokens(logits[rows], tokens[own]).to(ring.device)


@triton.jit
def keyed(logits, columns):
    """Return int64 keys that order tokens by their logits; of equal logits, the lower token is larger."""
    return (ordered_bits(logits).to(tl.int64) << 32) | (2147483647 - columns)


@triton.jit
def _tile_maxima_kernel(
    logits_ptr, tokens_ptr, slots_ptr, keys_ptr, masses_ptr, numbers_ptr, row_stride, slot_stride,
    N, TILES, TILE: tl.constexpr,
):  # fmt: skip
    """Store the key of one tile's largest logit, its mass, and how many of its logits exceed the token's.

    The mass is the sum of exp(logit - largest).
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += row * row_stride
    slot = tl.maximum(tl.load(slots_ptr + row), 0)
    token = tl.maximum(tl.load(tokens_ptr + slot * slot_stride), 0)
    own = tl.load(logits_ptr + token)
    columns = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + columns, mask=columns < N, other=float("-inf"))
    largest = tl.max(keyed(logits, columns), axis=0)
    mass = tl.sum(tl.exp(logits - float_of((largest >> 32).to(tl.int32))), axis=0)
    at = row * TILES + tile
    tl.store(keys_ptr + at, largest)
    tl.store(masses_ptr + at, mass)
    tl.store(numbers_ptr + at, tl.sum((logits > own).to(tl.int32), axis=0))


@triton.jit
def _store_likely_kernel(
    logits_ptr, tokens_ptr, slots_ptr, rounds_ptr, wanted_ptr, keys_ptr, masses_ptr, numbers_ptr, ring_ptr,
    row_stride, slot_stride, N, TILES, ring_stride,
    ROUNDS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store one row's words in the ring."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    slot, wanted = tl.load(slots_ptr + row), tl.load(wanted_ptr + row)
    if slot < 0:
        return
    entry = (tl.load(rounds_ptr + slot * slot_stride) + ROUNDS - 1) % ROUNDS
    ids_ptr = ring_ptr + entry * ring_stride + slot * WORDS
    logprobs_ptr = (ids_ptr + WORDS // 2).to(tl.pointer_type(tl.float32))
    tiles = tl.arange(0, WIDTH)
    at, inside = row * TILES + tiles, tiles < TILES
    keys = tl.load(keys_ptr + at, mask=inside, other=-9223372036854775808)
    masses = tl.load(masses_ptr + at, mask=inside, other=0.0)
    rank = 1 + tl.sum(tl.load(numbers_ptr + at, mask=inside, other=0), axis=0)
    largest = float_of((tl.max(keys, axis=0) >> 32).to(tl.int32))
    below = tl.where(inside, float_of((keys >> 32).to(tl.int32)) - largest, 0.0)
    total = largest + tl.log(tl.sum(masses * tl.exp(below), axis=0))
    token = tl.maximum(tl.load(tokens_ptr + slot * slot_stride), 0)
    tl.store(ids_ptr, token)
    tl.store(logprobs_ptr, tl.load(logits_ptr + token) - total)
    tl.store(ids_ptr + WORDS - 1, rank)
    for i in range(1, wanted + 1):
        key = tl.max(keys, axis=0)
        likely = 2147483647 - (key & 0xFFFFFFFF).to(tl.int32)
        tl.store(ids_ptr + i, likely)
        tl.store(logprobs_ptr + i, float_of((key >> 32).to(tl.int32)) - total)
        columns = likely // TILE * TILE + tl.arange(0, TILE)
        logits = tl.load(logits_ptr + columns, mask=columns < N, other=float("-inf"))
        rest = keyed(logits, columns)
        following = tl.max(tl.where(rest < key, rest, -9223372036854775808), axis=0)
        keys = tl.where(tiles == likely // TILE, following, keys)


def store_likely(
    *, logits: Tensor, tokens: Tensor, rounds: Tensor, slots: Tensor, wanted: Tensor, ring: Tensor
) -> None:
    """Store each row's words as :func:`store_likely_ref` does, in Triton.

    Only ``wanted`` most likely tokens are stored; of equal logits, the lower token comes first. logits may
    have any row stride, and tokens and rounds any one stride; ring may be pinned memory of the host.
    """
    n, size = logits.shape
    tiles = cdiv(size, TILE)
    keys = torch.empty(n, tiles, dtype=torch.int64, device=logits.device)
    masses = torch.empty(n, tiles, dtype=torch.float32, device=logits.device)
    numbers = torch.empty(n, tiles, dtype=torch.int32, device=logits.device)
    found, sizes = (keys, masses, numbers), (logits.stride(0), tokens.stride(0), size, tiles)
    _tile_maxima_kernel[(n, tiles)](logits, tokens, slots, *found, *sizes, TILE=TILE)
    _store_likely_kernel[(n,)](
        logits, tokens, slots, rounds, wanted, *found, ring, *sizes, ring.stride(0),
        ROUNDS=len(ring), WORDS=ring.shape[2], WIDTH=next_power_of_2(tiles), TILE=TILE,
    )  # fmt: skip
