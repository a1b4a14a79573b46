"""Streams that are cancelled, closed, or fail: every request ends exactly once."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from time import process_time

import pytest

from rosellm.errors import PromptError, RoseError, SamplingError
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.streaming import ClosedError, StreamingManager, WorkerError
from rosellm.roseinfer.text import IncrementalText, LateText
from tests.roseinfer.serving.common import ENDLESS, WORDS, assert_all_free, greedy, outcome
from tests.soak.fake_step import POISON, fake_engine, poison, tokens_after
from tests.soak.streaming_driver import Letters

ROOT = Path(__file__).parents[3]
WAIT_S = 100.0  # what nothing here comes near, unless it hangs


def test_a_request_whose_logits_are_not_finite_ends_its_stream_alone():
    engine = fake_engine(3, num_kv_blocks=30, max_batch_size=4, tokenizer=Letters())
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


@pytest.mark.parametrize(("logprobs", "expected"), [(None, (None, None)), (3, ([], 0.0))])
def test_a_request_cancelled_before_it_has_begun_has_no_tokens(engine, monkeypatch, logprobs, expected):
    params = SamplingParams(max_tokens=9, logprobs=logprobs, stop="and")
    with StreamingManager(engine, SchedulerConfig(max_batch_size=1), tokenize_workers=1) as manager:
        manager.add_request([1], ENDLESS)
        waiting = manager.add_request([2, 3], params)
        with tokenization_held(engine, monkeypatch) as begun:
            tokenizing = manager.add_request(WORDS, params)
            assert begun.wait(10) and manager.cancel(tokenizing) and manager.cancel(waiting)
            outputs = [manager.result(request, timeout=100) for request in (waiting, tokenizing)]
        assert outputs[1].metrics is manager.metrics(tokenizing)
    for output, prompt in zip(outputs, ([2, 3], []), strict=True):
        assert (output.logprobs, output.cumulative_logprob) == expected
        assert (output.prompt_token_ids, output.token_ids, output.text) == (prompt, [], "")
        assert output.finish_reason == "cancelled"
    assert_all_free(engine)


def test_a_client_that_cancels_without_pause_holds_up_nobody(engine):
    stop, flooding = threading.Event(), threading.Event()
    with StreamingManager(engine) as manager, ThreadPoolExecutor(1) as threads:
        manager.add_request([1], ENDLESS)

        def flood() -> None:
            while not stop.is_set():
                request = manager.add_request([2], ENDLESS)
                while manager.cancel(request):
                    flooding.set()

        flooded = threads.submit(flood)
        assert flooding.wait(WAIT_S)
        try:
            assert len(manager.result(manager.add_request([3], greedy(5)), WAIT_S).token_ids) == 5
        finally:
            stop.set()
        flooded.result(WAIT_S)
    assert_all_free(engine)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


def close_within_a_step(manager: StreamingManager) -> None:
    """By the processor's seconds, which other programs do not lengthen."""
    start = process_time()
    manager.close()
    assert process_time() - start < 2


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
    close_within_a_step(manager)
    accepted = [request for client in clients for request in client.result(WAIT_S)]
    ends = [outcome(lambda r=r: manager.result(r, WAIT_S)) for r in accepted]
    assert any(isinstance(end, ClosedError) for end in ends)
    assert all(isinstance(end, ClosedError) or end.finish_reason == "length" for end in ends)
    assert_all_free(engine)


def test_close_ends_requests_whose_prompts_are_being_tokenized(engine, threads, monkeypatch):
    with tokenization_held(engine, monkeypatch) as begun:
        manager = StreamingManager(engine, tokenize_workers=1)
        requests = [manager.add_request(WORDS[:n], greedy(3)) for n in range(4, 40, 5)]
        waits = [threads.submit(outcome, lambda r=r: list(manager.stream_text(r))) for r in requests]
        assert begun.wait(WAIT_S)
        close_within_a_step(manager)
        assert all(isinstance(wait.result(WAIT_S), ClosedError) for wait in waits)


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
    with pytest.raises(WorkerError, match="worker has failed"):
        manager.add_request([1], greedy(1))


def test_a_failure_while_closing_reaches_every_waiter(engine, monkeypatch):
    manager = StreamingManager(engine)
    request = manager.add_request([1], ENDLESS)
    next(manager.stream_text(request))
    break_at("release", engine, RuntimeError("device lost"), monkeypatch)
    manager.close()
    with pytest.raises(WorkerError, match="device lost"):
        manager.result(request, WAIT_S)


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
    assert_all_free(engine)


LEFT_OPEN = """
import sys
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.streaming import StreamingManager
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import random_model, small_config, small_engine

tokenizer = train_tokenizer(["some words and more words to learn from"], 270)
config = small_config(vocab_size=tokenizer.vocab_size, n_positions=40000)
engine = small_engine(random_model(3, config), tokenizer=tokenizer, recipe="dense", num_kv_blocks=30000)
endless = SamplingParams(temperature=0.0, max_tokens=30000, ignore_eos=True)
manager = StreamingManager(engine, tokenize_workers=1)
requests = [manager.add_request("some words", endless) for _ in range(4)]
next(manager.stream_text(requests[0]))
sys.exit(3)
"""


@pytest.mark.slow
def test_the_interpreter_s_exit_closes_a_manager_left_open():
    left = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (left.returncode, left.stdout, left.stderr) == (3, "", "")
