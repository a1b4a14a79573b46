"""Several ranks give the tokens of one, whatever they are asked: fp32 on a CPU, gloo.

The quick tests have a thread for each rank; processes are those of the slow ones and of ``test_ranks_end``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from rosellm import SamplingParams
from rosellm.models.loading import arch_of
from rosellm.roseinfer.cache.device_state import FIELDS
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import LADDER
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, OnlineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager
from rosellm.roseinfer.tensor_parallel import slower_line
from tests.helpers import FAMILIES, MODERN, random_prompts, small_config
from tests.roseinfer.ranks import logits_of, ranks_of, saved, threaded_ranks, tokens_of
from tests.roseinfer.steps.fake_graphs import captured  # noqa: F401

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


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Engine, Engine]]:
    """One rank with ample room, and two with few KV blocks and a prefix cache."""
    options = {"block_size": 16, "max_batch_size": 8, "max_model_len": 240}
    with threaded_ranks("rose-tiny", **options, num_kv_blocks=24, prefix_cache=True) as (two, _):
        yield ranks_of("rose-tiny", 1), two


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
            assert list(found) == list(likely)
            for token, entry in likely.items():
                assert found[token].rank == entry.rank
                assert found[token].logprob == pytest.approx(entry.logprob, abs=1e-4)


def test_a_streaming_manager_runs_ranks_from_its_own_thread(pair):
    texts = []
    for engine in pair:
        with StreamingManager(engine) as manager:
            ids = [manager.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
            texts.append(["".join(manager.stream_text(request_id)) for request_id in ids])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("name", "n_ranks", "is_slower"),
    [("Qwen/Qwen3-0.6B", 2, True), ("gpt2", 4, True), ("meta-llama/Llama-3.1-8B", 2, False)],
)
def test_a_line_says_when_layers_are_so_small_that_one_gpu_decodes_faster(name, n_ranks, is_slower):
    model = SimpleNamespace(whole=arch_of(name, "dummy"), dtype=torch.bfloat16)
    line = slower_line(model, n_ranks)
    assert (line is not None) == is_slower
    if line is not None:
        assert f"faster than tensor_parallel_size={n_ranks}" in line and "\n" not in line


# Any program.

SHAPE = small_config(**MODERN | {"vocab_size": VOCAB, "d_ff": 64, "eos_token_ids": (5,)})
TIGHT = {"block_size": 8, "max_batch_size": 5, "max_model_len": 64, "prefix_cache": True}
SHORT = [prompt[:30] for prompt in PROMPTS]
SHORT += [PROMPTS[1][:20] + prompt[:9] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(SHAPE, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(model: str) -> Iterator[tuple[Engine, Engine, list[Engine]]]:
    """One rank with ample room, rank 0 with hardly any, and rank 1."""
    with threaded_ranks(model, **TIGHT, num_kv_blocks=12) as (leader, others):
        yield ranks_of(model, 1, **TIGHT), leader, others


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.9]),
    top_k=st.sampled_from([0, 0, 7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    logprobs=st.sampled_from([None, None, 2]),
    max_tokens=st.integers(1, 30),
    seed=st.integers(0, 9),
)
some_requests = st.lists(st.tuples(st.sampled_from(SHORT), sampling_params), min_size=1, max_size=9)
some_cancels = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)), max_size=3)


def serve(engine: Engine, requests: list, cancels: list[tuple[int, int]]) -> list[list[int]]:
    """Tokens of all requests; a cancel is a number of steps and an index of a request."""
    scheduler = OnlineScheduler(engine, SchedulerConfig(prefill_token_budget=40, prefill_chunk=16))
    ids = [scheduler.add_request(prompt, params) for prompt, params in requests]
    n_steps = 0
    while scheduler.has_unfinished:
        scheduler.step()
        n_steps += 1
        for step, index in cancels:
            if step == n_steps and index < len(ids):
                scheduler.cancel(ids[index])
    engine.check_integrity()
    return [scheduler.take_result(request_id).token_ids for request_id in ids]


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some_requests, some_cancels)
def test_any_program_gives_the_tokens_of_one_rank_and_leaves_both_in_one_state(engines, requests, cancels):
    one, leader, others = engines
    expected, found = serve(one, requests, []), serve(leader, requests, cancels)
    cancelled = {index for _, index in cancels}
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == theirs or (i in cancelled and ours == theirs[: len(ours)])
    logits_of(leader, [[1, 2]], GREEDY, 0)  # rank 1's are among them, so it has run all that came before
    states = [engine.step.worker.state.rows[:, :FIELDS] for engine in (leader, *others)]
    assert torch.equal(*states)


@pytest.mark.parametrize(
    "when", ["later", *(pytest.param(when, marks=pytest.mark.slow) for when in ("at_start", "as_needed"))]
)
@pytest.mark.usefixtures("captured")
def test_ranks_that_capture_their_steps_give_the_tokens_of_one(model, when):
    mixed = [replace(params, max_tokens=6) for params in MIXED[:4]]
    asked = (mixed[0], mixed)
    expected = [tokens_of(ranks_of(model, 1, **TIGHT), SHORT[:4], params) for params in asked]
    with threaded_ranks(model, **TIGHT, warm_up=when == "at_start") as (engine, _):
        assert (engine.step.n_captured > 0) == (when == "at_start")
        if when == "later":
            engine.warm_up()
        assert [tokens_of(engine, SHORT[:4], p) for p in asked] == expected
        assert engine.step.n_captured > 0 and (engine.late_captures > 0) == (when == "as_needed")


# Ranks of every kind, in processes.

SIZES = {"n_heads": 8, "d_model": 64, "d_ff": 1024, "vocab_size": VOCAB, "n_positions": 256, "head_dim": 8}
GROUPED = small_config(**MODERN | SIZES)  # of two key-value heads
ONE_SHOT = replace(LADDER["split_kv"], all_reduce="one_shot")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU here")
# Name, ranks, and the options of all engines, then of several ranks alone.
ENGINES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two": (2, {"model": "rose-tiny-qwen3"}, {"num_kv_blocks": 24, "prefix_cache": True}),
    "four": (4, {"model": "rose-tiny"}, {}),
    "fewer_kv_heads": (4, {}, {}),
    "dummy_weights": (2, {"model": "rose-tiny", "load_format": "dummy"}, {}),
    "fused_append": (2, {"model": "rose-tiny-qwen3", "recipe": "fused_append"}, {}),
    "fused_norm": (2, {"model": "rose-tiny-qwen3", "recipe": "fused_norm"}, {}),
    "kernels": (2, {}, {"kernels": "triton", "max_batch_size": 3}),
    "one_shot": (2, {}, {"kernels": "triton", "max_batch_size": 3, "recipe": ONE_SHOT}),
}


@slow
@pytest.mark.parametrize("n_ranks", [4, 8])
@pytest.mark.parametrize("family", ["gpt2", *FAMILIES])
def test_four_and_eight_ranks_give_the_tokens_of_one_in_every_family(family, n_ranks, tmp_path):
    model = saved(small_config(**FAMILIES.get(family, {}) | SIZES | {"family": family}), tmp_path)
    one, several = (tokens_of(ranks_of(model, n), PROMPTS[:4], MIXED[:4]) for n in (1, n_ranks))
    assert several == one


@slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[interpreted] * ("kernels" in own)) for n, (_, _, own) in ENGINES.items()]
)
def test_ranks_of_every_kind_give_the_tokens_of_one(name, tmp_path):
    n_ranks, shared, own = ENGINES[name]
    options = {"model": saved(GROUPED, tmp_path)} | shared
    prompts, params = [PROMPTS[i] for i in (0, 2, 7, 1)], MIXED[:4]
    if "kernels" in own:
        prompts, params = [prompts[0], prompts[1], prompts[2][:50]], replace(GREEDY, max_tokens=3)
    several = ranks_of(n_ranks=n_ranks, **options, **own)
    assert several.model.config.n_kv_heads == max(1, several.model.whole.n_kv_heads // n_ranks)
    assert tokens_of(several, prompts, params) == tokens_of(ranks_of(n_ranks=1, **options), prompts, params)
