"""Notebook 33's figures are those of the recorded arrivals and of the long prompt beside them."""

from __future__ import annotations

import pytest

from rosellm.lab.records import arrivals
from rosellm.lab.records.records import find
from rosellm.lab.records.serving_times import ServingTimes
from rosellm.lab.scale.simulation import simulated_run
from tests.claims.prose import claim, prose, said
from tests.claims.reading import number

TEXT = prose("33")
RECORDED = arrivals.recorded_servers(find())
QWEN3, GPT2 = ({run["share"]: run for run in RECORDED[name]["runs"]} for name in ("Qwen3-0.6B", "gpt2"))
TTFT_MS, ITL_MS = (number(limit) for limit in said(TEXT, r"(\d+) ms to the first token, (\d+) ms between"))


def simulated(name, share):
    found = RECORDED[name]
    (run,) = (run for run in found["runs"] if run["share"] == share)
    times = ServingTimes.from_dict(found["times"])
    return simulated_run(arrivals.arrivals_of(run["options"]), times, found["max_batch_size"])


@pytest.fixture(scope="module")
def made():
    return {(name, share): simulated(name, share) for name in RECORDED for share in (0.5, 0.8, 0.95)}


def test_queues_are_those_recorded_and_simulated(made):
    both = QWEN3[0.95], made["Qwen3-0.6B", 0.95]
    most = [max(one["queue_in_flight"]) for one in both]
    claim(TEXT, r"agree even at 95 %: (\d+) requests in the engine at most against (\d+), and never", *most)
    claim(TEXT, r"never more than (\d+) wait", max(max(one["queue_waiting"]) for one in both))
    waits = [max(one["queue_waiting"]) for s in (0.8, 0.95) for one in (GPT2[s], made["gpt2", s])]
    words = r"up to (\d+) waiting and .*? (\d+); at 95 % the record has (\d+) and the simulation (\d+)\."
    claim(TEXT, words, *waits)


def test_the_simulation_is_as_near_to_the_record_as_said_where_it_is_trusted(made):
    (percent,) = said(TEXT, r"The simulation is within (\d+) % of these medians and of the 95th percentiles")
    keys = ("ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p95_s")
    apart = [abs(made["Qwen3-0.6B", s][key] / QWEN3[s][key] - 1) for s in QWEN3 for key in keys]
    assert round(100 * max(apart)) == number(percent)
    ms = made["gpt2", 0.95]["ttft_p95_s"] * 1e3
    claim(TEXT, r"the simulation, which says (\d+) ms, is wrong", ms)


def test_latencies_and_capacities_are_those_recorded():
    words = r"95 % of its (\d+) requests .*TTFT rises from (\S+) to (\S+) ms, .* from (\S+) to (\S+) ms, and"
    values = [RECORDED["Qwen3-0.6B"]["capacity_req_s"]]
    values += [QWEN3[s][key] * 1e3 for key in ("ttft_p50_s", "itl_p50_s") for s in (0.5, 0.95)]
    claim(TEXT, words, *values)
    words = r"between 80 and 95 % of (\d+) requests per second:.* one request in twenty waits (\d+) ms"
    claim(TEXT, words, RECORDED["gpt2"]["capacity_req_s"], GPT2[0.95]["ttft_p95_s"] * 1e3)


def test_gpt2s_decode_steps_are_as_short_as_said():
    times = ServingTimes.from_dict(RECORDED["gpt2"]["times"])
    values = [times.decode(rows, rows * 250, 500) * 1e3 for rows in (1, 256)]
    claim(TEXT, r"decode steps are so short, (\S+) to (\S+) ms", *values)


def test_the_knees_are_where_the_records_keep_and_break_the_limits():
    def keeps(run):
        tight = run["within_limits_share"] == 1 and TTFT_MS >= 100 and ITL_MS >= 20
        return tight and run["ttft_p95_s"] * 1e3 <= TTFT_MS

    assert [keeps(QWEN3[share]) for share in (0.5, 0.8, 0.95)] == [True, True, True]
    assert [keeps(GPT2[share]) for share in (0.5, 0.8, 0.95)] == [True, True, False]
    assert GPT2[0.95]["ttft_p95_s"] * 1e3 > TTFT_MS
    assert all(list(one["limits_s"]) == [0.1, 0.02] for one in RECORDED.values())


def test_a_long_prompts_figures_are_those_recorded():
    found = arrivals.recorded_long_prompt(find())["Qwen3-0.6B"]

    def ms(way, key):
        return found[way][key] * 1e3

    p99, wait = "itl_beside_p99_s", "long_prompt_ttft_s"
    words = r"a gap of (\S+) ms\. .*gaps of at most (\S+) ms, and the prompt waits (\d+) ms .* of (\d+)\."
    claim(
        TEXT,
        words,
        *(ms(*one) for one in [("whole", p99), ("chunked", p99), ("chunked", wait), ("whole", wait)]),
    )
    words = (
        r"([\d,]+) ms with chunks of 128, ([\d,]+) ms with chunks of 32, .*\(([\d.]+) ms against ([\d.]+)\)"
    )
    values = [ms(f"chunks of {n}", wait) for n in (128, 32)]
    claim(TEXT, words, *values, *(ms(f"chunks of {n}", "itl_beside_p50_s") for n in (32, 128)))
    apart = [ms(way, "itl_apart_p50_s") for way in ("chunks of 32", "whole")]
    words = r"shorter than usual, ([\d.]+) ms: .*\(([\d.]+) ms against about ([\d.]+)\)"
    claim(TEXT, words, ms("whole", "itl_beside_p50_s"), *apart)
    assert ms("whole", p99) > ITL_MS > ms("chunked", p99)
    assert ms("chunked", wait) < TTFT_MS < ms("chunks of 128", wait)
    saved = [100 * (1 - ms(f"joined, {way}", wait) / ms(way, wait)) for way in ("chunked", "chunks of 32")]
    claim(TEXT, r"the prompt waits (\d+) to (\d+) % less", *saved)
    assert 5.5 < ms("whole", wait) / ms("whole", "itl_beside_mean_s") < 6.5
