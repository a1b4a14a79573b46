"""What running requests feel of a long prompt that arrives."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

import pytest

from rosellm.bench import benchmark_streaming
from rosellm.bench.job import check_positions
from rosellm.bench.long_prompt import gap_figures
from rosellm.errors import PromptError, RoseError
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.request import RequestMetrics

RUN = ["--device=cpu", "--rung=packed_prefill", "--max-batch-size=4", "--no-stop-on-eos", "--num-requests=3"]
RUN += [
    "--max-new-tokens=60",
    "--prompt-tokens=4",
    "--warmup-runs=1",
    "--repeat-runs=1",
    "--prefill-chunk=32",
]
LONG = ["--long-prompt-tokens=420", "--long-prompt-after-ms=60"]


def output_of(arrival: float, times: list[float]) -> RequestOutput:
    return RequestOutput(1, [1], [1] * len(times), "length", RequestMetrics(arrival, times), str)


def test_gaps_are_beside_a_prefill_if_they_share_a_moment_with_it() -> None:
    running = output_of(0.0, [1.0, 2.0, 5.0, 6.0, 8.0])
    figures = gap_figures([running, output_of(2.5, [5.5])])
    assert figures["itl_beside_max_s"] == 3 and figures["itl_beside_mean_s"] == 2  # 2 to 5, 5 to 6
    assert figures["itl_apart_mean_s"] == 1.5 and figures["long_prompt_ttft_s"] == 3
    with pytest.raises(RoseError, match="no request was running"):
        gap_figures([running, output_of(8.5, [9.0])])


def test_without_a_gap_apart_from_the_prefill_the_figures_apart_have_no_value() -> None:
    figures = gap_figures([output_of(0.0, [1.0, 2.0, 5.0]), output_of(0.5, [7.0])])
    assert figures["itl_beside_max_s"] == 3 and figures["itl_beside_p50_s"] == 2
    assert [figures[f"itl_apart_{which}_s"] for which in ("mean", "p50", "p99")] == [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize("long_arrivals", [(0.5, 0.5), (2.5, 0.5), (0.5, 2.5)])
def test_a_run_without_a_gap_apart_from_the_prefill_is_recorded_and_told(
    long_arrivals: tuple[float, ...], tmp_path: Path, capsys, monkeypatch
) -> None:
    """Also if only one of two runs is without."""
    arrivals, running = cycle(long_arrivals), output_of(0.0, [1.0, 2.0, 5.0])

    def figures(_outputs: list[RequestOutput]) -> dict:
        return gap_figures([running, output_of(next(arrivals), [7.0])])

    monkeypatch.setattr(benchmark_streaming, "gap_figures", figures)
    record, sizes = tmp_path / "record.json", ["--max-new-tokens=2", "--warmup-runs=0", "--repeat-runs=2"]
    assert benchmark_streaming.main([*RUN, *sizes, "--long-prompt-tokens=40", f"--json={record}"]) == 0
    assert capsys.readouterr().out.count("ITL apart from it p50/p99: none/none ms\n") == 2
    for result in json.loads(record.read_text())["results"].values():
        found = [repeat["itl_apart_p50_s"] for repeat in result["repeats"]]
        assert found == [None if arrival == 0.5 else 1.0 for arrival in long_arrivals]
        assert "itl_apart_p50_s" not in result["medians"] and result["medians"]["itl_beside_max_s"] == 3


def test_a_long_prompt_and_the_others_fit_if_each_request_does(capsys) -> None:
    options = benchmark_streaming.BENCHMARK.parse_options([*RUN, "--long-prompt-tokens=480"])
    check_positions(options, options.prompt_tokens, 481)
    with pytest.raises(
        PromptError, match="480 prompt tokens and 1 new ones exceed the model's 480 positions"
    ):
        check_positions(options, options.prompt_tokens, 480)


@pytest.mark.slow
def test_a_user_compares_chunks_with_a_whole_prompt(tmp_path: Path, capsys) -> None:
    for _ in range(4):  # other processes may delay a round of chunks
        chunked, whole = compared(tmp_path / "record.json", capsys)
        assert chunked["tokens_sha256"] == whole["tokens_sha256"]
        if chunked["itl_beside_max_s"] < whole["itl_beside_max_s"]:
            break
    assert chunked["itl_beside_max_s"] < whole["itl_beside_max_s"]


def compared(record: Path, capsys) -> list[dict]:
    """What the command tells and records of both ways."""
    assert benchmark_streaming.main([*RUN, *LONG, "--json", str(record)]) == 0
    told = capsys.readouterr().out
    for line in ("ITL beside the long prompt p50/p99: ", "ITL apart from it p50/p99: "):
        assert told.count(line) == 2
    results = json.loads(record.read_text())["results"]
    return [results[mode]["repeats"][0] for mode in ("chunked", "whole")]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            [*RUN, *LONG, "--request-rate=2"],
            "argument --request-rate: not allowed with argument --long-prompt-",
        ),
        (["--device=cpu", *LONG], "give --prefill-chunk"),
        ([*RUN, *LONG, "--profile={}/trace.json", "--json={}/record.json"], "error: --profile traces decode"),
    ],
)
def test_what_a_long_prompt_excludes_is_refused_in_parsing(argv, told, tmp_path: Path, capsys) -> None:
    try:
        status = benchmark_streaming.main([one.format(tmp_path) for one in argv])
    except SystemExit as leaving:
        status = leaving.code
    said = capsys.readouterr()
    assert (status, said.out, said.err.count("\n")) == (2, "", 1) and told in said.err
    assert list(tmp_path.iterdir()) == []
