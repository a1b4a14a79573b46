"""The best rung is the fastest one that the device can run; a rung that it cannot is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rosellm.bench import benchmark_scheduler
from rosellm.bench.job import choose_recipe
from rosellm.errors import DeviceError, RecipeError
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.llm import LLM
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER, best_rung, check_launch, get_rung
from tests.helpers import CPU, small_config

CUDA = torch.device("cuda")
GPU_MODEL = SimpleNamespace(device=CUDA, config=small_config(), whole=small_config())


@pytest.fixture
def gpu_of(monkeypatch):
    def pretend(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return pretend


@pytest.mark.parametrize(
    ("capability", "rung"),
    [((7, 0), "small_gemm"), ((8, 9), "small_gemm"), ((9, 0), "split_kv"), ((12, 0), "split_kv")],
    ids=str,
)
def test_the_best_rung_has_dependent_launches_from_hopper_on_and_a_cpus_does_not_ask_its_gpu(
    capability, rung, gpu_of
):
    gpu_of(*capability)
    assert best_rung(CUDA) == get_rung(None, CUDA) == rung
    check_launch(LADDER[rung], CUDA)
    assert best_rung(CPU) == get_rung(None, CPU) == BEST_RUNG
    check_launch(LADDER[BEST_RUNG], CPU)
    eager, graph, on_cpu = (
        choose_recipe(benchmark_scheduler.BENCHMARK.parse_options(["--paged-attn", *options.split()]))
        for options in ("--device cuda", "--device cuda --cuda-graph", "--device cpu --cuda-graph")
    )
    assert (eager, graph, on_cpu) == (replace(LADDER[rung], runner="eager"), rung, BEST_RUNG)


@pytest.mark.parametrize(
    ("capability", "rung", "error", "message"),
    [
        *(
            ((8, 6), name, RecipeError, r"9\.0 or more, cuda has 8\.6: use rung='small_gemm'")
            for name in LADDER
            if LADDER[name].launch == "dependent"
        ),
        ((6, 1), None, DeviceError, r"has compute capability 6\.1; kernels need 7\.0"),
    ],
)
def test_a_gpu_that_cannot_run_a_rung_refuses_it(capability, rung, error, message, gpu_of):
    gpu_of(*capability)
    with pytest.raises(error, match=message) as raised:
        Engine(GPU_MODEL, recipe=rung)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("rung", [None, "paged"])
def test_an_llm_tells_its_rung(rung):
    assert LLM(device="cpu", num_kv_blocks=4, rung=rung).rung == (rung or BEST_RUNG)
