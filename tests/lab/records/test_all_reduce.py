"""The command that records sums over ranks: on a CPU by gloo, on two GPUs in every way."""

from __future__ import annotations

import json

import pytest
import torch

from rosellm.lab import measure
from rosellm.lab.records import all_reduce
from rosellm.lab.records.records import Results
from rosellm.models.part import Part
from tests.helpers import CPU
from tests.lab.measuring import measured


@pytest.mark.slow
def test_two_ranks_record_each_size_of_each_way_with_raw_values_beside_the_single_devices(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(all_reduce, "SIZES_KB", (8,))
    monkeypatch.setitem(all_reduce.PREFILL_KB, "cpu", 32)
    alone = Results(tmp_path / "gpu")
    alone.folder.mkdir()
    assert all_reduce.recorded(alone) == {}
    record = measured(tmp_path / "gpu-x2", "all_reduce", "--repeats=2")
    figures = record["figures"]
    assert record["kind"] == "all_reduce" and all_reduce.recorded(alone) == figures
    assert figures["ranks"] == 2 and figures["dtype"] == "float32"
    assert set(figures["us"]) == {"none", "library"}
    for times in figures["us"].values():
        assert set(times) == {"8", "32"}
        assert all(len(one["raw"]) == 2 and 0 < min(one["raw"]) <= one["median"] for one in times.values())


def test_a_way_that_does_not_give_the_sum_is_no_measurement() -> None:
    class Deaf:
        def summed(self, x):
            return x

    none, library = (all_reduce.SumBench(Deaf(), Part(0, 2), CPU, way) for way in ("none", "library"))
    assert none.times(8, repeats=1)["median"] > 0
    with pytest.raises(all_reduce.RoseError, match="all_reduce=library of 8192 bytes gives 2, not 6"):
        library.times(8, repeats=1)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_sum_in_every_way_and_one_shot_beats_the_library_for_one_row(tmp_path) -> None:
    assert measure.main(["all_reduce", "--device=cuda", "--repeats=5", f"--output={tmp_path}"]) == 0
    us = json.loads((tmp_path / "all_reduce.json").read_text())["figures"]["us"]
    assert set(us) == set(all_reduce.WAYS)
    assert us["one_shot"]["8"]["median"] < us["library"]["8"]["median"]
