"""``LLM``: prompts in any of the usual forms, results in order, nothing half-done."""

from __future__ import annotations

import copy
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rosellm import LLM, SamplingParams
from rosellm.errors import BusyError, PromptError, RecipeError, RoseError
from rosellm.models.checkpoint import SHIPPED_MODELS, checkpoint_folder
from rosellm.models.weights import save_model
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import Recipe
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, OnlineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager, WorkerError
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import random_model, small_config, uncached_greedy
from tests.roseinfer.serving.common import WORDS, assert_all_free
from tests.soak.fake_step import Letters, fake_engine, tokens_after

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_tokenizer([WORDS], 290)
    tokenizer.save(folder)
    save_model(random_model(3, small_config(vocab_size=tokenizer.vocab_size)), folder, torch.float32)
    return folder


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), rung="dense", device="cpu", max_batch_size=4, block_size=16)


def tokens(outputs: list) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_results_come_in_order_with_the_tokens_of_the_model(llm):
    prompts = [WORDS[:20], [5, 6, 7], "h", WORDS[3:9], [9], "world, here"]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (9, 2, 5, 1, 12, 3)]
    results = llm.generate(prompts, params)
    for prompt, own, result in zip(prompts, params, results, strict=True):
        is_text = isinstance(prompt, str)
        ids = llm.engine.tokenizer.encode(prompt) if is_text else prompt
        completion = result.outputs[0]
        assert (result.prompt, result.prompt_token_ids) == (prompt if is_text else None, ids)
        assert completion.token_ids == uncached_greedy(llm.engine.model, ids, own.max_tokens)
        assert completion.text == llm.engine.tokenizer.decode(completion.token_ids) != ""
        assert completion.finish_reason == "length"
    again = pickle.loads(pickle.dumps(results))
    assert again == results and again[0].outputs[0].text == results[0].outputs[0].text
    assert llm.generate([]) == []
    assert_all_free(llm.engine)


@pytest.mark.parametrize(
    ("options", "is_so"),
    [
        ({"deterministic": True}, lambda llm: llm.engine.recipe.numerics == "invariant"),
        ({"recipe": Recipe(norm="fused")}, lambda llm: (llm.engine.recipe.norm, llm.rung) == ("fused", None)),
        ({"prefix_cache": True}, lambda llm: llm.engine.prefix_cache.hit_tokens == 4 * 20),
        ({}, lambda llm: llm.engine.prefix_cache is None),
    ],
    ids=["deterministic", "recipe", "prefix_cache", "none"],
)
def test_options_of_the_engine_may_be_asked_for_and_give_the_same_tokens(llm, checkpoint, options, is_so):
    prompts = [[3] * 20 + [i] for i in range(5)]
    other = LLM(str(checkpoint), device="cpu", max_batch_size=2, block_size=8, num_kv_blocks=40, **options)
    assert tokens(other.generate(prompts, GREEDY)) == tokens(llm.generate(prompts, GREEDY))
    assert is_so(other)


def test_a_rung_and_a_recipe_together_are_refused(checkpoint):
    with pytest.raises(RecipeError, match="both a rung and a recipe"):
        LLM(str(checkpoint), rung="paged", recipe=Recipe(), device="cpu")


def fake_llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    engine = fake_engine(3, num_kv_blocks=30, tokenizer=Letters())
    monkeypatch.setattr(Engine, "load", lambda *_, **__: engine)
    return LLM()


@pytest.mark.parametrize("model", SHIPPED_MODELS)
def test_a_shipped_model_fits_twelve_megabytes_and_writes_python(model):
    files = [path for path in checkpoint_folder(model).rglob("*") if path.is_file()]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) <= 12_000_000
    prompt = "import os\nimport sys\n\n\nclass Cache:\n    def __init__(self"
    llm = LLM(model, device="cpu")
    (result,) = llm.generate(prompt, replace(GREEDY, max_tokens=24))
    assert "self" in result.outputs[0].text and "\n" in result.outputs[0].text
    first, second = tokens(llm.generate(["hello", "hello"]))  # drawn
    assert len(first) == len(second) == 16 and first != second


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}>>"
ONE = [{"role": "user", "content": "hello world"}]
OTHER = [{"role": "system", "content": "some"}, {"role": "user", "content": "words"}]


