"""A streamed request: the state shared by client and worker, and the worker's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import NoReturn

from rosellm.errors import RoseError, describe
from rosellm.models.loading import AnyTokenizer
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.request import RequestMetrics, Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.turns import Pieces
from rosellm.roseinfer.text import LateText


@dataclass(slots=True, eq=False)
class Stream:
    """One request, shared by its client and the worker; ``outcome`` is its output or its error.

    ``put`` delivers a piece of text, or None for the end, to ``pieces`` (whose reader is woken later) or to
    the client's inbox.
    """

    request_id: int
    params: SamplingParams
    metrics: RequestMetrics
    pieces: Pieces | None
    put: Callable[[str | None], None]
    ended: Event = field(default_factory=Event)
    running: Running | None = None
    cancelled: bool = False  # a client has requested cancellation
    outcome: RequestOutput | BaseException | None = None  # set once it has ended


@dataclass(slots=True, eq=False)
class Running:
    """A request in the scheduler, as the worker sees it.

    tokens: the sequence's; ``told`` of them, the prompt included, have been delivered, and the next delivery
    is at ``due`` tokens. in_rounds: that delivery waits for the next round. late: decodes text on delivery;
    None if the scheduler decodes it to find stop strings. take: returns the text to deliver.
    """

    stream: Stream
    sequence: Sequence
    tokens: list[int]
    late: LateText | None
    take: Callable[[], str]
    told: int
    due: int
    in_rounds: bool = False

    @classmethod
    def of(cls, stream: Stream, sequence: Sequence, tokenizer: AnyTokenizer, interval: int) -> Running:
        n, tokens, text = sequence.n_prompt, sequence.tokens, sequence.text
        if text is not None:
            return cls(stream, sequence, tokens, None, text.take, n, n + interval)
        late = LateText(tokenizer, tokens, n)
        return cls(stream, sequence, tokens, late, late.take, n, n + interval)

    def take_last(self) -> str:
        """Return the text to deliver once the request has ended."""
        if self.late is None:
            return self.take()
        return self.late.take_last(left_out=int(self.sequence.finish_reason == "stop"))


def inbox_putter(inbox: SimpleQueue, request_id: int) -> Callable[[str | None], None]:
    """Return a ``put`` into a queue shared by several requests."""

    def put(piece: str | None) -> None:
        inbox.put((request_id, piece))

    return put


def unborn_output(stream: Stream, tokenizer: AnyTokenizer) -> RequestOutput:
    """Return the output of a request cancelled before its prompt was tokenized."""
    sequence = Sequence(stream.request_id, [], stream.params)
    sequence.metrics = stream.metrics
    sequence.cancel()
    return RequestOutput.of(sequence, tokenizer)


def output_of(stream: Stream) -> RequestOutput:
    """Return the output of an ended stream, or raise the request's error."""
    outcome = stream.outcome
    if isinstance(outcome, RequestOutput):
        return outcome
    if isinstance(outcome, RoseError):
        raise_again(outcome)
    raise RoseError(f"request {stream.request_id} failed ({describe(outcome)})") from outcome


def raise_again(error: RoseError) -> NoReturn:
    """Raise a copy of the error, since several threads may raise it."""
    raise type(error)(str(error)) from (error.__cause__ or error)
