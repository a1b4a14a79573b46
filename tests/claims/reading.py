"""Figures as pages and notebooks state them: read out of tables and sentences."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import nbformat

from rosellm.lab.recorded import RecordedPair
from rosellm.lab.records.records import find
from rosellm.roseinfer.recipe import BEFORE

ROOT = Path(__file__).parents[2]


def number(text: str) -> float:
    """``12,345``, ``−3``, ``84%``, ``**9**`` as a number."""
    return float(re.sub(r"[*,%\s]", "", text).replace("−", "-"))


class Origin(NamedTuple):
    """A character of a file: its cell (0 if the file is no notebook), and its offset in that."""

    path: Path
    cell: int
    at: int


class Page(str):
    """The text of a file, or of a notebook's Markdown; origins: those of its characters."""

    origins: list[Origin]

    @classmethod
    def of(cls, characters: list[tuple[str, Origin]]) -> Page:
        page = cls("".join(one for one, _ in characters))
        page.origins = [origin for _, origin in characters]
        return page

    @classmethod
    def read(cls, path: Path) -> Page:
        characters = []
        for i, source in enumerate(sources(path)):
            characters += [(one, Origin(path, i, at)) for at, one in enumerate(source + "\n")]
        return cls.of(characters)


def sources(path: Path) -> list[str]:
    """The text of a file, or of a notebook's cells; "" for code."""
    text = path.read_text(encoding="utf-8")
    cells = json.loads(text)["cells"] if path.suffix == ".ipynb" else []
    return ["".join(one["source"]) if one["cell_type"] == "markdown" else "" for one in cells] or [text]


def on_one_line(text: str, without: str = "") -> str:
    """The text with single spaces; a :class:`Page` also without some characters, and it stays one."""
    if not isinstance(text, Page):
        return " ".join(text.split())
    kept: list[tuple[str, Origin]] = []
    for one, origin in zip(text, text.origins, strict=True):
        if one not in without and not (one.isspace() and kept and kept[-1][0] == " "):
            kept.append((" " if one.isspace() else one, origin))
    return Page.of(kept)


class Cell(str):
    """A figure in a text.

    place: where, in words. origin: its first character's; None if the text is not a page.
    """

    place: str = ""
    origin: Origin | None = None

    @classmethod
    def at(cls, place: str, figure: str, text: str, start: int) -> Cell:
        cell = cls(figure)
        cell.place, cell.origin = place, text.origins[start] if isinstance(text, Page) else None
        return cell

    def numbers(self) -> list[Cell]:
        found = []
        for one in re.finditer(r"−?\d[\d,]*(?:\.\d+)?%?", self):
            cell = self.at(self.place, one[0], "", 0)
            cell.origin = self.origin and self.origin._replace(at=self.origin.at + one.start())
            found.append(cell)
        return found


def rows(text: str, name: str) -> list[list[Cell]]:
    """The rows of the table after ``<!-- name -->``, without its header."""
    table = re.search(rf"<!-- {name} -->\n((?:\|.*\n)+)", text)
    assert table, f"no table {name}"
    lines = list(re.compile(r"\|.*\n").finditer(text, *table.span(1)))
    found = [list(re.compile(r"(?<=\| )[^|]*?(?= \|)").finditer(text, *line.span())) for line in lines]
    heads, _, *others = found
    return [
        [
            Cell.at(f"{name}: {row[0][0]}, {row[1][0]}: {head[0]}: ", one[0], text, one.start())
            for head, one in zip(heads, row, strict=True)
        ]
        for row in others
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


# page → where a wrong figure stands → it and the recorded one
CORRECTIONS: dict[Path, dict[Origin, tuple[str, str]]] = defaultdict(dict)


def wrong(claims: list[tuple[float | str, str]]) -> list[str]:
    """The texts that are not their values, each with its place and with what it should be.

    Those of pages are kept in ``CORRECTIONS``.
    """
    found = [(text, written(value, text)) for value, text in claims if not shown(value, text)]
    for text, right in found:
        if origin := getattr(text, "origin", None):
            CORRECTIONS[origin.path][origin] = text, right
    return [f"{getattr(text, 'place', '')}{text}, recorded {right}" for text, right in found]


def correct() -> None:
    """Write the recorded figures into the pages, in place of those that ``wrong`` has found."""
    for path, figures in CORRECTIONS.items():
        texts = sources(path)
        for origin in sorted(figures, reverse=True):
            text, (old, new) = texts[origin.cell], figures[origin]
            assert text.startswith(old, origin.at)
            texts[origin.cell] = text[: origin.at] + new + text[origin.at + len(old) :]
        if path.suffix == ".ipynb":
            notebook = json.loads(path.read_text(encoding="utf-8"))
            for cell, text in zip(notebook["cells"], texts, strict=True):
                if cell["cell_type"] == "markdown":
                    cell["source"] = text.splitlines(keepends=True)
            texts = [json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"]
        path.write_text("".join(texts), encoding="utf-8")


def falsified(text: str, at: int, end: int) -> str:
    """A page on which the number at ``at`` has another first digit."""
    first = next(i for i in range(at, end) if text[i].isdigit())
    return f"{text[:first]}{(int(text[first]) + 3) % 9 + 1}{text[first + 1 :]}"


@cache
def prose(number: str) -> str:
    """All Markdown of the notebook of this number, on one line, without asterisks."""
    (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    return on_one_line(Page.read(path), without="*")


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
    groups = zip(found[0].groups(), found[0].regs[1:], strict=True)
    return tuple(one and Cell.at("", one, text, start) for one, (start, _) in groups)


def claim(number: str, pattern: str, *values: float) -> None:
    """The groups of the one place where the notebook says ``pattern`` are these values, rounded as there."""
    assert wrong(list(zip(values, said(prose(number), pattern), strict=True))) == []
