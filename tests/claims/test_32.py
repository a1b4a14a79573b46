"""Notebook 32's figures are those of the recorded fresh processes."""

from __future__ import annotations

from rosellm.lab.records import first_request
from rosellm.lab.records.records import find
from tests.claims.prose import claim, prose

TEXT, PROCESSES = prose("32"), first_request.recorded(find())


def test_starts_and_first_runs_are_those_recorded():
    of = {(one["warm_up"], one["cache"]): one for one in PROCESSES}
    ratios = {key: 100 * first_request.run_ratio(one) for key, one in of.items()}
    warm, cold = ([ratios[way, cache] for cache in ("empty", "filled")] for way in (True, False))
    words = r"the first run has (\d+) to (\d+) % .*, without one (\d+) to (\d+) %"
    claim(TEXT, words, min(warm), max(warm), min(cold), max(cold))
    asked = (True, "filled"), (True, "empty"), (False, "filled")
    words = r"takes ([\d.]+) s for it, or ([\d.]+) s where .*, in place of ([\d.]+) s"
    claim(TEXT, words, *(first_request.construction_s(of[one]) for one in asked))


def test_graphs_captured_late_are_those_recorded():
    (found,) = {one["runs"][0]["late_captures"] for one in PROCESSES if not one["warm_up"]}
    claim(TEXT, r"Without a warm-up (\d+) graphs were captured late in the first run", found)
