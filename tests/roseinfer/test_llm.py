"""``LLM``: prompts in any of the usual forms, results in order, nothing half-done."""

from __future__ import annotations

import copy
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch

from rosellm import LLM, SamplingParams
from rosellm.errors import (
    BusyError,
    CheckpointError,
    DeviceError,
    OptionError,
    PromptError,
    RecipeError,
    RoseError,
)
from rosellm.models.weights import save_model
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import Recipe
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, OnlineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager, WorkerError
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import random_model, small_config, uncached_greedy
from tests.soak.fake_step import POISON, fake_engine, poison, tokens_after
from tests.soak.streaming_driver import Letters

WORDS = "hello world, here is some text to learn from, with words and words"
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


def assert_idle(llm: LLM) -> None:
    llm.engine.check_integrity()
    assert llm.engine.blocks.num_free_blocks() == llm.engine.num_kv_blocks


def test_results_come_in_order_with_the_tokens_of_the_model(llm: LLM) -> None:
    prompts = [WORDS[:20], [5, 6, 7], "h", WORDS[3:9], [9], "world, here"]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (9, 2, 5, 1, 12, 3)]
    results = llm.generate(prompts, params, use_tqdm=False)
    for prompt, own, result in zip(prompts, params, results, strict=True):
        is_text = isinstance(prompt, str)
        ids = llm.engine.tokenizer.encode(prompt) if is_text else prompt
        completion = result.outputs[0]
        assert (result.prompt, result.prompt_token_ids) == (prompt if is_text else None, ids)
        assert completion.token_ids == uncached_greedy(llm.engine.model, ids, own.max_tokens)
        assert completion.text == llm.engine.tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == "length"
    assert_idle(llm)


def test_one_prompt_may_be_given_bare(llm: LLM) -> None:
    text, ids = "hello", llm.engine.tokenizer.encode("hello")
    for bare, listed in ((text, [text]), (ids, [ids])):
        assert llm.generate(bare, GREEDY, use_tqdm=False) == llm.generate(listed, GREEDY, use_tqdm=False)
        assert len(llm.generate(bare, GREEDY, use_tqdm=False)) == 1


def test_a_deterministic_engine_may_be_asked_for(checkpoint: Path) -> None:
    asked = LLM(str(checkpoint), device="cpu", deterministic=True)
    assert asked.engine.recipe.numerics == "invariant"
    params = SamplingParams(temperature=0.8, max_tokens=5, seed=3)
    (alone,) = asked.generate([1, 2, 3], params, use_tqdm=False)
    assert asked.generate([[4], [1, 2, 3]], params, use_tqdm=False)[1].outputs == alone.outputs


def test_prompts_that_begin_alike_share_what_is_cached_of_them_if_asked_for(checkpoint: Path) -> None:
    prompts = [[3] * 20 + [i] for i in range(5)]
    sizes = {"max_batch_size": 2, "block_size": 8, "num_kv_blocks": 40}
    plain, caching = (
        LLM(str(checkpoint), rung="resident_step", device="cpu", prefix_cache=on, **sizes)
        for on in (False, True)
    )
    assert plain.engine.prefix_cache is None
    assert caching.generate(prompts, GREEDY, use_tqdm=False) == plain.generate(
        prompts, GREEDY, use_tqdm=False
    )
    assert caching.engine.prefix_cache.hit_tokens == 3 * 20
    caching.generate(prompts[0], GREEDY, use_tqdm=False)
    assert caching.engine.prefix_cache.hit_tokens == 4 * 20


def test_a_recipe_of_ones_own_may_be_asked_for_in_place_of_a_rung(checkpoint: Path) -> None:
    recipe = Recipe(norm="fused")
    llm = LLM(str(checkpoint), recipe=recipe, device="cpu")
    assert (llm.engine.recipe, llm.rung) == (recipe, None)
    with pytest.raises(RecipeError, match="both a rung and a recipe"):
        LLM(str(checkpoint), rung="paged", recipe=recipe, device="cpu")


def fake_llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    engine = fake_engine(3, num_kv_blocks=30, tokenizer=Letters())
    monkeypatch.setattr(Engine, "load", lambda *_, **__: engine)
    return LLM()


