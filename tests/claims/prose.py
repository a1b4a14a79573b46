"""The text of a notebook, from which its claims' tests read the figures."""

from __future__ import annotations

import re

import nbformat

from tests.claims.reading import ROOT, wrong


def prose(number: str) -> str:
    """All Markdown of the notebook of this number, on one line, without asterisks."""
    (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    cells = nbformat.read(path, 4).cells
    text = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.sub(r"\s+", " ", text.replace("*", ""))


def said(text: str, pattern: str) -> tuple[str, ...]:
    """The groups of the one place where ``text`` says ``pattern``."""
    found = list(re.finditer(pattern, text))
    assert len(found) == 1, f"{len(found)} places say {pattern}"
    return found[0].groups()


def claim(text: str, pattern: str, *values: float) -> None:
    """The groups of the one place where ``text`` says ``pattern`` are these values, rounded as there."""
    assert wrong(list(zip(values, said(text, pattern), strict=True))) == []
