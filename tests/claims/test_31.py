"""Notebook 31's figures are those of the recorded steps by what their rows ask for."""

from __future__ import annotations

from statistics import median

from rosellm.lab.records import sampling_steps
from rosellm.lab.records.records import find, read_us
from tests.claims.prose import claim, prose

TEXT, RECORDED = prose("31"), sampling_steps.recorded_modes(find())


def times(mode: str) -> list[float]:
    """Of a greedy step, in all batches of all models."""
    return [
        median(steps[mode]) / median(steps["greedy"])
        for batches in RECORDED.values()
        for steps in batches.values()
    ]


def more(mode: str) -> list[float]:
    return [100 * (one - 1) for one in times(mode)]


def test_what_modes_add_to_a_greedy_step_is_recorded():
    words = r"a step at most (\d+) % longer, .* top-p (\d+) to (\d+) %; .* takes (\S+) to (\S+) times"
    filtered, sort = more("top-k, top-p"), times("top-k, top-p, sorted")
    claim(TEXT, words, max(more("temperature")), min(filtered), max(filtered), min(sort), max(sort))
    values = []
    for model in ("Qwen3-0.6B", "gpt2"):
        steps = RECORDED[model]
        share = {n: 100 * (median(one["top-p"]) / median(one["greedy"]) - 1) for n, one in steps.items()}
        assert max(share, key=lambda n: share[n]) == 256
        values.append(share[256])
    claim(TEXT, r"dearest at 256 rows: (\d+) % for Qwen3-0.6B, (\d+) % for GPT-2", *values)
    words, found = r"of every token make a step ([\d.]+) to ([\d.]+) times", times("logprobs")
    claim(TEXT, words, min(found), max(found))


def test_bytes_explain_as_little_as_said():
    best = max(
        read_us(find(), moved) / sampling_steps.extra_us(RECORDED[model][256])[mode]
        for model, arch in sampling_steps.SHAPES.items()
        for mode, moved in sampling_steps.extra_bytes(arch, 256).items()
    )
    claim(TEXT, r"bytes explain at best (\d+) % of what a mode adds", 100 * best)
