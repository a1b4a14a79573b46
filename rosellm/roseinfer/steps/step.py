"""The interface of a step to the engine, and how tokens reach their sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import NO_TOKEN

STEP_RANGE = "roseinfer.decode_step_sessions"


class Step(Protocol):
    """Runs prefill and decode for an engine, which decides for whom and how much; tokens may arrive later.

    The caller has made room in the cache; the step reserves the blocks it writes to. ``run_ahead``: how many
    begun steps a scheduler leaves unfinished; a sequence may be in that many and in one more.
    """

    run_ahead: int

    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Cache ``counts[i]`` more tokens of each; a sequence then fully cached gets its next token.

        ``n_cached`` of the others has advanced on return.
        """

    def begin_decode(self, sequences: list[Sequence]) -> int:
        """One more token for each; returns how many rows actually run.

        That may leave out sequences already asked for their last token. A list that is passed again is
        unchanged.
        """

    def collect(self, leave: int = 0) -> Iterator[Done]:
        """Wait until at most ``leave`` begun steps are unfinished; yield all that have ended, in order.

        A step's tokens are committed to its sequences before it is yielded, except to released ones.
        """

    def release(self, sequence: Sequence) -> None:
        """The sequence has ended or is abandoned: it gets no further token, and its blocks will be freed."""

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Calls that capture what is not captured yet, so that no request has to wait for it: a graph each.

        rows: only decode steps of so many sequences.
        """

    def warm_ups(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Calls that run, uncaptured and with inert inputs, every kernel of :meth:`captures`."""

    def largest_captures(self) -> list[Callable[[], object]]:
        """Those of them that take the most memory, in every mode."""

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """Calls that run, uncaptured, all that a prefill of ``n_tokens`` may, with inert inputs.

        They compile kernels, and take as much memory as a prefill does. Empty if it cannot be run so.
        """

    @property
    def n_captured(self) -> int:
        """CUDA graphs captured so far."""

    def last_logits(self) -> Tensor:
        """Logits ``[B, V]`` of the latest step begun, in the order of the sequences that get a token."""


def commit_tokens(
    sequences: list[Sequence], tokens: list[int], n_cached: int
) -> tuple[list[Sequence], list[Sequence]]:
    """Give each sequence its token; ``n_cached`` more of its tokens are now in the KV cache.

    Returns those that got a new token (``sequences`` itself if that is all), and those that failed because
    there was no token (``NOT_FINITE``).
    """
    got: list[Sequence] = []
    failed: list[Sequence] = []
    for sequence, token in zip(sequences, tokens, strict=True):
        if token < 0:
            sequence.fail(NO_TOKEN)
            failed.append(sequence)
        elif sequence.commit(token, n_cached):
            got.append(sequence)
    return sequences if len(got) == len(sequences) else got, failed
