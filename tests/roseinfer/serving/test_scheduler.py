"""The schedulers: same tokens as alone, who is admitted when, what is released, and how text ends."""

from __future__ import annotations

from collections import Counter

import pytest

from rosellm.errors import OverloadError, PromptError, RoseError, SamplingError
from rosellm.models.tokenizer import Tokenizer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.request import RequestMetrics, Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.asked import one_each
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, OnlineScheduler
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import random_model, random_prompts, small_config, small_engine, uncached_greedy
from tests.soak.fake_step import POISON, fake_engine, poison, tokens_after

LENGTHS = [1, 9, 3, 20, 8, 2, 15, 5, 7, 30]


def greedy(max_tokens: int = 8, **others) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **others)


def engine_of(seed: int = 0, tokenizer: Tokenizer | None = None, **options) -> Engine:
    changes = {"vocab_size": tokenizer.vocab_size} if tokenizer else {}
    options = {"recipe": "dense"} | options
    return small_engine(random_model(seed, small_config(**changes)), tokenizer=tokenizer, **options)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["hello world, here is some text to learn from, with words and words"], 290)


class Calls:
    """Keeps the batches that the scheduler gives to the engine, and the chunks of prompts."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, list[int]]] = []
        self.chunks: list[list[int]] = []
        begin_prefill, begin_decode = engine.begin_prefill, engine.begin_decode

        def spy_prefill(sequences: list[Sequence], counts: list[int]) -> list[Sequence]:
            self.log.append(("prefill", [s.request_id for s in sequences]))
            self.chunks.append(counts)
            return begin_prefill(sequences, counts)

        def spy_decode(sequences: list[Sequence]) -> int:
            self.log.append(("decode", [s.request_id for s in sequences]))
            return begin_decode(sequences)

        monkeypatch.setattr(engine, "begin_prefill", spy_prefill)
        monkeypatch.setattr(engine, "begin_decode", spy_decode)

    def of(self, name: str) -> list[list[int]]:
        return [ids for called, ids in self.log if called == name]


def run_to_end(scheduler: OnlineScheduler) -> None:
    while scheduler.has_unfinished:
        scheduler.step()


def assert_all_free(engine: Engine) -> None:
    engine.check_integrity()
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks


# Tokens


@pytest.mark.parametrize("policy", ["fifo", "pack"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_mixed_lengths_give_the_tokens_of_each_request_alone(policy: str, prefix_cache: bool) -> None:
    engine = engine_of(num_kv_blocks=11, max_batch_size=4, prefix_cache=prefix_cache)
    prompts = random_prompts(LENGTHS)
    prompts += [prompts[3] + [5, 6], prompts[3][:17]]
    counts = [1 + 3 * i % 14 for i in range(len(prompts))]
    config = SchedulerConfig(prefill_token_budget=40, admission_policy=policy, pack_lookahead=5, fifo_every=3)
    outputs = OfflineScheduler(engine, config).run(prompts, [greedy(n) for n in counts])
    for prompt, n, output in zip(prompts, counts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.token_ids == uncached_greedy(engine.model, prompt, n)
        assert output.finish_reason == "length"
    if prefix_cache:
        engine.prefix_cache.clear()
    assert_all_free(engine)


def test_requests_added_while_others_run_join_the_batch() -> None:
    engine = engine_of()
    scheduler = OnlineScheduler(engine)
    first = scheduler.add_request([1, 2, 3], greedy(10))
    for _ in range(4):
        assert [s.request_id for s in scheduler.step()] == [first]
    second = scheduler.add_request([4, 5], greedy(3))
    assert [s.request_id for s in scheduler.step()] == [first, second]
    run_to_end(scheduler)
    assert scheduler.take_result(first).token_ids == uncached_greedy(engine.model, [1, 2, 3], 10)
    assert scheduler.take_result(second).token_ids == uncached_greedy(engine.model, [4, 5], 3)


def test_a_seed_gives_the_same_tokens_whatever_shares_the_batch() -> None:
    engine = engine_of()
    seeded = SamplingParams(temperature=1.5, top_p=0.95, max_tokens=12, seed=11)
    alone = OfflineScheduler(engine).run([[7, 8, 9]], seeded)[0].token_ids
    others = [SamplingParams(temperature=2.0, max_tokens=n, seed=n) for n in (3, 12, 5)]
    params = [*others[:2], seeded, others[2]]
    together = OfflineScheduler(engine).run([[1], [2, 3], [7, 8, 9], [4] * 9], params)
    assert together[2].token_ids == alone
    reseeded = SamplingParams(temperature=1.5, top_p=0.95, max_tokens=12, seed=12)
    assert OfflineScheduler(engine).run([[7, 8, 9]], reseeded)[0].token_ids != alone


# Admission


def test_an_iteration_decodes_first_and_then_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    calls = Calls(engine, monkeypatch)
    scheduler = OnlineScheduler(engine)
    first = scheduler.add_request([1], greedy(3))
    scheduler.step()
    second = scheduler.add_request([2], greedy(3))
    scheduler.step()
    assert calls.log == [("prefill", [first]), ("decode", [first]), ("prefill", [second])]


def test_budgets_of_batch_and_tokens_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    calls = Calls(engine, monkeypatch)
    prompts = random_prompts([4, 4, 4, 4, 1, 1, 1, 1, 1, 40, 3, 3])
    config = SchedulerConfig(max_batch_size=9, prefill_max_batch_size=3, prefill_token_budget=10)
    ids = OnlineScheduler(engine, config)
    requests = ids.add_requests(prompts, greedy(4))
    run_to_end(ids)
    computed = Counter()
    for batch, chunks in zip(calls.of("prefill"), calls.chunks, strict=True):
        assert 1 <= len(batch) <= 3 and sum(chunks) <= 10 and min(chunks) > 0
        computed.update(dict(zip(batch, chunks, strict=True)))
    assert computed == {request: len(prompt) for request, prompt in zip(requests, prompts, strict=True)}
    assert max(len(batch) for batch in calls.of("decode")) <= 9
    assert calls.chunks[:3] == [[4, 4, 2], [2, 4, 1], [1, 1, 1]]
    assert [40] not in calls.chunks and [10] in calls.chunks


@pytest.mark.parametrize("policy", ["fifo", "pack"])
def test_a_cut_prompt_goes_on_before_others_are_admitted(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()
    calls = Calls(engine, monkeypatch)
    config = SchedulerConfig(prefill_token_budget=10, admission_policy=policy, prefill_max_batch_size=2)
    scheduler = OnlineScheduler(engine, config)
    long = scheduler.add_request([1] * 25, greedy(3))
    first = scheduler.step()
    short, _, shortest = scheduler.add_requests([[2] * 3, [3] * 2, [4]], greedy(3))
    second, third = scheduler.step(), scheduler.step()
    run_to_end(scheduler)
    nearest = {"fifo": (short, 3), "pack": (shortest, 1)}[policy]
    assert calls.of("prefill")[:3] == [[long], [long], [long, nearest[0]]]
    assert calls.chunks[:3] == [[10], [10], [5, nearest[1]]]
    assert (first, second) == ([], [])
    assert [s.request_id for s in third] == [long, nearest[0]]


def test_fifo_admits_strictly_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(num_kv_blocks=5)
    calls = Calls(engine, monkeypatch)
    scheduler = OnlineScheduler(engine)
    ids = scheduler.add_requests([[1] * 20, [2] * 30, [3]], greedy(4))
    run_to_end(scheduler)
    assert [request for batch in calls.of("prefill") for request in batch] == ids
    assert calls.of("prefill")[0] == ids[:1]  # the third would fit at once, and waits behind the second


def test_pack_admits_the_shortest_prompts_of_the_look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    calls = Calls(engine, monkeypatch)
    config = SchedulerConfig(prefill_token_budget=12, admission_policy="pack", pack_lookahead=4)
    scheduler = OnlineScheduler(engine, config)
    ids = scheduler.add_requests([[1] * n for n in (12, 5, 3, 4, 1)], greedy(2))
    scheduler.step()
    assert calls.of("prefill")[0] == [ids[2], ids[3], ids[1]]
    scheduler.step()
    assert calls.of("prefill")[1] == [ids[4], ids[0]]
    run_to_end(scheduler)
    assert calls.chunks == [[3, 4, 5], [1, 11], [1]]


@pytest.mark.parametrize("long_prompt", [14, 30], ids=["needs a place", "needs most of the cache"])
def test_pack_starves_nobody_under_a_stream_of_short_requests(long_prompt: int) -> None:
    engine = engine_of(num_kv_blocks=5, max_batch_size=4)
    config = SchedulerConfig(prefill_token_budget=14, admission_policy="pack", fifo_every=4)
    scheduler = OnlineScheduler(engine, config)
    scheduler.add_requests([[2]] * 2, greedy(3))
    long = scheduler.add_request([1] * long_prompt, greedy(4))
    for i in range(60):
        scheduler.add_requests([[2]] * 2, [greedy(3 + i % 4), greedy(4 + i % 5)])
        scheduler.step()
        if long in scheduler.finished:
            break
    assert scheduler.take_result(long).finish_reason == "length"


def test_a_request_that_ends_with_its_first_token_never_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(0)
    first = uncached_greedy(model, [3, 4], 1)[0]
    by_eos = small_engine(random_model(0, small_config(eos_token_ids=(first,))), recipe="dense")
    for engine, params, reason in (
        (engine_of(), greedy(1), "length"),
        (by_eos, SamplingParams(temperature=0.0, max_tokens=9), "stop"),
    ):
        calls = Calls(engine, monkeypatch)
        output = OfflineScheduler(engine).run([[3, 4]], params)[0]
        assert (output.token_ids, output.finish_reason) == ([first], reason)
        assert calls.of("decode") == []
        assert_all_free(engine)


def test_a_finished_sequence_is_released_at_once() -> None:
    engine = engine_of()
    scheduler = OnlineScheduler(engine)
    scheduler.add_requests([[1], [2]], [greedy(2), greedy(9)])
    scheduler.step()
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks - 2
    scheduler.step()
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks - 1
    scheduler.cancel_all()


# Refusals, cancellation, failure


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"prefill_token_budget": 1.5}, "prefill_token_budget is 1.5"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"prefill_max_batch_size": None}, "prefill_max_batch_size is None"),
        ({"fifo_every": True}, "fifo_every is True"),
        ({"pack_lookahead": -1}, "pack_lookahead is -1"),
        ({"max_in_flight": 0}, "max_in_flight is 0"),
        ({"admission_policy": "lifo"}, "'lifo'; use fifo or pack"),
    ],
)
def test_a_bad_configuration_is_refused_by_name(change: dict, told: str) -> None:
    with pytest.raises(RoseError, match=told):
        SchedulerConfig(**change)


def test_a_batch_larger_than_the_engines_is_refused() -> None:
    with pytest.raises(RoseError, match="max_batch_size is 17; the engine decodes at most 16"):
        OnlineScheduler(engine_of(), SchedulerConfig(max_batch_size=17))


def test_overload_is_told_in_numbers_and_queues_nothing() -> None:
    scheduler = OnlineScheduler(engine_of(), SchedulerConfig(max_batch_size=2, max_in_flight=4))
    scheduler.add_requests([[1], [2], [3]], greedy())
    scheduler.step()
    with pytest.raises(OverloadError, match="2 more .* max_in_flight 4: 1 are waiting and 2 active"):
        scheduler.add_requests([[4], [5]], greedy())
    assert scheduler.n_waiting == 1
    scheduler.add_request([4], greedy())
    with pytest.raises(OverloadError):
        scheduler.add_request([5], greedy())
    run_to_end(scheduler)
    scheduler.add_request([5], greedy())
    assert len(scheduler.finished) == 4


def test_a_bad_prompt_among_many_is_named_and_none_is_queued() -> None:
    scheduler = OnlineScheduler(engine_of())
    with pytest.raises(PromptError, match="prompt 2: .*empty"):
        scheduler.add_requests([[1], [2], []], greedy())
    assert not scheduler.has_unfinished


@pytest.mark.parametrize("params", [[greedy()], [greedy(), "greedy"], None])
def test_parameters_must_be_one_or_one_each(params) -> None:
    with pytest.raises(SamplingError):
        one_each(params, 2)


def test_cancelling_frees_the_blocks_of_waiting_and_active_requests() -> None:
    engine = engine_of()
    scheduler = OnlineScheduler(engine, SchedulerConfig(max_batch_size=2))
    first, second, third = scheduler.add_requests([[1] * 9, [2] * 9, [3] * 9], greedy(20))
    scheduler.step()
    scheduler.step()
    assert scheduler.cancel(first) and scheduler.cancel(third)
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks - 2
    assert not scheduler.cancel(first)
    cancelled, unborn = scheduler.take_result(first), scheduler.take_result(third)
    assert (cancelled.finish_reason, len(cancelled.token_ids)) == ("cancelled", 2)
    assert (unborn.finish_reason, unborn.token_ids, unborn.metrics.ttft) == ("cancelled", [], None)
    run_to_end(scheduler)
    assert scheduler.take_result(second).token_ids == uncached_greedy(engine.model, [2] * 9, 20)
    assert_all_free(engine)


def test_unknown_taken_and_unfinished_requests_are_told_apart() -> None:
    scheduler = OnlineScheduler(engine_of())
    request = scheduler.add_request([1], greedy(1))
    with pytest.raises(RoseError, match=f"request {request} has not ended"):
        scheduler.take_result(request)
    run_to_end(scheduler)
    scheduler.take_result(request)
    with pytest.raises(RoseError, match=f"request {request} is unknown"):
        scheduler.take_result(request)
    with pytest.raises(RoseError, match="request 99 is unknown"):
        scheduler.cancel(99)


@pytest.mark.parametrize("where", ["prefill", "decode"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_engine_leaks_no_block(where: str, error, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    scheduler = OnlineScheduler(engine, SchedulerConfig(max_batch_size=2))
    first, second, third = scheduler.add_requests([[1] * 9, [2], [3]], [greedy(2), greedy(9), greedy(9)])
    scheduler.step()

    def fail_halfway(sequences: list[Sequence], counts: object = None) -> None:
        engine.blocks.reserve_prompt(0, sequences[0].block_ids, 3)
        raise error("no luck")

    with monkeypatch.context() as broken:
        broken.setattr(engine, f"begin_{where}", fail_halfway)
        with pytest.raises(error, match="no luck"):
            scheduler.step()
    assert_all_free(engine)
    failed = second if where == "decode" else third
    assert scheduler.take_result(failed).finish_reason == "failed"
    assert scheduler.take_result(first).finish_reason == ("failed" if where == "decode" else "length")
    assert scheduler.has_unfinished == (where == "decode")
    run_to_end(scheduler)
    if where == "decode":
        assert scheduler.take_result(third).token_ids == uncached_greedy(engine.model, [3], 9)


def test_an_interrupted_offline_run_leaves_scheduler_and_engine_ready() -> None:
    engine = engine_of()
    scheduler = OfflineScheduler(engine, SchedulerConfig(max_batch_size=2))

    class Interrupt:
        total = 27

        def update(self, n: int) -> None:
            if scheduler.decode_steps == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scheduler.run([[1], [2], [3]], greedy(9), Interrupt())
    assert not scheduler.has_unfinished and not scheduler.finished
    assert_all_free(engine)
    assert scheduler.run([[1]], greedy(9))[0].token_ids == uncached_greedy(engine.model, [1], 9)


# Requests that fail alone


@pytest.mark.parametrize("n_before", [0, 3])
@pytest.mark.parametrize("run_ahead", [0, 3])
@pytest.mark.parametrize("pool", ["shared", "per_layer"])
def test_a_request_whose_logits_are_not_finite_fails_alone(pool: str, run_ahead: int, n_before: int) -> None:
    engine = fake_engine(pool, run_ahead, num_kv_blocks=30, max_batch_size=4)
    scheduler = OnlineScheduler(engine)
    prompts = [[1, 2], [3], [4, 5, 6], [7]]
    ids = scheduler.add_requests(prompts, greedy(9))
    bad = scheduler.requests[ids[1]]
    told = []
    while scheduler.has_unfinished:
        if bad.n_output >= n_before:
            poison(engine, bad.request_id)
        told += [s.finish_reason for s in scheduler.step() if s is bad]
    outputs = [scheduler.take_result(request_id) for request_id in ids]
    failed = outputs.pop(1)
    assert (failed.finish_reason, failed.error) == ("failed", POISON)
    assert told[-1] == "failed" and told.count("failed") == 1
    assert n_before <= len(failed.token_ids) <= n_before + run_ahead
    assert failed.token_ids == list(tokens_after(tuple(prompts.pop(1)))[: len(failed.token_ids)])
    assert [output.token_ids for output in outputs] == [list(tokens_after(tuple(p))[:9]) for p in prompts]
    assert {(output.finish_reason, output.error) for output in outputs} == {("length", None)}
    assert_all_free(engine)


# Figures


def test_each_token_has_its_time_and_a_step_is_shared() -> None:
    scheduler = OfflineScheduler(engine_of())
    one, other = (output.metrics for output in scheduler.run([[1], [2, 3]], [greedy(5), greedy(3)]))
    assert (len(one.token_times), len(other.token_times)) == (5, 3)
    assert one.token_times[:3] == other.token_times
    assert [one.arrival, *one.token_times] == sorted([one.arrival, *one.token_times])
    assert (scheduler.decode_steps, scheduler.decode_tokens) == (4, 6)
    assert 0 < scheduler.decode_time_s < one.token_times[-1] - one.token_times[0]
    assert 0 < scheduler.prefill_time_s < one.ttft


def test_latency_figures_are_what_their_names_say() -> None:
    metrics = RequestMetrics(10.0, [12.0, 13.0, 16.0])
    assert (metrics.ttft, metrics.tpot, metrics.latency, metrics.itl) == (2.0, 2.0, 6.0, [1.0, 3.0])
    assert RequestMetrics(10.0, [12.0]).tpot is None
    nothing = RequestMetrics(10.0)
    assert (nothing.ttft, nothing.tpot, nothing.latency, nothing.itl) == (None, None, None, [])


def test_progress_hears_of_every_token() -> None:
    class Bar:
        total, n = 8, 0

        def update(self, n: int) -> None:
            self.n += n

    bar = Bar()
    OfflineScheduler(engine_of()).run([[1], [2], [3]], [greedy(n) for n in (1, 2, 5)], bar)
    assert bar.n == bar.total == 8


# Text
