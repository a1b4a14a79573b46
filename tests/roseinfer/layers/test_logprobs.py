"""Log-probabilities and several completions: what a request gets, on every kind of step."""

from __future__ import annotations

import pytest
import torch

from rosellm.errors import SamplingError
from rosellm.roseinfer.llm import LLM
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from tests.helpers import random_model, random_prompts, small_engine, uncached_logits
from tests.roseinfer.steps.fake_graphs import captured

__all__ = ["captured"]
RUNGS = ["resident_step", "split_kv", BEST_RUNG]
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4}


@pytest.mark.parametrize(
    ("rung", "is_captured", "n_requests"),
    [
        *((rung, is_captured, 4) for rung in RUNGS for is_captured in (False, True)),
        pytest.param(BEST_RUNG, True, 150, marks=pytest.mark.slow, id="more than one run takes"),
    ],
)
def test_log_probabilities_are_the_models_own_whatever_the_token_was_chosen_by(
    rung, is_captured, n_requests, request
):
    """And those of a request that asks do not change what others get, nor how many of them run together."""
    if is_captured:
        request.getfixturevalue("captured")
    model, prompts = random_model(0), random_prompts([3, 9, 1, 5]) * (1 + n_requests // 4)
    wishes = [
        {"temperature": 0.0, "logprobs": 3},
        {"seed": 4, "top_k": 5, "logprobs": 0, **PENALTIES},
        {"temperature": 0.0},
        {"seed": 7, "logprobs": 20, "temperature": 3.0},
    ]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, **wish) for wish in wishes] * (len(prompts) // 4)
    prompts, params = prompts[:n_requests], params[:n_requests]
    engine = small_engine(model, recipe=rung, max_batch_size=max(3, n_requests - 10))
    outputs = OfflineScheduler(engine).run(prompts, params)
    assert outputs[2].logprobs is None and outputs[2].cumulative_logprob is None
    for prompt, output, own in zip(prompts, outputs, params, strict=True):
        if own.logprobs is not None:
            logits = uncached_logits(model, prompt + output.token_ids)
            assert_logprobs(logits, len(prompt), output, own.logprobs)
    assert not is_captured or engine.late_captures == 0 < len(engine.step.worker.logprobs._runs)


def assert_logprobs(logits: torch.Tensor, n_prompt: int, output: RequestOutput, n: int) -> None:
    expected = logits[n_prompt - 1 : -1].log_softmax(dim=-1)
    assert len(output.logprobs) == len(output.token_ids)
    for token, row, found in zip(output.token_ids, expected, output.logprobs, strict=True):
        assert next(iter(found)) == token and n <= len(found) <= n + 1
        most = row.topk(n).indices.tolist() if n else []
        assert set(found) == {token, *most}
        for one, told in found.items():
            assert told.logprob == pytest.approx(row[one].item(), abs=1e-4)
            assert told.rank == 1 + (row > row[one]).sum()
    own = expected.gather(1, torch.tensor(output.token_ids)[:, None]).sum().item()
    assert output.cumulative_logprob == pytest.approx(own, abs=1e-3)


@pytest.mark.parametrize("deterministic", [False, True], ids=["prefilled again", "decoded again"])
def test_log_probabilities_survive_preemption(deterministic):
    model, prompts = random_model(0), random_prompts([9, 9, 9])
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
    scheduler = OfflineScheduler(small_engine(model, num_kv_blocks=8, deterministic=deterministic))
    outputs = scheduler.run(prompts, params)
    assert scheduler.preemptions
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_logprobs(uncached_logits(model, prompt + output.token_ids), len(prompt), output, 1)


# Several completions.


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_batch_size=4)


def test_each_of_n_completions_is_that_of_its_own_seed(llm):
    params = SamplingParams(seed=5, n=3, max_tokens=5, logprobs=1)
    several, one = llm.generate(["import os", "def"], [params, SamplingParams(seed=1, max_tokens=5)], False)
    assert len(several.outputs) == 3 and several.outputs[0] is several and len(one.outputs) == 1
    alone = [llm.generate("import os", SamplingParams(seed=5 + i, max_tokens=5), False)[0] for i in range(3)]
    assert [output.token_ids for output in several.outputs] == [output.token_ids for output in alone]
    assert len({tuple(output.token_ids) for output in alone}) == 3
    assert all(len(output.logprobs) == len(output.token_ids) for output in several.outputs)
    assert several.logprobs[0].popitem()[1].decoded_token
    assert one == llm.generate("def", SamplingParams(seed=1, max_tokens=5), False)[0]


def test_without_a_seed_completions_differ(llm):
    (output,) = llm.generate("x", SamplingParams(n=4, max_tokens=8, temperature=3.0), False)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 4


def test_a_scheduler_makes_one_completion_of_a_request():
    with pytest.raises(SamplingError, match=r"n is 2; only LLM.generate and LLM.chat"):
        OfflineScheduler(small_engine(random_model(0))).add_request([1], SamplingParams(n=2))
