"""A streamed request: what its client and the worker share, and what the worker alone knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import NoReturn

from rosellm.errors import RoseError, told
from rosellm.models.loading import AnyTokenizer
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.request import RequestMetrics, Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.turns import Pieces
from rosellm.roseinfer.text import LateText


@dataclass(slots=True, eq=False)
class Stream:
    """One request between its client and the worker; ``outcome`` is its output or its error.

    ``put`` delivers a piece, or None for the end, to ``pieces``, whose reader is woken later, or to the
    client's inbox.
    """

    request_id: int
    params: SamplingParams
    metrics: RequestMetrics
    pieces: Pieces | None
    put: Callable[[str | None], None]
    ended: Event = field(default_factory=Event)
    running: Running | None = None
    cancelled: bool = False  # a client has asked to end it
    outcome: RequestOutput | BaseException | None = None  # set once it has ended


@dataclass(slots=True, eq=False)
class Running:
    """A request in the scheduler.

    tokens: the sequence's; ``told`` of them, the prompt included, have been delivered, and ``due`` is their
    number at the next delivery; in_rounds: which waits for the next round. late: decodes the text as it is
    delivered, unless stop strings have the scheduler do that. take: the text to deliver.
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
        """The text to deliver once the request has ended."""
        if self.late is None:
            return self.take()
        return self.late.take_last(left_out=int(self.sequence.finish_reason == "stop"))


def inbox_putter(inbox: SimpleQueue, request_id: int) -> Callable[[str | None], None]:
    """Puts into a queue shared by several requests."""

    def put(piece: str | None) -> None:
        inbox.put((request_id, piece))

    return put


def unborn_output(stream: Stream, tokenizer: AnyTokenizer) -> RequestOutput:
    """The output of a request that was cancelled before its prompt was tokenized."""
    sequence = Sequence(stream.request_id, [], stream.params, n_pools=0)
    sequence.metrics = stream.metrics
    sequence.cancel()
    return RequestOutput.of(sequence, tokenizer)


def output_of(stream: Stream) -> RequestOutput:
    """The output of an ended stream; raises the request's error."""
    outcome = stream.outcome
    if isinstance(outcome, RequestOutput):
        return outcome
    if isinstance(outcome, RoseError):
        raise_again(outcome)
    raise RoseError(f"request {stream.request_id} failed ({told(outcome)})") from outcome


def raise_again(error: RoseError) -> NoReturn:
    """Raises a copy of the error, since several threads may raise it."""
    raise type(error)(str(error)) from (error.__cause__ or error)
