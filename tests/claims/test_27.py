"""Notebook 27's figures are those of the session with both engines, of the ceilings and of the shapes."""

from __future__ import annotations

import math

from rosellm.lab.figures import models
from rosellm.lab.records.records import find
from tests.claims.prose import claim, prose

TEXT, RESULTS = prose("27"), find()
TIMES = {
    name: {row.workload: models.speed_up(row) for row in models.lease_table(RESULTS, name)}
    for name in models.recorded_shapes(RESULTS)
}


def test_the_floor_rests_on_the_recorded_ceilings():
    ceilings = RESULTS.load("ceilings")["figures"]
    values = [max(ceilings[name]) for name in ("read_TB_s", "copy_TB_s", "matmul_TFLOP_s")]
    claim(TEXT, r"read once at ([\d.]+) TB/s.* reaches ([\d.]+)\), .*recorded (\d+) TFLOP/s", *values)


def test_leads_over_vllm_are_those_of_one_session():
    words = (
        r"largest model: ([\d.]+) to ([\d.]+) times .* of one token, ([\d.]+) to ([\d.]+) times after 32,000"
    )
    values = [choose(one[w] for one in TIMES.values()) for w in ("D1", "L32K") for choose in (min, max)]
    claim(TEXT, words, *values)
    equal = [TIMES["Llama-3.1-8B"][w] for w in ("MIX", "L8K", "L32K", "PRE")]
    percent = math.ceil(100 * max(abs(one - 1) for one in equal))
    words = r"equal within (\d+) % at MIX, L8K, L32K and PRE \(([\d.]+) to ([\d.]+) times\)"
    claim(TEXT, words, percent, min(equal), max(equal))
    for w in ("D1", "L32K"):  # smallest with the largest model
        leads = [one[w] for one in TIMES.values()]
        assert leads.index(min(leads)) == len(leads) - 1
    assert all(one["L32K"] < one["D1"] for one in TIMES.values())
