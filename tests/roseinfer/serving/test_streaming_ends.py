"""Streams that are cancelled, closed, or fail."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from time import process_time, sleep

import pytest

from rosellm.errors import OverloadError, PromptError, RoseError, SamplingError
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.stream import Stream
from rosellm.roseinfer.serving.streaming import ClosedError, StreamingManager, WorkerError
from rosellm.roseinfer.text import LateText
from tests.helpers import random_model, small_engine
from tests.roseinfer.serving.test_streaming import (  # noqa: F401
    ENDLESS,
    WORDS,
    Gate,
    assert_all_free,
    engine,
    greedy,
    outcome,
    tokenizer,
)


def test_a_request_cancelled_while_it_waits_has_its_prompt_and_the_log_probabilities_of_no_tokens(
    engine: Engine,
) -> None:
    with StreamingManager(engine, SchedulerConfig(max_batch_size=1)) as manager:
        manager.add_request([1], ENDLESS)
        waiting = manager.add_request([2, 3], SamplingParams(max_tokens=9, logprobs=3))
        assert manager.cancel(waiting)
        output = manager.result(waiting, timeout=100)
    assert repr((output.logprobs, output.cumulative_logprob)) == "([], 0.0)"
    assert (output.prompt_token_ids, output.token_ids, output.text) == ([2, 3], [], "")


def test_an_error_in_the_worker_reaches_every_waiter(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(engine, monkeypatch, error=RuntimeError("device lost"))
    with (
        StreamingManager(engine, SchedulerConfig(max_batch_size=2)) as manager,
        ThreadPoolExecutor(8) as clients,
    ):
        requests = [manager.add_request([i], ENDLESS) for i in range(1, 5)]
        with gate.held():
            waits = [clients.submit(outcome, lambda r=r: list(manager.stream_text(r))) for r in requests] + [
                clients.submit(outcome, lambda r=r: manager.result(r)) for r in requests
            ]
        for wait in waits:
            assert isinstance(wait.result(timeout=100), WorkerError)
            assert "RuntimeError: device lost" in str(wait.result())
            assert isinstance(wait.result().__cause__, RuntimeError)
        with pytest.raises(WorkerError, match="worker has failed .*device lost.*; make a new manager"):
            manager.add_request([1], greedy())
    assert_all_free(engine)


def test_an_error_between_two_steps_frees_the_blocks_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(text: LateText) -> str:
        raise RuntimeError("piece lost")

    monkeypatch.setattr(LateText, "take", lose)
    with StreamingManager(engine) as manager:
        request = manager.add_request([1], ENDLESS)
        with pytest.raises(RoseError, match="piece lost"):
            manager.result(request, timeout=100)
    assert_all_free(engine)


def test_a_bad_prompt_is_told_where_it_is_tokenised(engine: Engine) -> None:
    config = SchedulerConfig(max_in_flight=1)
    with StreamingManager(engine, config) as inline:
        for _ in range(2):  # it leaves nothing in flight
            with pytest.raises(PromptError, match="empty"):
                inline.add_request("", greedy())
        assert inline.result(inline.add_request("a", greedy())).text is not None
    with StreamingManager(engine, config, 1) as pooled:
        for _ in range(2):
            request = pooled.add_request("", greedy())
            with pytest.raises(PromptError, match="empty"):
                pooled.result(request, timeout=100)
            with pytest.raises(PromptError, match="empty"):
                list(pooled.stream_text(request))


@pytest.mark.parametrize("prompt", [[1, 2], "a"], ids=["token ids", "text"])
def test_several_completions_of_a_streamed_prompt_are_refused(engine: Engine, prompt) -> None:
    params, told = SamplingParams(n=3), r"^n is 3; only LLM\.generate and LLM\.chat make several completions$"
    with StreamingManager(engine) as manager:
        with pytest.raises(SamplingError, match=told):
            manager.add_request(prompt, params)
        assert not manager._in_flight
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [(7, greedy(), PromptError), (None, greedy(), PromptError), ("a", None, SamplingError)],
)
def test_a_request_of_the_wrong_type_is_refused(engine: Engine, prompt, params, error) -> None:
    with StreamingManager(engine) as manager, pytest.raises(error):
        manager.add_request(prompt, params)


def test_overload_is_told_in_numbers_until_a_request_ends(engine: Engine) -> None:
    with StreamingManager(engine, SchedulerConfig(max_batch_size=1, max_in_flight=2)) as manager:
        first, _ = manager.add_request([1], ENDLESS), manager.add_request([2], ENDLESS)
        with pytest.raises(
            OverloadError, match="2 requests are in flight, 1 more are requested, and max_in_flight is 2"
        ):
            manager.add_request([3], greedy())
        manager.cancel(first)
        manager.result(first, timeout=100)
        manager.add_request([3], greedy())


@pytest.mark.parametrize("tokenize_workers", [0, 2])
def test_requests_added_together_get_what_they_get_one_by_one(engine: Engine, tokenize_workers: int) -> None:
    prompts: list = [WORDS[:9], [5, 6], WORDS[:9], WORDS[3:7]]
    params = [greedy(3 + i) for i in range(4)]
    with StreamingManager(engine, tokenize_workers=tokenize_workers) as manager:
        alone = [manager.result(manager.add_request(*one)) for one in zip(prompts, params, strict=True)]
        together = manager.add_requests(prompts, params)
        read = ["".join(manager.stream_text(request)) for request in together]
        assert [manager.result(request) for request in together] == alone
        assert read == [one.text for one in alone] and len(set(together)) == 4
        same = manager.add_requests(tuple(prompts), greedy(5))  # one for all
        assert [len(manager.result(request).token_ids) for request in same] == [5] * 4
        assert manager.add_requests([], greedy()) == []
    assert_all_free(engine)


def test_requests_added_together_are_prefilled_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    begin_prefill = engine.begin_prefill

    def noted(sequences, counts=None):
        begun.append(len(sequences))
        return begin_prefill(sequences, counts)

    monkeypatch.setattr(engine, "begin_prefill", noted)
    with StreamingManager(engine, SchedulerConfig(max_batch_size=8)) as manager:
        for request in manager.add_requests([[i, 7] for i in range(8)], greedy(3)):
            manager.result(request)
    assert begun == [8]


@pytest.mark.parametrize(
    ("prompts", "params", "error", "told"),
    [
        ("ab", greedy(), PromptError, "the prompts are 'ab'; give a list"),
        (["a", 7], greedy(), PromptError, "prompt 1 is 7; give text"),
        ([[1], [2], []], greedy(), PromptError, "prompt 2: "),
        ([[1], "a", "\ud800"], greedy(), PromptError, "prompt 2: text .* cannot be encoded"),
        ([[1], [2]], [greedy()], SamplingError, "1 SamplingParams for 2 prompts"),
        ([[1], [2]], [greedy(), None], SamplingError, "give one SamplingParams"),
        (
            [[1]] * 4,
            greedy(),
            OverloadError,
            "0 requests are in flight, 4 more are requested, and max_in_fli",
        ),
    ],
)
def test_of_requests_added_together_none_is_queued_if_one_is_refused(
    engine: Engine, prompts, params, error: type[RoseError], told: str
) -> None:
    with StreamingManager(engine, SchedulerConfig(max_in_flight=3)) as manager:
        with pytest.raises(error, match=told):
            manager.add_requests(prompts, params)
        assert not manager._in_flight and not manager._streams
        assert manager.result(manager.add_request([1], greedy(2))).finish_reason == "length"
    assert_all_free(engine)


def test_a_request_ends_while_the_sequences_of_many_prompts_are_made(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = engine.make_sequence, []

    def made_after_the_end_of_the_first(ids, params):
        manager.result(first, timeout=20)
        made.append(ids)
        return make(ids, params)

    with StreamingManager(engine) as manager:
        first = manager.add_request([1], greedy(4))
        monkeypatch.setattr(engine, "make_sequence", made_after_the_end_of_the_first)
        requests = manager.add_requests([[2], [3], [4]], greedy(2))
        assert [len(manager.result(request).token_ids) for request in requests] == [2, 2, 2]
    assert made == [[2], [3], [4]]
    assert_all_free(engine)


def test_the_streams_of_many_prompts_are_made_without_the_lock_that_the_worker_needs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: list[bool] = []

    def noted(*given) -> Stream:
        free.append(not manager._lock.locked())
        return new_stream(*given)

    with StreamingManager(engine) as manager:
        new_stream = manager._new_stream
        monkeypatch.setattr(manager, "_new_stream", noted)
        for request in manager.add_requests([[2], [3], [4]], greedy(2)):
            manager.result(request)
    assert free == [True] * 3


class YieldingLock:
    """A lock that, each time it is free again, lets ``call`` run."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._lock, self._call = threading.Lock(), call

    def __enter__(self) -> None:
        assert self._lock.acquire(timeout=20)

    def __exit__(self, *_error: object) -> None:
        self._lock.release()
        self._call()


