"""What a warm-up compiles ahead: the kernels of every capture, before any of them runs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels.compile_ahead import compile_ahead
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.steps import step as step_module
from rosellm.triton_or_none import TensorDescriptor
from tests import helpers
from tests.fake_memory import FakeMemory
from tests.helpers import MODERN, ON_GPU, random_model, random_prompts, small_config, small_engine
from tests.roseinfer.steps.fake_graphs import FakeGraphs, captured

__all__ = ["captured"]
ROOT = Path(__file__).parents[3]
RUNGS = ("packed_prefill", BEST_RUNG, "one_pass", "speculative")
FAMILIES = {"gpt2": {}, "qwen3": MODERN}
Launch = tuple[str, tuple, tuple]


@triton.jit
def one_more_kernel(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at) + 1)


def specialisation(value: object) -> object:
    """What Triton compiles anew for."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(map(specialisation, value))
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    return (value == 1, value % 16 == 0) if type(value) is int else value


@pytest.fixture
def launches(monkeypatch) -> list[Launch]:
    """Interpreted kernels in place of whose runs their names and specialisations are noted."""
    noted: list[Launch] = []

    def note(kernel, *arguments, grid, warmup, **options):
        constants = {name: value for name, value in options.items() if isinstance(value, int)}
        others = {name: specialisation(options[name]) for name in options.keys() - constants.keys()}
        named = sorted((name, str(value)) for name, value in (constants | others).items())
        alike = kernel.kwargs["do_not_specialize"] or ()
        pairs = zip(kernel.arg_names, arguments, strict=False)
        kinds = (specialisation(value) for name, value in pairs if name not in alike)
        noted.append((kernel.__name__, tuple(kinds), tuple(named)))

    monkeypatch.setattr(triton.runtime.interpreter.InterpretedFunction, "run", note)
    return noted


def engine_of(rung: str, family: str, form: str = "auto") -> Engine:
    """In fp32, or in fp16 if keys and values are quantised in a form."""
    config = small_config(**FAMILIES[family], eos_token_ids=(3, 5, 7))
    model = random_model(0, config) if form == "auto" else random_model(0, config).half()
    return small_engine(model, recipe=rung, kernels="triton", kv_cache_dtype=form, warm_up=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rung", RUNGS)
def test_warm_ups_launch_every_kernel_that_captures_launch(captured, launches, monkeypatch, rung, family):
    monkeypatch.setattr("rosellm.roseinfer.assembly.room_of", lambda model, most_positions: 16)
    monkeypatch.setattr(FakeGraphs, "capture", lambda self, run, warm_up: (run(), run)[1])
    steps = [engine_of(rung, family).step for _ in range(2)]
    with torch.inference_mode():
        for capture in steps[0].captures():
            capture()
        captured_launches = set(launches)
        launches.clear()
        for run in steps[1].warm_ups():
            run()
    assert "_combine_tiles_kernel" in {name for name, *_ in captured_launches}
    assert captured_launches <= set(launches)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_warm_up_for_some_rows_runs_and_captures_their_steps_alone(captured, rung):
    engine = small_engine(random_model(0), recipe=rung, warm_up=False)
    step, n_modes = engine.step.worker, len(engine.step.worker.next_tokens.chooser.modes(4))
    assert len(step.warm_ups(4)) == 1
    engine.warm_up(4)
    assert {bucket for bucket, _, _ in step._steps} == {4}
    n_variants = len(step.variants(4))
    assert step.n_captured - 1 == len(step._steps) == n_modes * n_variants  # and the graph that moves rows
    engine.warm_up()
    assert step.captures() == [] and len(step._steps) > n_modes * n_variants
    host_driven = small_engine(random_model(0), recipe="cuda_graph", warm_up=False)
    host_driven.warm_up(5)
    assert list(host_driven.step.captured) == [8]


@pytest.mark.parametrize(("rows", "first"), [(None, ["rehearsal"]), (4, [])])
def test_on_a_gpu_a_warm_up_compiles_then_runs_and_rehearses_prefills_unless_rows_are_given(
    monkeypatch, rows, first
):
    engine, noted = engine_of(BEST_RUNG, "gpt2"), []
    monkeypatch.setattr(engine.step.worker, "device", torch.device("cuda"))
    monkeypatch.setattr(step_module, "GPUMemory", lambda device: FakeMemory())
    monkeypatch.setattr(step_module, "compile_ahead", lambda runs: [run("compile") for run in runs])
    for name in ("rehearsal", "warm_up", "capture"):
        runs = [lambda act="run", name=name: noted.append((act, name))]
        monkeypatch.setattr(engine.step.worker, f"{name}s", lambda sizes, runs=runs: runs)
    engine.warm_up(rows)
    compiled, run = ["warm_up", *first], [*first, "capture"]
    assert noted == [*(("compile", name) for name in compiled), *(("run", name) for name in run)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("form", "seed"), [*(("auto", seed) for seed in range(4)), ("int8", 4)])
def test_prefills_too_large_to_be_captured_launch_what_was_rehearsed(
    captured, launches, monkeypatch, family, form, seed
):
    for module in ("engine", "steps.captured_prefill"):
        monkeypatch.setattr(f"rosellm.roseinfer.{module}.CAPTURED_TOKENS", 256)
    monkeypatch.setattr("rosellm.roseinfer.steps.packed_prefill.LONG_PREFIX", 20)
    engine, draw = engine_of(BEST_RUNG, family, form), random.Random(seed)
    with torch.inference_mode():
        for run in engine.step.rehearsals(engine._rehearsed_tokens) + engine.step.warm_ups():
            run()
        rehearsed = set(launches)
        launches.clear()
        prompts = random_prompts([draw.randint(40, 60) for _ in range(16)], seed=seed)
        sequences = helpers.greedy_sequences(engine, prompts, 4)
        engine.begin_prefill(sequences, [draw.randint(17, 22) for _ in sequences])
        engine.begin_prefill(sequences)
    assert launches and set(launches) <= rehearsed
    assert ("_widen_kernel" in {name for name, _, _ in launches}) == (form == "int8")


def test_log_probabilities_of_16_bit_logits_are_captured_too(captured):
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2)
    found = []
    for kernels in ("torch", "triton"):
        engine = small_engine(random_model(0).half(), recipe="resident_step", kernels=kernels)
        outputs = OfflineScheduler(engine).run(random_prompts([5, 3]), params)
        found.append([likely for output in outputs for likely in output.logprobs])
    for specified, likely in zip(*found, strict=True):
        assert list(likely) == list(specified)
        for token, entry in specified.items():
            assert likely[token].logprob == pytest.approx(entry.logprob, abs=0.02)


