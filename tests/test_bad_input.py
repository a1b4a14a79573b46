"""Bad requests, options and checkpoints: told in one typed sentence, and what served before serves on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rosellm import LLM, SamplingParams
from rosellm.errors import (
    CheckpointError,
    DeviceError,
    LongPromptError,
    OptionError,
    OverloadError,
    PromptError,
    RecipeError,
    RoseError,
    SamplingError,
)
from rosellm.models.weights import save_model
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, OnlineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import MODERN, random_model, small_config

WORDS = "hello world, here is some text to learn from, with words and words"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
WPE = "transformer.wpe.weight"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [WORDS[:20], [5, 6, 7], "h", [9] * 17]
HUGE = 10**30
SPOILT = ["a", "\ud800"]
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


def row(call: Callable[[Any], object], error: type[RoseError], *words: str):
    """What must be refused with ``error``, in one line that holds ``words``."""
    return pytest.param(call, error, words, id=" ".join(words)[:60])


def refused(
    call: Callable[[Any], object], error: type[RoseError], words: tuple[str, ...], given: Any
) -> None:
    with pytest.raises(RoseError) as caught:
        call(given)
    message = str(caught.value)
    assert type(caught.value) is error
    assert "\n" not in message and all(word in message for word in words), message
    assert len(message) < 1000


def asked(prompts: object, params: object = GREEDY) -> Callable[[LLM], object]:
    return lambda llm: llm.generate(prompts, params, use_tqdm=False)


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


def spoilt_result(manager: StreamingManager) -> object:
    """Texts are tokenized by a worker, so the error comes with the result."""
    return manager.result(manager.add_requests(SPOILT, GREEDY)[0], 30)


REQUESTS = [
    row(asked([[1], "x\ud800y", "a"]), PromptError, "prompt 1: text 'x\\ud800y' cannot be encoded"),
    row(asked([[np.int64(3)], [np.float32(3)]]), PromptError, "prompt 1: token id 3.0 is of type float"),
    row(asked(torch.tensor(1)), PromptError, "prompts is tensor(1)", "give text"),
    row(asked({"text": "a"}), PromptError, "a prompt has 'text'", "only prompt and prompt_token_ids"),
    row(asked([b"a"]), PromptError, "prompt 0 is b'a'", "give text"),
    row(asked([[1], [True]]), PromptError, "prompt 1: token id True is of type bool; it must be an int"),
    row(asked([[1], [-1]]), PromptError, "prompt 1: token id -1", "vocabulary of 300"),
    row(asked([[1] * 64]), LongPromptError, "64 prompt tokens leave no room", "64 positions"),
    row(asked(["a"], {}), SamplingError, "sampling parameters are {}", "give one SamplingParams"),
    row(asked(["a"], []), SamplingError, "0 SamplingParams for 1 prompts", "one each"),
    row(offline([[1], []]), PromptError, "prompt 1", "empty", "at least one token id"),
    row(online(lambda s: s.add_request([[1]], GREEDY)), PromptError, "token id [1] is of type list"),
    row(online(lambda s: s.add_requests([[1]] * 3, GREEDY), max_in_flight=4), OverloadError, "3 more", "4"),
    row(online(lambda s: s.cancel("x")), RoseError, "request 'x' is unknown", "never added"),
    row(streamed(lambda m: m.add_request(b"x", GREEDY)), PromptError, "b'x'", "give text or a list"),
    row(streamed(lambda m: m.add_request([300], GREEDY)), PromptError, "id 300", "vocabulary of 300"),
    row(streamed(spoilt_result, tokenize_workers=1), PromptError, "prompt 1: text '\\ud800' cannot be enc"),
    row(streamed(lambda m: m.add_request([1], {})), SamplingError, "params is {}", "give SamplingParams"),
    row(streamed(lambda m: m.stream_text(77)), RoseError, "request 77 is unknown", "never added"),
    row(streamed(lambda m: m.result(1, "x")), RoseError, "timeout is 'x'", "seconds"),
]

OPTIONS = [
    row(lambda _: SchedulerConfig(max_batch_size="8"), RoseError, "max_batch_size is '8'", "1 or more"),
    row(lambda _: SchedulerConfig(admission_policy=[]), RoseError, "admission_policy is []", "fifo or pack"),
    row(lambda llm: OnlineScheduler(llm.engine, SchedulerConfig(HUGE)), RoseError, str(HUGE), "at most 4"),
    row(streamed(print, config={"a": 1}), RoseError, "config is {'a': 1}", "SchedulerConfig"),
    row(streamed(print, stream_interval=0), RoseError, "stream_interval is 0", "1 or more"),
    row(streamed(print, tokenize_workers="2"), RoseError, "tokenize_workers is '2'", "0 or more"),
    row(engine(block_size=-8), OptionError, "block_size is -8", "power of two"),
    row(engine(num_kv_blocks=0), OptionError, "num_kv_blocks is 0", "1 or more"),
    row(engine(max_batch_size=1.0), OptionError, "max_batch_size is 1.0", "1 or more"),
    row(engine(max_model_len=65), OptionError, "max_model_len is 65", "from 1 to the model's 64 positions"),
    row(engine(gpu_memory_utilization=1.01), OptionError, "utilization is 1.01", "above 0 and at most"),
    row(engine(recipe=5), RecipeError, "rung 5 is unknown", "dense, paged"),
    row(engine(kernels="cuda"), RecipeError, "kernels='cuda'", "'auto', 'triton' or 'torch'"),
    row(lambda _: LLM("a" * 5000, device="cpu"), CheckpointError, "aaa", "use 'rose-tiny'"),
    row(lambda _: LLM("rose-tiny", device=None), DeviceError, "device None", "'cuda' or 'cpu'"),
    row(lambda _: LLM("rose-tiny", device="cpu", dtype=["half"]), DeviceError, "['half']", "'float16'"),
    row(lambda _: LLM("rose-tiny", load_format=None), CheckpointError, "load_format None", "'dummy'"),
]


@pytest.mark.parametrize(("call", "error", "words"), REQUESTS + OPTIONS)
def test_a_bad_request_or_option_is_refused_and_the_engine_serves_on(call, error, words, serving: LLM):
    refused(call, error, words, serving)


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


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return edited("tokenizer.json", change)


FILES = [  # models/test_weights.py and test_bad_configs.py have more
    row(spoilt(lambda f: os.truncate(f / WEIGHTS, 5000)), CheckpointError, WEIGHTS, "cannot be read"),
    row(tensors(lambda t: t.update({WPE: t[WPE][:-1]})), CheckpointError, WPE, "[63, 32]", "[64, 32]"),
    row(tensors(lambda t: t[WPE].fill_(torch.nan)), CheckpointError, WPE, "not finite in float32"),
    row(tensors(lambda t: t[WPE].fill_(1e6), dtype="float16"), CheckpointError, WPE, "not finite in float16"),
    row(spoilt(lambda f: (f / CONFIG).unlink()), CheckpointError, "has no config.json"),
    row(spoilt(lambda f: (f / CONFIG).write_text("[" * 100_000)), CheckpointError, "cannot be read as JSON"),
    row(edited(CONFIG, lambda c: c.update(n_layer=4096)), CheckpointError, "parameters", "bytes of safet"),
    row(tokenizer(lambda t: t["model"]["vocab"].update(x=-5)), CheckpointError, "`-5`", "expected u32"),
    row(tokenizer(lambda t: t["model"]["merges"].append(["q", "zzz"])), CheckpointError, "`zzz` out of voc"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), FILES)
@pytest.mark.parametrize("llm", [None], ids=["best"], indirect=True)
def test_a_bad_checkpoint_is_refused_and_another_engine_serves_on(call, error, words, serving, folder):
    refused(call, error, words, folder)