def test_a_prompt_whose_logits_are_not_finite_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fake_llm(monkeypatch)
    poison(llm.engine, 2)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    one, failed, other = llm.generate(["bc", "d", "efg"], params, use_tqdm=False)
    assert (failed.prompt, failed.outputs[0].finish_reason, failed.error) == ("d", "failed", POISON)
    for result, prompt in ((one, (1, 2)), (other, (4, 5, 6))):
        assert result.outputs[0].token_ids == list(tokens_after(prompt)[:6])
        assert (result.outputs[0].finish_reason, result.error) == ("length", None)


def test_default_parameters_sample_sixteen_tokens(llm: LLM) -> None:
    first, second = (llm.generate("hello", use_tqdm=False)[0].outputs[0] for _ in range(2))
    assert len(first.token_ids) == len(second.token_ids) == 16
    assert first.token_ids != second.token_ids


def test_the_shipped_model_is_the_default_and_completes_python() -> None:
    prompt = "def add(a, b):\n    return"
    result = LLM(device="cpu").generate(
        prompt, SamplingParams(temperature=0.0, max_tokens=3), use_tqdm=False
    )[0]
    assert result.outputs[0].text.startswith(" a")


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>>{% endif %}"
)
ASKED = [{"role": "user", "content": "hello world"}]
OTHER = [{"role": "system", "content": "some"}, {"role": "user", "content": "words"}]


@pytest.fixture(scope="module")
def chatting(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("chatting") / "checkpoint"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return LLM(str(folder), rung="dense", device="cpu", max_batch_size=4, block_size=16)


def test_a_conversation_is_answered_as_its_rendered_text_is_continued(chatting: LLM) -> None:
    text = "<user>hello world>>"
    (result,) = chatting.chat(ASKED, GREEDY, use_tqdm=False)
    (plain,) = chatting.generate(text, GREEDY, use_tqdm=False)
    assert result == plain and result.prompt == text
    assert result.prompt_token_ids == chatting.engine.tokenizer.encode(text)
    assert_idle(chatting)


def test_several_conversations_are_answered_in_order_with_their_own_parameters(chatting: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (3, 5)]
    results = chatting.chat([ASKED, OTHER], params, use_tqdm=False)
    assert [result.prompt for result in results] == ["<user>hello world>>", "<system>some<user>words>>"]
    assert [len(result.outputs[0].token_ids) for result in results] == [3, 5]
    assert results[1].outputs == chatting.chat(OTHER, params[1:], use_tqdm=False)[0].outputs


def test_a_chat_without_a_template_or_with_bad_messages_is_refused_in_one_line(
    llm: LLM, chatting: LLM, checkpoint: Path
) -> None:
    dummy = LLM("rose-tiny", device="cpu", load_format="dummy", num_kv_blocks=4)
    for given, messages, error, told in (
        (llm, ASKED, CheckpointError, "no chat template; give a prompt as text"),
        (dummy, ASKED, CheckpointError, "a dummy tokenizer has no chat template; load a checkpoint"),
        (chatting, [], PromptError, "messages are"),
        (chatting, "hello", PromptError, "messages are 'hello'"),
        (chatting, [ASKED, []], PromptError, "messages are"),
        (chatting, [{"role": "user"}], PromptError, "message 0 is"),
    ):
        with pytest.raises(error, match=told) as caught:
            given.chat(messages, GREEDY, use_tqdm=False)
        assert "\n" not in str(caught.value)
        assert_idle(given)


def test_progress_counts_every_token_while_they_come_and_expects_no_more_than_can_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Bar:
        total, n = 20, 0
        seen: list[tuple[int, int]] = []

        def update(self, n: int) -> None:
            self.n += n
            self.seen.append((self.n, self.total))

    llm, bar = fake_llm(monkeypatch), Bar()
    stop = tokens_after((1, 2))[2]
    params = [
        SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True),
        SamplingParams(
            temperature=0.0, max_tokens=10, ignore_eos=True, stop=[llm.engine.tokenizer.decode([stop])]
        ),
    ]
    outputs = OfflineScheduler(llm.engine).run([[4, 5], [1, 2]], params, bar)
    n_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert bar.seen[-1] == (n_tokens, n_tokens) and n_tokens < 20
    assert len({n for n, _ in bar.seen}) > 4 and all(n <= total for n, total in bar.seen)


