"""The streaming manager: every request's text comes in pieces to its reader, and ends exactly once."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import islice
from queue import SimpleQueue
from time import process_time

import pytest

from rosellm.errors import OverloadError, PromptError, RoseError, SamplingError
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.streaming import ClosedError, StreamingManager, WorkerError
from rosellm.roseinfer.text import IncrementalText, LateText
from tests.helpers import random_model, small_engine
from tests.roseinfer.serving.common import ENDLESS, WORDS, Calls, assert_all_free, greedy, outcome
from tests.soak.fake_step import POISON, Letters, call_before, fake_engine, poison, tokens_after
from tests.soak.scheduler_driver import Asked, params_of, prompt_of

WAIT_S = 100.0  # what nothing here comes near, unless it hangs
BYTE = 256


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


# Text.


class Client:
    """Asks for requests at random and reads each to its end, or cancels it; what it gets is as it must be."""

    def __init__(self, manager: StreamingManager, seed: int) -> None:
        self.manager, self.draw = manager, random.Random(seed)

    def ends(self, n_requests: int) -> list[str]:
        return [
            self.end_of_one(self.draw.randrange(BYTE), self.draw.randrange(BYTE)) for _ in range(n_requests)
        ]

    def end_of_one(self, a: int, b: int) -> str:
        asked, text, params = expected(prompt_of(a, b), params_of(a, b), self.draw.randrange(40))
        asked.cancelled = b % 4 == 0
        prompt = Letters().decode(asked.prompt) if a % 2 else asked.prompt
        request = self.manager.add_request(prompt, params)
        pieces = self.manager.stream_text(request)
        read: list[str] = []
        try:
            if asked.cancelled:
                read += islice(pieces, b % 3)
                self.manager.cancel(request)
            read += pieces
            output = self.manager.result(request, WAIT_S)
        except SamplingError as error:
            assert POISON in str(error) and text.startswith("".join(read))
            return "poisoned"
        if a % 2 and asked.cancelled and not output.prompt_token_ids:
            asked.prompt = []  # it was not tokenized yet
        asked.judge(output)
        assert output.request_id == request and output.metrics is self.manager.metrics(request)
        is_cut = output.finish_reason != asked.reason
        assert all(read) and "".join(read) == output.text
        assert output.text == (Letters().decode(output.token_ids) if is_cut else text)
        assert is_cut or len(read) <= -(-len(output.token_ids) // self.manager.stream_interval)
        self.manager.forget(request)
        return output.finish_reason


def expected(prompt: list[int], params: SamplingParams, stop_at: int) -> tuple[Asked, str, SamplingParams]:
    """A request, its whole text, and its parameters with the letters at ``stop_at``, if any, to stop at."""
    asked = Asked.of(prompt, params, tokens_after(tuple(prompt)), 10**6)
    text = Letters().decode(asked.tokens[:-1] if asked.reason == "stop" else asked.tokens)
    stop = text[stop_at : stop_at + 2]
    if not stop:
        return asked, text, params
    n_before = text.index(stop)
    stopped = Asked(prompt, asked.tokens[: n_before + len(stop)], "stop")
    return stopped, text[:n_before], replace(params, stop=stop)


@pytest.mark.parametrize(("run_ahead", "tokenize_workers", "stream_interval"), [(0, 0, 1), (3, 2, 5)])
def test_every_client_of_many_threads_gets_the_text_of_its_requests_whoever_cancels_or_fails(
    threads, run_ahead, tokenize_workers, stream_interval
):
    options = {"num_kv_blocks": 14, "max_batch_size": 5, "prefix_cache": True}
    engine = fake_engine(run_ahead, **options, tokenizer=Letters())
    config = SchedulerConfig(prefill_token_budget=7)
    with StreamingManager(engine, config, tokenize_workers, stream_interval) as manager:
        for request_id in range(10, 130, 20):
            poison(engine, request_id)
        clients = [Client(manager, seed) for seed in range(8)]
        ends = Counter(end for own in threads.map(lambda client: client.ends(20), clients) for end in own)
        assert ends.keys() == {"length", "stop", "cancelled", "poisoned"} and ends["poisoned"] <= 6
        assert manager._scheduler.preemptions > 0 and not manager._in_flight
    assert_all_free(engine)


def test_text_comes_while_the_request_runs_and_its_end_is_waited_for_as_long_as_one_likes(engine, threads):
    may_begin = threading.Semaphore(1)  # the prefill
    call_before(engine.step, may_begin.acquire)
    with StreamingManager(engine) as manager:
        request = manager.add_request(WORDS, greedy(3))
        try:
            assert len(next(manager.stream_text(request))) > 0
            assert len(manager.metrics(request).token_times) == 1
            with pytest.raises(RoseError, match="has not ended within 0.01 s"):
                manager.result(request, 0.01)
            long = math.inf, 10**400, threading.TIMEOUT_MAX
            results = [threads.submit(manager.result, request, timeout) for timeout in long]
            assert not wait(results, timeout=0.05).done
        finally:
            may_begin.release(9)
        assert [len(result.result(timeout=WAIT_S).token_ids) for result in results] == [3] * 3


# Requests added together.


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
        assert [manager.result(request) for request in together] == alone
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


def test_what_cannot_be_streamed_is_refused(engine):
    with pytest.raises(RoseError, match="needs a tokenizer"):
        StreamingManager(small_engine(random_model(0), recipe="dense"))
    with StreamingManager(engine) as manager:
        running = manager.add_request([1], ENDLESS)
        with pytest.raises(RoseError, match="has not ended yet"):
            manager.forget(running)


# Ends.


def test_close_ends_every_request_of_clients_that_go_on_submitting(engine, threads):
    manager = StreamingManager(engine, SchedulerConfig(max_batch_size=8), tokenize_workers=2)
    under_way = threading.Semaphore(0)

    def submit() -> list[int]:
        accepted = []
        while True:
            try:
                accepted.append(manager.add_request(WORDS, greedy(5)))
            except ClosedError:
                return accepted
            under_way.release()

    clients = [threads.submit(submit) for _ in range(8)]
    for _ in range(50):
        assert under_way.acquire(timeout=WAIT_S)
    start = process_time()  # which other programs do not lengthen
    manager.close()
    assert process_time() - start < 2
    accepted = [request for client in clients for request in client.result(WAIT_S)]
    ends = [outcome(lambda r=r: manager.result(r, WAIT_S)) for r in accepted]
    assert any(isinstance(end, ClosedError) for end in ends)
    assert all(isinstance(end, ClosedError) or end.finish_reason == "length" for end in ends)
    assert_all_free(engine)


class Unprintable(RuntimeError):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Panic(BaseException):
    """As the tokenizers library raises it: no Exception."""


def break_at(where: str, engine: Engine, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object, **_options: object) -> None:
        raise error

    owners = {"push": IncrementalText, "take": LateText, "collect": engine.step}
    monkeypatch.setattr(owners.get(where, engine), where, broken)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("begin_prefill", RuntimeError("device lost")),
        ("begin_decode", PromptError("poisoned")),
        ("collect", MemoryError()),
        ("release", KeyboardInterrupt()),
        ("push", SystemExit(3)),
        ("take", Unprintable()),
    ],
)
def test_whatever_breaks_in_the_worker_reaches_all_who_wait_and_the_manager_is_dead(
    engine, threads, where, error, monkeypatch
):
    break_at(where, engine, error, monkeypatch)
    params = greedy(4, stop="never said" if where == "push" else None)
    inbox: SimpleQueue = SimpleQueue()
    with StreamingManager(engine, SchedulerConfig(max_batch_size=2)) as manager:
        read = manager.add_requests([[1]] * 3, params)
        try:
            followed = manager.add_requests([[1]] * 3, params, inbox)
        except WorkerError:  # it may be dead already
            followed = []
        waits = [threads.submit(outcome, lambda r=r: manager.result(r)) for r in read + followed]
        waits += [threads.submit(outcome, lambda r=r: list(manager.stream_text(r))) for r in read]
        ends = [wait.result(WAIT_S) for wait in waits]
        assert all(isinstance(end, WorkerError) and end.__cause__ is error for end in ends)
        assert sorted(inbox.get(timeout=WAIT_S) for _ in followed) == [(i, None) for i in followed]
    with pytest.raises(WorkerError, match=f"failed .*{type(error).__name__}.*make a new") as told:
        manager.add_request([1], greedy(1))
    assert told.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("no table"), Panic("in Rust")])
def test_an_error_of_a_tokenizer_thread_reaches_its_reader_and_no_other(engine, error, monkeypatch):
    encode = engine.tokenizer.encode

    def broken(text: str, special: bool = True) -> list[int]:
        if text == "bad":
            raise error
        return encode(text, special)

    monkeypatch.setattr(engine.tokenizer, "encode", broken)
    with StreamingManager(engine, tokenize_workers=2) as manager:
        bad, good = (manager.add_request(text, greedy(3)) for text in ("bad", WORDS))
        for read in (lambda: manager.result(bad, WAIT_S), lambda: list(manager.stream_text(bad))):
            with pytest.raises(RoseError, match=f"request {bad} failed .*{type(error).__name__}") as told:
                read()
        assert told.value.__cause__ is error
        assert manager.result(good, WAIT_S).finish_reason == "length"


LEFT_OPEN = """
import sys
from rosellm import LLM, SamplingParams
from rosellm.roseinfer.serving.streaming import StreamingManager

manager = StreamingManager(LLM(device="cpu"), tokenize_workers=1)
long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
requests = [manager.add_request("some words", long) for _ in range(4)]
next(manager.stream_text(requests[0]))
sys.exit(3)
"""


@pytest.mark.slow
def test_the_interpreter_s_exit_closes_a_manager_left_open():
    left = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=60)
    assert (left.returncode, left.stdout, left.stderr) == (3, "", "")
