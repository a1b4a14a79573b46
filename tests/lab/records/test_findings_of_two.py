"""What README says of two GPUs comes from their records, and is a dash without them."""

from __future__ import annotations

import json

from rosellm.lab.records.findings import UNTOLD, finding
from rosellm.lab.records.records import Results


def rate(tokens_s: float) -> dict:
    return {"medians": {"total_throughput_tok_s": tokens_s}}


def test_a_finding_is_two_gpus_over_one_by_the_fastest_way_to_sum(tmp_path):
    alone, pair = tmp_path / "gpu", tmp_path / "gpu-x2"
    alone.mkdir()
    results = Results(alone)
    assert finding(results, "35_tensor_parallelism") == UNTOLD == finding(results, "36_replicas")
    folder = pair / "Qwen3-0.6B"
    folder.mkdir(parents=True)
    shared = {"1": rate(100), "2 library": rate(60), "2 one_shot": rate(80)}
    apart = {"1": rate(100), "2": rate(190)}
    for kind, workload, sides in (("tensor_parallel", "D1", shared), ("replicas", "W8", apart)):
        record = {"model_shape": {}, "workload": workload, "flags": {}, "figures": sides}
        (folder / f"{kind}-{workload}.json").write_text(json.dumps(record))
    told = "two GPUs against one, tok/s: Qwen3-0.6B"
    assert finding(results, "35_tensor_parallelism") == f"{told} D1 0.800 ×"
    assert finding(results, "36_replicas") == f"{told} W8 1.90 ×"
