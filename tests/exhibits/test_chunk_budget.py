"""The command that records goodput against the chunk budget: the same requests in every cell of a load."""

from __future__ import annotations

import pytest

from rosellm.lab.records.arrivals import WORKLOAD
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.request import RequestMetrics
from tests.lab.measuring import measured

chunk_budget = load_exhibit("chunk_budget")


def test_one_request_in_sixteen_has_a_long_prompt_and_fewer_requests_are_the_first_ones() -> None:
    requests = chunk_budget.requests_of(WORKLOAD, 40, 4096)
    assert [i for i, one in enumerate(requests) if one.prompt_tokens == 4096] == [1, 17, 33]
    assert all(16 <= one.prompt_tokens <= 512 for i, one in enumerate(requests) if i % 16 != 1)
    assert len({one.new_tokens for one in requests}) > 20
    assert chunk_budget.requests_of(WORKLOAD, 20, 4096) == requests[:20]


def test_a_cell_counts_the_requests_that_keep_both_limits_from_when_they_were_due(monkeypatch) -> None:
    metrics = [RequestMetrics(10.0, [11.0, 11.5, 12.5]), RequestMetrics(10.0, [12.0, 14.0], preemptions=1)]
    metrics.append(RequestMetrics(13.5, [14.0]))
    outputs = [RequestOutput(0, [1], [1] * len(one.token_times), "length", one) for one in metrics]
    monkeypatch.setattr(chunk_budget, "serve", lambda _job, _times: (outputs, [0.25, 0.0, 0.5], 9.0))
    monkeypatch.setattr(chunk_budget, "TTFT_LIMITS_S", (0.9, 1.0, 1.25, 2.0))
    monkeypatch.setattr(chunk_budget, "ITL_LIMITS_S", (0.5, 1.0, 2.0))
    cell = chunk_budget.run_cell(None, [])
    assert cell["good"] == [[0, 0, 0], [1, 1, 1], [1, 2, 2], [1, 2, 3]]
    assert (cell["requests"], cell["total_time_s"], cell["preemptions"]) == (3, 5.0, 1)
    assert cell["total_throughput_tok_s"] == 6 / 5 and cell["ttft_p50_s"] == 1.25 and cell["itl_p50_s"] == 1.0


@pytest.mark.slow
def test_a_small_record_has_a_cell_for_every_load_chunk_and_way(tmp_path, monkeypatch) -> None:
    shares, chunks, jobs = (0.5, 0.95), (None, 32), []

    def watched(job, times=None, serve=chunk_budget.serve):
        jobs.append((job, times))
        return serve(job, times)

    monkeypatch.setattr(chunk_budget, "serve", watched)
    monkeypatch.setattr(chunk_budget, "SHARES", shares)
    monkeypatch.setattr(chunk_budget, "CHUNKS", chunks)
    record = measured(tmp_path, "chunk_budget")
    assert (
        record["kind"] == "chunk_budget" and record["model"] == "rose-tiny" and record["long_tokens"] == 384
    )
    figures, at_once = record["figures"], record["figures"]["at_once"]
    assert figures["capacity_req_s"] == pytest.approx(16 / at_once["total_time_s"])
    rates = {share: share * figures["capacity_req_s"] for share in shares}
    wanted = [
        (share, rates[share], chunk, way)
        for share in shares
        for chunk in chunks
        for way in ("apart", "joined")
    ]
    cells = figures["cells"]
    assert [(one["share"], one["rate"], one["chunk"], one["way"]) for one in cells] == wanted
    for cell, (job, times) in zip(cells, jobs[3:], strict=True):  # after two warm-ups and the capacity's run
        assert job.config.prefill_chunk == cell["chunk"]
        assert job.engine.recipe.exhibit == {"apart": "none", "joined": "one_pass"}[cell["way"]]
        assert len(times) == cell["requests"] and max(map(len, job.prompts)) == 384
        assert max(map(max, cell["good"])) <= cell["requests"]
    for i in range(0, len(cells), 4):
        requests = [(job.prompts, job.params, times) for job, times in jobs[3 + i : 7 + i]]
        assert all(one == requests[0] for one in requests)
