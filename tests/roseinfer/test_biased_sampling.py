"""Tokens that a request favours, bans or waits for, and the logprobs of its prompt, on every kind of rung."""

from __future__ import annotations

import math
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rosellm.errors import SamplingError
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from tests.helpers import MODERN, random_model, random_prompts, small_config, small_engine, uncached_logits

EOS = 7
CONFIG = small_config(**MODERN, eos_token_ids=(EOS,))
PROMPTS = random_prompts([3, 9, 17], seed=4)
TOKENS = SimpleNamespace(encode=lambda text, special: [*map(int, text.split())], token_text=str)
FEW = [4, 9, 33, 60]


@pytest.fixture(scope="module")
def model():
    return random_model(3, CONFIG)


@pytest.fixture(scope="module", params=["dense", "resident_step", BEST_RUNG, "one_pass"])
def engine(request, model) -> Engine:
    return small_engine(model, recipe=request.param, tokenizer=TOKENS)


def run(engine: Engine, params, prompts=PROMPTS, **limits: int) -> list[RequestOutput]:
    return OfflineScheduler(engine, SchedulerConfig(**limits)).run(prompts, params)


def expected(model, prompt: list[int], params: SamplingParams) -> list[int]:
    """Greedy tokens by the definition, everything computed anew for each of them."""
    tokens = list(prompt)
    for i in range(params.max_tokens or 0):
        logits = uncached_logits(model, tokens)[-1].clone()
        if params.allowed_token_ids is not None:
            banned = torch.ones(len(logits), dtype=torch.bool)
            banned[list(params.allowed_token_ids)] = False
            logits[banned] = -math.inf
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += bias
        if i < params.min_tokens:
            logits[[EOS, *(params.stop_token_ids or ())]] = -math.inf
        seen = tokens
        penalised = torch.where(
            logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
        )
        logits[seen] = penalised[seen]
        for *begun, last in (TOKENS.encode(word, False) for word in params.bad_words):
            if tokens[max(len(tokens) - len(begun), len(prompt)) :] == begun:
                logits[last] = -math.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] in (EOS, *(params.stop_token_ids or ())):
            break
    return tokens[len(prompt) :]


CASES = {
    "a favoured token": {"logit_bias": {5: 8.0, EOS: -100.0}},
    "only some tokens": {"allowed_token_ids": [4, 9, 33, 60]},
    "some tokens, biased": {"allowed_token_ids": [4, 9, 33], "logit_bias": {9: 3.5, 50: 100}},
    "no end before its time": {"logit_bias": {EOS: 100.0}, "min_tokens": 5},
    "an end at the first token": {"logit_bias": {EOS: 100.0}, "min_tokens": 1},
    "an own end, not before its time": {"stop_token_ids": [11], "logit_bias": {11: 100.0}, "min_tokens": 3},
    "many ends, which nothing favours": {"stop_token_ids": [*range(0, 101, 2)], "min_tokens": 3},
    "a bad word that overlaps itself": {"allowed_token_ids": [4, 9], "bad_words": ["9 9 9", "4 4 9"]},
    "bad words with one beginning": {"allowed_token_ids": FEW, "bad_words": ["4 9 33", "4 9", "4 9 4", "33"]},
    "bad words with one end": {"logit_bias": dict.fromkeys(FEW, 9.0), "bad_words": ["9 4", "33 4", "4 4"]},
    "a bad word that ends in an end": {
        "logit_bias": {EOS: 9.0, 9: 8.0},
        "bad_words": ["9 7"],
        "min_tokens": 2,
    },
    "with a penalty": {"repetition_penalty": 1.5, "logit_bias": {5: 2.0}, "min_tokens": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_follow_the_definition(engine, model, case):
    params = SamplingParams(temperature=0, max_tokens=8, **CASES[case])
    plain = SamplingParams(temperature=0, max_tokens=8)
    outputs = run(engine, [params, plain, params])  # the neighbour is not affected
    assert [o.token_ids for o in outputs] == [
        expected(model, prompt, own) for prompt, own in zip(PROMPTS, (params, plain, params), strict=True)
    ]


def test_drawn_tokens_obey_bans_too_and_depend_on_their_seed_alone(engine):
    params = SamplingParams(
        seed=3, max_tokens=9, top_p=0.9, allowed_token_ids=[4, 9, 33, 60, EOS], min_tokens=9
    )
    alone = [run(engine, params, [prompt])[0].token_ids for prompt in PROMPTS]
    assert alone == [o.token_ids for o in run(engine, params)]
    assert all(set(tokens) <= {4, 9, 33, 60} and len(tokens) == 9 for tokens in alone)


def test_an_own_stop_token_ends_a_request_and_is_its_reason(engine, model):
    first = expected(model, PROMPTS[1], SamplingParams(temperature=0, max_tokens=4))
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[first[2]], ignore_eos=True)
    for _ in range(2):  # its row is free again
        (output,) = run(engine, params, [PROMPTS[1]])
        assert output.token_ids == first[: first.index(first[2]) + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", first[2])


def test_min_tokens_hold_after_a_preemption(model):
    params = SamplingParams(temperature=0, max_tokens=24, min_tokens=20, logit_bias={EOS: 100.0})
    engine = small_engine(model, num_kv_blocks=9)
    scheduler = OfflineScheduler(engine)
    outputs = scheduler.run(PROMPTS, params)
    assert scheduler.preemptions > 0
    assert [o.token_ids for o in outputs] == [expected(model, prompt, params) for prompt in PROMPTS]
    assert all(len(o.token_ids) == 21 for o in outputs)


def random_bad_words(rng: random.Random) -> list[str]:
    """Of one to four tokens; the last of ``FEW`` is always allowed."""
    words = [[*rng.choices(FEW, k=rng.randint(0, 3)), rng.choice(FEW[:3])] for _ in range(rng.randint(1, 12))]
    return [" ".join(map(str, word)) for word in words]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 9}], ids=["room for all", "preempted"])
