"""From logits to tokens: greedy, temperature, top-k, top-p, seeded."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rosellm.errors import SamplingError, told
from rosellm.roseinfer.noise import gumbel_noise

if TYPE_CHECKING:
    from rosellm.roseinfer.request import Sequence

INT64_MAX = 2**63 - 1
FLOAT32 = torch.finfo(torch.float32)
NOT_FINITE = -2

Noise = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops.

    temperature: 0 is greedy; otherwise logits are divided by it. top_k: keep the k likeliest tokens; 0 keeps
    all. top_p: keep the smallest set of likeliest tokens whose probability reaches it (Holtzman et al. 2020);
    1 keeps all. max_tokens: new tokens at most. seed: the same seed and logits give the same tokens whatever
    shares the batch; None draws a fresh one. ignore_eos: go on past the end-of-sequence token. stop: a string
    or list of strings at which the text ends, the stop string not included. Raises ``SamplingError``.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    ignore_eos: bool = False
    stop: str | list[str] | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, sys.float_info.max, "a number from 0 (greedy) to 1.79e308")
        self._number("top_p", math.ulp(0.0), 1.0, "a number above 0 and at most 1")
        self._whole("top_k", 0, INT64_MAX)
        self._whole("max_tokens", 1)
        if self.seed is not None:
            self._whole("seed", 0, INT64_MAX)
        if not isinstance(self.ignore_eos, bool):
            raise SamplingError(f"ignore_eos is {self.ignore_eos!r}; use True or False")
        stops = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) and s for s in stops):
            raise SamplingError(f"stop is {self.stop!r}; use a non-empty string or a list of them")
        object.__setattr__(self, "stop", tuple(stops))

    def _number(self, name: str, low: float, high: float, allowed: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise SamplingError(f"{name} is {told(value)}; it must be {allowed}")

    def _whole(self, name: str, low: int, high: float = math.inf) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            allowed = f", {low} or more" if high == math.inf else f" from {low} to {high}"
            raise SamplingError(f"{name} is {told(value)}; it must be a whole number{allowed}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def allowed_log_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Log-probabilities after temperature, top-k and top-p: ``[B, V]`` → ``[B, V]``, −inf where ruled out.

    temperature, top_k, top_p ``[B]``; the likeliest token always stays, and of equals the first. Subtracting
    a row's maximum before the division changes no probability, and keeps +inf out however small the
    temperature; one beyond float32 counts as its largest number.
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

    temperature, top_p ``[B]`` float32, top_k ``[B]`` int, seeds ``[B]`` int64; positions ``[B]`` int, the
    index that the new token will have in its sequence. At temperature 0, which is also what float32 makes of
    anything below 1e-45, the largest raw logit wins, the first of equals. Otherwise the Gumbel-max trick
    (Gumbel 1954): the argmax of log-probabilities plus noise is a draw. ``NOT_FINITE`` for a row that gives
    no probabilities: with NaN, with +inf, or all −inf.
    """
    best, likeliest = logits.max(dim=-1)
    log_probs = allowed_log_probs(logits, temperature, top_k, top_p)
    drawn = log_probs.add_(noise(seeds, positions, logits.shape[1])).argmax(dim=-1)
    return _finite(best, torch.where(temperature > 0, drawn, likeliest)).int()


def likeliest(logits: Tensor) -> Tensor:
    """The greedy choice of every row, as :func:`draw` makes it: logits ``[B, V]`` → ``[B]`` int32."""
    return _finite(*logits.max(dim=-1)).int()


def _finite(best: Tensor, tokens: Tensor) -> Tensor:
    """``tokens`` of the rows whose largest logit ``best`` is finite, ``NOT_FINITE`` for the others."""
    return torch.where(best.abs() < math.inf, tokens, NOT_FINITE)


class Sampler:
    """Next tokens for a batch: one argmax; rows that are not greedy are drawn with their requests' own noise.

    noise: :func:`noise.gumbel_noise` or its Triton twin.
    """

    def __init__(self, noise: Noise = gumbel_noise) -> None:
        self.noise = noise

    def __call__(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        """logits ``[B, V]`` → B token ids. Raises ``SamplingError`` where logits give no probabilities."""
        tokens = _finite(*logits.max(dim=-1))
        sampled = [row for row, s in enumerate(sequences) if not s.params.is_greedy]
        if sampled:
            tokens[sampled] = self._draw(logits[sampled], [sequences[row] for row in sampled]).long()
        tokens = tokens.tolist()
        if NOT_FINITE in tokens:
            raise SamplingError("the model's logits are not finite; nothing can be drawn from them")
        return tokens

    def _draw(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        params = [s.params for s in sequences]
        reals = torch.tensor([[float(p.temperature) for p in params], [p.top_p for p in params]])
        integers = torch.tensor(
            [[p.top_k for p in params], [s.seed for s in sequences], [len(s.tokens) for s in sequences]]
        )
        temperature, top_p = reals.to(logits.device)
        top_k, seeds, positions = integers.to(logits.device)
        return draw(logits, temperature, top_k, top_p, seeds, positions, self.noise)
