"""Bad input: told in one typed sentence, and whatever was serving before serves on with the same tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
from rosellm.models.weights import save_model
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import Recipe
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, OnlineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager
from rosellm.rosetrainer.bpe import train_tokenizer
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


def row(call: Callable[[Any], object], error: type[RoseError], *words: str):
    return pytest.param(Row(call, error, words), id=" ".join(words)[:60])


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


def spoilt_result(manager: StreamingManager) -> object:
    """Texts are tokenized by a worker, so the error comes with the result."""
    return manager.result(manager.add_requests(["a", "\ud800"], GREEDY)[0], 30)


REQUESTS = [
    row(asked([[1], "x\ud800y", "a"]), PromptError, "prompt 1: text 'x\\ud800y' cannot be encoded"),
    row(asked([[np.int64(3)], [np.float32(3)]]), PromptError, "prompt 1: token id 3.0 is of type float"),
    row(asked(torch.tensor(1)), PromptError, "prompts is tensor(1)", "give text"),
    row(asked({"prompt": "a"}), PromptError, "prompts is {'prompt': 'a'}", "give text, token ids"),
    row(asked(10**5000), PromptError, "prompts is an integer of", "give text"),
    row(asked([b"a"]), PromptError, "prompt 0 is b'a'", "give text"),
    row(asked([{"a": np.eye(40)}]), PromptError, "prompt 0 is {'a': array([[1., 0.", "give text or token"),
    row(asked([[1], [True]]), PromptError, "prompt 1: token id True is of type bool; it must be an int"),
    row(asked([[1], [-1]]), PromptError, "prompt 1: token id -1", "vocabulary of 300"),
    row(asked([[10**5000]]), PromptError, "token id an integer of", "vocabulary of 300"),
    row(asked([[1], [1] * 59]), PromptError, "prompt 1: 59 prompt tokens and 6 new ones", "64 positions"),
    row(asked(["a"], SamplingParams(max_tokens=HUGE)), PromptError, f"{HUGE} new ones", "64 positions"),
    row(asked(["a"], {}), SamplingError, "sampling parameters are {}", "give one SamplingParams"),
    row(asked(["a"], []), SamplingError, "0 SamplingParams for 1 prompts", "one each"),
    row(asked(["a"], [10**5000]), SamplingError, "sampling parameters are [an integer of", "give one"),
    row(lambda llm: llm.chat([{"role": 10**5000}]), PromptError, "message 0 is {'role': an integer of"),
    row(params(temperature=None), SamplingError, "temperature is None", "from 0"),
    row(params(temperature=10**400), SamplingError, "temperature is an integer of", "1.79e308"),
    row(params(top_p="0.5"), SamplingError, "top_p is '0.5'", "above 0 and at most 1"),
    row(params(top_k=np.int64(3)), SamplingError, "top_k is", "whole number from 0"),
    row(params(max_tokens=-(10**5000)), SamplingError, "max_tokens is an integer of", "1 or more"),
    row(params(seed="x"), SamplingError, "seed is 'x'", "whole number from 0"),
    row(params(ignore_eos=None), SamplingError, "ignore_eos is None", "True or False"),
    row(params(n=2, temperature=0.0), SamplingError, "n is 2", "1 at temperature 0"),
    row(params(stop=b"x"), SamplingError, "stop is b'x'", "non-empty string"),
    row(params(stop=["a", ""]), SamplingError, "stop is ['a', '']", "non-empty string"),
]

SCHEDULERS = [
    row(offline([[1], []]), PromptError, "prompt 1", "empty", "at least one token id"),
    row(offline([[1], "text"]), PromptError, "prompt 1", "str", "at least one token id"),
    row(offline([[1]], None), SamplingError, "sampling parameters are None", "give one SamplingParams"),
    row(online(lambda s: s.add_request((1,), GREEDY)), PromptError, "tuple", "token id in a list"),
    row(online(lambda s: s.add_request([[1]], GREEDY)), PromptError, "token id [1] is of type list"),
    row(online(lambda s: s.add_request([1], None)), SamplingError, "None", "SamplingParams"),
    row(online(lambda s: s.add_requests(5, GREEDY)), PromptError, "5"),
    row(online(lambda s: s.add_requests([[1]] * 3, GREEDY), max_in_flight=4), OverloadError, "3 more", "4"),
    row(online(lambda s: s.cancel("x")), RoseError, "request 'x' is unknown", "never added"),
    row(online(lambda s: s.take_result(-5)), RoseError, "request -5 is unknown", "never added"),
    row(lambda _: SchedulerConfig(max_batch_size="8"), RoseError, "max_batch_size is '8'", "1 or more"),
    row(lambda _: SchedulerConfig(prefill_token_budget=-1), RoseError, "is -1", "1 or more"),
    row(lambda _: SchedulerConfig(prefill_chunk=-(10**5000)), RoseError, "prefill_chunk is an integer of"),
    row(lambda _: SchedulerConfig(admission_policy=[]), RoseError, "admission_policy is []", "fifo or pack"),
    row(lambda llm: OnlineScheduler(llm.engine, SchedulerConfig(HUGE)), RoseError, str(HUGE), "at most 4"),
    row(lambda llm: OnlineScheduler(llm.engine, 8), RoseError, "config is 8", "SchedulerConfig"),
    row(lambda _: StreamingManager(10**5000), RoseError, "engine is an integer of", "give an Engine"),
    row(streamed(lambda m: m.add_request(b"x", GREEDY)), PromptError, "b'x'", "give text or a list"),
    row(streamed(lambda m: m.add_request([], GREEDY)), PromptError, "empty", "at least one token id"),
    row(streamed(lambda m: m.add_request([300], GREEDY)), PromptError, "id 300", "vocabulary of 300"),
    row(streamed(lambda m: m.add_requests([[1], 10**5000], GREEDY)), PromptError, "prompt 1 is an integer"),
    row(streamed(lambda m: m.add_requests(np.eye(40), GREEDY)), PromptError, "prompts are array([[1., 0."),
    row(
        streamed(lambda m: m.add_requests(["a", "\ud800"], GREEDY)), PromptError, "prompt 1: text", "encoded"
    ),
    row(
        streamed(spoilt_result, tokenize_workers=1), PromptError, "prompt 1: text '\\ud800' cannot be encoded"
    ),
    row(streamed(lambda m: m.add_request([1], {})), SamplingError, "params is {}", "give SamplingParams"),
    row(streamed(lambda m: m.add_requests([[1]], 10**5000)), SamplingError, "parameters are an integer of"),
    row(streamed(lambda m: m.add_request([1], GREEDY, 10**5000)), RoseError, "inbox is an integer of"),
    row(streamed(lambda m: m.stream_text(77)), RoseError, "request 77 is unknown", "never added"),
    row(streamed(lambda m: m.cancel(None)), RoseError, "request None is unknown", "never added"),
    row(streamed(lambda m: m.result(1, "x")), RoseError, "timeout is 'x'", "seconds"),
    row(streamed(print, config={"a": 1}), RoseError, "config is {'a': 1}", "SchedulerConfig"),
    row(streamed(print, stream_interval=0), RoseError, "stream_interval is 0", "1 or more"),
    row(streamed(print, tokenize_workers="2"), RoseError, "tokenize_workers is '2'", "0 or more"),
]

OPTIONS = [
    row(engine(block_size=-8), OptionError, "block_size is -8", "power of two"),
    row(engine(block_size=True), OptionError, "block_size is True"),
    row(engine(num_kv_blocks=0), OptionError, "num_kv_blocks is 0", "1 or more"),
    row(engine(num_kv_blocks=1 << 60), OptionError, f"num_kv_blocks is {1 << 60}"),
    row(engine(max_batch_size=1.0), OptionError, "max_batch_size is 1.0", "1 or more"),
    row(engine(max_model_len=0), OptionError, "max_model_len is 0", "from 1 to the model's 64 positions"),
    row(engine(max_model_len=65), OptionError, "max_model_len is 65", "from 1 to the model's 64 positions"),
    row(engine(max_model_len="64"), OptionError, "max_model_len is '64'", "whole number"),
    *(
        row(engine(gpu_memory_utilization=bad), OptionError, f"utilization is {bad!r}", "above 0 and at most")
        for bad in (0, 1.01, "0.9", float("nan"), True)
    ),
    row(engine(recipe=5), RecipeError, "rung 5 is unknown", "dense, paged"),
    row(engine(recipe=10**5000), RecipeError, "rung an integer of", "dense, paged"),
    row(lambda _: Recipe(gemm=10**5000), RecipeError, "gemm=an integer of"),
    row(engine(kernels="cuda"), RecipeError, "kernels='cuda'", "'auto', 'triton' or 'torch'"),
    row(lambda _: LLM(np.eye(40)), CheckpointError, "model is array([[1., 0.", "a folder or a hub id"),
    row(lambda _: LLM(None), CheckpointError, "model is None", "a folder or a hub id"),
    row(lambda _: LLM("a" * 5000, device="cpu"), CheckpointError, "aaa", "use 'rose-tiny'"),
    row(lambda _: LLM("\0", load_format="dummy"), CheckpointError, "'\\x00'", "use one of gpt2"),
    row(lambda _: LLM("rose-tiny", device=None), DeviceError, "device None", "'cuda' or 'cpu'"),
    row(lambda _: LLM("rose-tiny", device="cpu", dtype=["half"]), DeviceError, "['half']", "'float16'"),
    row(lambda _: LLM("rose-tiny", load_format=None), CheckpointError, "load_format None", "'dummy'"),
]


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
