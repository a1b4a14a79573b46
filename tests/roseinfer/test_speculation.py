"""What users see of speculation: the same text, fewer steps, and one line where it cannot be."""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rosellm import LLM, SamplingParams
from rosellm.errors import CheckpointError, OptionError, RecipeError, RoseError
from rosellm.models.checkpoint import SHIPPED_MODELS
from rosellm.models.loading import load_draft, load_parts
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import LADDER
from rosellm.roseinfer.serving.streaming import StreamingManager
from rosellm.roseinfer.steps.pace import Always
from rosellm.rosetrainer.bpe import train_tokenizer
from rosellm.serve import main as serve
from tests.helpers import random_model, refusal, small_config

SOURCE = inspect.getsource(heapq._siftup).replace("childpos", "child")[:500]
EDIT = f"{SOURCE}\n\n# Once more:\n\n{SOURCE[:150]}"
DRAFTED = replace(LADDER["speculative"], speculation="draft")
SMALL = {"device": "cpu", "dtype": "float32", "max_batch_size": 4}


@pytest.fixture(scope="module")
def both() -> tuple[LLM, LLM]:
    return LLM(**SMALL), LLM(**SMALL, speculation="ngram")


def asked(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 80} | more)


def test_a_text_that_repeats_takes_less_than_half_the_steps(both):
    plain, fast = both
    (expected,), (found,) = (llm.generate([EDIT], asked()) for llm in both)
    assert found.token_ids == expected.token_ids and found.text == expected.text
    assert len(found.metrics.token_times) == len(found.token_ids)
    fast.engine.step.pace.drafts = lambda rows, accepted, batch: True
    steps, decode = [], fast.engine.begin_decode
    fast.engine.begin_decode = lambda sequences: steps.append(decode(sequences)) or steps[-1]
    fast.generate([EDIT], asked())
    assert sum(map(bool, steps)) < len(found.token_ids) / 2 + fast.engine.step.run_ahead


@pytest.mark.parametrize("more", [{"include_stop_str_in_output": True}, {"temperature": 0.8, "seed": 3}, {}])
def test_a_stop_string_ends_the_text_among_accepted_drafts(both, more):
    """Tokens after it are forgotten, and those that complete it are the last."""
    text = both[0].generate([EDIT], asked(**more))[0].text
    for stop in (text[10:13], text[25:30], text[40:42]):
        plain, fast = (llm.generate([EDIT, SOURCE], asked(stop=[stop], logprobs=0, **more)) for llm in both)
        for one, other in zip(plain, fast, strict=True):
            assert (one.text, one.token_ids, one.finish_reason, one.stop_reason) == (
                other.text,
                other.token_ids,
                other.finish_reason,
                other.stop_reason,
            )
            assert len(other.metrics.token_times) == len(other.token_ids) == len(other.logprobs)


@pytest.mark.parametrize("bad_words", [(), (" smaller child", "heap[")])
def test_penalties_and_bad_words_count_accepted_drafts_and_no_others(both, bad_words, monkeypatch):
    monkeypatch.setattr(both[1].engine.step.pace, "drafts", lambda rows, accepted, batch: True)
    params = asked(max_tokens=40, frequency_penalty=0.1, bad_words=list(bad_words))
    (plain,), (fast,) = (llm.generate([EDIT], params) for llm in both)
    assert fast.token_ids == plain.token_ids
    assert len(set(fast.metrics.token_times)) < len(fast.token_ids)


def test_a_streamed_text_is_the_same_in_whatever_pieces(both):
    def streamed(llm: LLM) -> Iterator[str]:
        with StreamingManager(llm.engine) as manager:
            yield from manager.stream_text(manager.add_request(EDIT, asked()))

    plain, fast = ("".join(streamed(llm)) for llm in both)
    assert plain == fast and plain


def test_speculation_chooses_a_rung_or_a_recipe(both):
    assert both[1].rung == "speculative"
    llm = LLM(**SMALL, rung="fused_head", speculation="ngram", speculative_tokens=3)
    assert llm.rung is None and llm.engine.recipe.speculation == "ngram"
    assert llm.engine.speculative_tokens == 3
    config = {"method": "ngram", "num_speculative_tokens": 5}
    llm = LLM(**SMALL, speculative_config=config)
    assert llm.rung == "speculative" and llm.engine.speculative_tokens == 5
    llm = LLM(**SMALL, speculative_config={"model": "rose-tiny-draft", "num_speculative_tokens": 3})
    assert llm.engine.recipe.speculation == "draft" and llm.engine.speculative_tokens == 3


