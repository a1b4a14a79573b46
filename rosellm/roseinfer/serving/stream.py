"""A streamed request, and the inboxes that receive its text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Lock
from typing import NoReturn

from rosellm.errors import RoseError, describe
from rosellm.models.loading import AnyTokenizer
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.request import RequestMetrics, Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.text import IncrementalText, LateText


class Mailbox:
    """Pieces of text for the coroutines of one event loop, which is woken at most once per step.

    Pieces that arrive while the loop is busy wait, and a coroutine receives all of its own at once.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._new: list[tuple[CoroutineInbox, str | None]] = []
        self._is_awaited = False  # a callback that will take the new pieces is scheduled

    def put_all(
        self, loop: asyncio.AbstractEventLoop, pieces: list[tuple[CoroutineInbox, str | None]]
    ) -> None:
        """Add the pieces of a step, from the worker's thread; ``loop`` is not kept, so it can be freed."""
        if loop.is_closed():  # there is no reader
            return self._new.clear()
        with self._lock:
            self._new += pieces
            if self._is_awaited:
                return
            self._is_awaited = True
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            new, self._new, self._is_awaited = self._new, [], False
        for inbox, piece in new:
            inbox.receive(piece)


class CoroutineInbox:
    """The inbox of one request, read by a coroutine of the event loop that runs when it is made.

    mail: collects, by event loop, the pieces that the worker puts into inboxes during a step.
    """

    def __init__(self, mail: Mail) -> None:
        self._mail, self._loop = mail, asyncio.get_running_loop()
        self._pieces: list[str] = []
        self._has_ended = False
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: tuple[int, str | None]) -> None:
        """Note a piece in ``mail``; called by the worker."""
        self._mail.setdefault(self._loop, []).append((self, item[1]))

    def receive(self, piece: str | None) -> None:
        """Take a piece, or the end (None), and wake the reader; called by the event loop."""
        if piece is None:
            self._has_ended = True
        else:
            self._pieces.append(piece)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> str | None:
        """Return all text that has arrived since the last call, or None at the end."""
        while not self._pieces and not self._has_ended:
            self._reader = self._loop.create_future()
            await self._reader
        if not self._pieces:
            return None
        text = "".join(self._pieces)
        self._pieces.clear()
        return text


# For each event loop, the pieces of text of one step for its coroutines.
Mail = dict[asyncio.AbstractEventLoop, list[tuple[CoroutineInbox, str | None]]]
Inbox = SimpleQueue | CoroutineInbox


@dataclass(slots=True, eq=False)
class Stream:
    """A request, shared by its client and the worker thread.

    metrics: the times of the request's arrival and of its delivered tokens.
    inbox: receives ``(request id, piece)`` for each piece of text, and ``(request id, None)`` at the end.
    inbox_is_shared: whether the client provided the inbox, which may then receive other requests' text, too.
    outcome: the output of the ended request, or its error.

    Only the worker uses the fields that :meth:`start` sets:

    sequence, tokens, text: the request in the engine, its tokens, and the text decoded from them.
    n_delivered: number of delivered tokens, including the prompt.
    due: number of tokens, including the prompt, at which text is next delivered.
    """

    request_id: int
    params: SamplingParams
    metrics: RequestMetrics
    inbox: Inbox
    inbox_is_shared: bool
    ended: Event = field(default_factory=Event)
    interval: int = 1  # number of tokens per delivery of text
    cancelled: bool = False  # a client has requested cancellation
    outcome: RequestOutput | BaseException | None = None  # set before ``ended``
    has_started: bool = False
    sequence: Sequence = field(init=False)
    tokens: list[int] = field(init=False)
    text: IncrementalText | LateText = field(init=False)
    n_delivered: int = field(init=False)
    due: int = field(init=False)

    def start(self, sequence: Sequence, tokenizer: AnyTokenizer) -> None:
        """Set the worker's fields for a request that starts."""
        self.has_started, n_prompt = True, sequence.n_prompt
        self.sequence, self.tokens = sequence, sequence.tokens
        self.text = sequence.text or LateText(
            tokenizer, sequence.tokens, n_prompt, sequence.params.skip_special_tokens
        )
        self.n_delivered, self.due = n_prompt, n_prompt + self.interval

    def cancel_unstarted(self, tokenizer: AnyTokenizer) -> RequestOutput:
        """Return the output of a request that was cancelled before its prompt was tokenized."""
        sequence = Sequence(self.request_id, [], self.params)
        sequence.metrics = self.metrics
        sequence.cancel()
        return RequestOutput.of(sequence, tokenizer)

    def output(self) -> RequestOutput:
        """Return the output of the ended request, or raise its error."""
        outcome = self.outcome
        if isinstance(outcome, RequestOutput):
            return outcome
        if isinstance(outcome, RoseError):
            raise_again(outcome)
        raise RoseError(f"request {self.request_id} failed ({describe(outcome)})") from outcome


def raise_again(error: RoseError) -> NoReturn:
    """Raise a copy of the error, since several threads may raise the same error."""
    raise type(error)(str(error)) from (error.__cause__ or error)


class Reply:
    """The text of a request in pieces as they arrive: an asynchronous iterator for one coroutine.

    begin: queues the request; returns its stream, the coroutine's inbox, and a function to call when the
        reader has gone or has read everything, which cancels the request if it has not ended.

    The request is queued by :meth:`start` or when the first piece is requested, which raise the errors of a
    request that is refused. Cancelling the reader's task, :meth:`aclose` and dropping the object cancel it.
    At the end, the iterator raises the error with which the request ended, if any.
    """

    def __init__(self, begin: Callable[[], tuple[Stream, CoroutineInbox, Callable[[], None]]]) -> None:
        self._begin = begin
        self._begun: tuple[Stream, CoroutineInbox, Callable[[], None]] | None = None

    def start(self) -> Reply:
        """Queue the request, in the event loop that reads it, and return this object."""
        if self._begun is None:
            self._begun = self._begin()
        return self

    def __aiter__(self) -> Reply:
        return self

    async def __anext__(self) -> str:
        self.start()
        assert self._begun is not None
        stream, inbox, close = self._begun
        try:
            piece = await inbox.get()
        except BaseException:
            close()
            raise
        if piece is not None:
            return piece
        close()
        stream.output()
        raise StopAsyncIteration

    async def whole(self) -> RequestOutput:
        """Read to the end, and return the request's output."""
        async for _ in self:
            pass
        return self.output

    async def aclose(self) -> None:
        """Cancel the request, unless it has ended."""
        self.__del__()

    def __del__(self) -> None:
        if self._begun is not None:
            self._begun[2]()

    @property
    def stream(self) -> Stream:
        """The request, once it has been queued."""
        assert self._begun is not None
        return self._begun[0]

    @property
    def output(self) -> RequestOutput:
        """The request's output, once it has been read to its end; raises the request's error, if any."""
        return self.stream.output()


async def merged(replies: list[Reply]) -> AsyncIterator[tuple[int, str | None]]:
    """Yield the pieces of several replies as they arrive, each with the index of its reply.

    A reply's last piece is None. If one fails or the reader goes away, all of them are cancelled.
    """
    pieces: asyncio.Queue[tuple[int, str | None] | None] = asyncio.Queue()

    async def read(index: int, reply: Reply) -> None:
        async for piece in reply:
            pieces.put_nowait((index, piece))
        pieces.put_nowait((index, None))

    reading = asyncio.gather(*(read(*one) for one in enumerate(replies)))
    reading.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await reading
    finally:
        for reply in replies:
            await reply.aclose()
