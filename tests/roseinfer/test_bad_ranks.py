"""What ranks cannot run is refused in a line, before any process starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rosellm import LLM
from rosellm.bench import benchmark_scheduler
from rosellm.errors import DeviceError, OptionError, RecipeError
from rosellm.roseinfer import tensor_parallel
from rosellm.roseinfer.recipe import LADDER

BEST = LADDER["split_kv"]
REFUSED = {
    "three": (OptionError, "3 does not divide the model's 4 attention heads", {"tensor_parallel_size": 3}),
    "qwen3_by_four": (
        OptionError,
        "4 does not divide the model's 6 attention heads",
        {"tensor_parallel_size": 4, "model": "rose-tiny-qwen3"},
    ),
    "host_step": (RecipeError, "needs rung 'fused_append' or a later one", {"rung": "cuda_graph"}),
    "padded": (RecipeError, "needs rung 'fused_append' or a later one", {"rung": "resident_step"}),
    "persistent": (RecipeError, "needs exhibit='none'", {"rung": "persistent_kernel"}),
    "deterministic": (RecipeError, "needs numerics='fast'", {"deterministic": True}),
    "recipe": (RecipeError, "needs rung 'fused_append'", {"recipe": LADDER["packed_prefill"]}),
    "one_shot": (RecipeError, "is a Triton kernel", {"recipe": replace(BEST, all_reduce="one_shot")}),
    "rung": (RecipeError, "rung 'fast' is unknown", {"rung": "fast"}),
    "device": (DeviceError, "device 'tpu' is unknown", {"device": "tpu"}),
    **{
        f"size_{size!r}": (OptionError, "must be a whole number from 1 to 64", {"tensor_parallel_size": size})
        for size in (0, -1, 65, 2.0, "2", True, None)
    },
}


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        pytest.fail("a process would have been started")

    monkeypatch.setattr(tensor_parallel, "start_ranks", started)


@pytest.mark.parametrize("error, said, options", REFUSED.values(), ids=REFUSED)
def test_what_ranks_cannot_run_is_refused_before_any_starts(error, said, options):
    with pytest.raises(error, match=said) as raised:
        LLM(**{"tensor_parallel_size": 2, "device": "cpu"} | options)
    assert "\n" not in str(raised.value)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="tensor_parallel_size 2 needs as many GPUs; this machine has 1"):
        LLM(tensor_parallel_size=2, device="cuda")


def test_a_benchmark_refuses_them_likewise(capsys: pytest.CaptureFixture):
    asked = ["--device", "cpu", "--rung", "split_kv", "--tensor-parallel-size", "3"]
    assert benchmark_scheduler.main(asked) == 2
    assert "does not divide" in capsys.readouterr().err
    assert benchmark_scheduler.main(["--device", "cpu", "--tensor-parallel-size", "2"]) == 2
    assert "needs rung 'fused_append'" in capsys.readouterr().err
    assert benchmark_scheduler.main([*asked[:4], "--all-reduce", "one_shot"]) == 2
    assert "needs a --tensor-parallel-size of 2 or more" in capsys.readouterr().err
