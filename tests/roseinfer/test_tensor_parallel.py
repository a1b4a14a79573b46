"""Several ranks give the tokens of one: fp32, processes of a CPU, gloo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rosellm import SamplingParams
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import LADDER
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager
from tests.helpers import MODERN, random_prompts, small_config
from tests.roseinfer.ranks import logits_of, ranks_of, saved, tokens_of

N_TOKENS = 12
VOCAB = 500
PROMPTS = random_prompts([1, 40, 7, 200, 16, 17, 3, 90], seed=2, vocab_size=VOCAB)
GREEDY = SamplingParams(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, max_tokens=N_TOKENS, ignore_eos=True, seed=5)
MIXED = [
    GREEDY,
    DRAWN,
    replace(DRAWN, top_k=40, top_p=0.9),
    replace(DRAWN, min_p=0.02, seed=None, temperature=0.0),
    replace(DRAWN, repetition_penalty=1.3, frequency_penalty=0.4),
    replace(GREEDY, presence_penalty=0.7, repetition_penalty=1.2),
    replace(DRAWN, top_p=0.8, seed=7),
    replace(DRAWN, top_k=3, presence_penalty=0.5),
]
slow = pytest.mark.slow


@pytest.fixture(scope="module", params=["rose-tiny", pytest.param("rose-tiny-qwen3", marks=slow)])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """One rank with ample room, and two with few KV blocks and a prefix cache."""
    yield ranks_of(request.param, 1), ranks_of(request.param, 2, num_kv_blocks=24, prefix_cache=True)


@pytest.mark.parametrize("n", [3, pytest.param(8, marks=slow)])
def test_two_ranks_give_the_tokens_of_one_however_requests_sample(pair, n):
    expected, found = (tokens_of(engine, PROMPTS[:n], MIXED[:n]) for engine in pair)
    assert found == expected


def test_logits_and_log_probabilities_are_those_of_the_whole_vocabulary(pair):
    theirs, ours = (logits_of(engine, PROMPTS[:3], GREEDY, 1) for engine in pair)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    params = replace(GREEDY, logprobs=3, max_tokens=4)
    for one, two in zip(*(OfflineScheduler(e).run(PROMPTS[:5], params) for e in pair), strict=True):
        for likely, found in zip(one.logprobs, two.logprobs, strict=True):
            assert [(token, entry.rank) for token, entry in found.items()] == [
                (token, entry.rank) for token, entry in likely.items()
            ]
            values = [entry.logprob for entry in likely.values()]
            assert [entry.logprob for entry in found.values()] == pytest.approx(values, abs=1e-4)


def test_a_streaming_manager_runs_ranks_from_its_own_thread(pair):
    texts = []
    for engine in pair:
        with StreamingManager(engine) as manager:
            ids = [manager.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
            texts.append(["".join(manager.stream_text(request_id)) for request_id in ids])
    assert texts[0] == texts[1]


SIZES = {"n_heads": 8, "d_model": 64, "d_ff": 128, "vocab_size": VOCAB, "n_positions": 256, "head_dim": 8}
GROUPED = small_config(**MODERN | SIZES)  # of two key-value heads
ONE_SHOT = replace(LADDER["split_kv"], all_reduce="one_shot")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU here")
# Name, ranks, and the options of all engines, then of several ranks alone.
ENGINES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "four": (4, {"model": "rose-tiny"}, {}),
    "fewer_kv_heads": (4, {}, {}),
    "dummy_weights": (2, {"model": "rose-tiny", "load_format": "dummy"}, {}),
    "fused_append": (2, {"model": "rose-tiny-qwen3", "recipe": "fused_append"}, {}),
    "fused_norm": (2, {"model": "rose-tiny-qwen3", "recipe": "fused_norm"}, {}),
    "kernels": (2, {}, {"kernels": "triton", "max_batch_size": 3}),
    "one_shot": (2, {}, {"kernels": "triton", "max_batch_size": 3, "recipe": ONE_SHOT}),
}


@slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[interpreted] * ("kernels" in own)) for n, (_, _, own) in ENGINES.items()]
)
def test_ranks_of_every_kind_give_the_tokens_of_one(name, tmp_path):
    n_ranks, shared, own = ENGINES[name]
    options = {"model": saved(GROUPED, tmp_path)} | shared
    prompts, params = [PROMPTS[i] for i in (0, 2, 7, 1)], MIXED[:4]
    if "kernels" in own:
        prompts, params = [prompts[0], prompts[1], prompts[2][:70]], replace(GREEDY, max_tokens=3)
    several = ranks_of(n_ranks=n_ranks, **options, **own)
    assert several.model.config.n_kv_heads == max(1, several.model.whole.n_kv_heads // n_ranks)
    assert tokens_of(several, prompts, params) == tokens_of(ranks_of(n_ranks=1, **options), prompts, params)
