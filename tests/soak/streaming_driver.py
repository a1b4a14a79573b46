"""Random operations on the streaming manager, in step with its worker: every accepted request ends once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Condition, Thread
from time import perf_counter

from rosellm.errors import OverloadError, PromptError, RoseError
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.streaming import ClosedError, StreamingManager, WorkerError
from tests.soak.fake_step import N_POSITIONS, POISON, VOCAB, call_before, fake_engine, poison, tokens_after
from tests.soak.programs import one_of
from tests.soak.scheduler_driver import Asked, FaultError, OnEngine, params_of, prompt_of

PATIENCE_S = 60.0
GLANCE_S = 2e-4
UNKNOWN = 10**6


class Letters:
    """A tokenizer of one letter a token."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def encode_many(self, texts: list[str], special: bool = True) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(self.push, token_ids))

    def stream(self) -> Letters:
        return self

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def finish(self) -> str:
        return ""


class Gate:
    """Holds the worker before every step that it begins, until it is let through or the gate is opened."""

    def __init__(self) -> None:
        self.reached = False
        self.error: Exception | None = None
        self._passes, self._is_open = 0, False
        self._changed = Condition()

    def __call__(self) -> None:
        with self._changed:
            self.reached = True
            self._changed.notify()
            assert self._changed.wait_for(lambda: self._passes or self._is_open, PATIENCE_S)
            self._passes = 0
            if self.error is not None:
                raise self.error

    def let_through(self) -> None:
        with self._changed:
            self.reached, self._passes = False, 1
            self._changed.notify()

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify()

    def await_worker(self, is_idle: Callable[[], bool]) -> None:
        """Until the worker stands here, or has nothing to do."""
        until = perf_counter() + PATIENCE_S
        with self._changed:
            while not self._changed.wait_for(lambda: self.reached, GLANCE_S) and not is_idle():
                assert perf_counter() < until, "the worker hangs"


@dataclass(eq=False)
class Client:
    """Who asked for a request, its ``whole`` text, what was read of it, and how often its end was told."""

    asked: Asked
    whole: str
    reader: Iterator[str] | None
    pieces: list[str] = field(default_factory=list)
    ends: int = 0
    has_ended: bool = False  # and the result is as it must be
    text: str | None = None  # the result's; None if there is only an error


