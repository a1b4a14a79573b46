"""Notebook 29: what is said of its run is what its outputs show."""

import re

import nbformat

from tests.claims.prose import prose, said
from tests.claims.reading import ROOT


def test_the_missing_cache_costs_most_and_the_first_diagnosis_names_it():
    said(prose("29"), r"In this run, on a CPU, (the missing cache costs most)")
    cells = nbformat.read(ROOT / "notebooks/29_why_is_it_slow.ipynb", 4).cells
    shown = [output.get("text", "") for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    (first,) = (text for text in shown if text.startswith("NoCache:"))
    assert first.partition("\n* ")[2].startswith("Computes the past again")
    found = re.findall(r"^(\w+): ([\d.]+)× the", "\n".join(shown), re.MULTILINE)
    times = {name: float(ratio) for name, ratio in found}
    assert max(times, key=lambda name: times[name]) == "RowByRow"
