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


@pytest.fixture
def gpu_of(monkeypatch):
    def pretend(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return pretend


@pytest.mark.parametrize(
    ("capability", "rung"),
    [
        ((7, 0), "small_gemm"),
        ((7, 5), "small_gemm"),
        ((8, 0), "small_gemm"),
        ((8, 9), "small_gemm"),
        ((9, 0), "split_kv"),
        ((10, 0), "split_kv"),
        ((12, 0), "split_kv"),
    ],
    ids=str,
)
def test_a_gpu_before_hopper_takes_the_best_rung_without_dependent_launch(capability, rung, gpu_of):
    gpu_of(*capability)
    assert best_rung(CUDA) == get_rung(None, CUDA) == rung
    check_launch(LADDER[rung], CUDA)


def test_a_cpu_takes_the_best_rung_whatever_gpu_there_is(gpu_of):
    gpu_of(8, 0)
    assert best_rung(CPU) == get_rung(None, CPU) == BEST_RUNG
    check_launch(LADDER[BEST_RUNG], CPU)


@pytest.mark.parametrize("rung", [name for name in LADDER if LADDER[name].launch == "dependent"])
def test_a_rung_of_dependent_launches_is_refused_before_hopper(rung, gpu_of):
    gpu_of(8, 6)
    gpu = SimpleNamespace(device=CUDA, config=small_config(), whole=small_config())
    with pytest.raises(RecipeError, match=r"9\.0 or more, cuda has 8\.6: use rung='small_gemm'") as raised:
        Engine(gpu, recipe=rung)
    assert "\n" not in str(raised.value)


def test_a_gpu_that_cannot_run_the_kernels_is_refused(gpu_of):
    gpu_of(6, 1)
    with pytest.raises(DeviceError, match=r"has compute capability 6\.1; kernels need 7\.0") as raised:
        Engine(SimpleNamespace(device=CUDA, config=small_config(), whole=small_config()))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("capability", "rung"), [((8, 0), "small_gemm"), ((9, 0), "split_kv")], ids=str)
def test_the_benchmarks_take_the_best_rung_of_the_device_that_their_options_name(
    capability, rung, gpu_of, monkeypatch
):
    gpu_of(*capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    eager = benchmark_scheduler.BENCHMARK.parse_options(["--device", "cuda", "--paged-attn"])
    assert choose_recipe(eager) == replace(LADDER[rung], runner="eager")
    graph = benchmark_scheduler.BENCHMARK.parse_options(["--device", "cuda", "--paged-attn", "--cuda-graph"])
    assert choose_recipe(graph) == rung
    graph.device = "cpu"
    assert choose_recipe(graph) == BEST_RUNG


def test_an_llm_tells_its_rung():
    assert LLM(device="cpu", num_kv_blocks=4).rung == BEST_RUNG
    assert LLM(device="cpu", num_kv_blocks=4, rung="paged").rung == "paged"
