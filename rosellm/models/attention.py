"""The interface between the model and attention: a callable that takes q, k and v of one layer.

N: number of tokens in the step. In decode, each sequence has one token; in prefill and training, the tokens
    of all sequences are packed back to back.
H: number of query heads, a multiple of H_kv.
H_kv: number of key/value heads.
D: head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Attend(Protocol):
    """A callable that computes attention in one layer for the N tokens of a step."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map q ``[N, H, D]``, k and v ``[N, H_kv, D]`` of layer ``layer`` to outputs ``[N, H, D]``."""


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute scaled dot-product attention (Vaswani et al. 2017) with grouped key/value heads.

    q: ``[B, H, T, D]``.
    k, v: ``[B, H_kv, S, D]``.
    mask: boolean, broadcastable to ``[B, H, T, S]``, True where a query attends to a key; None means
        everywhere, unless ``is_causal``.
    is_causal: whether queries attend to no later keys; ``mask`` must then be None.
    scale: the factor on the scores; None means 1 / √D.

    Returns ``[B, H, T, D]``.
    """
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def in_window(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Return the boolean mask that is True where a token at ``query`` attends to a token at ``key``.

    query, key: positions, broadcast against each other.
    window: number of tokens that a token attends to, itself and the ``window - 1`` tokens before it; None
        means itself and all tokens before it.
    """
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


class CausalAttention:
    """Attention without a cache: each token attends to itself and to earlier tokens of its sequence.

    lengths: number of tokens of each packed sequence; their sum is N.
    scale, window: the fields of ``Arch``.

    Sequences of different lengths are padded on the right, where the causal mask hides the padding; sequences
    of equal length need no copy.
    """

    def __init__(
        self, lengths: list[int], device: torch.device, scale: float | None = None, window: int | None = None
    ) -> None:
        self.scale = scale
        self.batch, self.longest = len(lengths), max(lengths)
        self.equal = all(n == self.longest for n in lengths)
        if not self.equal:
            counts = torch.tensor(lengths, device=device)
            self.real = torch.arange(self.longest, device=device)[None, :] < counts[:, None]  # [B, T]
        self.mask = None
        if window is not None and window < self.longest:
            position = torch.arange(self.longest, device=device)
            self.mask = in_window(position[:, None], position[None, :], window)  # [T, T]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        padded = self._pad(q), self._pad(k), self._pad(v)
        out = masked_attention(*padded, self.mask, is_causal=self.mask is None, scale=self.scale)
        out = out.transpose(1, 2)  # [B, T, H, D]
        return out.reshape(q.shape) if self.equal else out[self.real]

    def _pad(self, x: Tensor) -> Tensor:
        shape = (self.batch, self.longest, *x.shape[1:])
        if self.equal:
            return x.reshape(shape).transpose(1, 2)  # [B, H, T, D]
        padded = x.new_zeros(shape)
        padded[self.real] = x
        return padded.transpose(1, 2)
