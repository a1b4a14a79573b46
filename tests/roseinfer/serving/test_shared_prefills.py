"""What is cached is not computed again: answers, cached prefixes at admission, completions of one prompt."""

from __future__ import annotations

import pytest

from rosellm import LLM
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, OnlineScheduler
from tests.helpers import MODERN, random_model, random_prompts, small_config, small_engine
from tests.roseinfer.serving.common import assert_all_free, run_to_end

GREEDY = SamplingParams(temperature=0, max_tokens=9)


@pytest.fixture(scope="module")
def model():
    return random_model(5, small_config(**MODERN, n_positions=512))


class Prefills:
    """Counts the tokens that an engine prefills, and its prefills."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: list[list[int]] = []
        begin = engine.step.begin_prefill

        def counted(sequences: list, counts: list[int]) -> None:
            self.counts.append(list(counts))
            begin(sequences, counts)

        monkeypatch.setattr(engine.step, "begin_prefill", counted)

    @property
    def n_tokens(self) -> int:
        return sum(map(sum, self.counts))


def test_the_second_turn_of_a_chat_prefills_only_what_is_new(model, monkeypatch):
    engine = small_engine(model, prefix_cache=True)
    (prompt,) = random_prompts([21])
    (first,) = OfflineScheduler(engine).run([prompt], GREEDY)
    turn = [*prompt, *first.token_ids, 3, 1, 4]
    prefills = Prefills(engine, monkeypatch)
    (second,) = OfflineScheduler(engine).run([turn], GREEDY)
    assert prefills.counts == [[1 + 3]]  # the last token of an answer is never cached
    assert second.num_cached_tokens == len(turn) - 4
    assert second.token_ids == OfflineScheduler(small_engine(model)).run([turn], GREEDY)[0].token_ids
    assert len(engine.prefix_cache) == 1  # the longest sequence stands for those that it begins with
    assert_all_free(engine)


def test_in_deterministic_mode_answers_are_not_reused(model, monkeypatch):
    engine = small_engine(model, prefix_cache=True, deterministic=True)
    (prompt,) = random_prompts([70])
    (first,) = OfflineScheduler(engine).run([prompt], GREEDY)
    turn = [*prompt, *first.token_ids, 3]
    prefills = Prefills(engine, monkeypatch)
    (second,) = OfflineScheduler(engine).run([turn], GREEDY)
    assert prefills.n_tokens == len(turn) - 64
    cold = small_engine(model, prefix_cache=True, deterministic=True)
    assert second == OfflineScheduler(cold).run([turn], GREEDY)[0]


def test_admission_counts_only_tokens_that_are_not_cached(model, monkeypatch):
    engine = small_engine(model, prefix_cache=True, max_batch_size=32, num_kv_blocks=400)
    shared, *ends = random_prompts([400] + [2] * 24)
    OfflineScheduler(engine).run([shared], SamplingParams(max_tokens=1))
    prefills = Prefills(engine, monkeypatch)
    scheduler = OnlineScheduler(engine, SchedulerConfig(prefill_token_budget=512))
    scheduler.add_requests([shared + end for end in ends], GREEDY)
    scheduler.step()
    assert scheduler.n_active == 24 and prefills.n_tokens == 24 * 2


def test_admission_counts_only_blocks_that_are_not_shared(model):
    engine = small_engine(model, prefix_cache=True, max_batch_size=32, num_kv_blocks=50 + 24 * 2)
    shared, *ends = random_prompts([400] + [2] * 24)
    OfflineScheduler(engine).run([shared], SamplingParams(max_tokens=1))
    scheduler = OnlineScheduler(engine)
    ids = scheduler.add_requests([shared + end for end in ends], SamplingParams(temperature=0, max_tokens=5))
    scheduler.step()
    assert scheduler.n_active > 20
    run_to_end(scheduler)
    outputs = [scheduler.take_result(i).token_ids for i in ids]
    alone = small_engine(model, max_batch_size=32)
    prompts = [shared + end for end in ends]
    params = SamplingParams(temperature=0, max_tokens=5)
    assert outputs == [o.token_ids for o in OfflineScheduler(alone).run(prompts, params)]


@pytest.mark.parametrize(
    ("options", "policy", "n_documents", "n_requests", "n_found"),
    [
        ({}, "fifo", 1, 24, 400),
        ({}, "fifo", 2, 24, 400),
        ({}, "pack", 2, 24, 400),
        ({"deterministic": True}, "fifo", 2, 6, 384),
    ],
    ids=str,
)
def test_requests_that_come_together_compute_their_beginning_once(
    model, monkeypatch, options, policy, n_documents, n_requests, n_found
):
    documents, ends = random_prompts([400] * n_documents), random_prompts([2] * n_requests, seed=1)
    prompts = [documents[i % n_documents] + end for i, end in enumerate(ends)]
    engine = small_engine(model, prefix_cache=True, max_batch_size=32, **options)
    prefills = Prefills(engine, monkeypatch)
    outputs = OfflineScheduler(engine, SchedulerConfig(admission_policy=policy)).run(prompts, GREEDY)
    n_later = n_requests - n_documents
    assert prefills.counts == [[402] * n_documents, [402 - n_found] * n_later]
    assert [o.num_cached_tokens for o in outputs] == [0] * n_documents + [n_found] * n_later
    alone = OfflineScheduler(small_engine(model, max_batch_size=32, **options)).run(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("n_shared", "n_own", "asked", "n_prefills"),
    [(18, 1, {}, 2), (17, 1, {}, 1), (18, 0, {}, 1), (18, 1, {"prompt_logprobs": 1}, 1)],
    ids=str,
)
def test_a_request_waits_only_for_a_whole_block_that_it_may_use(
    model, monkeypatch, n_shared, n_own, asked, n_prefills
):
    engine = small_engine(model, prefix_cache=True, block_size=8)
    (document,) = random_prompts([20])
    OfflineScheduler(engine).run([document[:10]], SamplingParams(max_tokens=1))
    prefills = Prefills(engine, monkeypatch)
    prompts = [document[:n_shared] + [end] * n_own for end in (1, 2)]
    OfflineScheduler(engine).run(prompts, SamplingParams(max_tokens=1, **asked))
    assert len(prefills.counts) == n_prefills


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_request_that_waits_for_a_chunked_prefill_blocks_nobody_and_survives_its_cancellation(
    model, is_cancelled
):
    engine = small_engine(model, prefix_cache=True)
    scheduler = OnlineScheduler(engine, SchedulerConfig(prefill_chunk=100))
    running, document, unrelated = random_prompts([5, 130, 30])
    scheduler.add_request(running, GREEDY)
    scheduler.step()
    first, *others = scheduler.add_requests([document, [*document, 1], unrelated], GREEDY)
    scheduler.step()
    if is_cancelled:
        scheduler.cancel(first)
    waiting, passing = (scheduler.requests[i] for i in others)
    scheduler.step()
    has_begun = [bool(request.block_ids) for request in (waiting, passing)]
    assert has_begun == ([True, False] if is_cancelled else [False, True])
    run_to_end(scheduler)
    assert waiting.num_cached_prompt_tokens == (0 if is_cancelled else 130)
    alone = OfflineScheduler(small_engine(model)).run([waiting.prompt, unrelated], GREEDY)
    assert [waiting.output, passing.output] == [output.token_ids for output in alone]
    assert_all_free(engine)


@pytest.mark.parametrize("options", [{}, {"prefix_cache": True}, {"num_kv_blocks": 26}], ids=str)
@pytest.mark.parametrize("rung", ["dense", BEST_RUNG])
def test_completions_of_a_prompt_prefill_it_once_and_are_those_of_their_seeds(
    model, monkeypatch, rung, options
):
    if rung == "dense" and "prefix_cache" in options:
        pytest.skip("dense has no prefix cache")
    prompts = random_prompts([43, 30], seed=2)
    params = SamplingParams(n=4, seed=7, max_tokens=20)
    each = [own for _ in prompts for own in params.each()]
    copies = [prompt for prompt in prompts for _ in range(4)]
    expected = [o.token_ids for o in OfflineScheduler(small_engine(model)).run(copies, each)]
    engine = small_engine(model, recipe=rung, **options)
    prefills = Prefills(engine, monkeypatch)
    firsts = [0, 0, 0, 0, 4, 4, 4, 4]
    outputs = OfflineScheduler(engine).run(copies, each, None, firsts)
    assert [o.token_ids for o in outputs] == expected
    if rung != "dense" and "num_kv_blocks" not in options:
        assert prefills.counts == [[43, 30], [1] * 6]
    assert_all_free(engine)


def test_an_llm_shares_the_prefill_of_n_completions():
    llm = LLM("rose-tiny", device="cpu", max_batch_size=8)
    outputs = llm.generate(["import os\nimport sys\n" * 5] * 2, SamplingParams(n=3, seed=1), use_tqdm=False)
    assert [own.num_cached_tokens > 20 for own in outputs[0].outputs] == [False, True, True]
    assert outputs[0].outputs == outputs[1].outputs
