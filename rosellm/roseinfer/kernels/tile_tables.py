"""Tile shapes as data: rules for the fastest of each kernel and size on an H200, which every GPU uses.

``tiles/rules.json`` holds a table for each kernel: columns, and rules of conditions and values. The first
rule whose conditions all hold applies. A condition compares a size, or two of them ("n/k", "n*k", "k%256"),
with a number. The shapes were chosen by timing whole decode steps of GPT-2 small, Qwen3-0.6B, Llama-3.2-1B
and Llama-3.1-8B. :mod:`tuned` has choices for single shapes, which come first.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

TABLES = Path(__file__).parent / "tiles" / "rules.json"
COMPARED = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "=": operator.eq}
COMBINED = {"/": operator.truediv, "*": operator.mul, "%": operator.mod}


class Condition(NamedTuple):
    """A bound on a size, or on two combined.

    first: name of the size.
    combine: the operation on ``first`` and ``second``; None to compare ``first`` alone.
    second: name of another size, or a number as text.
    compare: the comparison with ``bound``.
    bound: the number to compare with.
    """

    first: str
    combine: Callable[[float, float], float] | None
    second: str
    compare: Callable[[float, float], bool]
    bound: float

    def holds(self, sizes: dict[str, float]) -> bool:
        value = sizes[self.first]
        if self.combine is not None:
            value = self.combine(value, sizes.get(self.second) or float(self.second))
        return self.compare(value, self.bound)


@lru_cache(4096)
def best(table: str, **sizes: float) -> tuple[Any, ...]:
    """Return the values of the first rule of ``table`` whose conditions hold, in the order of the columns.

    sizes: the named sizes that the table's conditions use.
    """
    return next(values for conditions, values in _tables()[table] if all(c.holds(sizes) for c in conditions))


@cache
def _tables() -> dict[str, list[tuple[list[Condition], tuple[Any, ...]]]]:
    tables = json.loads(TABLES.read_text(encoding="utf-8"))
    return {
        name: [
            ([c for size, text in when.items() for c in _conditions(size, text)], tuple(values))
            for when, values in table["rules"]
        ]
        for name, table in tables.items()
    }


def _conditions(size: str, text: str) -> list[Condition]:
    """Parse a size, for example "n/k", and its bounds, for example ">1 <=4", into conditions."""
    combine = next((sign for sign in COMBINED if sign in size), None)
    first, _, second = size.partition(combine or " ")
    found = []
    for bound in text.split():
        sign = next(sign for sign in COMPARED if bound.startswith(sign))
        number = float(bound.removeprefix(sign))
        found.append(Condition(first, COMBINED.get(combine or ""), second, COMPARED[sign], number))
    return found
