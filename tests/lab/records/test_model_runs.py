"""What is told of modern models' recorded whole runs."""

import json
from pathlib import Path

from rosellm.lab.records.model_runs import runs_told
from rosellm.lab.records.records import Results, find


def write_run(folder: Path, model: str, workload: str, repeats: int) -> None:
    (folder / model).mkdir(exist_ok=True)
    record = {"results": {"offline": {"repeat_runs": repeats}}}
    (folder / model / f"{workload}.json").write_text(json.dumps(record))


def test_each_models_runs_are_counted_alone_and_a_range_is_told_where_they_differ(tmp_path):
    for model, workload, repeats in (("A", "D1", 1), ("B", "D1", 1), ("C", "D1", 2), ("C", "MIX", 3)):
        write_run(tmp_path, model, workload, repeats)
    (tmp_path / "C" / "ledgers.json").write_text("{}")
    assert runs_told(Results(tmp_path)) == "1 of A, B; 2 to 3 of C"


def test_every_recorded_model_is_named_once():
    told = runs_told(find())
    assert all(told.count(model) == 1 for model in ("Qwen3-0.6B", "Llama-3.2-1B", "Llama-3.1-8B"))
