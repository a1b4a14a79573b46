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
from tests.roseinfer.serving.common import assert_all_free

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
    while scheduler.has_unfinished:
        scheduler.step()
    outputs = [scheduler.take_result(i).token_ids for i in ids]
    alone = small_engine(model, max_batch_size=32)
    prompts = [shared + end for end in ends]
    params = SamplingParams(temperature=0, max_tokens=5)
    assert outputs == [o.token_ids for o in OfflineScheduler(alone).run(prompts, params)]


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
