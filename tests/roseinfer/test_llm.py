"""``LLM``: prompts in any of the usual forms, results in order, nothing half-done."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from rosellm import LLM, SamplingParams
from rosellm.errors import CheckpointError, DeviceError, OptionError, PromptError, RecipeError, SamplingError
from rosellm.models.tokenizer import train_tokenizer
from rosellm.models.weights import save_model
from rosellm.roseinfer.recipe import Recipe
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


def test_a_recipe_of_ones_own_may_be_asked_for_in_place_of_a_rung(checkpoint: Path) -> None:
    recipe = Recipe(attention="paged", mask="none", tables="resident")
    llm = LLM(str(checkpoint), recipe=recipe, device="cpu")
    assert (llm.engine.recipe, llm.rung) == (recipe, None)
    with pytest.raises(RecipeError, match="both a rung and a recipe"):
        LLM(str(checkpoint), rung="paged", recipe=recipe, device="cpu")


def test_a_prompt_whose_logits_are_not_finite_fails_alone() -> None:
    llm = object.__new__(LLM)
    llm.engine = fake_engine("shared", 3, num_kv_blocks=30, tokenizer=Letters())
    poison(llm.engine, 2)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    one, failed, other = llm.generate(["bc", "d", "efg"], params, use_tqdm=False)
    assert (failed.prompt, failed.outputs[0].finish_reason, failed.error) == ("d", "failed", POISON)
    for result, prompt in ((one, (1, 2)), (other, (4, 5, 6))):
        assert result.outputs[0].token_ids == list(tokens_after(prompt)[:6])
        assert (result.outputs[0].finish_reason, result.error) == ("length", None)


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


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


def test_a_stop_string_ends_the_text(llm: LLM) -> None:
    whole = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)[0].outputs[
        0
    ]
    stop = whole.text[6:9]
    params = SamplingParams(temperature=0.0, max_tokens=20, stop=[stop])
    cut = llm.generate("hello", params, use_tqdm=False)[0].outputs[0]
    assert (cut.text, cut.finish_reason) == (whole.text.partition(stop)[0], "stop")


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        (None, "prompts is None"),
        (7, "prompts is 7"),
        (("a", "b"), "give text"),
        (["a", 7], "prompt 1 is 7"),
        ([3, "a"], "prompt 0 is 3"),
        ([True], "prompt 0 is True"),
        (["a", ""], "prompt 1: .*empty"),
        ([[1], []], "prompt 1: .*empty"),
        ([[1], [1.5]], "prompt 1: token id 1.5"),
        ([[1], [10**6]], "prompt 1: token id 1000000"),
        ([[1], [1] * 60], "prompt 1: 60 prompt tokens and 6 new ones"),
    ],
)
def test_a_bad_prompt_is_named_before_anything_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, prompts, told: str
) -> None:
    ran = []
    monkeypatch.setattr(llm.engine, "prefill", ran.append)
    with pytest.raises(PromptError, match=told):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert ran == []


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY] * 3, "greedy", [GREEDY, None]])
def test_parameters_must_be_one_or_one_each(llm: LLM, params) -> None:
    with pytest.raises(SamplingError):
        llm.generate(["a", "b"], params, use_tqdm=False)


def test_progress_is_shown_only_if_wanted(llm: LLM, capsys: pytest.CaptureFixture) -> None:
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rung": "fastest"}, RecipeError),
        ({"device": "tpu"}, DeviceError),
        ({"dtype": "int8"}, DeviceError),
        ({"load_format": "pickle"}, CheckpointError),
        ({"max_batch_size": 0}, OptionError),
        ({"block_size": 3}, OptionError),
    ],
)
def test_bad_options_are_refused(checkpoint: Path, options: dict, error) -> None:
    with pytest.raises(error):
        LLM(str(checkpoint), **({"device": "cpu"} | options))


def test_results_can_be_pickled_and_keep_their_text(llm: LLM) -> None:
    (result,) = llm.generate("hello", GREEDY, use_tqdm=False)
    again = pickle.loads(pickle.dumps(result))
    assert again == result and again.outputs[0].text == result.outputs[0].text != ""
