"""The streaming manager: text in pieces to readers of several threads."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from time import perf_counter

import pytest

from rosellm.errors import OverloadError, PromptError, RoseError, SamplingError
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving import streaming
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager
from tests.helpers import random_model, small_engine
from tests.roseinfer.serving.common import WORDS, Calls, assert_all_free, greedy
from tests.soak.fake_step import call_before
from tests.soak.streaming_driver import Gate


@pytest.mark.parametrize(("tokenize_workers", "stream_interval"), [(0, 1), (2, 5)])
def test_readers_in_several_threads_get_the_text_of_an_offline_run(engine, tokenize_workers, stream_interval):
    prompts = [WORDS[i : i + 4 + i % 7] for i in range(12)]
    params = [greedy(3 + 4 * i % 23) for i in range(12)]
    tokenizer = engine.tokenizer
    expected = OfflineScheduler(engine).run([tokenizer.encode(p) for p in prompts], params)
    config = SchedulerConfig(max_batch_size=5)
    with (
        StreamingManager(engine, config, tokenize_workers, stream_interval) as manager,
        ThreadPoolExecutor(6) as clients,
    ):

        def client(i: int) -> tuple[str, int, list[int]]:
            prompt = prompts[i] if i % 3 else tokenizer.encode(prompts[i])
            request = manager.add_request(prompt, params[i])
            pieces = list(manager.stream_text(request))
            result = manager.result(request)
            assert all(pieces)
            assert result.request_id == request
            assert result.text == "".join(pieces)
            assert result.metrics is manager.metrics(request)
            return result.text, len(pieces), result.token_ids

        results = list(clients.map(client, range(12)))
        assert not manager._readers
    for (text, n_pieces, tokens), reference in zip(results, expected, strict=True):
        assert (text, tokens) == (reference.text, reference.token_ids)
        assert n_pieces <= -(-len(tokens) // stream_interval)
    assert_all_free(engine)


def test_text_comes_while_the_request_runs_and_its_end_is_waited_for_as_long_as_one_likes(engine):
    gate = Gate()
    call_before(engine.step, gate)
    with StreamingManager(engine) as manager, ThreadPoolExecutor(3) as clients:
        request = manager.add_request(WORDS, greedy(3))
        gate.await_worker(lambda: False)
        gate.let_through()  # the prefill
        gate.await_worker(lambda: False)
        try:
            assert len(next(manager.stream_text(request))) > 0
            assert len(manager.metrics(request).token_times) == 1
            for timeout in (0, 0.01):
                with pytest.raises(RoseError, match=f"has not ended within {timeout} s"):
                    manager.result(request, timeout)
            for bad in (math.nan, -1, True):
                with pytest.raises(RoseError, match=f"timeout is {bad}"):
                    manager.result(request, bad)
            long = math.inf, 10**400, threading.TIMEOUT_MAX
            results = [clients.submit(manager.result, request, timeout) for timeout in long]
            assert not wait(results, timeout=0.05).done
        finally:
            gate.open()
        assert [len(result.result(timeout=100).token_ids) for result in results] == [3] * 3


def test_readers_of_single_requests_take_turns_and_an_inbox_gets_every_token_at_once(engine, monkeypatch):
    """A reader gets the first token at once, and the rest in its turn or at the end."""
    monkeypatch.setattr(streaming, "READER_S", 60.0)  # no turn meanwhile
    inbox: SimpleQueue = SimpleQueue()
    reference = OfflineScheduler(engine).run([[9, 8]], greedy(12))[0]
    with StreamingManager(engine) as manager:
        manager._turns_at = perf_counter()
        requests = [manager.add_request([9, 8], greedy(12), to) for to in (None, None, inbox)]
        results = [manager.result(request) for request in requests]
        pieces = [list(manager.stream_text(request)) for request in requests[:2]]
        with pytest.raises(RoseError, match="inbox"):
            manager.stream_text(requests[2])
    assert [one.text for one in results] == [reference.text] * 3
    assert ["".join(own) for own in pieces] == [reference.text] * 2 and max(map(len, pieces)) <= 2
    times = [one.metrics.token_times for one in results]
    assert [[own.count(t) for t in sorted(set(own))] for own in times] == [[1, 11]] * 2 + [[1] * 12]


@pytest.mark.parametrize("tokenize_workers", [0, 2])
def test_requests_added_together_get_what_they_get_one_by_one_of_one_prefill(
    engine, monkeypatch, tokenize_workers
):
    prompts: list = [WORDS[:9], [5, 6], WORDS[:9], WORDS[3:7]]
    params = [greedy(3 + i) for i in range(4)]
    calls = Calls(engine, monkeypatch)
    with StreamingManager(engine, tokenize_workers=tokenize_workers) as manager:
        alone = [manager.result(manager.add_request(*one)) for one in zip(prompts, params, strict=True)]
        calls.log.clear()
        together = manager.add_requests(prompts, params)
        read = ["".join(manager.stream_text(request)) for request in together]
        assert [manager.result(request) for request in together] == alone
        assert read == [one.text for one in alone]
        assert list(map(sorted, calls.of("prefill"))) == [sorted(together)] or tokenize_workers
        same = manager.add_requests(tuple(prompts), greedy(5))  # one for all
        assert [len(manager.result(request).token_ids) for request in same] == [5] * 4
        assert manager.add_requests([], greedy()) == []
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("prompts", "params", "error", "told"),
    [
        (["a", 7], greedy(), PromptError, "prompt 1 is 7"),
        ([[1], [2], []], greedy(), PromptError, "prompt 2: "),
        ([[1], [2]], [greedy()], SamplingError, "1 SamplingParams for 2 prompts"),
        ([[1], [2]], SamplingParams(n=3), SamplingError, "n is 3"),
        ([[1]] * 4, greedy(), OverloadError, "0 requests .*, 4 more .* max_in_flight is 3"),
    ],
)
def test_of_requests_added_together_none_is_queued_if_one_is_refused(engine, prompts, params, error, told):
    with StreamingManager(engine, SchedulerConfig(max_in_flight=3)) as manager:
        with pytest.raises(error, match=told):
            manager.add_requests(prompts, params)
        assert not manager._in_flight and not manager._streams
        assert manager.result(manager.add_request([1], greedy(2))).finish_reason == "length"
    assert_all_free(engine)


def test_a_request_ends_while_the_sequences_of_many_prompts_are_made(engine, monkeypatch):
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


def test_a_list_of_prompts_may_be_used_again_before_they_are_tokenized(engine):
    may_tokenize = threading.Event()
    with StreamingManager(engine, tokenize_workers=1) as manager:
        manager._pool.submit(may_tokenize.wait)
        prompts: list = [WORDS[:9], WORDS[3:7]]
        requests = manager.add_requests(prompts, greedy(3))
        prompts.clear()
        may_tokenize.set()
        assert [len(manager.result(request).token_ids) for request in requests] == [3, 3]
    assert_all_free(engine)


def test_an_engine_without_a_tokenizer_cannot_stream():
    with pytest.raises(RoseError, match="needs a tokenizer"):
        StreamingManager(small_engine(random_model(0), recipe="dense"))
