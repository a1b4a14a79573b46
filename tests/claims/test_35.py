"""Notebook 35's figures are those of the recorded all-reduces and runs on two GPUs."""

from __future__ import annotations

from rosellm.lab.records import all_reduce, two_gpus
from rosellm.lab.records.records import find, read_us
from rosellm.roseinfer.exhibits import load_exhibit
from tests.claims.prose import claim, prose, said
from tests.claims.reading import number

cuts = load_exhibit("cuts")
TEXT = prose("35")
US = {way: times["8"]["median"] for way, times in all_reduce.recorded(find())["us"].items()}
FASTEST = min(us - US["none"] for way, us in US.items() if way != "none")
RUNS = two_gpus.recorded_runs(find(), kind="tensor_parallel")


def allowed(name: str) -> float:
    """µs that an all-reduce may take before nothing is left of the bytes saved."""
    one, two = (cuts.step_bytes(cuts.MODELS[name], n) for n in (1, 2))
    return read_us(find(), one - two) / cuts.sums_a_step(cuts.MODELS[name])


def test_what_an_all_reduce_takes_and_may_take_is_recorded():
    values = [FASTEST, allowed("Qwen3-0.6B"), allowed("Llama-3.1-8B")]
    claim(TEXT, r"takes (\S+) µs, and it may take (\S+)\. Llama-3.1-8B may take (\d+) µs", *values)
    assert allowed("Qwen3-0.6B") < FASTEST < allowed("Llama-3.2-1B") < allowed("Llama-3.1-8B")


def test_only_the_measured_model_is_said_to_win():
    assert list(RUNS) == ["Llama-3.1-8B"]
    speeds = two_gpus.speeds(RUNS["Llama-3.1-8B"]["D1"])
    alone, two = speeds["1"], speeds["2 one_shot"]
    claim(TEXT, r"does win where it was measured: ([\d.]+) times at D1", two / alone)
    words = r"takes (\S+) ms per token at D1; .* of (\S+) µs would be (\S+) ms, and (\S+) are recorded"
    ms = 1e3 / alone
    hoped = ms / 2 + cuts.sums_a_step(cuts.MODELS["Llama-3.1-8B"]) * number(said(TEXT, words)[1]) / 1e3
    claim(TEXT, words, ms, FASTEST, hoped, 1e3 / two)
