"""Bad input: told in one typed sentence, and whatever was serving before serves on with the same tokens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from nbformat.v4 import new_code_cell, new_notebook
from safetensors.torch import load_file, save_file

from rosellm import LLM, SamplingParams
from rosellm.errors import (
    CheckpointError,
    DeviceError,
    OptionError,
    OverloadError,
    PromptError,
    RecipeError,
    RoseError,
    SamplingError,
)
from rosellm.lab import measure
from rosellm.lab.diagnose import __main__ as diagnose
from rosellm.lab.running import refresh_notebooks, run_notebooks
from rosellm.models.tokenizer import load_tokenizer, train_tokenizer
from rosellm.models.weights import save_model
from rosellm.roseinfer import benchmark_kv_append, benchmark_rivals, benchmark_scheduler, benchmark_streaming
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import Recipe
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, OnlineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager
from rosellm.rosetrainer import train
from tests.helpers import MODERN, random_model, small_config

ROOT = Path(__file__).parents[1]
WORDS = "hello world, here is some text to learn from, with words and words"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WPE = "transformer.wpe.weight"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [WORDS[:20], [5, 6, 7], "h", [9] * 17]
HUGE = 10**30
SHAPE = small_config(vocab_size=300, eos_token_ids=(0,))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint: the model has 300 embeddings and 64 positions, the tokenizer 290 tokens."""
    folder = tmp_path_factory.mktemp("checkpoint")
    train_tokenizer([WORDS], 290).save(folder)
    save_model(random_model(3, SHAPE), folder, torch.float32)
    return folder


@pytest.fixture(scope="module")
def modern_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("modern") / "checkpoint"))
    save_model(random_model(3, replace(SHAPE, **MODERN)), folder, torch.float32)
    return folder


@pytest.fixture(scope="module", params=["dense", None, "modern"], ids=["dense", "best", "modern"])
def llm(request: pytest.FixtureRequest, checkpoint: Path, modern_checkpoint: Path) -> LLM:
    is_modern = request.param == "modern"
    folder, rung = (modern_checkpoint, None) if is_modern else (checkpoint, request.param)
    return LLM(str(folder), rung=rung, device="cpu", max_batch_size=4, block_size=8)


@pytest.fixture(scope="module")
def tokens(llm: LLM) -> list[list[int]]:
    return generated(llm)


@pytest.fixture
def serving(llm: LLM, tokens: list[list[int]]) -> Iterator[LLM]:
    """An engine that is as it was after the test: nothing leaked, the same tokens."""
    yield llm
    llm.engine.check_integrity()
    assert llm.engine.blocks.num_free_blocks() == llm.engine.num_kv_blocks
    assert generated(llm) == tokens


