"""Measure things to compare in alternation, so that temporary slowdowns of the machine affect all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from tqdm import tqdm

from rosellm.bench.record import across_repeats

Key = TypeVar("Key")
T = TypeVar("T")


def in_turns(sides: Mapping[Key, Callable[[], T]], turns: int, warm_up: bool = True) -> dict[Key, list[T]]:
    """Call each side's function once per turn, and return side → the results of its turns.

    sides: the things to compare: name → function that measures it once.
    warm_up: whether there is a first turn whose results are dropped.
    """
    found: dict[Key, list[T]] = {side: [] for side in sides}
    for turn in range(turns + warm_up):
        for side, run in sides.items():
            figures = run()
            if turn >= warm_up:
                found[side].append(figures)
    return found


def runs_in_turns(
    sides: Mapping[str, Callable[[], dict[str, Any]]], repeats: int
) -> dict[str, dict[str, Any]]:
    """Measure sides as :func:`in_turns` does, after a warm-up turn.

    Returns side → figures of every repeat, with medians and means.
    """
    found = in_turns(sides, repeats)
    return {side: {"repeat_runs": repeats, **across_repeats(own)} for side, own in found.items()}


def each(name: str, parts: Iterable[T]) -> Iterator[T]:
    """Yield the parts of an experiment, with a progress bar."""
    with tqdm(list(parts), leave=False) as bar:
        for part in bar:
            bar.set_description(f"{name}: {part}")
            yield part
