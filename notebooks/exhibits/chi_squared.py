"""Test whether draws follow given probabilities: Pearson's chi-squared test."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rosellm.errors import RoseError

LEAST_EXPECTED = 5  # draws per token; with fewer, the statistic's distribution is not chi-squared


class DrawsError(RoseError):
    """Draws that the test cannot judge."""


class Fit(NamedTuple):
    """Pearson's statistic and its degrees of freedom, the number of excluded tokens drawn, and a chance.

    chance: probability that fair draws have a statistic at least as large. If excluded tokens were drawn, it
    is 0 and the statistic infinite.
    """

    statistic: float
    degrees: int
    excluded: int
    chance: float


def fit(tokens: Tensor, probs: Tensor) -> Fit:
    """Compare draws ``[n]`` int with probabilities ``[V]``; a token of probability 0 is excluded.

    Raises ``DrawsError`` for tokens outside the vocabulary, or if ``n`` is too small for every allowed token
    to be expected ``LEAST_EXPECTED`` times.
    """
    n, wanted = len(tokens), probs.double()
    if n and not 0 <= int(tokens.min()) <= int(tokens.max()) < len(wanted):
        raise DrawsError(
            f"tokens {int(tokens.min())} to {int(tokens.max())} are outside a vocabulary of {len(wanted)}"
        )
    allowed = wanted > 0
    needed = math.ceil(LEAST_EXPECTED / wanted[allowed].min().item() - 1e-9)
    if n < needed:
        raise DrawsError(f"{n} draws are too few to judge a token so rare; draw {needed} or more")
    counts = torch.bincount(tokens.flatten(), minlength=len(wanted)).double()
    excluded, degrees = int(counts[~allowed].sum()), int(allowed.sum()) - 1
    if excluded:
        return Fit(math.inf, degrees, excluded, 0.0)
    expected = n * wanted[allowed]
    statistic = ((counts[allowed] - expected).square() / expected).sum()
    halves = torch.tensor([degrees / 2, statistic.item() / 2], dtype=torch.float64)
    chance = torch.special.gammaincc(*halves).item() if degrees else 1.0
    return Fit(statistic.item(), degrees, excluded, chance)
