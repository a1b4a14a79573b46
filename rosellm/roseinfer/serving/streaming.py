"""Streaming: a worker thread runs the scheduler and delivers the text of every request in pieces."""

from __future__ import annotations

import atexit
import sys
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX, Lock, Thread
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from rosellm.errors import OverloadError, PromptError, RoseError, SamplingError, describe
from rosellm.frozen_heap import frozen_heap
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.request import RequestMetrics, Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig, config_or_default
from rosellm.roseinfer.serving.prompts import check_prompts, each_encoded, each_made, one_each
from rosellm.roseinfer.serving.scheduler import OnlineScheduler, Scheduler
from rosellm.roseinfer.serving.stream import CoroutineInbox, Inbox, Mail, Mailbox, Reply, Stream, raise_again

ORDERS_A_STEP = 1024
WHOLE = sys.maxsize  # an interval of delivery: all text at the end


class ClosedError(RoseError):
    """The streaming manager is closed: it accepts no requests, and unfinished requests were aborted."""


class WorkerError(RoseError):
    """The streaming worker has failed, for the reason in ``__cause__``: no request is served any more."""


class StreamingManager:
    """The streaming interface of an engine: any thread adds requests, and one worker thread runs them.

    engine: an ``Engine``, ``Replicas`` or an ``LLM``. It is reserved until :meth:`close`; raises
        ``BusyError`` if it is already in use.
    config: limits of the scheduler; None means the defaults.
    tokenize_workers: number of threads that tokenize text prompts, whose errors reach the reader; 0 means
        that prompts are tokenized in the caller's thread.
    stream_interval: number of tokens of a request per delivery of text. Text is also delivered at the end.

    Coroutines read with :meth:`stream`, threads with :meth:`stream_text`; one thread can read many requests
    from an inbox. A piece of text never contains part of a stop string. Waking a thread takes time from the
    worker, so for many readers use coroutines, whose event loop is woken once per step, or an inbox. Queues
    are unbounded: a reader that stops reading delays no other reader.

    If the model produces no valid token for a request, its reader receives a ``SamplingError``. If the worker
    fails, every waiting reader receives a ``WorkerError``, and no further request is accepted. A request's
    results are kept until :meth:`forget`. Use the manager as a context manager, or call :meth:`close`;
    otherwise it is closed when the interpreter exits.
    """

    def __init__(
        self,
        engine: Any,
        config: SchedulerConfig | None = None,
        tokenize_workers: int = 0,
        stream_interval: int = 1,
    ) -> None:
        _check_whole("tokenize_workers", tokenize_workers, 0)
        _check_whole("stream_interval", stream_interval, 1)
        engine = getattr(engine, "served", engine)  # an LLM's engine
        if not hasattr(engine, "make_sequence"):
            raise RoseError(f"engine is {describe(engine)}; give an Engine or an LLM")
        if engine.tokenizer is None:
            raise RoseError("streaming needs a tokenizer, and this engine has none")
        config = config_or_default(config)
        self.engine, self.stream_interval = engine, stream_interval
        self.max_in_flight = config.max_in_flight
        self._scheduler = _scheduler_of(engine, config)
        self._pool = ThreadPoolExecutor(tokenize_workers) if tokenize_workers else None
        self._ids = count(1)  # safe in any thread
        self._making = Lock()  # guards the engine's count of sequences; the worker never waits for it
        self._lock = Lock()  # guards the fields below, down to the orders
        self._streams: dict[int, Stream] = {}
        self._in_flight: set[Stream] = set()
        self._refusal: RoseError | None = None  # why requests are refused
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Used by the worker only:
        self._running: dict[int, Stream] = {}  # by the scheduler's request id
        self._sequences: list[Sequence] | None = None  # those of the latest step
        self._stepped: list[Stream] = []
        self._mail: Mail = {}
        self._mailboxes: WeakKeyDictionary[AbstractEventLoop, Mailbox] = WeakKeyDictionary()
        engine.own(self._scheduler, "a StreamingManager")
        try:
            self._worker = Thread(target=self._work, name="rosellm-streaming", daemon=True)
            self._worker.start()
        except BaseException:
            engine.disown(self._scheduler)
            raise
        atexit.register(self.close)  # a worker killed inside torch may crash the exit

    def add_request(
        self, prompt: str | list[int], params: SamplingParams, inbox: SimpleQueue | None = None
    ) -> int:
        """Queue a prompt, as text or token ids, and return the request's id.

        inbox: a queue that receives ``(request id, piece)`` for every piece of text and ``(request id,
            None)`` at the end, so that one thread can follow many requests; :meth:`stream_text` is then not
            available. None: the text is read with :meth:`stream_text`.

        Raises ``PromptError``, ``SamplingError``, ``OverloadError``, ``ClosedError`` or ``WorkerError``.
        """
        return self._add_one(prompt, params, inbox)

    def add_requests(
        self,
        prompts: SequenceOf[str | list[int]],
        params: SamplingParams | list[SamplingParams],
        inbox: SimpleQueue | None = None,
    ) -> list[int]:
        """Queue all prompts, or none if :meth:`add_request` would raise for any; return the request ids.

        params: one for all prompts, or a list of one per prompt.
        inbox: as in :meth:`add_request`.

        Texts are tokenized on all cores, and the requests start together.
        """
        check_prompts(prompts)
        for index, prompt in enumerate(prompts):
            _check_prompt(prompt, f"prompt {index}")
        return self._add(list(prompts), one_each(params, len(prompts)), inbox)

    def stream(self, prompt: str | list[int], params: SamplingParams, interval: int | None = None) -> Reply:
        """Return the text of a prompt's completion in pieces, to be read by a coroutine with ``async for``.

        interval: number of tokens per piece; None means ``stream_interval``, and ``WHOLE`` one piece at the
            end.

        If the reader goes away, the request is cancelled. The first piece raises the errors of
        :meth:`add_request`.
        """

        def begin() -> tuple[Stream, CoroutineInbox, Callable[[], None]]:
            inbox = CoroutineInbox(self._mail)
            request_id = self._add_one(prompt, params, inbox, interval)
            return self._streams[request_id], inbox, partial(self._leave, request_id)

        return Reply(begin)

    async def complete(self, prompt: str | list[int], params: SamplingParams) -> RequestOutput:
        """Queue a prompt, wait for its end and return its output, for a coroutine.

        Cancelling the task cancels the request. Raises the errors of :meth:`add_request`, and the error with
        which the request ends.
        """
        return await self.stream(prompt, params, WHOLE).whole()

    def _leave(self, request_id: int) -> None:
        """Cancel a request that has not ended, and forget it; without effect if it is forgotten."""
        if request_id in self._streams:
            self.cancel(request_id)
            with self._lock:
                self._streams.pop(request_id, None)

    def stream_text(self, request_id: int) -> Iterator[str]:
        """Yield the request's text in pieces until the request ends; only one thread may read it.

        Raises the error with which the request ends, or ``RoseError`` if it was added with an inbox.
        """
        stream = self._stream(request_id)
        if stream.inbox_is_shared or not isinstance(stream.inbox, SimpleQueue):
            raise RoseError(f"request {request_id} sends its text to the inbox it was added with")
        return self._read(stream, stream.inbox)

    def result(self, request_id: int, timeout: float | None = None) -> RequestOutput:
        """Wait until the request has ended; return its output or raise its error.

        timeout: maximum wait in seconds, after which ``RoseError`` is raised; None means no limit.
        """
        longest = _longest_wait(timeout)
        stream = self._stream(request_id)
        if not stream.ended.wait(longest):
            raise RoseError(f"request {request_id} has not ended within {timeout} s")
        return stream.output()

    def metrics(self, request_id: int) -> RequestMetrics:
        """Return the request's arrival time and the delivery times of its tokens so far."""
        return self._stream(request_id).metrics

    def cancel(self, request_id: int) -> bool:
        """Cancel a request, whose stream ends soon after; return False if it has already ended."""
        stream = self._stream(request_id)
        if stream.ended.is_set():
            return False
        if not stream.cancelled:
            stream.cancelled = True
            self._orders.put(partial(self._cancel, stream))
        return True

    def forget(self, request_id: int) -> None:
        """Drop the results of an ended request; raise ``RoseError`` if it has not ended."""
        stream = self._stream(request_id)
        if not stream.ended.is_set():
            raise RoseError(f"request {request_id} has not ended yet")
        with self._lock:
            self._streams.pop(request_id, None)

    def close(self) -> None:
        """Abort all requests and stop the worker, which finishes at most its current step.

        Every waiting reader receives a ``ClosedError``. May be called repeatedly, and from several threads.
        """
        with self._lock:
            self._refusal = self._refusal or _closed()
        self._orders.put(None)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._worker.join()

    @property
    def is_open(self) -> bool:
        """Whether requests are accepted; False once the manager is closed or its worker has failed."""
        return self._refusal is None

    @property
    def n_in_flight(self) -> int:
        """The number of requests that have not ended."""
        return len(self._in_flight)

    def __enter__(self) -> StreamingManager:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _add_one(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        inbox: Inbox | None,
        interval: int | None = None,
    ) -> int:
        _check_prompt(prompt)
        if not isinstance(params, SamplingParams):
            raise SamplingError(f"params is {describe(params)}; give SamplingParams")
        return self._add([prompt], [params], inbox, interval)[0]

    def _add(
        self,
        prompts: list[str | list[int]],
        params: list[SamplingParams],
        inbox: Inbox | None,
        interval: int | None = None,
    ) -> list[int]:
        arrival = perf_counter()
        self.engine.check_process()
        if not isinstance(inbox, (SimpleQueue, CoroutineInbox, type(None))):
            raise RoseError(f"inbox is {describe(inbox)}; give a queue.SimpleQueue, which is never full")
        pool = self._pool if any(isinstance(prompt, str) for prompt in prompts) else None
        with self._lock:
            self._check_room(len(prompts))
        sequences = self._make_sequences(prompts, params) if pool is None else []
        interval = self.stream_interval if interval is None else interval
        streams = [self._new_stream(own, arrival, inbox, interval) for own in params]
        with self._lock:
            self._check_room(len(prompts))
            if pool is not None:
                pool.submit(self._prepare, streams, prompts, params)
            self._streams.update((stream.request_id, stream) for stream in streams)
            self._in_flight.update(streams)
        if pool is None:
            self._orders.put(partial(self._start, streams, sequences))
        return [stream.request_id for stream in streams]

    def _check_room(self, n_new: int) -> None:
        """Raise if ``n_new`` more requests cannot be accepted; the caller holds the lock."""
        if self._refusal is not None:
            raise_again(self._refusal)
        if self.max_in_flight is not None and len(self._in_flight) + n_new > self.max_in_flight:
            raise OverloadError(
                f"{len(self._in_flight)} requests are in flight, {n_new} more are requested, and "
                f"max_in_flight is {self.max_in_flight}; try again later"
            )

    def _new_stream(
        self, params: SamplingParams, arrival: float, inbox: Inbox | None, interval: int
    ) -> Stream:
        is_shared, metrics = isinstance(inbox, SimpleQueue), RequestMetrics(arrival)
        return Stream(next(self._ids), params, metrics, inbox or SimpleQueue(), is_shared, interval=interval)

    def _make_sequences(self, prompts: list[str | list[int]], params: list[SamplingParams]) -> list[Sequence]:
        return each_made(self._make_sequence, each_encoded(self.engine.encode_many, prompts), params)

    def _make_sequence(self, ids: list[int], params: SamplingParams) -> Sequence:
        with self._making:
            return self.engine.make_sequence(ids, params)

    def _prepare(
        self, streams: list[Stream], prompts: list[str | list[int]], params: list[SamplingParams]
    ) -> None:
        """Tokenize the prompts in a thread of the pool, then order the worker to start the requests."""
        try:
            self._orders.put(partial(self._start, streams, self._make_sequences(prompts, params)))
        except BaseException as error:  # even a tokenizer's panic must reach the readers
            self._orders.put(partial(self._end_all, streams, error))

    def _stream(self, request_id: int) -> Stream:
        try:
            return self._streams[request_id]
        except (KeyError, TypeError):
            raise RoseError(f"request {describe(request_id)} is unknown: never added, or forgotten") from None

    def _read(self, stream: Stream, inbox: SimpleQueue) -> Iterator[str]:
        while (piece := inbox.get()[1]) is not None:
            yield piece
        inbox.put((stream.request_id, None))  # a second read also finds the end
        stream.output()

    # Runs in the worker thread.

    def _work(self) -> None:
        try:
            with frozen_heap(), self.engine.selected():
                self._serve()
            self._scheduler.cancel_all()
        except BaseException as error:
            failure = WorkerError(f"the streaming worker has failed ({describe(error)}); make a new manager")
            failure.__cause__ = error
            with self._lock:
                self._refusal = failure
            with suppress(BaseException):  # a lost device cannot free anything
                self._scheduler.cancel_all()
        self.engine.disown(self._scheduler)
        with self._lock:
            rest, reason = list(self._in_flight), self._refusal or _closed()
        self._end_all(rest, reason)
        self._send_mail()
        atexit.unregister(self.close)

    def _serve(self) -> None:
        while True:
            for order in self._take_orders():
                if order is None:
                    return
                order()
            self._deliver_due(self._scheduler.step())
            self._send_mail()

    def _send_mail(self) -> None:
        while self._mail:
            loop, pieces = self._mail.popitem()
            self._mailboxes.setdefault(loop, Mailbox()).put_all(loop, pieces)

    def _take_orders(self) -> Iterator[Callable[[], None] | None]:
        """Yield at most ``ORDERS_A_STEP`` incoming orders; wait for the first if no request is running.

        One order may start any number of requests that were added together.
        """
        wait = not self._scheduler.has_unfinished
        for _ in range(ORDERS_A_STEP):
            try:
                yield self._orders.get(block=wait)
            except Empty:
                return
            wait = False

    def _start(self, streams: list[Stream], sequences: list[Sequence]) -> None:
        for stream, sequence in zip(streams, sequences, strict=True):
            if not stream.ended.is_set():  # or else it was cancelled while being tokenized
                stream.start(sequence, self.engine.tokenizer)
                self._running[self._scheduler.submit(sequence)] = stream

    def _deliver_due(self, sequences: list[Sequence]) -> None:
        """Finish the requests that ended in a step, and deliver due text.

        sequences: the sequences that received tokens or failed in the step.
        """
        if sequences is not self._sequences:  # usually the same list step after step
            self._sequences, self._stepped = sequences, [self._running[s.request_id] for s in sequences]
        now = perf_counter()
        for stream in self._stepped:
            if stream.sequence.finish_reason is not None:
                self._finish(stream)
            elif len(stream.tokens) >= stream.due:
                self._deliver(stream, stream.text.take(), now)

    def _deliver(self, stream: Stream, piece: str, now: float) -> None:
        """Put ``piece``, the text of all undelivered tokens, into the inbox; record the time ``now``."""
        length = len(stream.tokens)
        stream.metrics.token_times += (now,) * (length - stream.n_delivered)
        stream.n_delivered, stream.due = length, length + stream.interval
        if piece:
            stream.inbox.put((stream.request_id, piece))

    def _finish(self, stream: Stream) -> None:
        """Deliver the rest of an ended request's text, and its result."""
        sequence = stream.sequence
        self._deliver(stream, stream.text.take_last(sequence.n_without_text), perf_counter())
        del self._running[sequence.request_id]
        output = self._scheduler.take_result(sequence.request_id)
        stream.metrics.preemptions = output.metrics.preemptions
        if output.error is not None:
            return self._end(stream, SamplingError(output.error))
        output.request_id, output.metrics = stream.request_id, stream.metrics  # cheaper than a copy
        self._end(stream, output)

    def _cancel(self, stream: Stream) -> None:
        if stream.ended.is_set():
            return
        if not stream.has_started:
            return self._end(stream, stream.cancel_unstarted(self.engine.tokenizer))
        self._scheduler.cancel(stream.sequence.request_id)
        self._finish(stream)

    def _end_all(self, streams: list[Stream], reason: BaseException) -> None:
        for stream in streams:
            self._end(stream, reason)

    def _end(self, stream: Stream, outcome: RequestOutput | BaseException) -> None:
        """End the stream and wake its readers; only the first call has an effect."""
        if stream.ended.is_set():
            return
        with self._lock:
            self._in_flight.discard(stream)
            stream.outcome = outcome
            stream.ended.set()
        stream.inbox.put((stream.request_id, None))


def _closed() -> ClosedError:
    return ClosedError("the streaming manager is closed")


def _check_prompt(prompt: object, name: str = "the prompt") -> None:
    if not isinstance(prompt, (str, list)):
        raise PromptError(f"{name} is {describe(prompt)}; give text or a list of token ids")


def _check_whole(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise RoseError(f"{name} is {describe(value)}; it must be a whole number, {low} or more")


def _longest_wait(timeout: float | None) -> float | None:
    """Return ``timeout`` in seconds, or None (no limit) if it is None or exceeds ``TIMEOUT_MAX``.

    Raises ``RoseError`` if it is invalid.
    """
    if timeout is None:
        return None
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout >= 0:
        raise RoseError(f"timeout is {describe(timeout)}; it must be seconds, 0 or more, or None")
    return timeout if timeout <= TIMEOUT_MAX else None


def _scheduler_of(engine: Any, config: SchedulerConfig) -> Scheduler:
    return OnlineScheduler(engine, config) if isinstance(engine, Engine) else engine.scheduler(config)
