"""From logits to tokens: greedy, temperature, top-k, top-p, seeded."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rosellm.roseinfer.kernels.noise import gumbel_noise
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import NOT_FINITE

FLOAT32 = torch.finfo(torch.float32)


Noise = Callable[[Tensor, Tensor, int], Tensor]


def allowed_log_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Log-probabilities after temperature, top-k and top-p: ``[B, V]`` → ``[B, V]``, −inf where excluded.

    temperature, top_k, top_p ``[B]``; the most likely token always stays, the first of equals. Subtracting a
    row's maximum before dividing changes no probability and avoids +inf at small temperatures; a temperature
    beyond float32 is clamped to its largest number.
    """
    below_best = logits.float() - logits.amax(dim=-1, keepdim=True).float()
    scaled = below_best / temperature[:, None].clamp(FLOAT32.tiny, FLOAT32.max)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)[None, :]
    limit = torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    ordered = ordered.masked_fill(rank >= limit, float("-inf"))
    probs = ordered.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    ordered = ordered.masked_fill((mass_before >= top_p[:, None]) & (rank > 0), float("-inf"))
    return torch.empty_like(ordered).scatter_(1, order, ordered).log_softmax(dim=-1)


def draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    noise: Noise = gumbel_noise,
) -> Tensor:
    """The next token of every row: logits ``[B, V]`` → ``[B]`` int32; nothing waits for the host.

    temperature, top_p ``[B]`` float32, top_k ``[B]`` int, seeds ``[B]`` int64; positions ``[B]`` int, the new
    token's index in its sequence. At temperature 0 (to which float32 rounds anything below 1e-45) the largest
    raw logit wins, the first of equals. Otherwise the Gumbel-max trick (Gumbel 1954): the argmax of
    log-probabilities plus noise is a draw. ``NOT_FINITE`` for a row without probabilities: with NaN, with
    +inf, or all −inf.
    """
    best, likeliest = logits.max(dim=-1)
    log_probs = allowed_log_probs(logits, temperature, top_k, top_p)
    drawn = log_probs.add_(noise(seeds, positions, logits.shape[1])).argmax(dim=-1)
    return _finite(best, torch.where(temperature > 0, drawn, likeliest)).int()


def likeliest(logits: Tensor) -> Tensor:
    """The greedy choice of every row, as in :func:`draw`: logits ``[B, V]`` → ``[B]`` int32."""
    return _finite(*logits.max(dim=-1)).int()


def _finite(best: Tensor, tokens: Tensor) -> Tensor:
    """``tokens`` of the rows whose largest logit ``best`` is finite, ``NOT_FINITE`` for the others."""
    return torch.where(best.abs() < math.inf, tokens, NOT_FINITE)


class Sampler:
    """Next tokens for a batch: one argmax; rows that are not greedy are drawn with their request's own noise.

    noise: :func:`noise.gumbel_noise` or its Triton version.
    """

    def __init__(self, noise: Noise = gumbel_noise) -> None:
        self.noise = noise

    def __call__(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        """logits ``[B, V]`` → B token ids, ``NOT_FINITE`` for a row without probabilities."""
        tokens = _finite(*logits.max(dim=-1))
        sampled = [row for row, s in enumerate(sequences) if not s.params.is_greedy]
        if sampled:
            tokens[sampled] = self._draw(logits[sampled], [sequences[row] for row in sampled]).long()
        return tokens.tolist()

    def _draw(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        params = [s.params for s in sequences]
        reals = torch.tensor([[float(p.temperature) for p in params], [p.top_p for p in params]])
        integers = torch.tensor(
            [[p.top_k for p in params], [s.seed for s in sequences], [len(s.tokens) for s in sequences]]
        )
        temperature, top_p = reals.to(logits.device)
        top_k, seeds, positions = integers.to(logits.device)
        return draw(logits, temperature, top_k, top_p, seeds, positions, self.noise)