def test_requests_are_added_between_the_sequences_of_many_prompts(engine: Engine) -> None:
    between: list[int] = []

    def add_another() -> None:
        if len(between) < 3 and threading.current_thread() is threading.main_thread():
            between.append(0)
            between[-1] = others.submit(manager.add_request, [9], greedy(2)).result(timeout=20)

    with StreamingManager(engine) as manager, ThreadPoolExecutor(1) as others:
        manager._making = YieldingLock(add_another)
        together = manager.add_requests([[2], [3], [4]], greedy(2))
        assert len(between) == 3
        assert all(len(manager.result(request).token_ids) == 2 for request in together + between)
    assert_all_free(engine)


def test_a_list_of_prompts_may_be_used_again_before_they_are_tokenized(engine: Engine) -> None:
    may_tokenize = threading.Event()
    with StreamingManager(engine, tokenize_workers=1) as manager:
        manager._pool.submit(may_tokenize.wait)
        prompts: list = [WORDS[:9], WORDS[3:7]]
        requests = manager.add_requests(prompts, greedy(3))
        prompts.clear()
        may_tokenize.set()
        assert [len(manager.result(request).token_ids) for request in requests] == [3, 3]
    assert_all_free(engine)


def test_an_error_of_texts_tokenized_together_reaches_each_of_their_readers(engine: Engine) -> None:
    with StreamingManager(engine, tokenize_workers=1) as manager:
        for request in manager.add_requests([WORDS, ""], greedy()):
            with pytest.raises(PromptError):
                list(manager.stream_text(request))
    assert_all_free(engine)