def test_random_bad_words_are_obeyed_by_each_request(engine, model, seed, options):
    """Some requests have none; the prompts' last tokens begin bad words, which does not count."""
    rng = random.Random(seed)
    prompts = [[*prompt, *rng.choices(FEW, k=3)] for prompt in PROMPTS]
    own = [random_bad_words(rng), [], random_bad_words(rng)]
    params = [
        SamplingParams(temperature=0, max_tokens=20, allowed_token_ids=FEW, bad_words=words) for words in own
    ]
    options = options | {"recipe": engine.recipe, "prefix_cache": engine.recipe.has_prefix_cache}
    engine = small_engine(model, tokenizer=TOKENS, **options)
    scheduler = OfflineScheduler(engine)
    outputs = scheduler.run(prompts, params)
    assert [o.token_ids for o in outputs] == list(map(partial(expected, model), prompts, params))
    assert (scheduler.preemptions > 0) == ("num_kv_blocks" in options)
    drawn = [SamplingParams(max_tokens=20, allowed_token_ids=FEW, bad_words=words) for words in own]
    for words, output in zip(own, OfflineScheduler(engine).run(prompts, drawn), strict=True):
        text = " ".join(["", *map(str, output.token_ids), ""])
        assert not any(f" {word} " in text for word in words)


def test_a_request_that_continues_elsewhere_obeys_its_bad_words(engine, model):
    params = SamplingParams(
        temperature=0, max_tokens=12, allowed_token_ids=[4, 9], bad_words=["9 9 4", "4 4 4"]
    )
    whole = expected(model, PROMPTS[0], params)
    for known in range(1, 8):
        sequence = engine.make_sequence(PROMPTS[0], params)
        sequence.resume(whole[:known], None)
        scheduler = OfflineScheduler(engine)
        scheduler.submit(sequence)
        while not sequence.is_finished:
            scheduler.step()
        assert sequence.output == whole


@pytest.mark.parametrize("limits", [{}, {"prefill_token_budget": 5}], ids=["whole", "in chunks"])
def test_prompt_logprobs_are_those_of_the_model(engine, model, limits):
    asked = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=1)
    plain = SamplingParams(temperature=0, max_tokens=3)
    for _ in range(2):
        outputs = run(engine, [asked, plain, asked], **limits)
        assert outputs[1].prompt_logprobs is None
        for prompt, output in ((PROMPTS[0], outputs[0]), (PROMPTS[2], outputs[2])):
            truth = uncached_logits(model, prompt).log_softmax(-1)
            first, *others = output.prompt_logprobs
            assert first is None and len(others) == len(prompt) - 1
            for position, entries in enumerate(others):
                own = entries[prompt[position + 1]]
                assert own.logprob == pytest.approx(float(truth[position, prompt[position + 1]]), abs=1e-4)
                best = truth[position].topk(2).indices.tolist()
                assert set(entries) == {prompt[position + 1], *best}
                assert own.rank == 1 + int((truth[position] > truth[position, prompt[position + 1]]).sum())


def test_prompt_logprobs_are_complete_although_the_prompt_is_cached(model):
    engine = small_engine(model, prefix_cache=True)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    cold, warm = (run(engine, params, [PROMPTS[2]])[0] for _ in range(2))
    assert [set(e) for e in warm.prompt_logprobs[1:]] == [{t} for t in PROMPTS[2][1:]]
    assert warm.prompt_logprobs[-1][PROMPTS[2][-1]].logprob == pytest.approx(
        cold.prompt_logprobs[-1][PROMPTS[2][-1]].logprob, abs=1e-5
    )


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_a_token_beyond_the_vocabulary_is_refused(engine, name):
    value = {101: 1.0} if name == "logit_bias" else [101]
    with pytest.raises(SamplingError, match=f"{name} has token 101"):
        run(engine, SamplingParams(**{name: value}))