def test_conversations_are_answered_in_order_as_their_rendered_texts_are_continued(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "chatting")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    llm = LLM(str(folder), rung="dense", device="cpu", max_batch_size=4, block_size=16)
    texts = ["<user>hello world>>", "<system>some<user>words>>"]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (3, 5)]
    results = llm.chat([ONE, OTHER], params)
    assert results == llm.generate(texts, params)
    assert [result.prompt for result in results] == texts
    assert llm.chat(OTHER, params[1]) == results[1:]
    with pytest.raises(PromptError, match="message 0 is"):
        llm.chat([{"role": "user"}], params[0])


def test_progress_counts_every_token_as_it_comes_and_expects_no_more_than_can_come(monkeypatch):
    class Bar:
        total, n = 20, 0
        seen: list[tuple[int, int]] = []

        def update(self, n: int) -> None:
            self.n += n
            self.seen.append((self.n, self.total))

    llm, bar = fake_llm(monkeypatch), Bar()
    long = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    stopped = replace(long, stop=[llm.engine.tokenizer.decode([tokens_after((1, 2))[2]])])
    n_tokens = sum(map(len, tokens(OfflineScheduler(llm.engine).run([[4, 5], [1, 2]], [long, stopped], bar))))
    assert bar.seen[-1] == (n_tokens, n_tokens) and n_tokens < 20
    assert len({n for n, _ in bar.seen}) > 4 and all(n <= total for n, total in bar.seen)


@pytest.mark.parametrize(
    "prompts",
    [
        ((5, 6), (7, 8)),
        np.array([[5, 6], [7, 8]]),
        torch.tensor([[5, 6], [7, 8]]),
        [range(5, 7), np.array([7, 8], dtype=np.uint16)],
        [[np.int64(5), 6], (7, np.int32(8))],
    ],
    ids=lambda prompts: type(prompts).__name__,
)
def test_prompts_may_come_in_any_sequence_and_one_may_be_bare(llm, prompts):
    wanted = llm.generate([[5, 6], [7, 8]], GREEDY)
    assert llm.generate(prompts, GREEDY) == llm.generate((one for one in prompts), GREEDY) == wanted
    assert llm.generate(prompts[0], GREEDY) == wanted[:1]
    assert llm.generate("hello", GREEDY) == llm.generate(["hello"], GREEDY)


def test_an_engine_that_a_manager_has_is_refused_to_others_until_it_is_closed(checkpoint):
    llm = LLM(str(checkpoint), rung="dense", device="cpu", max_batch_size=4, block_size=16)
    early = OfflineScheduler(llm.engine)
    wanted = llm.generate([5, 6], GREEDY)
    with StreamingManager(llm) as manager:
        assert manager.engine is llm.engine
        for use in (
            lambda: llm.generate("hello"),
            lambda: StreamingManager(llm),
            lambda: StreamingManager(llm.engine),
            lambda: OnlineScheduler(llm.engine),
            lambda: early.run([[5, 6]], GREEDY),
        ):
            with pytest.raises(BusyError, match="^.*in use by a StreamingManager; .*$"):
                use()
        assert manager.result(manager.add_request([5, 6], GREEDY), 60).outputs == wanted[0].outputs
    assert tokens(llm.generate([5, 6], GREEDY)) == tokens(early.run([[5, 6]], GREEDY)) == tokens(wanted)


def test_who_fails_gives_the_engine_back(monkeypatch):
    llm = fake_llm(monkeypatch)
    begin = llm.engine.step.begin_prefill

    def broken(*_: object, **_named: object) -> None:
        raise RuntimeError("device lost")

    llm.engine.step.begin_prefill = broken
    with pytest.raises(RuntimeError):
        llm.generate("b", GREEDY)
    failing = StreamingManager(llm)
    with pytest.raises(WorkerError, match="make a new manager"):
        failing.result(failing.add_request("b", GREEDY), 60)
    llm.engine.step.begin_prefill = begin
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr("rosellm.roseinfer.serving.streaming.Thread", broken)
        StreamingManager(llm)
    with StreamingManager(llm) as manager:  # the one that failed need not be closed
        assert manager.result(manager.add_request("b", GREEDY), 60)
    failing.close()
    assert llm.generate("b", GREEDY)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_llm_and_its_engine_cannot_be_copied_or_pickled(llm, duplicate):
    for original, name in ((llm, "an LLM"), (llm.engine, "an engine")):
        with pytest.raises(RoseError, match=f"{name} cannot be copied or pickled; make another one"):
            duplicate(original)