def test_closing_under_load_is_quick_and_releases_every_waiter(engine: Engine) -> None:
    manager = StreamingManager(engine, SchedulerConfig(max_batch_size=4), tokenize_workers=1)
    requests = [manager.add_request(WORDS[i:] if i % 2 else [1 + i], ENDLESS) for i in range(12)]
    with ThreadPoolExecutor(12) as clients:
        waits = [clients.submit(outcome, lambda r=r: list(manager.stream_text(r))) for r in requests]
        while not manager.metrics(requests[0]).token_times:
            sleep(0.001)
        start = process_time()  # which other programs do not lengthen
        manager.close()
        assert process_time() - start < 2
        for request, wait in zip(requests, waits, strict=True):
            assert isinstance(wait.result(timeout=100), ClosedError)
            with pytest.raises(ClosedError, match="the streaming manager is closed"):
                manager.result(request)
    with pytest.raises(ClosedError, match="the streaming manager is closed"):
        manager.add_request([1], greedy())
    manager.close()
    assert_all_free(engine)


def test_a_streamed_request_tells_how_often_it_was_preempted(engine: Engine) -> None:
    tight = small_engine(engine.model, tokenizer=engine.tokenizer, num_kv_blocks=8)
    with StreamingManager(tight) as manager:
        requests = [manager.add_request([1, 2, 3], greedy(40)) for _ in range(6)]
        results = [manager.result(request) for request in requests]
        assert sum(one.metrics.preemptions for one in results) == manager._scheduler.preemptions > 0


def test_unknown_and_forgotten_requests_are_refused_in_one_sentence(engine: Engine) -> None:
    with StreamingManager(engine) as manager:
        request = manager.add_request([1], greedy(2))
        manager.result(request)
        manager.forget(request)
        for ask in (manager.stream_text, manager.result, manager.metrics, manager.cancel, manager.forget):
            for unknown in (request, 99, "x", []):
                with pytest.raises(RoseError, match=re.escape(f"request {unknown!r} is unknown")):
                    ask(unknown)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"tokenize_workers": -1}, "tokenize_workers is -1"), ({"stream_interval": 0}, "stream_interval is 0")],
)
def test_bad_options_are_refused_by_name(engine: Engine, options: dict, told: str) -> None:
    with pytest.raises(RoseError, match=told):
        StreamingManager(engine, **options)


def test_an_engine_without_a_tokenizer_cannot_stream() -> None:
    with pytest.raises(RoseError, match="needs a tokenizer"):
        StreamingManager(small_engine(random_model(0), recipe="dense"))


def test_one_inbox_follows_many_requests_and_tells_each_end(engine):
    inbox = SimpleQueue()
    with StreamingManager(engine) as manager:
        ids = [manager.add_request([i + 1, 7], greedy(6), inbox) for i in range(5)]
        with pytest.raises(RoseError, match="inbox"):
            manager.stream_text(ids[0])
        texts, ended = {i: "" for i in ids}, []
        while len(ended) < len(ids):
            request_id, piece = inbox.get(timeout=100)
            if piece is None:
                ended.append(request_id)
            else:
                texts[request_id] += piece
        assert sorted(ended) == sorted(ids)
        assert all(texts[i] == manager.result(i).text for i in ids)
    assert_all_free(engine)
