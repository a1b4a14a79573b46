"""What an engine asks of a step, and how tokens reach their sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import NO_TOKEN

STEP_RANGE = "roseinfer.decode_step_sessions"


class Step(Protocol):
    """Runs prefill and decode for an engine, which says who and how much; tokens may come later.

    Room in the cache has been made beforehand; the step reserves the blocks it writes to. ``run_ahead``: how
    many begun steps a scheduler leaves unfinished; a sequence may be in that many and in one more.
    """

    run_ahead: int

    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Cache ``counts[i]`` more tokens of each; one whose tokens are all cached then gets its next one.

        ``n_cached`` of the others has advanced on return.
        """

    def begin_decode(self, sequences: list[Sequence]) -> int:
        """One more token for each; how many rows it really runs.

        That may leave out sequences that were asked for their last token already. A list that is passed
        again is unchanged.
        """

    def collect(self, leave: int = 0) -> Iterator[Done]:
        """Wait until at most ``leave`` begun steps are unfinished; yield all that have ended, in order.

        A step's tokens are committed to its sequences before it is yielded, except to those released.
        """

    def release(self, sequence: Sequence) -> None:
        """The sequence has ended or is given up: it gets no further token, and its blocks will be freed."""

    def warm_up(self, rows: int | None = None) -> None:
        """Capture steps of ``rows`` sequences, None: of any number, so that none has to wait for it."""

    def last_logits(self) -> Tensor:
        """Logits ``[B, V]`` of the latest step begun, in the order of the sequences that it gives a token."""


def commit_tokens(
    sequences: list[Sequence], tokens: list[int], n_cached: int
) -> tuple[list[Sequence], list[Sequence]]:
    """Give each sequence its token; ``n_cached`` more of its tokens are in the KV cache now.

    Who got one that was not known before (the very list ``sequences`` if that is everybody), and who failed,
    there being no token (``NOT_FINITE``).
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
