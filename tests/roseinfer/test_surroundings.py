"""An engine in a program that changes torch's defaults, or forks."""

from __future__ import annotations

import ast
import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import rosellm
from rosellm import LLM, SamplingParams
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.serving.streaming import StreamingManager

OF_INTEGERS = {"torch.arange", "torch.tensor"}  # as they are used
MAKERS = {f"torch.{name}" for name in ("empty", "full", "ones", "rand", "randn", "zeros")} | OF_INTEGERS
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
FILTERED = SamplingParams(top_k=20, max_tokens=12, ignore_eos=True, logprobs=0, seed=1)


@contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    """Set torch's default dtype and device."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def generated(**options) -> list[tuple[list[int], float]]:
    llm = LLM(device="cpu", max_batch_size=4, num_kv_blocks=32, **options)
    outputs = llm.generate(
        ["import os\n", "def main(", "class "], [GREEDY, FILTERED, FILTERED], use_tqdm=False
    )
    return [(one.token_ids, one.cumulative_logprob) for one in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"model": "rose-tiny-qwen3", "speculation": "ngram"},
        {"quantization": "fp8", "kv_cache_dtype": "fp8"},
        {"dtype": "bfloat16"},
    ],
    ids=["rotary_and_drafts", "quantised", "half"],
)
def test_outputs_do_not_depend_on_the_default_dtype_and_device(options):
    wanted = generated(**options)
    with defaults(torch.bfloat16, "meta"):
        assert generated(**options) == wanted


def in_a_fork(call: Callable[[], object]) -> str:
    """Return the result or the error of a call in a forked process, as text."""
    ours, theirs = multiprocessing.Pipe()

    def tell() -> None:
        try:
            theirs.send(str(call()))
        except BaseException as error:
            theirs.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=tell)
    process.start()
    try:
        return ours.recv() if ours.poll(60) else "it hangs"
    finally:
        process.kill()
        process.join()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_is_refused_the_engine_and_the_managers_of_its_parent():
    llm = LLM(device="cpu", max_batch_size=4, num_kv_blocks=32)
    refused = "the engine was made before this process was forked; start processes by "
    assert in_a_fork(lambda: llm.generate("a", GREEDY)).startswith(refused)
    assert in_a_fork(lambda: asyncio.run(llm.generate_async("a", GREEDY))).startswith(refused)
    with StreamingManager(llm) as manager:  # its worker does not run in the fork
        assert in_a_fork(lambda: manager.add_request("a", GREEDY)).startswith(refused)


def test_every_tensor_of_an_engine_names_its_device_and_its_dtype_unless_of_integers():
    """Most tensors that kernels write are made on GPUs only."""
    package, found = Path(rosellm.__file__).parent, []
    for path in [*package.glob("roseinfer/**/*.py"), *package.glob("models/**/*.py")]:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in (one for one in calls if ast.unparse(one.func) in MAKERS):
            named = {keyword.arg for keyword in call.keywords}
            needed = {"device"} if ast.unparse(call.func) in OF_INTEGERS else {"device", "dtype"}
            if not needed <= named and path.name != "model.py":  # a model is made on "meta", then converted
                found.append(f"{path.name}:{call.lineno} {ast.unparse(call)}")
    assert found == []


def test_steps_run_where_the_engine_was_made(monkeypatch):
    inside, steps = [], []

    @contextmanager
    def selected(engine: Engine) -> Iterator[None]:
        inside.append(engine)
        yield
        inside.remove(engine)

    def begin_decode(self: Engine, sequences: list[Sequence]) -> int:
        steps.append(self in inside)
        return begin(self, sequences)

    begin = Engine.begin_decode
    monkeypatch.setattr(Engine, "selected", selected)
    monkeypatch.setattr(Engine, "begin_decode", begin_decode)
    llm = LLM(device="cpu", max_batch_size=2, num_kv_blocks=16)
    llm.generate("a", GREEDY, use_tqdm=False)
    n = len(steps)
    with StreamingManager(llm.engine) as manager:
        manager.result(manager.add_request("a", GREEDY))
    assert len(steps) > n > 0 and all(steps) and not inside
