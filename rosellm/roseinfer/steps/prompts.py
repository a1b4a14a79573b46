"""Prompts of a resident step: what a prefill leaves in the device state, and how it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.next_tokens import NextTokens
from rosellm.roseinfer.steps.prefill import Prefill
from rosellm.roseinfer.steps.rows import NO_ROWS, Batch, Rows


class Prompts(Protocol):
    """Caches chunks of prompts; a sequence then fully cached gets a row and its first token."""

    def run(self, sequences: list[Sequence], counts: list[int]) -> tuple[Tensor, Batch]:
        """Reserve slots for ``counts[i]`` more tokens of each and cache them; the caller counts ``n_cached``.

        Returns the rows of those now fully cached and, as the first rows, the final hidden states
        ``[>= n, C]`` from which their tokens were chosen.
        """

    def captures(self) -> list[Callable[[], object]]:
        """Calls that capture what is not captured yet, one graph each, the largest first."""

    def warm_ups(self) -> list[Callable[[], object]]:
        """See ``step.Step.warm_ups``."""

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """See ``step.Step.rehearsals``."""


class PromptsByHost:
    """Everything is launched from Python: the prefill, the copy of the rows, the choice of tokens."""

    def __init__(self, prefill: Prefill, rows: Rows, next_tokens: NextTokens) -> None:
        self.prefill, self.rows, self.next_tokens = prefill, rows, next_tokens

    @torch.inference_mode()
    def run(self, sequences: list[Sequence], counts: list[int]) -> tuple[Tensor, Batch]:
        """See :class:`Prompts`."""
        whole = [s for s, n in zip(sequences, counts, strict=True) if s.completes_prefill(n)]
        hidden = self.prefill.run(sequences, counts)
        if not whole:
            return hidden, NO_ROWS
        slots = self.rows.attach(whole, [s.prefill_length - 1 for s in whole])
        mode = self.next_tokens.chooser.mode([s.params for s in whole])
        state = self.rows.state
        self.next_tokens(hidden, state.at(slots), mode, state, slots)
        return hidden, self.rows.batch(whole)

    def captures(self) -> list[Callable[[], object]]:
        """Nothing is captured."""
        return []

    def warm_ups(self) -> list[Callable[[], object]]:
        """Nothing is captured."""
        return []

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """None: every token of such a prefill is real."""
        return []
