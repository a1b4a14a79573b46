"""Figures as pages and notebooks state them: read out of tables and sentences."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import nbformat

from rosellm.lab.recorded import RecordedPair
from rosellm.lab.records.records import find
from rosellm.roseinfer.recipe import BEFORE

ROOT = Path(__file__).parents[2]


def number(text: str) -> float:
    """``12,345``, ``−3``, ``84%``, ``**9**`` as a number."""
    return float(re.sub(r"[*,%\s]", "", text).replace("−", "-"))


class Cell(str):
    """A cell of a table, or a number in it.

    place: the table, the row's first two cells, and the column.
    """

    place: str

    @classmethod
    def at(cls, place: str, text: str) -> Cell:
        cell = cls(text)
        cell.place = place
        return cell

    def numbers(self) -> list[Cell]:
        return [self.at(self.place, one) for one in re.findall(r"−?\d[\d,]*(?:\.\d+)?%?", self)]


def rows(text: str, name: str) -> list[list[Cell]]:
    """The rows of the table after ``<!-- name -->``, without its header."""
    table = re.search(rf"<!-- {name} -->\n((?:\|.*\n)+)", text)
    assert table, f"no table {name}"
    lines = [[one.strip() for one in line.strip("|").split("|")] for line in table[1].splitlines()]
    heads, _, *found = lines
    return [
        [Cell.at(f"{name}: {row[0]}, {row[1]}: {head}: ", one) for head, one in zip(heads, row, strict=True)]
        for row in found
    ]


def written(value: float | str, text: str) -> str:
    """``value`` as the page would show it, with as many digits as ``text``."""
    if isinstance(value, str):
        return value
    digits = len(re.sub(r"[*,%\s]", "", text).partition(".")[2])
    figure = f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")
    return f"{figure}%" if "%" in text else figure


def shown(value: float | str, text: str) -> bool:
    """Whether ``text`` is ``value``, rounded to the digits that it has."""
    if isinstance(value, str):
        return text == value
    digits = re.sub(r"[*,%\s]", "", text).partition(".")[2]
    return abs(number(text) - value) <= 0.5 * 10.0 ** -len(digits) + 1e-9


def wrong(claims: list[tuple[float | str, str]]) -> list[str]:
    """The texts that are not their values, each with its place and with what it should be."""
    return [
        f"{getattr(text, 'place', '')}{text}, recorded {written(value, text)}"
        for value, text in claims
        if not shown(value, text)
    ]


def falsified(text: str, at: int, end: int) -> str:
    """A page on which the number at ``at`` has another first digit."""
    first = next(i for i in range(at, end) if text[i].isdigit())
    return f"{text[:first]}{(int(text[first]) + 3) % 9 + 1}{text[first + 1 :]}"


@cache
def prose(number: str) -> str:
    """All Markdown of the notebook of this number, on one line, without asterisks."""
    (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    cells = nbformat.read(path, 4).cells
    text = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.sub(r"\s+", " ", text.replace("*", ""))


@cache
def stored(number: str) -> str:
    """The stored outputs of the notebook of this number, as text."""
    (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    outputs = [one for cell in nbformat.read(path, 4).cells for one in cell.get("outputs", [])]
    return "\n".join(one.get("text") or one.get("data", {}).get("text/plain", "") for one in outputs)


def table_row(notebook: str, *cells: str) -> list[float]:
    """The numbers after ``cells`` in the one row of the notebook's stored tables that begins with them."""
    (row,) = re.findall(rf"^{' +'.join(map(re.escape, cells))} {{2,}}(.+)$", stored(notebook), re.MULTILINE)
    return [float(one.replace(",", "")) for one in row.split()]


def predicted(notebook: str, table: int = 0) -> dict[str, float]:
    """Workload → the saving in µs that a stored table of the notebook predicts."""
    found = re.findall(r"predicted to save, µs +%\n.*\n((?:W\d .*\n?)+)", stored(notebook))[table]
    return {row.split()[0]: number(row.split()[2]) for row in found.splitlines()}


def pair_of(rung: str, before: str | None = None) -> RecordedPair:
    """A rung and the one that it changes, or another, on the reference machine."""
    return RecordedPair(before=before or BEFORE[rung], after=rung, results=find())


def said(text: str, pattern: str) -> tuple[str, ...]:
    """The groups of the one place where ``text`` says ``pattern``."""
    found = list(re.finditer(pattern, text))
    assert len(found) == 1, f"{len(found)} places say {pattern}"
    return found[0].groups()


def claim(number: str, pattern: str, *values: float) -> None:
    """The groups of the one place where the notebook says ``pattern`` are these values, rounded as there."""
    assert wrong(list(zip(values, said(prose(number), pattern), strict=True))) == []