@pytest.mark.parametrize("model", SHIPPED_MODELS)
def test_the_shipped_draft_models_give_the_same_text_in_fewer_steps(model):
    texts = [SOURCE[:200], "def maximum(values):\n", "Permission is hereby granted"]
    params = [asked(max_tokens=40), asked(max_tokens=40, temperature=0.8, seed=1), asked(max_tokens=40)]
    plain = LLM(model, **SMALL).generate(texts, params)
    llm = LLM(model, **SMALL, speculation="draft", speculative_tokens=4)
    llm.engine.step.pace = Always()
    fast = llm.generate(texts, params)
    assert [one.token_ids for one in fast] == [one.token_ids for one in plain]
    times = [one.metrics.token_times for one in fast]
    assert sum(len(set(own)) for own in times) < 0.75 * sum(map(len, times))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"speculation": "ngram", "speculative_tokens": 0}, "speculative_tokens is 0; it must be"),
        ({"speculation": "ngram", "speculative_tokens": 17}, "a whole number from 1 to 16"),
        ({"speculation": "ngram", "speculative_tokens": 2.0}, "speculative_tokens is 2.0; it must be"),
        ({"speculation": "medusa"}, "speculation='medusa' is unknown; use one of none, ngram"),
        ({"speculation": "ngram", "rung": "dense"}, "rung 'dense' cannot speculate; fused_append and"),
        ({"speculation": "ngram", "rung": "one_pass"}, "speculation='ngram' needs exhibit='none'"),
        ({"speculation": "ngram", "tensor_parallel_size": 2}, "needs speculation='none', not 'ngram'"),
        ({"speculation": "draft", "tensor_parallel_size": 2}, "needs speculation='none', not 'draft'"),
        ({"draft_model": "rose-tiny"}, "draft_model is 'rose-tiny'; it needs speculation='draft'"),
        ({"speculation": "draft", "draft_model": "nowhere/at-all"}, "'nowhere/at-all'"),
        ({"speculation": "draft", "model": "gpt2", "load_format": "dummy"}, "needs a draft_model, a smaller"),
        ({"speculative_tokens": 5}, "speculative_tokens is 5, but nothing drafts"),
        ({"recipe": DRAFTED, "model": "gpt2", "load_format": "dummy"}, "needs a draft_model, a smaller"),
        ({"speculation": "ngram", "speculative_config": {"method": "ngram"}}, "both speculation and spec"),
        ({"speculative_config": {"method": "eagle"}}, 'use {"method": "ngram"'),
        ({"speculative_config": {"method": "draft_model"}}, 'use {"method": "ngram"'),
        ({"speculative_config": {"method": "ngram", "num_tokens": 5}}, 'use {"method": "ngram"'),
    ],
)
def test_what_cannot_be_is_one_line(options, told):
    with pytest.raises((OptionError, RecipeError, CheckpointError)) as raised:
        LLM(**SMALL, **options)
    assert told in str(raised.value) and "\n" not in str(raised.value)
    assert isinstance(raised.value, RoseError)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"vocab_size": 60}, "a vocabulary of 60 tokens, the model one of 101"),
        ({"n_positions": 16}, "has 16 positions; max_model_len is 64: use at most 16"),
    ],
)
def test_a_draft_model_must_have_the_tokens_and_the_positions(sizes, told):
    with pytest.raises(OptionError, match=told):
        Engine(random_model(1, small_config()), recipe=DRAFTED, draft=random_model(1, small_config(**sizes)))


def test_a_draft_model_with_another_tokenizer_is_refused():
    model, _ = load_parts("rose-tiny", "cpu")
    others = train_tokenizer(["def other(tokens):\n    return tokens\n" * 9], 270)
    with pytest.raises(CheckpointError, match="has other tokens than the model it drafts for"):
        load_draft("rose-tiny-draft", model, others, "auto")


def test_the_server_refuses_a_proposer_that_it_does_not_know(capsys):
    assert "invalid choice: 'medusa'" in refusal(serve, ["--speculation", "medusa"], capsys)


def test_the_rung_differs_from_the_best_one_in_one_field():
    assert LADDER["split_kv"].difference(LADDER["speculative"]) == {"speculation": ("none", "ngram")}
