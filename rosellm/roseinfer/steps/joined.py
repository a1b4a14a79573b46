"""The resident step that takes prompts along: a decode step waits for them and runs in the same pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.profile_range import profile_range
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.joined_pass import JoinedPass, Sizes
from rosellm.roseinfer.steps.resident import ResidentStep, SamplingPlan
from rosellm.roseinfer.steps.rows import NO_ROWS, Batch
from rosellm.roseinfer.steps.step import STEP_RANGE


class JoinedStep(ResidentStep):
    """A decode step is held until the next call: a prefill that fits joins it, any other call begins it.

    So nothing is lost by holding it if the call comes at once. Of a joined step, ``collect`` yields two: the
    decode step, which has all of its time, and the prefill. One step fewer is left unfinished than of steps
    that are begun at once: prompts are chosen before the next one is begun, and shall not be chosen later.
    """

    run_ahead, holds_decode = ResidentStep.run_ahead - 1, True

    def __init__(self, joined: JoinedPass, **parts: Any) -> None:
        super().__init__(**parts)
        self.joined = joined
        self._held: list[Sequence] | None = None  # whose decode step has blocks, and is not begun

    @torch.inference_mode()
    def begin_decode(self, sequences: list[Sequence]) -> int:
        """See :class:`step.Step`; reserves the blocks."""
        self._begin_held()
        batch = self._to_run(sequences)
        if batch.rows:
            self.rows.grow(batch)
            self._held = sequences
        return len(batch.rows)

    @torch.inference_mode()
    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        """See :class:`step.Step`; more tokens than fit are cached by a pass of their own."""
        if self._held is not None and self.joined.takes(counts):
            self._begin_joined(sequences, counts)
        else:
            self._begin_held()
            super().begin_prefill(sequences, counts)

    def collect(self, leave: int = 0) -> Iterator[Done]:
        """See :class:`step.Step`."""
        self._begin_held()
        return super().collect(leave)

    def release(self, sequence: Sequence) -> None:
        """See :class:`step.Step`."""
        self._begin_held()
        super().release(sequence)

    def last_logits(self) -> Tensor:
        """See :class:`step.Step`."""
        self._begin_held()
        return super().last_logits()

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """See :class:`step.Step`."""
        joined = [] if rows is not None else self.joined.captures(self._variants_of)
        return joined + super().captures(rows)

    def warm_ups(self, rows: int | None = None) -> list[Callable[[], object]]:
        """See :class:`step.Step`."""
        joined = [] if rows is not None else self.joined.warm_ups(self._variants_of)
        return joined + super().warm_ups(rows)

    def largest_captures(self) -> list[Callable[[], object]]:
        """See :class:`step.Step`."""
        return self.joined.captures(self._variants_of)[:1] + super().largest_captures()

    @torch.inference_mode()
    def _begin_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._begin_step(held, self.rows.running())

    def _begin_joined(self, sequences: list[Sequence], counts: list[int]) -> None:
        whole = [s for s, n in zip(sequences, counts, strict=True) if s.completes_prefill(n)]
        self.rows.check_room(len(whole))
        held, self._held = self._held or [], None
        decoding = self.rows.running()
        self._in_flight.start()
        with profile_range(STEP_RANGE):
            self.rows.deactivate()  # before their places are given to prompts, which the layers have not seen
            chunks = self.joined.packed.reserved(sequences, counts)
            sizes = self.joined.sizes(int(decoding.indices[-1]) + 1, counts)
            mode = self.next_tokens.chooser.mode([s.params for s in decoding.sequences + chunks.whole])
            variant = self._variant(sizes.rows, decoding)
            hidden = self.joined(sizes, chunks, variant, mode)
            for sequence, n in zip(sequences, counts, strict=True):
                sequence.n_cached += n
            prefilled = self.rows.batch(chunks.whole) if whole else NO_ROWS
            self._note_joined(sizes, hidden, decoding, prefilled, mode)
        self._latest = hidden, held + whole, _of_hidden(sizes, decoding, prefilled)
        if whole:
            self._listed = None

    def _note_joined(
        self, sizes: Sizes, hidden: Tensor, decoding: Batch, prefilled: Batch, mode: str
    ) -> None:
        both = _together(decoding, prefilled, prefilled.indices)
        asking = np.flatnonzero([s.logprobs is not None for s in both.sequences])
        self._find_logprobs(
            hidden, SamplingPlan(both, mode, asking), _of_hidden(sizes, decoding, prefilled).indices
        )
        self._in_flight.note("decode", decoding, has_logprobs=bool(asking.size))
        self._in_flight.note("prefill", prefilled, has_logprobs=bool(asking.size))
        self.rows.begin_step(both, np.union1d(np.arange(sizes.rows), prefilled.indices))


def _of_hidden(sizes: Sizes, decoding: Batch, prefilled: Batch) -> Batch:
    """Both, with their rows of the hidden states that tokens were chosen from."""
    return _together(decoding, prefilled, sizes.rows + np.arange(len(prefilled.rows)))


def _together(first: Batch, second: Batch, indices: np.ndarray) -> Batch:
    """One batch of both, the second with these indices."""
    rows, sequences = first.rows + second.rows, first.sequences + second.sequences
    return Batch(rows, sequences, np.concatenate((first.indices, indices)))
