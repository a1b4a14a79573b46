"""Which tokens penalised requests have seen, and how often: counted on the device."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from rosellm.roseinfer.request import Sequence


class TokenCounts:
    """A table ``[S, V]`` int32, a row for each request that has penalties, made when the first one comes.

    A number is twice the times that the token is in the output, plus 1 if it is in the prompt. It leaves out
    the last token of the output, which a step counts as it begins (``penalties.count_tokens``). Captured
    steps read the table where it is, so it is never replaced.
    """

    def __init__(self, n_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape, self._device = (n_rows, vocab_size), device
        self._table: Tensor | None = None
        self._place_of: dict[Sequence, int] = {}
        self._free = list(range(n_rows))  # a heap: the lowest first

    @property
    def table(self) -> Tensor:
        if self._table is None:
            self._table = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._table

    def hold(self, sequence: Sequence, position: int) -> int:
        """1 + the place of the sequence's counts, of the tokens before ``position``; 0 if it needs none."""
        if not sequence.params.is_penalised:
            return 0
        place = self._place_of.get(sequence)
        if place is None:
            place = self._place_of[sequence] = heapq.heappop(self._free)
        self.table[place] = seen_tokens(sequence, position, self._shape[1], self._device)
        return 1 + place

    def drop(self, sequence: Sequence) -> None:
        """The sequence has left its row."""
        place = self._place_of.pop(sequence, None)
        if place is not None:
            heapq.heappush(self._free, place)


def seen_tokens(sequence: Sequence, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """Counts ``[V]`` int32 of the whole prompt and of the output's tokens before ``position``."""
    counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
    output = torch.tensor(sequence.tokens[sequence.n_prompt : position], dtype=torch.int64, device=device)
    counts.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))
    counts[torch.tensor(sequence.prompt, device=device)] += 1  # once, however often it is there
    return counts
