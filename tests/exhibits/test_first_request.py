"""What the first request of a process waits for: parts timed in fresh processes, late captures counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rosellm.bench.benchmark_scheduler import BENCHMARK
from rosellm.bench.prompts import new_tokens
from rosellm.errors import RoseError
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.exhibits import load_exhibit
from tests.helpers import random_model
from tests.lab.measuring import measured

first_request = load_exhibit("first_request")
SMALL = ["--workload=W8", "--device=cpu", "--num-requests=3", "--max-new-tokens=5", "--min-new-tokens=2"]
SMALL += ["--prompt-tokens=20", "--max-batch-size=2"]


@pytest.mark.slow
def test_a_fresh_process_tells_the_seconds_of_its_parts_and_of_three_equal_runs() -> None:
    found = first_request.first_process([*SMALL, "--hf-model-id=rose-tiny", "--load-format=auto"])
    parts = found["parts_s"]
    assert list(parts) == ["import", "load", "build", "warm_up"]
    assert 0.1 < parts["import"] < 60 and all(seconds >= 0 for seconds in parts.values())
    assert len(found["runs"]) == 3 and len({run["tokens_sha256"] for run in found["runs"]}) == 1
    assert all(0 < run["first_token_s"] < run["seconds"] for run in found["runs"])
    assert found["graphs"] == 0 and found["engine"]["max_batch_size"] == 2  # a CPU has no graphs


@pytest.mark.slow
def test_a_process_that_fails_says_why_in_one_line() -> None:
    with pytest.raises(RoseError, match="the new process failed: .*no shape is known") as raised:
        first_request.first_process([*SMALL, "--hf-model-id=nobody/knows", "--load-format=dummy"])
    assert "\n" not in str(raised.value)


def test_captures_during_a_run_are_that_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, options = Engine(random_model(0), max_batch_size=2), BENCHMARK.parse_options(SMALL)
    captured = iter([3, 10])
    monkeypatch.setattr(Engine, "late_captures", property(lambda _: next(captured)))
    run = first_request.first_run(engine, options)
    assert run["late_captures"] == 7
    assert run["throughput_tok_s"] * run["seconds"] == pytest.approx(sum(new_tokens(options)))


def process(options: list[str], warm_up: bool, cache: Path) -> dict[str, Any]:
    """Finds compiled kernels if one before it has left some, as Triton does."""
    compiled = cache / "kernel"
    build = 0.5 if compiled.exists() else 2.5
    compiled.touch()
    runs = [{"throughput_tok_s": 100.0 * n, "late_captures": 0 if warm_up else 4 - n} for n in (1, 2, 3)]
    parts = {"import": 9.0, "load": 1.0, "build": build, "warm_up": 3.0 * warm_up}
    return {"parts_s": parts, "graphs": 40 * warm_up, "runs": runs}


def test_the_record_has_each_process_with_an_empty_and_with_the_filled_cache(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(first_request, "first_process", process)
    record = measured(tmp_path, "first_request", "--repeats=2")
    assert record["kind"] == "first_request" and record["environment"]["device_name"]
    found = record["figures"]["processes"]
    kinds = [(one["warm_up"], one["cache"], first_request.construction_s(one)) for one in found]
    assert kinds == 2 * [
        (True, "empty", 6.5),
        (True, "filled", 4.5),
        (False, "empty", 3.5),
        (False, "filled", 1.5),
    ]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 9
    assert said[3] == "no warm-up, filled cache: 1.5 s to construct; 100, 200, 300 tok/s"