class StreamingDriver(OnEngine):
    """The test's thread is every client; the worker takes a step when it is let."""

    weights = {
        "add": 16, "step": 60, "cancel": 5, "read": 12, "result": 3, "forget": 6, "close": 1, "fault": 1,
        "misuse": 2, "poison": 2,
    }  # fmt: skip
    axes = {
        "run_ahead": (0, 3),
        "n_blocks": (8, 12, 30),
        "prefix_cache": (False, True),
        "prefill_token_budget": (64, 7),
        "stream_interval": (1, 3),
        "max_in_flight": (None, 4),
        "tokenize_workers": (0, 1),
    }

    def open(
        self,
        run_ahead: int,
        n_blocks: int,
        prefix_cache: bool,
        prefill_token_budget: int,
        max_in_flight: int | None,
        **options,
    ) -> None:
        self.engine = fake_engine(
            run_ahead,
            num_kv_blocks=n_blocks,
            prefix_cache=prefix_cache,
            max_batch_size=4,
            tokenizer=Letters(),
        )
        self.max_in_flight = max_in_flight
        config = SchedulerConfig(prefill_token_budget=prefill_token_budget, max_in_flight=max_in_flight)
        self.new_manager = lambda: StreamingManager(self.engine, config, **options)
        call_before(self.engine.step, lambda: self.gate())
        self._start()

    # Operations.

    def add(self, a: int, b: int) -> None:
        """Text or token ids; read as a stream or from the inbox that requests share."""
        prompt = prompt_of(a, b)
        stop_at = b % 16 if a & 16 else N_POSITIONS
        asked, whole, params = _expected(prompt, params_of(a, b), stop_at)
        given = Letters().decode(prompt) if a & 4 else prompt
        inbox = self.inbox if a & 8 else None
        if self.max_in_flight is not None and self._n_in_flight() == self.max_in_flight:
            self.refused(OverloadError, lambda: self.manager.add_request(given, params, inbox))
            return
        is_too_long = len(prompt) + params.max_tokens - 1 > self.engine.num_kv_blocks * self.engine.block_size
        if is_too_long and not (a & 4 and self.manager._pool):
            self.refused(PromptError, lambda: self.manager.add_request(given, params, inbox))
            return
        request_id = self.manager.add_request(given, params, inbox)
        reader = self.manager.stream_text(request_id) if inbox is None else None
        assert request_id not in self.clients
        asked.failed = is_too_long
        self.clients[request_id] = Client(asked, whole, reader)
        self._await_worker()

    def step(self, a: int, b: int) -> bool:
        """One step of the engine, as far as the beginning of the next."""
        if not self.gate.reached:
            return False
        self.gate.let_through()
        self._await_worker()
        return True

    @one_of("clients")
    def cancel(self, request_id: int, b: int) -> None:
        """Carried out by the worker before its next step."""
        client = self.clients[request_id]
        assert self.manager.cancel(request_id) != client.has_ended
        client.asked.cancelled = True

    @one_of("clients")
    def poison(self, request_id: int, b: int) -> None:
        """The logits of a request are not finite from now on: it fails, and nobody else does."""
        self.clients[request_id].asked.failed = True
        poison(self.engine, request_id)

    @one_of("clients")
    def read(self, request_id: int, b: int) -> None:
        """What has been handed over to a client."""
        client = self.clients[request_id]
        if client.reader is None:
            self._empty_inbox()
        elif client.has_ended:
            self._read_to_the_end(client)
        else:
            n_pieces = self.manager._streams[request_id].inbox.qsize()
            client.pieces += [next(client.reader) for _ in range(n_pieces)]

    @one_of("clients")
    def result(self, request_id: int, b: int) -> None:
        client = self.clients[request_id]
        if not client.has_ended:
            self.refused(RoseError, lambda: self.manager.result(request_id, timeout=0))
        elif client.text is None:
            self.refused(RoseError, lambda: self.manager.result(request_id))
        else:
            assert self.manager.result(request_id).text == client.text

    @one_of("clients")
    def forget(self, request_id: int, b: int) -> None:
        client = self.clients[request_id]
        if not client.has_ended:
            self.refused(RoseError, lambda: self.manager.forget(request_id))
            return
        self._settle(client)
        self.manager.forget(request_id)
        del self.clients[request_id]
        self.refused(RoseError, lambda: self.manager.result(request_id))

    def close(self, a: int = 0, b: int = 0) -> None:
        """Whoever is in flight is told, and a new manager takes over."""
        self._close()
        self.refused(ClosedError, lambda: self.manager.add_request([1], params_of(0, 0)))
        self._start_again()

    def fault(self, a: int, b: int) -> bool:
        """The worker fails in a step: whoever is in flight is told, and a new manager takes over."""
        if not self.gate.reached:
            return False
        self._interrupt()
        self.gate.error = FaultError("a step is made to fail")
        self.gate.let_through()
        self.manager._worker.join(PATIENCE_S)
        self.refused(WorkerError, lambda: self.manager.add_request([1], params_of(0, 0)))
        self._start_again()
        self.seen["faults"] += 1
        return True

    def misuse(self, a: int, b: int) -> None:
        for call in (self.manager.result, self.manager.cancel, self.manager.forget, self.manager.stream_text):
            self.refused(RoseError, lambda call=call: call(UNKNOWN))
        if self.max_in_flight is None or self._n_in_flight() < self.max_in_flight:
            for bad in ([], [VOCAB], None):
                self.refused(PromptError, lambda bad=bad: self.manager.add_request(bad, params_of(a, b)))

    # What must hold.

    def check(self) -> None:
        with self.manager._lock:  # under which a request ends: both are of one moment
            ended = {i for i in self.clients if self.manager._streams[i].ended.is_set()}
            n_in_flight = len(self.manager._in_flight)
        for request_id, client in self.clients.items():
            if not client.has_ended and request_id in ended:
                client.has_ended = True
                self._judge(request_id, client)
        assert self._n_in_flight() == n_in_flight
        self.check_holders(self.manager._scheduler)

    def end(self) -> None:
        """All requests run to their end, if nobody stands in the way."""
        for _ in range(100_000):
            if not self.gate.reached:
                break
            self.apply("step", 0, 0)
        assert self._n_in_flight() == 0
        self._close()
        self._settle_all()
        self.seen["preemptions"] += self.manager._scheduler.preemptions
        self.assert_all_free()

    def stop(self) -> None:
        self.gate.open()
        self.manager.close()

    # The model.

    def _start(self) -> None:
        self.gate = Gate()
        self.manager = self.new_manager()
        self.inbox: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
        self.clients: dict[int, Client] = {}

    def _start_again(self) -> None:
        """After everybody in flight has ended, one way or another."""
        self.check()
        assert self._n_in_flight() == 0
        self._settle_all()
        self._start()

    def _close(self) -> None:
        self._interrupt()
        closing = Thread(target=self.manager.close)
        closing.start()
        self.gate.open()
        closing.join(PATIENCE_S)
        assert not closing.is_alive(), "close hangs"

    def _interrupt(self) -> None:
        """From now on requests in flight may fail."""
        for client in self.clients.values():
            client.asked.failed |= not client.has_ended

    def _await_worker(self) -> None:
        if self.manager._pool is not None:
            self.manager._pool.submit(int).result(PATIENCE_S)  # what was given to the pool before is ready
        self.gate.await_worker(self._is_idle)

    def _is_idle(self) -> bool:
        with self.manager._lock:
            return not self.manager._in_flight

    def _n_in_flight(self) -> int:
        return sum(not client.has_ended for client in self.clients.values())

    def _judge(self, request_id: int, client: Client) -> None:
        try:
            output = self.manager.result(request_id, timeout=0)
        except RoseError as error:
            assert client.asked.failed
            self.seen["failed"] += 1
            self.seen["poisoned"] += POISON in str(error)
            return
        client.asked.judge(output)
        client.text = output.text
        is_cut = output.finish_reason != client.asked.reason
        assert client.text == (Letters().decode(output.token_ids) if is_cut else client.whole)
        self.seen[output.finish_reason] += 1

    def _settle(self, client: Client) -> None:
        """A client reads the rest of a request that has ended: the text is whole, and its end came once."""
        if client.reader is None:
            while client.ends == 0:
                self._sort(*self.inbox.get(timeout=PATIENCE_S))
            self._empty_inbox()
        else:
            self._read_to_the_end(client)
        assert client.ends == 1
        assert all(client.pieces)
        text = "".join(client.pieces)
        assert text == client.text if client.text is not None else client.whole.startswith(text)

    def _settle_all(self) -> None:
        for client in self.clients.values():
            self._settle(client)

    def _read_to_the_end(self, client: Client) -> None:
        try:
            client.pieces += client.reader
        except RoseError:
            assert client.text is None
        client.ends = 1

    def _empty_inbox(self) -> None:
        while not self.inbox.empty():
            self._sort(*self.inbox.get())

    def _sort(self, request_id: int, piece: str | None) -> None:
        client = self.clients[request_id]
        assert client.ends == 0
        if piece is None:
            client.ends = 1
        else:
            client.pieces.append(piece)


def _expected(prompt: list[int], params: SamplingParams, stop_at: int) -> tuple[Asked, str, SamplingParams]:
    """A request, its whole text, and its parameters with the letters at ``stop_at``, if any, to stop at."""
    asked = Asked.of(prompt, params, tokens_after(tuple(prompt)))
    text = Letters().decode(asked.tokens[:-1] if asked.reason == "stop" else asked.tokens)
    stop = text[stop_at : stop_at + 2]
    if not stop:
        return asked, text, params
    n_before = text.index(stop)
    stopped = Asked(prompt, asked.tokens[: n_before + len(stop)], "stop")
    return stopped, text[:n_before], replace(params, stop=stop)
