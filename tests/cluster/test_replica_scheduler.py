"""The scheduler of replicas, on actors of this process: whoever dies when, each token comes once."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given, settings, strategies as st

from rosellm.cluster import seats as seats_module
from rosellm.cluster.replica import Order, Replica
from rosellm.errors import BusyError, CheckpointError, ClusterError, PromptError, RankError, RoseError
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, run_all
from rosellm.roseinfer.serving.streaming import StreamingManager, WorkerError
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.cluster.inline_ray import Call, InlineFleet, InlineRay
from tests.helpers import random_model, random_prompts, small_config, small_engine
from tests.soak.fake_step import EOS, Letters, fake_engine, poison, tokens_after

WORDS = "hello world, here is some text to learn from, with words and words"
ENDS = {"ignore_eos": True}


def fake() -> Engine:
    return fake_engine(0, tokenizer=Letters(), max_batch_size=3, num_kv_blocks=12)


def greedy(max_tokens: int, **others) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **others)


def expected(prompt: list[int], params: SamplingParams) -> list[int]:
    tokens = list(tokens_after(tuple(prompt))[: params.max_tokens])
    if not params.ignore_eos and EOS in tokens:
        tokens = tokens[: tokens.index(EOS) + 1]
    return tokens


requests = st.lists(
    st.tuples(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(1, 20), st.booleans()),
    min_size=1,
    max_size=12,
)


def test_a_replica_prefills_equal_prompts_that_come_together_once():
    prompt, params = random_prompts([40])[0], [SamplingParams(max_tokens=5, seed=i) for i in range(3)]
    replica = Replica("", 1, {})
    replica.take(SchedulerConfig(), small_engine(random_model(0)))
    orders = [Order(i, prompt, own, [], None) for i, own in enumerate(params)]
    gains = replica.advance(orders, [], 60.0).gains
    assert [gains[i].num_cached_tokens for i in range(3)] == [0, 39, 39]
    outputs = OfflineScheduler(small_engine(random_model(0))).run([prompt] * 3, params)
    assert [gains[i].tokens for i in range(3)] == [output.token_ids for output in outputs]


@settings(max_examples=70, deadline=None, derandomize=True, database=None)
@given(
    requests, st.integers(1, 3), st.booleans(), st.floats(0, 0.2), st.integers(0, 2**32).map(random.Random)
)
def test_whoever_dies_or_is_cancelled_every_token_comes_once_in_order(asked, n, marks, cancelling, chance):
    fleet = InlineFleet(InlineRay(lambda calls: chance.choice([None, *calls])), n, fake, marks)
    scheduler = fleet.scheduler(SchedulerConfig(max_batch_size=2))
    prompts, params = [one[0] for one in asked], [greedy(one[1], ignore_eos=one[2]) for one in asked]
    ids = scheduler.add_requests(prompts, params)
    sequences, seen = dict(scheduler.requests), {request_id: 0 for request_id in ids}
    deaths, cancelled = dict.fromkeys(range(n), 0), set()
    while scheduler.has_unfinished:
        for index, actor in list(fleet.actors.items()):
            if chance.random() < 0.05 and deaths[index] < seats_module.MOST_DEATHS:
                deaths[index] += 1
                actor.is_alive = False
        if chance.random() < cancelling and scheduler.cancel(request_id := chance.choice(ids)):
            cancelled.add(request_id)
            assert scheduler.finished[request_id].finish_reason == "cancelled"
            assert not scheduler.cancel(request_id)
        for sequence in scheduler.step():
            assert sequence.n_output > seen[sequence.request_id] or sequence.is_finished
            seen[sequence.request_id] = sequence.n_output
    for request_id, prompt, own in zip(ids, prompts, params, strict=True):
        output, wanted = scheduler.take_result(request_id), expected(prompt, own)
        assert output.token_ids == sequences[request_id].output
        assert output.token_ids == (wanted[: len(output.token_ids)] if request_id in cancelled else wanted)
        assert len(output.metrics.token_times) == len(output.token_ids)
    assert scheduler.n_tokens == sum(seen.values())
    assert not any(map(fleet.router.running, fleet.router.live))
    check_serving(fleet)


def test_after_all_are_cancelled_the_replicas_serve_the_next_ones_with_free_caches():
    fleet = InlineFleet(InlineRay(), 2, fake)
    scheduler = fleet.scheduler(SchedulerConfig())
    scheduler.add_requests([[i] for i in range(1, 9)], greedy(20, **ENDS))
    for _ in range(6):
        scheduler.step()
    scheduler.cancel_all()
    assert not scheduler.has_unfinished and scheduler.step() == []
    check_serving(fleet)
    engines = [actor.loaded.engine for actor in fleet.actors.values()]
    for engine in engines:
        engine.check_integrity()
    assert any(engine.budget.free == 12 for engine in engines)


def check_serving(fleet: InlineFleet) -> None:
    """Twice: the first also tells the replicas of the last cancellations."""
    for _ in range(2):
        (output,) = run_all(fleet.scheduler(SchedulerConfig()), [[5]], greedy(10, **ENDS))
        assert output.token_ids == expected([5], greedy(10, **ENDS))


def model_engine(**options) -> Callable[[], Engine]:
    tokenizer = train_tokenizer([WORDS], 290)
    config = small_config(vocab_size=tokenizer.vocab_size, n_positions=128)
    sizes = {"max_batch_size": 8, "block_size": 8, "num_kv_blocks": 80, "kernels": "torch"}
    return lambda: Engine(random_model(3, config), tokenizer, **sizes, **options)


SAMPLED = [
    greedy(6, logprobs=3),
    SamplingParams(max_tokens=10, temperature=0.8, top_k=40, seed=1, logprobs=0),
    SamplingParams(
        max_tokens=12, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, seed=2
    ),
    SamplingParams(max_tokens=14, top_p=0.9, seed=3, stop=["o", "he"]),
    greedy(16, stop=" w", **ENDS),
]
VARIANTS = {
    "unfused": {"recipe": "resident_step"},
    "resident": {"recipe": "packed_prefill", "prefix_cache": True},
    "deterministic": {"deterministic": True},
}


def dying(every: int) -> Callable[[list[Call]], Call]:
    """The calls are answered in turn; three times, so many calls apart, the replica that has one is dead."""
    answers = count(1)

    def choose(calls: list[Call]) -> Call:
        n = next(answers)
        chosen = calls[n % len(calls)]
        if n % every == 0 and n <= 3 * every:
            chosen.actor.is_alive = False
        return chosen

    return choose


@pytest.mark.parametrize("variant", VARIANTS)
def test_requests_that_go_on_elsewhere_end_as_on_one_engine_in_every_way_to_sample(variant):
    make = model_engine(**VARIANTS[variant])
    prompts = random_prompts([3, 17, 24, 8, 5], seed=4, vocab_size=256)
    wanted = OfflineScheduler(make()).run(prompts, SAMPLED)
    ray = InlineRay()
    fleet = InlineFleet(ray, 2, make)
    ray.choose = dying(5)
    before = dict(fleet.actors)
    outputs = run_all(fleet.scheduler(SchedulerConfig()), prompts, SAMPLED)
    assert outputs == wanted and fleet.actors != before
    for output, other in zip(outputs, wanted, strict=True):
        assert output.text == other.text and (output.logprobs is None) == (other.logprobs is None)
        if output.logprobs is not None:
            assert [list(each) for each in output.logprobs] == [list(each) for each in other.logprobs]
            assert output.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


def test_a_request_that_cannot_run_is_refused_at_once_and_one_without_a_token_fails_alone():
    fleet = InlineFleet(InlineRay(), 1, fake)
    with StreamingManager(fleet) as manager:
        for prompt in ([], [99], [1] * 48, "abc" * 20):
            with pytest.raises(PromptError):
                manager.add_request(prompt, greedy(5))
        with pytest.raises(BusyError, match="the engine is in use by a StreamingManager"):
            fleet.scheduler(SchedulerConfig())
        poison(fleet.actors[0].loaded.engine, 1)
        bad, good = manager.add_request([3], greedy(5, **ENDS)), manager.add_request([4], greedy(5, **ENDS))
        with pytest.raises(RoseError, match="not finite"):
            manager.result(bad, timeout=10)
        assert manager.result(good, timeout=10).token_ids == expected([4], greedy(5, **ENDS))


def test_an_engine_that_raises_fails_every_stream_and_the_next_manager_finds_it_replaced():
    fleet = InlineFleet(InlineRay(), 2, fake)
    broken = fleet.actors[0]
    broken.loaded.engine.begin_decode = lambda _sequences: 1 // 0
    with StreamingManager(fleet) as manager:
        ids = manager.add_requests([[1], [2]], greedy(20, **ENDS))
        for request_id in ids:
            with pytest.raises(WorkerError, match=r"failed \(ZeroDivisionError: "):
                manager.result(request_id, timeout=10)
    assert fleet.actors[0] is not broken and not broken.is_alive
    with StreamingManager(fleet) as manager:
        ids = [manager.add_request([i], greedy(9, **ENDS)) for i in (1, 2)]
        results = [manager.result(request_id, timeout=10).token_ids for request_id in ids]
    assert results == [expected([i], greedy(9, **ENDS)) for i in (1, 2)]


def test_a_replica_whose_rank_failed_is_replaced_unnoticed_and_all_its_errors_are_fetched():
    """Ray prints the errors of calls whose results are never fetched."""
    ran: list[Call] = []

    def choose(calls: list[Call]) -> Call:
        ran.extend(calls[-1].actor.run_all())
        return calls[-1]

    def failed(*_: object) -> None:
        raise RankError("rank 1 of 2 was killed by SIGKILL; the engine has ended; make another")

    fleet, params = InlineFleet(InlineRay(choose), 2, fake), greedy(20, **ENDS)
    broken = fleet.actors[1]
    broken.loaded.advance = failed
    outputs = run_all(fleet.scheduler(SchedulerConfig()), [[i] for i in range(1, 7)], params)
    assert [output.token_ids for output in outputs] == [expected([i], params) for i in range(1, 7)]
    assert fleet.actors[1] is not broken
    errors = [call.is_fetched for call in ran if call.error is not None]
    assert len(errors) > 1 and all(errors)


def test_replicas_that_die_again_and_again_end_all_streams_with_one_line(monkeypatch):
    monkeypatch.setattr(seats_module, "MOST_DEATHS", 2)
    ray = InlineRay()
    fleet = InlineFleet(ray, 2, fake)

    def choose(calls: list[Call]) -> Call:
        calls[-1].actor.is_alive = False
        return calls[-1]

    ray.choose = choose
    told = "all 2 replicas have died 3 times; the last one: .*Lost: The actor died"
    with StreamingManager(fleet) as manager:
        request = manager.add_request([1], greedy(20, **ENDS))
        with pytest.raises(WorkerError, match=told) as raised:
            manager.result(request, timeout=10)
        assert isinstance(raised.value.__cause__, ClusterError) and "\n" not in str(raised.value)
    ray.choose = lambda calls: calls[0]
    check_serving(fleet)  # the dead start anew


def test_a_replica_that_cannot_be_loaded_again_stays_dead_and_its_error_is_told():
    def make() -> Engine:
        if next(loaded) >= 2:
            raise CheckpointError("it is gone")
        return fake()

    loaded = count()  # once for the tokenizer, once for the replica
    fleet = InlineFleet(InlineRay(), 1, make)
    fleet.actors[0].is_alive = False
    with pytest.raises(ClusterError, match="all 1 replicas have died 4 times; .*it is gone"):
        run_all(fleet.scheduler(SchedulerConfig()), [[1]], greedy(5))


def test_replicas_that_do_not_come_back_in_time_end_the_run(monkeypatch):
    ray, answers = InlineRay(), count()
    fleet = InlineFleet(ray, 1, fake)
    fleet.actors[0].is_alive = False
    ray.choose = lambda calls: None if next(answers) else calls[0]
    monkeypatch.setattr(seats_module, "LOADS_WITHIN_S", 0.01)
    with pytest.raises(ClusterError, match="all replicas have died, and none came back within 0.01 s"):
        run_all(fleet.scheduler(SchedulerConfig()), [[1]], greedy(5))
