"""The streaming manager: text in pieces to readers of several threads, and an end for every waiter."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from queue import SimpleQueue
from time import perf_counter

import pytest

from rosellm.errors import RoseError, SamplingError, describe
from rosellm.models.tokenizer import Tokenizer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving import streaming
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import random_model, small_config, small_engine
from tests.late_step import run_late
from tests.soak.fake_step import POISON, fake_engine, poison, tokens_after
from tests.soak.streaming_driver import Letters

WORDS = "hello world, here is some text to learn from, with words and words"
ENDLESS = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)


def greedy(max_tokens: int = 12, **others) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **others)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([WORDS], 290)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Engine:
    config = small_config(vocab_size=tokenizer.vocab_size, n_positions=1100)
    return small_engine(random_model(3, config), tokenizer=tokenizer, recipe="dense")


def assert_all_free(engine: Engine) -> None:
    engine.check_integrity()
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks


class Gate:
    """Holds the engine's decode steps back until it is opened; tells when the first one has begun."""

    def __init__(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None
    ) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        begin_decode = engine.begin_decode

        def held_back(sequences) -> int:
            self.reached.set()
            assert self._open.wait(10)
            if error is not None:
                raise error
            return begin_decode(sequences)

        monkeypatch.setattr(engine, "begin_decode", held_back)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within: a decode step has begun and does not end."""
        assert self.reached.wait(10)
        try:
            yield
        finally:
            self._open.set()


def outcome(read: Callable[[], object]) -> object:
    try:
        return read()
    except RoseError as error:
        return error


@pytest.mark.parametrize("tokenize_workers", [0, 2])
@pytest.mark.parametrize("stream_interval", [1, 5])
def test_readers_in_several_threads_get_the_text_of_an_offline_run(
    engine: Engine, tokenize_workers: int, stream_interval: int
) -> None:
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
    for (text, n_pieces, tokens), reference in zip(results, expected, strict=True):
        assert (text, tokens) == (reference.text, reference.token_ids)
        assert n_pieces <= -(-len(tokens) // stream_interval)
    assert_all_free(engine)


def test_text_comes_while_the_request_is_still_running(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(engine, monkeypatch)
    with StreamingManager(engine) as manager:
        request = manager.add_request(WORDS, greedy(3))
        with gate.held():
            assert len(next(manager.stream_text(request))) > 0
            assert len(manager.metrics(request).token_times) == 1
            with pytest.raises(RoseError, match="has not ended within 0.01 s"):
                manager.result(request, timeout=0.01)
            with pytest.raises(RoseError, match="has not ended yet"):
                manager.forget(request)
        assert len(manager.result(request).token_ids) == 3


@pytest.mark.parametrize("timeout", [math.inf, 1e10, 1e308, 10**400, threading.TIMEOUT_MAX], ids=describe)
def test_a_result_may_be_waited_for_as_long_as_one_likes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    gate = Gate(engine, monkeypatch)
    with StreamingManager(engine) as manager, ThreadPoolExecutor(1) as clients:
        request = manager.add_request(WORDS, greedy(3))
        with gate.held():
            result = clients.submit(manager.result, request, timeout)
            assert wait([result], timeout=0.05).not_done
        assert len(result.result(timeout=100).token_ids) == 3


@pytest.mark.parametrize("timeout", [math.nan, -1, -math.inf, -(10**400), True, False, "1"], ids=describe)
def test_a_timeout_that_is_no_length_of_time_is_refused(engine: Engine, timeout) -> None:
    with StreamingManager(engine) as manager:
        request = manager.add_request([1], greedy(2))
        with pytest.raises(RoseError) as refusal:
            manager.result(request, timeout)
    assert str(refusal.value) == f"timeout is {describe(timeout)}; it must be seconds, 0 or more, or None"


def test_a_timeout_of_zero_asks_without_waiting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(engine, monkeypatch)
    with StreamingManager(engine) as manager:
        request = manager.add_request([1], greedy(2))
        with gate.held(), pytest.raises(RoseError, match="has not ended within 0 s"):
            manager.result(request, timeout=0)
        manager.result(request)
        assert len(manager.result(request, timeout=0).token_ids) == 2


def test_tokens_are_timed_as_their_piece_is_handed_over(engine: Engine) -> None:
    with StreamingManager(engine, stream_interval=4) as manager:
        before = perf_counter()
        request = manager.add_request([5], greedy(10))
        metrics = manager.result(request).metrics
    times = metrics.token_times
    assert before <= metrics.arrival < times[0]
    assert [times.count(t) for t in sorted(set(times))] == [4, 4, 2]
    assert times == sorted(times) and times[-1] < perf_counter()


def test_a_reader_gets_the_first_token_at_once_then_takes_turns_and_gets_the_rest_at_the_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "READER_S", 60.0)  # no turn meanwhile
    references = OfflineScheduler(engine).run([[9, 8], [7]], greedy(12))
    with StreamingManager(engine) as manager:
        manager._turns_at = perf_counter()
        requests = [manager.add_request(prompt, greedy(12)) for prompt in ([9, 8], [7])]
        results = [manager.result(request) for request in requests]
        pieces = [list(manager.stream_text(request)) for request in requests]
    for reference, result, own in zip(references, results, pieces, strict=True):
        assert (result.text, "".join(own)) == (reference.text,) * 2
        times = result.metrics.token_times
        assert [times.count(t) for t in sorted(set(times))] == [1, 11] and len(own) <= 2


def test_an_inbox_has_every_token_s_text_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "READER_S", 60.0)
    inbox: SimpleQueue = SimpleQueue()
    with StreamingManager(engine) as manager:
        requests = [manager.add_request(prompt, greedy(12), inbox) for prompt in ([9, 8], [7])]
        times = [manager.result(request).metrics.token_times for request in requests]
    assert [len(set(own)) for own in times] == [12, 12]


def test_a_turn_also_comes_for_a_request_that_the_step_did_not_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that was preempted after its last token."""
    gate = Gate(engine, monkeypatch)
    with StreamingManager(engine) as manager:
        requests = manager.add_requests([[9, 8], [7]], greedy(4))
        with gate.held():
            skipped, stepped = (manager._stream(request) for request in requests)
            delivered = []
            monkeypatch.setattr(manager, "_deliver", lambda stream, *_: delivered.append(stream))
            for has_turn in (False, True):
                skipped.due = 0
                manager._turns, manager._turns_at = 2.0 * has_turn, perf_counter()
                monkeypatch.setattr(streaming, "READER_S", 60.0)
                manager._deliver_due([stepped.sequence])
                assert (skipped in delivered) == has_turn
            monkeypatch.undo()


