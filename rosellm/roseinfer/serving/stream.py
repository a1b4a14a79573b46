"""A streamed request, and the inboxes that receive its text."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import NoReturn

from rosellm.errors import RoseError, describe
from rosellm.models.loading import AnyTokenizer
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.request import RequestMetrics, Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.text import IncrementalText, LateText

# For each event loop: queues that its coroutines read, and the pieces of text to put into these queues.
Mail = dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue, str | None]]]


def send(mail: Mail) -> None:
    """Put all pieces into their queues, waking each event loop once, and empty ``mail``."""
    while mail:
        loop, pieces = mail.popitem()
        with suppress(RuntimeError):  # the loop is closed: there is no reader
            loop.call_soon_threadsafe(_put_all, pieces)


def _put_all(pieces: list[tuple[asyncio.Queue, str | None]]) -> None:
    for queue, piece in pieces:
        queue.put_nowait(piece)


class CoroutineInbox:
    """The inbox of one request, read by a coroutine of the event loop that runs when it is made.

    mail: collects the pieces that are put into the inbox, until :func:`send` delivers them.
    """

    def __init__(self, mail: Mail) -> None:
        self._mail, self._loop = mail, asyncio.get_running_loop()
        self._queue: asyncio.Queue[str | None] = asyncio.Queue()
        self.get = self._queue.get

    def put(self, item: tuple[int, str | None]) -> None:
        self._mail.setdefault(self._loop, []).append((self._queue, item[1]))


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
    takes_turns: whether deliveries also wait for the reader's turn.
    """

    request_id: int
    params: SamplingParams
    metrics: RequestMetrics
    inbox: Inbox
    inbox_is_shared: bool
    ended: Event = field(default_factory=Event)
    cancelled: bool = False  # a client has requested cancellation
    outcome: RequestOutput | BaseException | None = None  # set before ``ended``
    has_started: bool = False
    sequence: Sequence = field(init=False)
    tokens: list[int] = field(init=False)
    text: IncrementalText | LateText = field(init=False)
    n_delivered: int = field(init=False)
    due: int = field(init=False)
    takes_turns: bool = False

    def start(self, sequence: Sequence, tokenizer: AnyTokenizer, interval: int) -> None:
        """Set the worker's fields for a request that starts.

        interval: number of tokens per delivery.
        """
        self.has_started, n_prompt = True, sequence.n_prompt
        self.sequence, self.tokens = sequence, sequence.tokens
        self.text = sequence.text or LateText(tokenizer, sequence.tokens, n_prompt)
        self.n_delivered, self.due = n_prompt, n_prompt + interval

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
