"""Steps with equal and unequal contexts: what a model has room for, and what was recorded."""

from __future__ import annotations

from collections.abc import Mapping

from rosellm.errors import OptionError
from rosellm.lab.records.records import Results
from rosellm.lab.records.step_time import StepTimes, room, step_times
from rosellm.roseinfer.exhibits import load_exhibit

lengths = load_exhibit("lengths")


def mean_within(n_positions: int) -> int:
    """Return ``MEAN``, or the largest mean that ``n_positions`` allow. Raises ``OptionError`` if too few."""
    fits = (n_positions - room()) // lengths.TIMES
    if fits < lengths.TIMES:
        needed = lengths.positions_for(lengths.TIMES)
        raise OptionError(f"rows of unequal lengths need {needed} positions; there are {n_positions}")
    return min(lengths.MEAN, fits)


def recorded_lengths(results: Results) -> dict[int, dict[str, StepTimes]]:
    """Return batch → recorded ``length_steps``, for the recorded batches."""
    there = [batch for batch in lengths.BATCHES if f"lengths-{batch}" in results.names()]
    return {n: step_times(results.load(f"lengths-{n}")["figures"]["turns_us"]) for n in there}


def faster_way(steps: Mapping[str, StepTimes], share: str) -> str:
    """Return which way has the faster step for a distribution: "whole", "cut", or "either".

    "either" if the engines' ranges overlap, or differ by at most twice the larger spread.
    """
    whole, cut = (steps[f"{share}, {way}"] for way in lengths.WAYS)
    (least, most), (least_cut, most_cut) = whole.range_us, cut.range_us
    spread = max(most - least, most_cut - least_cut)
    if abs(whole.us - cut.us) <= 2 * spread or (least <= most_cut and least_cut <= most):
        return "either"
    return "whole" if whole.us < cut.us else "cut"
