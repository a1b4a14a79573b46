"""A case of each value of each parameter: other combinations of the same values are left to make test-all.

Covers of one value, of pairs and whole products were found to catch the same planted faults and mutants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from zlib import crc32

import pytest


def combinations(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The cases whose parameters' values all stand in other cases of the same test."""
    tests: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if len(_values(item)) > 1:
            test, on_gpu = item.nodeid.partition("[")[0], item.get_closest_marker("gpu") is not None
            tests[test, on_gpu].append(item)
    return [item for cases in tests.values() for item in _spare(cases)]


def _spare(cases: list[pytest.Item]) -> list[pytest.Item]:
    """In an order that mixes the values, a case is kept that has one not seen before."""
    seen: set[tuple[str, type, object]] = set()
    spare = []
    for case in sorted(cases, key=lambda case: crc32(case.nodeid.encode())):
        values = _values(case)
        if values <= seen:
            spare.append(case)
        seen |= values
    return spare


def _values(item: pytest.Item) -> set[tuple[str, type, object]]:
    """Each parameter's name, type and value."""
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    return {(name, type(value), value if _has_hash(value) else id(value)) for name, value in params.items()}


def _has_hash(value: object) -> bool:
    try:
        hash(value)
    except TypeError:  # a tuple of lists, say
        return False
    return True
