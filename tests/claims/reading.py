"""Figures as pages state them: read out of tables and sentences, to be compared with the records."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def number(text: str) -> float:
    """``12,345``, ``−3``, ``84%``, ``**9**`` as a number."""
    return float(re.sub(r"[*,%\s]", "", text).replace("−", "-"))


def rows(text: str, name: str) -> list[list[str]]:
    """The rows of the table between ``<!-- name -->`` and ``<!-- /name -->``, without its header."""
    between = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    assert between, f"no table {name}"
    lines = [line for line in between[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def shown(value: float, text: str) -> bool:
    """Whether ``text`` is ``value``, rounded to the digits that it has."""
    digits = re.sub(r"[*,%\s]", "", text).partition(".")[2]
    return abs(number(text) - value) <= 0.5 * 10.0 ** -len(digits) + 1e-9


def wrong(claims: list[tuple[float, str]]) -> list[str]:
    """The texts that are not their values."""
    return [f"{text}, recorded {value:.6g}" for value, text in claims if not shown(value, text)]


def falsified(text: str, at: int, end: int) -> str:
    """A page on which the number at ``at`` has another first digit."""
    first = next(i for i in range(at, end) if text[i].isdigit())
    return f"{text[:first]}{(int(text[first]) + 3) % 9 + 1}{text[first + 1 :]}"