@pytest.mark.parametrize("stream_interval", [1, 2, 5])
def test_several_tokens_at_once_are_handed_over_in_one_piece(engine: Engine, stream_interval: int) -> None:
    reference = OfflineScheduler(engine).run([[9, 8]], greedy(12))[0]
    run_late(engine, 3)
    with StreamingManager(engine, stream_interval=stream_interval) as manager:
        request = manager.add_request([9, 8], greedy(12))
        pieces = list(manager.stream_text(request))
        result = manager.result(request)
    assert ("".join(pieces), result.text, result.token_ids) == (reference.text,) * 2 + (reference.token_ids,)
    handed_over = [result.metrics.token_times.count(t) for t in sorted(set(result.metrics.token_times))]
    assert sum(handed_over) == 12 and max(handed_over) > stream_interval
    assert all(n >= stream_interval for n in handed_over[:-1])
    assert len(pieces) <= len(handed_over)
    assert_all_free(engine)


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("stream_interval", [1, 3])
def test_no_part_of_a_stop_string_is_ever_handed_over(
    engine: Engine, stream_interval: int, run_ahead: int
) -> None:
    whole = OfflineScheduler(engine).run([[9, 8]], greedy(40))[0].text
    if run_ahead:
        run_late(engine, run_ahead)
    with StreamingManager(engine, stream_interval=stream_interval) as manager:
        for at in range(6, 16):
            stop = whole[at : at + 5]
            request = manager.add_request([9, 8], greedy(40, stop=stop))
            text = "".join(manager.stream_text(request))
            assert text == whole.partition(stop)[0] == manager.result(request).text
            assert manager.result(request).finish_reason == "stop"


def test_text_held_back_for_a_stop_string_comes_at_the_end(engine: Engine) -> None:
    whole = OfflineScheduler(engine).run([[9, 8]], greedy(12))[0].text
    with StreamingManager(engine) as manager:
        request = manager.add_request([9, 8], greedy(12, stop=whole[-3:] + "and more"))
        assert "".join(manager.stream_text(request)) == whole
        assert manager.result(request).finish_reason == "length"