def generated(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@dataclass(frozen=True)
class Row:
    """Something that must be refused with ``error``, in one line that holds ``words``."""

    call: Callable[[Any], object]
    error: type[RoseError]
    words: tuple[str, ...]


def row(call: Callable[[Any], object], error: type[RoseError], *words: str, bug: str = ""):
    """``bug``: one that is known and not mended yet."""
    marks = pytest.mark.xfail(reason=bug, strict=True) if bug else ()
    return pytest.param(Row(call, error, words), id=" ".join(words)[:60], marks=marks)


def check(one: Row, given: Any) -> None:
    with pytest.raises(RoseError) as caught:
        one.call(given)
    message = str(caught.value)
    assert type(caught.value) is one.error
    assert "\n" not in message and all(word in message for word in one.words), message
    assert len(message) < 1000


def asked(prompts: object, params: object = GREEDY) -> Callable[[LLM], object]:
    return lambda llm: llm.generate(prompts, params, use_tqdm=False)


def params(**fields: object) -> Callable[[LLM], object]:
    return lambda llm: llm.generate(["a", [1]], [GREEDY, SamplingParams(**fields)], use_tqdm=False)


def offline(prompts: object, params: object = GREEDY) -> Callable[[LLM], object]:
    return lambda llm: OfflineScheduler(llm.engine).run(prompts, params)


def online(call: Callable[[OnlineScheduler], object], **config: object) -> Callable[[LLM], object]:
    """``call`` while two requests are on their way, which are then run to their ends."""

    def run(llm: LLM) -> None:
        scheduler = OnlineScheduler(llm.engine, SchedulerConfig(**config))
        scheduler.add_requests([[1, 2], [3]], GREEDY)
        scheduler.step()
        try:
            call(scheduler)
        finally:
            while scheduler.has_unfinished:
                scheduler.step()

    return run


def streamed(call: Callable[[StreamingManager], object], **options: object) -> Callable[[LLM], object]:
    """``call`` on a manager that serves another request meanwhile, and to its end."""

    def run(llm: LLM) -> None:
        with StreamingManager(llm.engine, **options) as manager:
            other = manager.add_request([1, 2, 3], GREEDY)
            try:
                call(manager)
            finally:
                assert len(manager.result(other, timeout=100).token_ids) == 6

    return run


def engine(**options: object) -> Callable[[LLM], object]:
    return lambda llm: Engine(llm.engine.model, **options)


REQUESTS = [
    row(asked("\udcff"), PromptError, "'\\udcff' cannot be encoded"),
    row(asked(["a", "x\ud800y"]), PromptError, "prompt 1: text 'x\\ud800y' cannot be encoded"),
    row(asked([[1], "\ud800", "a"]), PromptError, "prompt 1: text '\\ud800' cannot be encoded"),
    row(asked([[np.int64(3)], [np.float32(3)]]), PromptError, "prompt 1: token id 3.0 is of type float"),
    row(asked(torch.tensor(1)), PromptError, "prompts is tensor(1)", "give text"),
    row(asked({"prompt": "a"}), PromptError, "prompts is {'prompt': 'a'}", "give text, token ids"),
    row(asked([b"a"]), PromptError, "prompt 0 is b'a'", "give text"),
    row(asked([[1], [True]]), PromptError, "prompt 1: token id True is of type bool; it must be an int"),
    row(asked([[1], [-1]]), PromptError, "prompt 1: token id -1", "vocabulary of 300"),
    row(asked([[1], [300]]), PromptError, "prompt 1: token id 300", "vocabulary of 300"),
    row(asked([[HUGE]]), PromptError, f"token id {HUGE}", "vocabulary of 300"),
    row(asked([[10**5000]]), PromptError, "token id an integer of", "vocabulary of 300"),
    row(asked([[1] * 59]), PromptError, "59 prompt tokens and 6 new ones", "64 positions"),
    row(asked(["a"], SamplingParams(max_tokens=HUGE)), PromptError, f"{HUGE} new ones", "64 positions"),
    row(asked([[1]], SamplingParams(max_tokens=10**5000)), PromptError, "an integer of", "64 positions"),
    row(
        lambda llm: llm.generate([1], SamplingParams(max_tokens=10**310)),
        PromptError,
        "an integer of",
        "64 positions",
    ),
    row(asked(10**5000), PromptError, "prompts is an integer of", "give text"),
    row(
        asked([[1], [1] * 59], SamplingParams(n=3, max_tokens=6)),
        PromptError,
        "prompt 1: 59 prompt tokens",
        "64 positions",
    ),
    row(asked(["a"], {}), SamplingError, "sampling parameters are {}", "give one SamplingParams"),
    row(asked(["a"], []), SamplingError, "0 SamplingParams for 1 prompts", "one each"),
    row(asked(["a"], SamplingParams), SamplingError, "class", "give one SamplingParams"),
    *(
        row(asked(["a"], params), SamplingError, f"sampling parameters are {words}", "give one Sampling")
        for params, words in (
            (10**5000, "an integer of"),
            ([10**5000], "[an integer of"),
            (np.eye(40), "array([[1., 0."),
        )
    ),
    row(asked([{"a": np.eye(40)}]), PromptError, "prompt 0 is {'a': array([[1., 0.", "give text or token"),
    row(lambda llm: llm.chat([{"role": 10**5000}]), PromptError, "message 0 is {'role': an integer of"),
    row(params(temperature=None), SamplingError, "temperature is None", "from 0"),
    row(params(temperature=10**400), SamplingError, "temperature is an integer of", "1.79e308"),
    row(params(temperature=1j), SamplingError, "temperature is 1j", "from 0"),
    row(params(top_p="0.5"), SamplingError, "top_p is '0.5'", "above 0 and at most 1"),
    row(params(top_k=np.int64(3)), SamplingError, "top_k is", "whole number from 0"),
    row(params(max_tokens=-(10**5000)), SamplingError, "max_tokens is an integer of", "1 or more"),
    row(params(seed="x"), SamplingError, "seed is 'x'", "whole number from 0"),
    row(params(ignore_eos=None), SamplingError, "ignore_eos is None", "True or False"),
    row(params(ignore_eos=10**5000), SamplingError, "ignore_eos is an integer of", "True or False"),
    row(params(n=10**5000, temperature=0.0), SamplingError, "n is an integer of", "1 at temperature 0"),
    row(params(stop=b"x"), SamplingError, "stop is b'x'", "non-empty string"),
    row(params(stop=["a", ""]), SamplingError, "stop is ['a', '']", "non-empty string"),
    row(params(stop={"a"}), SamplingError, "stop is {'a'}", "non-empty string"),
]

SCHEDULERS = [
    row(offline([[1], []]), PromptError, "prompt 1", "empty", "at least one token id"),
    row(offline([[1], "text"]), PromptError, "prompt 1", "str", "at least one token id"),
    row(offline([[1]], None), SamplingError, "sampling parameters are None", "give one SamplingParams"),
    row(online(lambda s: s.add_request("hi", GREEDY)), PromptError, "str", "token id in a list"),
    row(online(lambda s: s.add_request((1,), GREEDY)), PromptError, "tuple", "token id in a list"),
    row(online(lambda s: s.add_request([[1]], GREEDY)), PromptError, "token id [1] is of type list"),
    row(
        online(lambda s: s.add_request([1], None)), SamplingError, "None", "SamplingParams",
    ),
    row(
        online(lambda s: s.add_requests(5, GREEDY)), PromptError, "5",
    ),
    row(online(lambda s: s.add_requests([[1]] * 3, GREEDY), max_in_flight=4), OverloadError, "3 more", "4"),
    row(online(lambda s: s.add_request([np.int64(1)], GREEDY)), PromptError, "is of type int64", "an int"),
    row(online(lambda s: s.cancel(10**5000)), RoseError, "request an integer of", "never added"),
    row(online(lambda s: s.cancel("x")), RoseError, "request 'x' is unknown", "never added"),
    row(online(lambda s: s.take_result(-5)), RoseError, "request -5 is unknown", "never added"),
    row(lambda _: SchedulerConfig(max_batch_size="8"), RoseError, "max_batch_size is '8'", "1 or more"),
    row(lambda _: SchedulerConfig(prefill_token_budget=-1), RoseError, "is -1", "1 or more"),
    row(lambda _: SchedulerConfig(admission_policy=[]), RoseError, "admission_policy is []", "fifo or pack"),
    row(lambda _: SchedulerConfig(admission_policy=10**5000), RoseError, "policy is an integer of"),
    row(lambda llm: OnlineScheduler(llm.engine, SchedulerConfig(HUGE)), RoseError, str(HUGE), "at most 4"),
    row(streamed(lambda m: m.add_request("\udcff", GREEDY)), PromptError, "'\\udcff' cannot be encoded"),
    row(
        streamed(lambda m: m.result(m.add_request("\udcff", GREEDY), 30), tokenize_workers=1),
        PromptError, "'\\udcff' cannot be encoded",
    ),
    row(streamed(lambda m: m.add_request(b"x", GREEDY)), PromptError, "b'x'", "give text or a list"),
    *(
        row(streamed(call), error, words)
        for call, error, words in (
            (lambda m: m.add_request(10**5000, GREEDY), PromptError, "the prompt is an integer of"),
            (lambda m: m.add_request(np.eye(40), GREEDY), PromptError, "the prompt is array([[1., 0."),
            (lambda m: m.add_requests([[1], 10**5000], GREEDY), PromptError, "prompt 1 is an integer of"),
            (lambda m: m.add_requests([torch.eye(40)], GREEDY), PromptError, "prompt 0 is tensor([[1., 0."),
            (lambda m: m.add_requests(np.eye(40), GREEDY), PromptError, "the prompts are array([[1., 0."),
            (lambda m: m.add_request([1], 10**5000), SamplingError, "params is an integer of"),
            (lambda m: m.add_request([1], np.eye(40)), SamplingError, "params is array([[1., 0."),
            (lambda m: m.add_requests([[1]], 10**5000), SamplingError, "parameters are an integer of"),
            (lambda m: m.add_request([1], GREEDY, 10**5000), RoseError, "inbox is an integer of"),
            (lambda m: m.cancel(10**5000), RoseError, "request an integer of"),
            (lambda m: m.stream_text(10**5000), RoseError, "request an integer of"),
            (lambda m: m.result(np.eye(40)), RoseError, "request array([[1., 0."),
        )
    ),
    row(lambda _: StreamingManager(10**5000), RoseError, "engine is an integer of", "give an Engine"),
    row(
        streamed(lambda m: m.add_requests(["a", "\ud800"], GREEDY)),
        PromptError, "prompt 1: text '\\ud800' cannot be encoded",
    ),
    row(
        streamed(lambda m: m.result(m.add_requests(["a", "\ud800"], GREEDY)[0], 30), tokenize_workers=1),
        PromptError, "prompt 1: text '\\ud800' cannot be encoded",
    ),
    row(streamed(lambda m: m.add_request([], GREEDY)), PromptError, "empty", "at least one token id"),
    row(streamed(lambda m: m.add_request([1], {})), SamplingError, "params is {}", "give SamplingParams"),
    row(streamed(lambda m: m.add_request([300], GREEDY)), PromptError, "id 300", "vocabulary of 300"),
    row(streamed(lambda m: m.stream_text(77)), RoseError, "request 77 is unknown", "never added"),
    row(streamed(lambda m: m.cancel(None)), RoseError, "request None is unknown", "never added"),
    row(streamed(lambda m: m.result(1, "x")), RoseError, "timeout is 'x'", "seconds"),
    row(streamed(print, config={"a": 1}), RoseError, "config is {'a': 1}", "SchedulerConfig"),
    row(lambda llm: OnlineScheduler(llm.engine, 8), RoseError, "config is 8", "SchedulerConfig"),
    row(lambda _: SchedulerConfig(prefill_chunk=-(10**5000)), RoseError, "prefill_chunk is an integer of"),
    row(streamed(print, stream_interval=0), RoseError, "stream_interval is 0", "1 or more"),
    row(streamed(print, tokenize_workers=-(10**5000)), RoseError, "tokenize_workers is an integer of"),
    row(streamed(print, tokenize_workers="2"), RoseError, "tokenize_workers is '2'", "0 or more"),
]  # fmt: skip

OPTIONS = [
    row(engine(block_size=8.0), OptionError, "block_size is 8.0", "power of two"),
    row(engine(block_size=-8), OptionError, "block_size is -8", "power of two"),
    row(engine(block_size=True), OptionError, "block_size is True"),
    row(
        engine(block_size=1 << 60), OptionError, f"block_size is {1 << 60}",
    ),
    row(engine(num_kv_blocks=0), OptionError, "num_kv_blocks is 0", "1 or more"),
    row(
        engine(num_kv_blocks=1 << 60), OptionError, f"num_kv_blocks is {1 << 60}",
    ),
    row(engine(max_batch_size=1.0), OptionError, "max_batch_size is 1.0", "1 or more"),
    row(
        engine(max_batch_size=1 << 60), OptionError, f"max_batch_size is {1 << 60}",
    ),
    row(engine(max_model_len=0), OptionError, "max_model_len is 0", "from 1 to the model's 64 positions"),
    row(engine(max_model_len=65), OptionError, "max_model_len is 65", "from 1 to the model's 64 positions"),
    row(engine(max_model_len=True), OptionError, "max_model_len is True", "whole number"),
    row(engine(max_model_len="64"), OptionError, "max_model_len is '64'", "whole number"),
    row(engine(max_model_len=HUGE), OptionError, f"max_model_len is {HUGE}", "64 positions"),
    *(
        row(engine(gpu_memory_utilization=bad), OptionError, f"utilization is {bad!r}", "above 0 and at most")
        for bad in (0, -0.5, 1.01, "0.9", None, float("nan"), float("inf"), True)
    ),
    row(
        engine(gpu_memory_utilization=2, num_kv_blocks=4), OptionError, "gpu_memory_utilization is 2",
    ),
    row(engine(recipe=5), RecipeError, "rung 5 is unknown", "dense, paged"),
    row(
        engine(recipe=["dense"]), RecipeError, "rung ['dense'] is unknown",
    ),
    row(engine(recipe=10**5000), RecipeError, "rung an integer of", "dense, paged"),
    row(engine(kernels=10**5000), RecipeError, "kernels=an integer of"),
    row(lambda _: Recipe(gemm=10**5000), RecipeError, "gemm=an integer of"),
    row(engine(kernels="cuda"), RecipeError, "kernels='cuda'", "'auto', 'triton' or 'torch'"),
    row(lambda _: LLM(5), CheckpointError, "model is 5", "a folder or a hub id"),
    row(lambda _: LLM(10**5000), CheckpointError, "model is an integer of", "a folder or a hub id"),
    row(lambda _: LLM(np.eye(40)), CheckpointError, "model is array([[1., 0.", "a folder or a hub id"),
    row(lambda _: LLM(None), CheckpointError, "model is None", "a folder or a hub id"),
    row(lambda _: LLM(b"gpt2", load_format="dummy"), CheckpointError, "model is b'gpt2'", "a hub id"),
    row(lambda _: LLM("a" * 5000, device="cpu"), CheckpointError, "aaa", "use 'rose-tiny'"),
    row(lambda _: LLM("\0", load_format="dummy"), CheckpointError, "'\\x00'", "use one of gpt2"),
    row(lambda _: LLM("rose-tiny", device=None), DeviceError, "device None", "'cuda' or 'cpu'"),
    row(lambda _: LLM("rose-tiny", device="cpu", dtype=["half"]), DeviceError, "['half']", "'float16'"),
    row(lambda _: LLM("rose-tiny", device=10**5000), DeviceError, "device an integer of", "'cpu'"),
    row(lambda _: LLM("rose-tiny", device="cpu", dtype=10**5000), DeviceError, "dtype an integer of"),
    row(lambda _: LLM("rose-tiny", load_format=10**5000), CheckpointError, "load_format an integer of"),
    row(lambda _: LLM("rose-tiny", load_format=None), CheckpointError, "load_format None", "'dummy'"),
]  # fmt: skip


@pytest.mark.parametrize("one", [*REQUESTS, *SCHEDULERS, *OPTIONS])
def test_a_bad_request_or_option_is_refused_and_the_engine_serves_on(one: Row, serving: LLM) -> None:
    check(one, serving)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poisoned_weights_fail_each_request_with_its_reason_and_leave_nothing_behind(
    serving: LLM, poison: float
) -> None:
    weight = serving.engine.model.blocks[1].norm_2.weight
    kept = weight.clone()
    weight.fill_(poison)
    try:
        for output in serving.generate([[1], [2, 3]], GREEDY, use_tqdm=False):
            assert output.finish_reason == "failed" and "logits are not finite" in output.error
        with (
            StreamingManager(serving.engine) as manager,
            pytest.raises(SamplingError, match="logits are not finite"),
        ):
            manager.result(manager.add_request([1, 2, 3], GREEDY), timeout=100)
    finally:
        weight.copy_(kept)


# Checkpoints


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the good checkpoint, to be spoilt."""
    return Path(shutil.copytree(checkpoint, tmp_path / "spoilt"))


def loaded(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), **({"device": "cpu", "rung": "dense", "num_kv_blocks": 9} | options))


def spoilt(change: Callable[[Path], object], **options: object) -> Callable[[Path], object]:
    def run(folder: Path) -> None:
        change(folder)
        loaded(folder, **options)

    return run


def tensors(change: Callable[[dict[str, torch.Tensor]], object], **options: object):
    """Load after ``change`` of the tensors."""

    def run(folder: Path) -> None:
        values = load_file(folder / WEIGHTS)
        change(values)
        save_file(values, folder / WEIGHTS)

    return spoilt(run, **options)


def edited(name: str, change: Callable[[dict[str, Any]], object], **options: object):
    """Load after ``change`` of a JSON file."""

    def run(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return spoilt(run, **options)


def written(name: str, content: str | bytes, **options: object) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return spoilt(lambda folder: (folder / name).write_bytes(data), **options)


def config(**fields: object) -> Callable[[Path], object]:
    return edited("config.json", lambda value: value.update(fields))


def index(shard: str) -> Callable[[Path], object]:
    return indexed(json.dumps({"weight_map": {WPE: shard}}))


def indexed(text: str) -> Callable[[Path], object]:
    """Weights by an index alone; beside a single file none is read."""

    def run(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(text)

    return spoilt(run)


def pickled(folder: Path) -> None:
    torch.save({WPE: torch.zeros(64, 32)}, folder / WEIGHTS)


FILES = [
    row(spoilt(lambda f: os.truncate(f / WEIGHTS, 5000)), CheckpointError, WEIGHTS, "cannot be read"),
    row(spoilt(pickled), CheckpointError, WEIGHTS, "cannot be read as safetensors"),
    row(spoilt(lambda f: (f / WEIGHTS).unlink()), CheckpointError, "lacks model.safetensors", "only"),
    row(written(WEIGHTS, b"\xff" * 8 + b"{}"), CheckpointError, WEIGHTS, "cannot be read as safetensors"),
    row(tensors(lambda t: t.pop(WPE)), CheckpointError, "lacks 1 tensors", WPE),
    row(tensors(lambda t: t.update({WPE: t[WPE][:-1]})), CheckpointError, WPE, "[63, 32]", "[64, 32]"),
    row(tensors(lambda t: t[WPE].fill_(torch.nan)), CheckpointError, WPE, "not finite in float32"),
    row(tensors(lambda t: t[WPE].fill_(-torch.inf)), CheckpointError, WPE, "not finite in float32"),
    row(tensors(lambda t: t[WPE].fill_(1e6), dtype="float16"), CheckpointError, WPE, "not finite in float16"),
    row(tensors(lambda t: t.update({WPE: t[WPE].int()})), CheckpointError, WPE, "int32", "use float32"),
    row(
        tensors(lambda t: t.update({WPE: t[WPE].to(torch.float8_e4m3fn)})),
        CheckpointError, WPE, "float8_e4m3fn", "use float32",
    ),
    row(index("gone.safetensors"), CheckpointError, "lacks gone.safetensors"),
    row(index("../spoilt/model.safetensors"), CheckpointError, INDEX, "outside its folder"),
    row(index(".."), CheckpointError, "lacks .."),
    row(index("config.json"), CheckpointError, "config.json cannot be read as safetensors"),
    row(indexed("[" * 100_000), CheckpointError, INDEX, "not a valid safetensors index"),
    row(spoilt(lambda f: (f / "config.json").unlink()), CheckpointError, "has no config.json"),
    row(written("config.json", b"\xff\xfe"), CheckpointError, "config.json cannot be read as JSON"),
    row(written("config.json", "[" * 100_000), CheckpointError, "config.json cannot be read as JSON"),
    row(written("config.json", "[]"), CheckpointError, "config.json", "JSON object"),
    row(config(n_layer=10**9), CheckpointError, "n_layers is 1000000000", "from 1 to 4096"),
    row(config(n_layer=4096), CheckpointError, "parameters", "bytes of safetensors"),
    row(config(vocab_size=HUGE), CheckpointError, f"vocab_size is {HUGE}", "from 1 to 2147483647"),
    row(config(n_positions=2**31 - 1), CheckpointError, "parameters", "bytes of safetensors"),
    row(config(n_embd=2**30), CheckpointError, "parameters", "bytes of safetensors"),
    row(config(n_embd=-32), CheckpointError, "d_model is -32", "whole number from 1"),
    row(config(n_head=5), CheckpointError, "32 is not a multiple of n_heads 5"),
    row(config(n_head=2.0), CheckpointError, "n_heads is 2.0", "whole number from 1"),
    row(config(n_inner="128"), CheckpointError, "d_ff is '128'", "whole number from 1"),
    row(config(n_inner=64), CheckpointError, "c_fc.weight", "[32, 128]", "[32, 64]"),
    row(config(layer_norm_epsilon=float("nan")), CheckpointError, "norm_eps is nan", "at most 1"),
    row(config(layer_norm_epsilon=float("inf")), CheckpointError, "norm_eps is inf", "at most 1"),
    row(config(layer_norm_epsilon=10**400), CheckpointError, "norm_eps is an integer of 1329", "at most 1"),
    row(config(layer_norm_epsilon=True), CheckpointError, "norm_eps is True", "at most 1"),
    row(config(eos_token_id=10**12), CheckpointError, "eos_token_id is 1000000000000", "2147483647"),
    row(config(eos_token_id=["0"]), CheckpointError, "eos_token_id is '0'", "token ids (0 to"),
    row(config(eos_token_id=[0, True]), CheckpointError, "eos_token_id is True", "token ids (0 to"),
    row(config(torch_dtype="int4"), CheckpointError, "dtype 'int4' is not supported", "bfloat16"),
    row(config(dtype=16), CheckpointError, "dtype 16 is not supported", "bfloat16"),
    row(config(quantization_config={"bits": 4}), CheckpointError, "is quantised", "float16"),
    row(config(n_embd=None), CheckpointError, "config.json lacks n_embd"),
    row(config(activation_function=["gelu"]), CheckpointError, "['gelu']", "'gelu_new' is"),
    row(config(scale_attn_weights=None), CheckpointError, "scale_attn_weights None", "only True is"),
    row(config(reorder_and_upcast_attn="no"), CheckpointError, "'no'", "only False is"),
    row(config(model_type={}), CheckpointError, "model_type {} is not supported; gpt2, llama"),
    row(config(model_type="llama"), CheckpointError, "config.json lacks max_position", "num_hidden_layers"),
]  # fmt: skip


def dummy(**fields: object) -> Callable[[Path], object]:
    return edited("config.json", lambda value: value.update(fields), load_format="dummy")


DUMMIES = [
    row(dummy(n_embd=2**30), CheckpointError, "parameters in float32 take", "'cpu' has"),
    row(
        dummy(n_embd=2**24, vocab_size=2**31 - 1), CheckpointError, "parameters in float32 take", "'cpu' has"
    ),
]


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return edited("tokenizer.json", change)


def answered(change: Callable[[dict[str, Any]], object], text: str) -> Callable[[Path], object]:
    """The file is a tokenizer; the fault shows with a text."""

    def run(folder: Path) -> None:
        path = folder / "tokenizer.json"
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))
        llm = loaded(folder)
        try:
            llm.generate([[1], text], GREEDY, use_tqdm=False)
        finally:
            assert len(llm.generate([1], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 6

    return run


WORD_LEVEL = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
PREPEND_NOTHING = {"type": "Prepend", "prepend": ""}
PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}

TOKENIZERS = [
    row(spoilt(lambda f: (f / "tokenizer.json").unlink()), CheckpointError, "has no tokenizer.json"),
    row(spoilt(lambda f: os.truncate(f / "tokenizer.json", 900)), CheckpointError, "as a tokenizer: EOF"),
    row(tokenizer(lambda t: t["model"]["vocab"].update(x=-5)), CheckpointError, "`-5`", "expected u32"),
    row(tokenizer(lambda t: t["model"]["vocab"].update(zz=300)), CheckpointError, "ids up to 300", "for 300"),
    row(tokenizer(lambda t: t["model"]["vocab"].update(zz=2**32 - 1)), CheckpointError, "4294967295", "300"),
    row(tokenizer(lambda t: t["model"].update(vocab=[])), CheckpointError, "tokenizer", "expected a map"),
    row(tokenizer(lambda t: t["model"].pop("merges")), CheckpointError, "Missing vocab/merges"),
    row(tokenizer(lambda t: t["model"]["merges"].append(["q", "zzz"])), CheckpointError, "`zzz` out of voc"),
    row(tokenizer(lambda t: t["model"]["merges"].append(["a"])), CheckpointError, "tokenizer", "MergeType"),
    row(tokenizer(lambda t: t["model"].update(dropout=2.5)), CheckpointError, "between 0 and 1"),
    row(tokenizer(lambda t: t["model"].update(continuing_subword_prefix="##")), CheckpointError, "slice"),
    row(tokenizer(lambda t: t.update(normalizer=PRECOMPILED)), CheckpointError, "precompiled_charsmap"),
    row(
        tokenizer(lambda t: t["model"]["vocab"].update({f"z{i}": 290 + i for i in range(11)})),
        CheckpointError, "ids up to 300", "embeddings for 300",
    ),
    row(answered(lambda t: t.update(model=WORD_LEVEL), "hello"), PromptError, "'hello'", "Missing [UNK]"),
    row(answered(lambda t: t.update(normalizer=PREPEND_NOTHING), "hello"), PromptError, "'hello'", "index"),
]  # fmt: skip


@pytest.mark.parametrize("one", [*FILES, *DUMMIES, *TOKENIZERS])
@pytest.mark.parametrize("llm", [None], ids=["best"], indirect=True)
def test_a_bad_checkpoint_is_refused_and_another_engine_serves_on(
    one: Row, serving: LLM, folder: Path
) -> None:
    check(one, folder)


CUT = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}
PADDED = {
    "strategy": {"Fixed": 50},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 7,
    "pad_type_id": 0,
    "pad_token": "x",
}


@pytest.mark.parametrize("change", [{"truncation": CUT}, {"padding": PADDED}], ids=str)
def test_a_tokenizer_cuts_and_pads_no_prompt_whatever_its_file_says(folder: Path, change: dict) -> None:
    before = load_tokenizer(folder, SHAPE).encode(WORDS)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert load_tokenizer(folder, SHAPE).encode(WORDS) == before


# Fuzzing: whatever stands in a file, it loads and works, or is refused by a RoseError.

INTEGERS = [0, 1, -1, 2, 3, 31, 64, 65, 2**31 - 1, 2**31, 2**40, 2**63, 10**30, 10**400]
REALS = [0.0, -1.5, 1.5, 1e308, float("inf"), float("nan")]
OTHERS = [None, True, False, "", "gpt2", "gelu", "2", "\0", "\ud800", "é" * 9, "BPE", "ByteLevel", [], {}]
SCALARS = st.sampled_from(INTEGERS) | st.sampled_from(REALS) | st.sampled_from(OTHERS)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.sampled_from(["type", "a"]), SCALARS)
PLACES = st.integers(0, 3000)
WAYS = st.sampled_from(["replace"] * 5 + ["delete", "double", "rename"])


def places(value: object) -> list[tuple[dict | list, str | int]]:
    """Where in a JSON value there is another; of a long list or vocabulary, the beginning."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in list(inside)[:20] for place in ((value, key), *places(inner)[:60])]


@st.composite
def mutations(draw: st.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    """``good`` with one or a few places changed."""
    bad = deepcopy(good)
    for _ in range(draw(st.sampled_from([1, 1, 2, 4]))):
        container, key = draw(st.sampled_from(places(bad)))
        change(container, key, draw(WAYS), draw(VALUES))
    return bad


def change(container: dict | list, key: str | int, way: str, value: object) -> None:
    if way == "replace":
        container[key] = value
    elif way == "delete":
        del container[key]
    elif isinstance(container, list):
        container.insert(key, deepcopy(container[key]) if way == "double" else value)
    elif way == "rename":
        container[f"{key}_"] = container.pop(key)
    else:
        container[f"{key}"] = [deepcopy(container[key])] * 2


FUZZED = settings(
    max_examples=250, deadline=2000, derandomize=True, database=None, print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@pytest.fixture
def lean() -> Iterator[None]:
    """At most half a GiB more than before."""
    before = getrusage(RUSAGE_SELF).ru_maxrss
    yield
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 1 << 19


@FUZZED
@given(data=st.data())
def test_whatever_stands_in_config_json_loads_and_runs_or_is_refused(
    checkpoint: Path, folder: Path, lean: None, data: st.DataObject
) -> None:
    good = json.loads((checkpoint / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data.draw(mutations(good))))
    try:
        llm = loaded(folder, rung=None)
    except RoseError as error:
        assert "\n" not in str(error)
        return
    params = SamplingParams(temperature=0.0, max_tokens=3)
    outputs = llm.generate([[1], [2, 3]], params, use_tqdm=False)
    assert all(1 <= len(result.outputs[0].token_ids) <= 3 for result in outputs)


@FUZZED
@given(data=st.data())
def test_whatever_stands_in_tokenizer_json_encodes_and_streams_or_is_refused(
    checkpoint: Path, folder: Path, lean: None, data: st.DataObject
) -> None:
    good = json.loads((checkpoint / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(data.draw(mutations(good))))
    spells(folder)


TOKENIZER_CONFIG = {
    "tokenizer_class": "GPT2Tokenizer",
    "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "lstrip": False, "normalized": True},
    "unk_token": "<|endoftext|>",
    "add_prefix_space": False,
    "model_max_length": 1024,
    "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}},
    "additional_special_tokens": ["x"],
}


@settings(FUZZED, max_examples=100)
@given(data=st.data())
def test_whatever_stands_in_gpt2s_older_files_encodes_and_streams_or_is_refused(
    checkpoint: Path, folder: Path, lean: None, data: st.DataObject
) -> None:
    """vocab.json, merges.txt, tokenizer_config.json: without a tokenizer.json, `transformers` reads them."""
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    files = {"vocab.json": model["vocab"], "tokenizer_config.json": TOKENIZER_CONFIG}
    spoilt = data.draw(st.sampled_from([*files, None]))
    for name, good in files.items():
        value = data.draw(mutations(good)) if name == spoilt else good
        (folder / name).write_text(json.dumps(value))
    (folder / "merges.txt").write_text("".join(f"{' '.join(merge)}\n" for merge in model["merges"]))
    (folder / "tokenizer.json").unlink(missing_ok=True)
    spells(folder)
    if spoilt is None:
        load_tokenizer(folder, SHAPE)


@FUZZED
@given(
    cut=st.integers(0, 3200), flips=st.lists(st.tuples(st.integers(0, 3200), st.integers(0, 255)), max_size=4)
)
def test_bytes_that_changed_in_tokenizer_json_are_read_or_refused(
    checkpoint: Path, folder: Path, lean: None, cut: int, flips: list[tuple[int, int]]
) -> None:
    content = bytearray((checkpoint / "tokenizer.json").read_bytes())
    for place, byte in flips:
        content[place] = byte
    (folder / "tokenizer.json").write_bytes(content[:cut] if not flips else content)
    spells(folder)


def spells(folder: Path) -> None:
    """Whatever was loaded gives ids of the model, and their text in pieces."""
    try:
        tokenizer = load_tokenizer(folder, SHAPE)
        ids = tokenizer.encode("hello wörld <|endoftext|>")
    except RoseError as error:
        assert "\n" not in str(error)
        return
    stream = tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in [*ids, 299]]
    assert all(0 <= token_id < 300 for token_id in ids)
    assert isinstance("".join(pieces) + stream.finish() + tokenizer.decode(ids), str)


# Commands


@dataclass(frozen=True)
class Asked:
    """A command line, and what its one line on stderr must hold."""

    main: Callable[[list[str]], int]
    arguments: list[str]
    words: tuple[str, ...]


def command(main: Callable[[list[str]], int], base: str = "") -> Callable[..., Any]:
    def asked(arguments: str | list[str], *words: str):
        own = arguments.split() if isinstance(arguments, str) else arguments
        return pytest.param(Asked(main, [*base.split(), *own], words), id=" ".join(words)[:60])

    return asked


SMALL = "--device cpu --num-requests 2 --max-new-tokens 1 --warmup-runs 0 --repeat-runs 1"
scheduler = command(benchmark_scheduler.main, SMALL)
streaming = command(benchmark_streaming.main, SMALL)
kv_append = command(benchmark_kv_append.main, "--device cpu")
rivals = command(benchmark_rivals.main, "--device cpu")
training = command(train.main, "--smoke --device cpu --output out")
measuring = command(measure.main, "--device cpu --output out --model rose-tiny --workloads=")
diagnosing = command(diagnose.main, "--device cpu")
notebooks = command(run_notebooks.main, "--notebooks notebooks --output out")
refresh = command(refresh_notebooks.main, "--without-png --notebooks notebooks")
nines = "9" * 40

COMMANDS = [
    scheduler("--num-requests +-5", "--num-requests", "'+-5' is not a whole number, 1 or more"),
    scheduler(f"--num-requests {'9' * 5000}", "--num-requests", "...", "is not a whole number"),
    scheduler("--num-requests 9999999", "'9999999' is too large; use at most 1048576"),
    scheduler(f"--prompt-tokens {nines}", "--prompt-tokens", "too large; use at most 1048576"),
    scheduler(f"--prompt-repeats {nines}", "--prompt-repeats", "too large; use at most 1048576"),
    scheduler(f"--max-batch-size {nines}", "--max-batch-size", "too large; use at most 2147483647"),
    scheduler(f"--block-size {2**70}", "--block-size", "too large; use at most 1048576"),
    scheduler(f"--num-kv-blocks {nines}", "--num-kv-blocks", "too large; use at most 2147483647"),
    scheduler("--num-kv-blocks 2147483647", "out of memory; ask for a smaller batch, fewer KV blocks"),
    scheduler("--prompt \udcff", "text '\\udcff' cannot be encoded"),
    scheduler(f"--hf-model-id {'a' * 5000}", "model 'aaa", "use 'rose-tiny', a local folder"),
    scheduler("--hf-model-id=", "model ''", "use 'rose-tiny', a local folder"),
    scheduler("--hf-model-id file", "model 'file'", "use 'rose-tiny', a local folder"),
    scheduler("--hf-model-id .", "has no config.json"),
    scheduler(f"--json {'x' * 5000}", "File name too long"),
    scheduler("--json file/x", "cannot write file/x: there is no folder file"),
    scheduler("--profile .", "cannot write .", "not a regular file"),
    scheduler("--workload=", "workload '' is unknown; benchmark_scheduler runs W0"),
    scheduler("--rung=", "rung '' is unknown; use one of dense"),
    scheduler("--top-k -2", "--top-k: '-2' is not a whole number, -1 or more"),
    scheduler("stray", "unrecognized arguments: stray"),
    streaming("--submit-interval-ms 1e300", "'1e300'", "at most 86400000, a day"),
    streaming("--submit-interval-ms inf", "'inf'", "at most 86400000, a day"),
    streaming("--prompt \udcff --tokenize-workers 1", "text '\\udcff' cannot be encoded"),
    streaming(f"--tokenize-workers {nines}", "--tokenize-workers", "too large"),
    streaming("--trace file", "file: the header is kept; it must name seconds, prompt_tokens, new_tokens"),
    streaming("--long-prompt-tokens 9999999", "'9999999' is too large; use at most 1048576"),
    kv_append(f"--batch-sizes 8,{nines}", "--batch-sizes", "too large; use at most 1099511627776"),
    kv_append("--batch-sizes=", "'' is not a whole number, 1 or more"),
    kv_append("--head-dim 2147483647 --num-heads 2147483647", "out of memory"),
    rivals("--rival=", "'' is unknown; use vllm, transformers, rosellm"),
    rivals("--rival rosellm --workloads W1 --num-requests 9999999", "too large; use at most 1048576"),
    rivals("--rival rosellm --workloads W1 --output file/x", "cannot write records to file/x"),
    training("--epochs x", "--epochs: invalid float value: 'x'"),
    training("--epoch 1", "unrecognized arguments: --epoch 1"),
    training("--epochs 1e308", "epochs is 1e+308; it must be at most 1000000"),
    training("--learning-rate 1e300", "learning_rate is 1e+300; it must be at most 1000"),
    training(f"--batch-size {10**12}", "batch_size is 1000000000000; it must be at most 65536"),
    training("--json .", "record '.' is not a file name"),
    measuring("--repeats 0", "--repeats: '0' is not a whole number, 1 or more"),
    measuring("--device tpu", "invalid choice: 'tpu'", "'cuda', 'cpu'"),
    measuring("--load-format gguf", "invalid choice: 'gguf'", "'auto', 'dummy'"),
    measuring("--output file", "File exists: 'file'"),
    measuring(["--experiments", "", "--workloads", "W0", "--model", "gpt5"], "for 'gpt5'", "rose-tiny"),
    diagnosing("--batch 0", "--batch: '0' is not a whole number, 1 or more"),
    diagnosing(f"--batch {nines}", "--batch", "too large; use at most 4096"),
    diagnosing("--context 489", "context 489", "512 positions; use a context of at most 488"),
    diagnosing("--transformers --context 489", "context 489", "use a context of at most 488"),
    diagnosing("--rung=", "rung '' is unknown; use one of dense"),
    diagnosing("--rung paged --transformers", "--transformers leaves out; give one of both"),
    diagnosing("--model gpt5 --transformers", "model 'gpt5'", "use 'rose-tiny', a local folder"),
    notebooks("--workers x", "--workers: invalid int value: 'x'"),
    notebooks("--timeout nan", "timeout above 0 and finite, not 2 and nan"),
    notebooks("--timeout inf", "timeout above 0 and finite, not 2 and inf"),
    notebooks("--output file", "output 'file' cannot be a folder: File exists"),
    notebooks("--select 99", "no notebook is called '99': there are 01_dense"),
    notebooks("--notebooks broken --parameters batch=1", "broken/01.ipynb cannot be read as a notebook"),
    refresh("--timeout nan", "timeout must be above 0 and finite, not nan"),
    refresh("--timeout x", "--timeout: invalid float value: 'x'"),
    refresh("--select 99", "no notebook is called '99': there are 01_dense"),
]

PARAMETERS = {
    "batch=x": ("batch='x'", "a value like 8"),
    "batch=1.5": ("batch=1.5", "a value like 8"),
    "batch=true": ("batch=True", "a value like 8"),
    "batch=null": ("batch=None", "a value like 8"),
    "quick=1": ("quick=1", "a value like True"),
    "rate=fast": ("rate='fast'", "a value like 0.5"),
    "lengths=3": ("lengths=3", "a value like [2, 40]"),
    "lengths=[2,x]": ("lengths=[2, 'x']", "a value like [2, 40]"),
    "rung=7": ("rung=7", "a value like 'dense'"),
    "rungs=dense": ("no parameter 'rungs'", "batch, lengths, quick, rate, rung"),
    "batch": ("name=value", "'batch'"),
    "batch=@8": ("'batch'", "cannot be read as YAML: '@8'"),
    f"batch={'[' * 9000}": ("'batch'", "cannot be read as YAML"),
}
COMMANDS += [notebooks(["--parameters", text], *words) for text, words in PARAMETERS.items()]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in: a file, notebooks, one that is none."""
    for name in ("notebooks", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "broken/01.ipynb").write_text('{"cells"')
    cell = new_code_cell("batch = 8\nlengths = [2, 40]\nquick = True\nrate = 0.5  # a share\nrung = 'dense'")
    cell.metadata["tags"] = ["parameters"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=[cell], metadata={"kernelspec": kernel})
    nbformat.write(notebook, tmp_path / "notebooks/01_dense.ipynb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("one", COMMANDS)
def test_a_command_tells_bad_input_in_one_line_and_leaves_nothing(
    one: Asked, place: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: None)
    before = {path: path.is_file() and path.read_bytes() for path in place.rglob("*")}
    try:
        status = one.main(one.arguments)
    except SystemExit as leaving:
        status = leaving.code
    [line] = capsys.readouterr().err.splitlines()
    assert status == 2
    assert all(word in line for word in one.words), line
    after = {path: path.is_file() and path.read_bytes() for path in place.rglob("*") if path.name != "out"}
    assert after == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("rosellm.roseinfer.benchmark_scheduler", "--device cpu --prompt-tokens 9999999999"),
        ("rosellm.rosetrainer.train", "--batch-size many"),
    ],
)
def test_a_process_ends_with_status_2_and_one_line(module: str, arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments.split()],
        capture_output=True, text=True, cwd=ROOT, timeout=60, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and arguments.split()[-1] in line