def test_nothing_is_launched_within_and_everything_again_after_even_if_a_run_raises():
    x = torch.zeros(16)
    compile_ahead([lambda: one_more_kernel[(1,)](x, SIZE=16)] * 3)
    assert x.tolist() == [0.0] * 16
    with pytest.raises(ZeroDivisionError):
        compile_ahead([lambda: 1 / 0])
    one_more_kernel[(1,)](x, SIZE=16)
    assert x.tolist() == [1.0] * 16


def compile_three_kernels(folder: Path, killed: bool) -> None:
    """Twice, with an empty and a full cache; list the compiling processes, and kill those of children."""
    folder.mkdir()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL if killed else signal.SIG_IGN)  # as some servers do
    here, target, make_ir = os.getpid(), GPUTarget("cuda", 90, 32), ASTSource.make_ir

    def noted(*arguments, **options):
        with (folder / "compilers").open("a") as file:
            print("parent" if os.getpid() == here else "child", file=file)
        if killed and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return make_ir(*arguments, **options)

    current = {"device": lambda: 0, "stream": lambda device: 0, "target": lambda: target}
    stand_in = {f"get_current_{what}": get for what, get in current.items()}
    driver.set_active(SimpleNamespace(launcher_cls=lambda *_arguments: None, **stand_in))
    ASTSource.make_ir = noted
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    x = torch.zeros(16)
    for _ in range(2):
        kernel = JITFunction(one_more_kernel.fn)
        compile_ahead(lambda kernel=kernel, size=size: kernel[(1,)](x, SIZE=size) for size in (8, 16, 32))
        assert len(kernel.device_caches[0][0]) == 3
    ASTSource.make_ir = make_ir


def test_children_compile_what_is_not_cached_and_this_process_what_a_killed_child_was_to(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    folders = {str(whole): False, str(killed): True}
    call = f"[here.compile_three_kernels(here.Path(one), killed) for one, killed in {folders}.items()]"
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", f"import {__name__} as here; {call}"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    assert (whole / "compilers").read_text().split() == ["child"] * 3
    n_children = min(3, len(os.sched_getaffinity(0)))
    assert (killed / "compilers").read_text().split() == ["child"] * n_children + ["parent"] * 3


@pytest.mark.parametrize("device", [ON_GPU])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rung", RUNGS)
def test_on_a_gpu_a_warm_up_compiles_nothing_one_after_the_other(device, rung, family, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("rosellm.roseinfer.assembly.room_of", lambda model, most_positions: 16)
    compiled_late: list[str] = []
    config = small_config(**FAMILIES[family])
    model = random_model(0, config).to(device)
    engine = small_engine(model, recipe=rung, kernels="triton", warm_up=False)
    triton.runtime.driver.active.get_current_target()  # builds the driver's own extension
    compile_one, build_one = triton.runtime.jit.JITFunction._do_compile, triton.runtime.build._build
    here = threading.get_ident()

    def noted(kernel, *arguments):
        if triton.runtime._async_compile.active_mode.get() is None:
            compiled_late.append(kernel.__name__)
        return compile_one(kernel, *arguments)

    def build_noted(name, *arguments, **options):
        if threading.get_ident() == here:
            compiled_late.append(name)
        return build_one(name, *arguments, **options)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", noted)
    monkeypatch.setattr(triton.runtime.build, "_build", build_noted)
    engine.warm_up()
    assert compiled_late == []
    assert engine.late_captures == 0
