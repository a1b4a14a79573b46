"""When requests arrive: seeded, read from a trace, submitted by their deadlines, joined by a long prompt."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rosellm.bench import benchmark_streaming
from rosellm.bench.arrivals import (
    Arrival,
    gap_figures,
    goodput,
    poisson_times,
    queue_over_time,
    read_trace,
    submit_by_deadline,
)
from rosellm.bench.job import SPARE_KV_BLOCKS
from rosellm.bench.prompts import make_prompts
from rosellm.errors import RoseError
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.request import RequestMetrics
from tests.helpers import refusal

HEADER = "seconds,prompt_tokens,new_tokens\n"
ROWS = [(0.5, 3, 4), (0.0, 2, 6), (1.25, 9, 1)]
ONCE = ["--warmup-runs=0", "--repeat-runs=1"]
TINY = ["--device=cpu", "--rung=dense", "--max-batch-size=2", "--no-stop-on-eos", *ONCE]


def test_poisson_times_are_seeded_begin_at_0_and_have_the_gaps_of_their_rate() -> None:
    times = poisson_times(20.0, 5000, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.05)  # as of an exponential distribution
    assert times == poisson_times(20.0, 5000, seed=1) != poisson_times(20.0, 5000, seed=2)


NAMES = ("seconds", "prompt_tokens", "new_tokens")
AS_CSV = [f"x,{new},{seconds},{prompt}" for seconds, prompt, new in ROWS]
AS_CSV = "\n".join(["user, new_tokens, seconds, prompt_tokens", *AS_CSV])
IN_ORDER = [Arrival(*row) for row in sorted(ROWS)]
ONE = [Arrival(0.0, 1, 2)]


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("\n".join(json.dumps(dict(zip(NAMES, row, strict=True))) for row in ROWS), IN_ORDER),
        (AS_CSV, IN_ORDER),
        ('\ufeff\n{"seconds": "0", "prompt_tokens": 1.0, "new_tokens": 2}\n \n', ONE),
        ("\ufeffuser,seconds,prompt_tokens,new_tokens\r\n\r\na b,0,1,2\r\n  \r\n", ONE),
    ],
    ids=["JSON", "CSV", "JSON-with-mark-and-blanks", "CSV-with-mark-and-blanks"],
)
def test_a_trace_is_read_in_order_of_time(tmp_path: Path, text: str, arrivals: list[Arrival]) -> None:
    assert read_trace(str(written(tmp_path, text))) == arrivals


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_bytes(text.encode())
    return path


JSON_ROW = '{"seconds": 0, "prompt_tokens": 1, "new_tokens": %s}'
NUMBERS = "must give seconds, prompt_tokens, new_tokens as numbers"
WHOLE = "it must be a whole number from 1 to"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEADER, "it has no arrivals"),
        (f"{HEADER}0,1,2\n1,2\n", f"request 2 {NUMBERS}"),
        (f"{HEADER}0,3.7,1\n", f"request 1: prompt_tokens is 3.7; {WHOLE} 1048576"),
        (f"{HEADER}0,1,0\n", f"new_tokens is 0; {WHOLE} 2147483647"),
        (f"{HEADER}-1,1,1\n", "request 1: seconds is -1; it must be a number from 0 to 86400"),
        (f"{HEADER}nan,1,1\n", "seconds is nan"),
        (JSON_ROW % "[1]", f"request 1 {NUMBERS}"),
        (JSON_ROW % 1 + "\n[]", f"request 2 {NUMBERS}"),
        (JSON_ROW % 1 + "\n{", "Expecting property name"),
    ],
    ids=lambda text: text[-40:],
)
def test_a_broken_trace_is_one_line_that_says_where(tmp_path: Path, capsys, text: str, told: str) -> None:
    path = written(tmp_path, text)
    error = refusal(benchmark_streaming.main, ["--trace", str(path)], capsys)
    assert f"cannot read {path}: " in error and told in error


class FakeClock:
    """Time passes only while one sleeps, a little longer than asked, or while a call takes long."""

    def __init__(self, oversleep: float) -> None:
        self.now, self.oversleep = 100.0, oversleep

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.oversleep


@given(
    gaps=st.lists(st.floats(0, 3), max_size=20),
    costs=st.lists(st.floats(0, 5), min_size=20, max_size=20),
    oversleep=st.floats(0, 0.1),
)
def test_each_submission_is_at_its_time_or_as_soon_as_those_before_are_done(gaps, costs, oversleep) -> None:
    clock, made = FakeClock(oversleep), []

    def submit(i: int) -> None:
        made.append((i, clock.now - 100.0))
        clock.now += costs[i]

    times = np.cumsum(gaps).tolist()
    lags = submit_by_deadline(times, submit, clock, clock.sleep)
    assert [i for i, _ in made] == list(range(len(times)))
    free = 0.0
    for due, (i, at), lag in zip(times, made, lags, strict=True):
        assert lag == pytest.approx(at - due, abs=1e-9)
        assert max(due, free) - 1e-9 <= at <= max(due, free) + oversleep + 1e-9
        free = at + costs[i]


SERVED = [RequestMetrics(0.0, [1.0, 1.5, 2.0]), RequestMetrics(0.0, [2.0, 5.0]), RequestMetrics(4.0, [5.0])]


@pytest.mark.parametrize(
    ("ttft", "itl", "n_good"),
    [(math.inf, math.inf, 3), (1.0, math.inf, 1), (1.2, math.inf, 2), (2.0, 1.0, 2), (0.5, 1.0, 0)],
)
def test_goodput_counts_requests_that_keep_both_limits_from_when_they_were_due(ttft, itl, n_good) -> None:
    figures = goodput(SERVED, [0.0, 0.0, 0.1], 10.0, ttft, itl)
    assert figures == {"goodput_req_s": n_good / 10, "within_limits_share": n_good / 3}


def test_the_queue_is_counted_over_the_run() -> None:
    queue = queue_over_time(SERVED, 0.0, 5.0)
    at = {round(t, 2): i for i, t in enumerate(queue["queue_times_s"])}
    near = {t: at[min(at, key=lambda sample: abs(sample - t))] for t in (0.5, 1.7, 3.0, 4.5, 5.0)}
    assert [queue["queue_waiting"][i] for i in near.values()] == [2, 1, 0, 1, 0]
    assert [queue["queue_in_flight"][i] for i in near.values()] == [2, 2, 1, 2, 0]


@pytest.mark.slow
def test_a_user_replays_a_trace_and_the_record_tells_all(tmp_path: Path, capsys) -> None:
    record = tmp_path / "record.json"
    argv = [
        *TINY,
        "--trace",
        str(written(tmp_path, AS_CSV)),
        "--json",
        str(record),
        "--ttft-limit-ms",
        "60000",
    ]
    assert benchmark_streaming.main(argv) == 0
    told = capsys.readouterr().out
    assert "Goodput (requests within the limits): " in told and "Submission lag p50/p95/p99: " in told
    read = json.loads(record.read_text())
    (repeat,) = read["results"]["streaming"]["repeats"]
    assert read["options"]["trace"] == [list(row) for row in sorted(ROWS)]
    assert repeat["completion_tokens"] == 11 and repeat["total_time_s"] > 1.25
    assert repeat["within_limits_share"] == 1 and 0 <= repeat["lag_p50_s"] < 1.0
    assert max(repeat["queue_in_flight"]) >= 1 and repeat["queue_in_flight"][-1] == 0


def of_trace(folder: Path, *rows: str) -> list[str]:
    """Options that name a trace of these rows."""
    return ["--device=cpu", "--trace", str(written(folder, "\n".join([HEADER.strip(), *rows])))]


def test_a_trace_fits_if_each_of_its_requests_does_and_takes_no_more_cache(tmp_path: Path, capsys) -> None:
    record = tmp_path / "record.json"
    fits = [*of_trace(tmp_path, "0,500,1", "0,5,100"), "--block-size=8", "--max-batch-size=3"]
    assert benchmark_streaming.main([*fits, *ONCE, f"--json={record}"]) == 0
    assert "Requests: 2, 1 to 100 new tokens each, 3 at a time\n" in capsys.readouterr().out
    assert json.loads(record.read_text())["num_kv_blocks"] == 2 * 63 + SPARE_KV_BLOCKS  # of 501 tokens
    for rows, more, told in (
        (["0,413,100", "0,5,200"], [], "413 prompt tokens and 100 new ones exceed the model's 512 positions"),
        (["0,500,1"], ["--shared-prefix-tokens=12"], "512 prompt tokens and 1 new ones exceed"),
    ):
        assert told in refusal(benchmark_streaming.main, [*of_trace(tmp_path, *rows), *more], capsys)


def test_the_prompts_of_a_trace_take_memory_for_their_own_tokens_only(tmp_path: Path) -> None:
    rows = of_trace(tmp_path, *["0,5,1"] * 1000, "0,20000,1")
    options = benchmark_streaming.BENCHMARK.parse_options(rows)
    tracemalloc.start()
    prompts = make_prompts(options, 50257)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [len(prompt) for prompt in prompts] == [5] * 1000 + [20_000]
    assert peak < 4e6  # all at the longest's length take 160 MB in numpy alone


def test_a_user_asks_for_a_rate(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    sizes = ["--num-requests", "4", "--max-new-tokens", "2", "--request-rate", "20", "--json", str(record)]
    assert benchmark_streaming.main([*TINY, *sizes]) == 0
    (repeat,) = json.loads(record.read_text())["results"]["streaming"]["repeats"]
    assert repeat["total_time_s"] >= poisson_times(20.0, 4, seed=0)[-1]
    assert benchmark_streaming.BENCHMARK.parse_options(["--request-rate=inf"]).request_rate is None


# A long prompt that arrives while others run

RUN = ["--device=cpu", "--rung=packed_prefill", "--max-batch-size=4", "--no-stop-on-eos", "--num-requests=3"]
RUN += ["--prompt-tokens=4", "--max-new-tokens=60", "--warmup-runs=1", "--repeat-runs=1"]
RUN += ["--prefill-chunk=32", "--long-prompt-after-ms=60"]


def output_of(arrival: float, times: list[float]) -> RequestOutput:
    return RequestOutput(1, [1], [1] * len(times), "length", RequestMetrics(arrival, times), str)


def test_gaps_are_beside_a_prefill_if_they_share_a_moment_with_it() -> None:
    running = output_of(0.0, [1.0, 2.0, 5.0, 6.0, 8.0])
    figures = gap_figures([running, output_of(2.5, [5.5])])
    assert figures["itl_beside_max_s"] == 3 and figures["itl_beside_mean_s"] == 2  # 2 to 5, 5 to 6
    assert figures["itl_apart_mean_s"] == 1.5 and figures["long_prompt_ttft_s"] == 3
    assert gap_figures([running, output_of(0.5, [9.0])])["itl_apart_p50_s"] is None  # all are beside
    with pytest.raises(RoseError, match="no request was running"):
        gap_figures([running, output_of(8.5, [9.0])])


@pytest.mark.slow
def test_a_user_compares_chunks_with_a_whole_prompt(tmp_path: Path, capsys) -> None:
    record = tmp_path / "record.json"
    for _ in range(4):  # other processes may delay a round of chunks
        assert benchmark_streaming.main([*RUN, "--long-prompt-tokens=420", f"--json={record}"]) == 0
        told = capsys.readouterr().out
        for line in ("ITL beside the long prompt p50/p99: ", "ITL apart from it p50/p99: "):
            assert told.count(line) == 2
        results = json.loads(record.read_text())["results"]
        chunked, whole = (results[mode]["repeats"][0] for mode in ("chunked", "whole"))
        assert chunked["tokens_sha256"] == whole["tokens_sha256"]
        if chunked["itl_beside_max_s"] < whole["itl_beside_max_s"]:
            break
    assert chunked["itl_beside_max_s"] < whole["itl_beside_max_s"]