def test_prompts_may_come_in_any_sequence(llm: LLM) -> None:
    wanted = llm.generate([[5, 6], [7, 8]], GREEDY, use_tqdm=False)
    for prompts in (
        ((5, 6), (7, 8)),
        np.array([[5, 6], [7, 8]]),
        torch.tensor([[5, 6], [7, 8]]),
        ([5 + i, 6 + i] for i in (0, 2)),
        [range(5, 7), np.array([7, 8], dtype=np.uint16)],
        [[np.int64(5), 6], (7, np.int32(8))],
    ):
        assert llm.generate(prompts, GREEDY, use_tqdm=False) == wanted
    for bare in ((5, 6), np.array([5, 6]), range(5, 7)):
        assert llm.generate(bare, GREEDY, use_tqdm=False)[0].outputs == wanted[0].outputs
    texts = llm.generate(["hello", "world"], GREEDY, use_tqdm=False)
    assert llm.generate((text for text in ("hello", "world")), GREEDY, use_tqdm=False) == texts


def test_threads_take_turns(llm: LLM) -> None:
    prompts = [[n + 5, n + 6, n + 7] for n in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    wanted = [llm.generate([p], params, use_tqdm=False)[0].outputs for p in prompts]
    together = Barrier(len(prompts))

    def alone(prompt: list[int]) -> list:
        together.wait()
        return llm.generate([prompt], params, use_tqdm=False)[0].outputs

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(alone, prompts)) == wanted
    assert_idle(llm)


def test_an_engine_that_a_manager_has_is_refused_to_others_until_it_is_closed(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), rung="dense", device="cpu", max_batch_size=4, block_size=16)
    early = OfflineScheduler(llm.engine)
    wanted = llm.generate([5, 6], GREEDY, use_tqdm=False)[0].outputs[0].text
    with StreamingManager(llm) as manager:
        assert manager.engine is llm.engine
        for use in (
            lambda: llm.generate("hello", use_tqdm=False),
            lambda: StreamingManager(llm),
            lambda: StreamingManager(llm.engine),
            lambda: OnlineScheduler(llm.engine),
            lambda: early.run([[5, 6]], GREEDY),
        ):
            with pytest.raises(BusyError, match="in use by a StreamingManager; ") as told:
                use()
            assert "\n" not in str(told.value)
        assert manager.result(manager.add_request([5, 6], GREEDY), 60).outputs[0].text == wanted
    assert llm.generate([5, 6], GREEDY, use_tqdm=False)[0].outputs[0].text == wanted
    assert early.run([[5, 6]], GREEDY)[0].outputs[0].text == wanted


def test_who_fails_gives_the_engine_back(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fake_llm(monkeypatch)
    begin = llm.engine.step.begin_prefill

    def broken(*_: object, **_named: object) -> None:
        raise RuntimeError("device lost")

    llm.engine.step.begin_prefill = broken
    with pytest.raises(RuntimeError):
        llm.generate("b", GREEDY, use_tqdm=False)
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
    assert llm.generate("b", GREEDY, use_tqdm=False)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_llm_and_its_engine_cannot_be_copied_or_pickled(llm: LLM, duplicate) -> None:
    for original, name in ((llm, "an LLM"), (llm.engine, "an engine")):
        with pytest.raises(RoseError, match=f"{name} cannot be copied or pickled; make another one"):
            duplicate(original)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rung": "fastest"}, RecipeError),
        ({"device": "tpu"}, DeviceError),
        ({"load_format": "pickle"}, CheckpointError),
        ({"warm_up": "no"}, OptionError),
    ],
)
def test_bad_options_are_refused(checkpoint: Path, options: dict, error) -> None:
    with pytest.raises(error):
        LLM(str(checkpoint), **({"device": "cpu"} | options))


def test_results_can_be_pickled_and_keep_their_text(llm: LLM) -> None:
    (result,) = llm.generate("hello", GREEDY, use_tqdm=False)
    again = pickle.loads(pickle.dumps(result))
    assert again == result and again.outputs[0].text == result.outputs[0].text != ""
