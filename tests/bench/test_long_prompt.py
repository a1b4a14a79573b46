"""What running requests feel of a long prompt that arrives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rosellm.bench import benchmark_streaming
from rosellm.bench.long_prompt import gap_figures
from rosellm.errors import RoseError
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.request import RequestMetrics

RUN = ["--device=cpu", "--rung=packed_prefill", "--max-batch-size=4", "--no-stop-on-eos", "--num-requests=3"]
RUN += [
    "--prompt-tokens=4",
    "--max-new-tokens=60",
    "--warmup-runs=1",
    "--repeat-runs=1",
    "--prefill-chunk=32",
]
RUN += ["--long-prompt-after-ms=60"]


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
def test_a_user_compares_chunks_with_a_whole_prompt(tmp_path: Path, capsys) -> None:
    for _ in range(4):  # other processes may delay a round of chunks
        chunked, whole = compared(tmp_path / "record.json", capsys)
        assert chunked["tokens_sha256"] == whole["tokens_sha256"]
        if chunked["itl_beside_max_s"] < whole["itl_beside_max_s"]:
            break
    assert chunked["itl_beside_max_s"] < whole["itl_beside_max_s"]


def compared(record: Path, capsys) -> list[dict]:
    """What the command tells and records of both ways."""
    assert benchmark_streaming.main([*RUN, "--long-prompt-tokens=420", f"--json={record}"]) == 0
    told = capsys.readouterr().out
    for line in ("ITL beside the long prompt p50/p99: ", "ITL apart from it p50/p99: "):
        assert told.count(line) == 2
    results = json.loads(record.read_text())["results"]
    return [results[mode]["repeats"][0] for mode in ("chunked", "whole")]