def test_a_reader_who_walks_away_holds_up_nobody(engine: Engine) -> None:
    with StreamingManager(engine, SchedulerConfig(max_batch_size=2)) as manager:
        abandoned = [manager.add_request([i], greedy(30)) for i in range(1, 4)]
        next(manager.stream_text(abandoned[0]))
        last = manager.add_request([7], greedy(5))
        assert len(manager.result(last, timeout=100).token_ids) == 5
        assert len(manager.result(abandoned[0]).token_ids) == 30
    assert_all_free(engine)


def test_a_stream_that_has_been_read_is_empty_and_ends(engine: Engine) -> None:
    with StreamingManager(engine) as manager:
        request = manager.add_request([7], greedy(5))
        assert list(manager.stream_text(request))
        assert list(manager.stream_text(request)) == []


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_a_request_whose_logits_are_not_finite_ends_its_stream_alone(run_ahead: int) -> None:
    engine = fake_engine("shared", run_ahead, num_kv_blocks=30, max_batch_size=4, tokenizer=Letters())
    prompts = [[1, 2], [3], [4, 5, 6]]
    texts = [Letters().decode(tokens_after(tuple(prompt))[:9]) for prompt in prompts]
    poison(engine, 2)
    with StreamingManager(engine) as manager:
        requests = [manager.add_request(prompt, greedy(9)) for prompt in prompts]
        with pytest.raises(SamplingError, match=POISON):
            list(manager.stream_text(requests[1]))
        with pytest.raises(SamplingError, match=POISON):
            manager.result(requests[1], 10)
        assert ["".join(manager.stream_text(r)) for r in requests[::2]] == texts[::2]
        again = manager.add_request(prompts[1], greedy(9))
        assert manager.result(again, 10).text == texts[1]
    assert_all_free(engine)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_cancelling_ends_active_and_waiting_requests(engine: Engine, run_ahead: int) -> None:
    if run_ahead:
        run_late(engine, run_ahead)
    with StreamingManager(engine, SchedulerConfig(max_batch_size=1)) as manager:
        active, waiting = (manager.add_request([i], ENDLESS) for i in (1, 2))
        pieces = manager.stream_text(active)
        read = next(pieces)
        assert manager.cancel(waiting) and manager.cancel(active)
        read += "".join(pieces)
        cut, unborn = manager.result(active), manager.result(waiting)
        assert (cut.finish_reason, unborn.finish_reason) == ("cancelled", "cancelled")
        assert cut.text == read
        assert 0 < len(cut.token_ids) == len(cut.metrics.token_times) < 1000
        assert list(manager.stream_text(waiting)) == unborn.token_ids == []
        assert not manager.cancel(active)
        assert manager.result(manager.add_request([3], greedy(4))).finish_reason == "length"
    assert_all_free(engine)


@contextmanager
def tokenization_held(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Within: no text's tokenization ends; the event tells that one has begun."""
    begun, go_on = threading.Event(), threading.Event()
    encode = engine.tokenizer.encode

    def slow_encode(text: str, special: bool = True) -> list[int]:
        begun.set()
        assert go_on.wait(10)
        return encode(text, special)

    monkeypatch.setattr(engine.tokenizer, "encode", slow_encode)
    try:
        yield begun
    finally:
        go_on.set()


def test_a_request_can_be_cancelled_while_it_is_tokenised(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StreamingManager(engine, tokenize_workers=1) as manager:
        with tokenization_held(engine, monkeypatch) as begun:
            request = manager.add_request(WORDS, ENDLESS)
            assert begun.wait(10)
            assert manager.cancel(request)
            result = manager.result(request, timeout=100)
        assert (result.finish_reason, result.token_ids, result.text) == ("cancelled", [], "")
        assert manager.result(manager.add_request(WORDS, greedy(2)), timeout=100).finish_reason == "length"
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("logprobs", "expected"), [(None, "(None, None)"), (0, "([], 0.0)"), (3, "([], 0.0)")]
)
def test_a_request_cancelled_while_it_is_tokenised_has_the_log_probabilities_of_no_tokens_if_it_asked(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, logprobs: int | None, expected: str
) -> None:
    asked = SamplingParams(max_tokens=9, logprobs=logprobs, stop="and")
    with StreamingManager(engine, tokenize_workers=1) as manager:
        with tokenization_held(engine, monkeypatch) as begun:
            request = manager.add_request(WORDS, asked)
            assert begun.wait(10) and manager.cancel(request)
            output = manager.result(request, timeout=100)
        assert output.metrics is manager.metrics(request)
    assert repr((output.logprobs, output.cumulative_logprob)) == expected
    assert (output.request_id, output.prompt_token_ids, output.text) == (request, [], "")
