"""Pearson's test: it accepts fair draws as often as it says, and finds each kind of unfair ones."""

import pytest
import torch

from rosellm.roseinfer.exhibits import load_exhibit

_chi_squared = load_exhibit("chi_squared")
DrawsError, fit = _chi_squared.DrawsError, _chi_squared.fit


PROBS = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
# 0.1% points of chi-squared by degrees of freedom, from tables.
CRITICAL = {1: 10.828, 2: 13.816, 3: 16.266, 5: 20.515, 9: 27.877}


def counted(*counts: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


@pytest.mark.parametrize("degrees", CRITICAL)
def test_the_chance_is_that_of_tables(degrees):
    """Two of equal probability are moved apart until the statistic is the table's."""
    n = 2_000_000
    each = n // (degrees + 1) // 2 * 2
    moved = round((CRITICAL[degrees] * each / 2) ** 0.5)
    counts = [each + moved, each - moved, *[each] * (degrees - 1)]
    probs = torch.full((degrees + 1,), 1 / (degrees + 1), dtype=torch.float64)
    assert fit(counted(*counts), probs).chance == pytest.approx(1e-3, rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (counted(20, 15, 10, 4), "49 draws are too few to judge a token so rare; draw 50 or more"),
        (torch.tensor([], dtype=torch.int64), "0 draws are too few"),
        (torch.tensor([0, 5]), "tokens 0 to 5 are outside a vocabulary of 5"),
        (torch.tensor([-2, 1]), "tokens -2 to 1 are outside a vocabulary of 5"),
    ],
)
def test_draws_that_cannot_be_judged_are_refused_in_one_line(tokens, message):
    with pytest.raises(DrawsError, match=f"^{message}.*$"):
        fit(tokens, PROBS)
