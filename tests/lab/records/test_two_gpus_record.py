"""The command that runs the same workloads on one and on two, in turns; here on processes of a CPU."""

from __future__ import annotations

import pytest

from rosellm.lab import measure
from rosellm.lab.records import two_gpus
from rosellm.lab.records.records import Results
from rosellm.lab.records.turns import runs_in_turns
from rosellm.models.families.table import read_arch
from rosellm.models.loading import arch_of

SMALL = ["--device=cpu", "--model=rose-tiny", "--repeats=2"]


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> dict:
    pair = tmp_path_factory.mktemp("results") / "cpu-x2"
    alone = Results(pair.with_name("cpu"))
    assert two_gpus.recorded(Results(pair), "replicas") == {}
    assert measure.main(["tensor_parallel-D64", "replicas-W8", *SMALL, f"--output={pair}"]) == 0
    return {kind: two_gpus.recorded(alone, kind)["rose-tiny"] for kind in two_gpus.KINDS}


@pytest.mark.slow
def test_both_sides_of_each_kind_are_recorded_with_raw_values(record) -> None:
    shared, replicas = record["tensor_parallel"]["D64"], record["replicas"]["W8"]
    assert read_arch(shared["model_shape"]).shapes == arch_of("rose-tiny", "auto").shapes
    shared, replicas = shared["figures"], replicas["figures"]
    assert set(shared) == {"1", "2 library"} and set(replicas) == {"1", "2"}
    for side in (*shared.values(), *replicas.values()):
        assert len(side["repeats"]) == 2 and side["medians"]["total_throughput_tok_s"] > 0
    assert shared["2 library"]["medians"]["decode_steps"] == shared["1"]["medians"]["decode_steps"] > 0


@pytest.mark.slow
def test_two_give_the_tokens_of_one(record) -> None:
    for records in record.values():
        for one in records.values():
            runs = [run for side in one["figures"].values() for run in side["repeats"]]
            assert len({run["tokens_sha256"] for run in runs}) == 1


def test_sides_take_turns_after_a_run_of_each_that_does_not_count() -> None:
    calls: list[str] = []

    def run(side: str) -> dict:
        calls.append(side)
        return {"total_time_s": float(len(calls))}

    figures = runs_in_turns({"a": lambda: run("a"), "b": lambda: run("b")}, 2)
    assert calls == ["a", "b"] * 3
    assert [one["total_time_s"] for one in figures["a"]["repeats"]] == [3.0, 5.0]
    assert figures["b"]["medians"]["total_time_s"] == 5.0
