"""Assignment of rows in the device's table of token counts to requests with penalties."""

from __future__ import annotations

import heapq
from itertools import repeat

import numpy as np

from rosellm.roseinfer.ranks.group import Call
from rosellm.roseinfer.request import Sequence


class TokenCounts:
    """The host's assignment of the rows of a device table ``[S, V]`` int32 to requests with penalties.

    A table entry is twice the number of times that the token occurs in the output, plus 1 if the token is in
    the prompt. The last output token is not yet included: it is counted by the step that reads it as input
    (``penalties.count_tokens``).

    call: ``Worker.call``; every rank's worker holds the table.
    """

    def __init__(self, n_rows: int, call: Call) -> None:
        self._call = call
        self._place_of: dict[Sequence, int] = {}
        self._free = list(range(n_rows))  # min-heap

    def hold(self, sequences: list[Sequence], positions: list[int]) -> list[int]:
        """Assign table rows to sequences with penalties, and upload the counts of their tokens so far.

        positions: only tokens before a sequence's position are counted.

        Returns 1 + the table row of each sequence, or 0 for a sequence without penalties. All counts are sent
        in one copy, for which the host does not wait.
        """
        penalised = [i for i, s in enumerate(sequences) if s.params.is_penalised]
        places = [0] * len(sequences)
        for i in penalised:
            places[i] = 1 + self._take(sequences[i])
        if penalised:
            seen = [seen_tokens(sequences[i], positions[i]) for i in penalised]
            self._send([places[i] - 1 for i in penalised], seen)
        return places

    def drop(self, sequence: Sequence) -> None:
        """Free the table row, if any, of a sequence that has left the batch."""
        place = self._place_of.pop(sequence, None)
        if place is not None:
            heapq.heappush(self._free, place)

    def _take(self, sequence: Sequence) -> int:
        if sequence not in self._place_of:
            self._place_of[sequence] = heapq.heappop(self._free)
        return self._place_of[sequence]

    def _send(self, places: list[int], seen: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Overwrite table rows ``places`` with the entries of their ``seen`` tokens, and with 0 elsewhere."""
        tokens, numbers = (np.concatenate(arrays) for arrays in zip(*seen, strict=True))
        place = np.repeat(places, [len(own) for own, _ in seen])
        words = np.concatenate((places, place, tokens, numbers)).astype(np.int32)
        self._call("write_counts", words, len(places))


def seen_tokens(sequence: Sequence, position: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct tokens of the prompt and of the output before ``position``, with their entries.

    Both arrays are int32 ``[n]``; ``TokenCounts`` describes the entries.
    """
    numbers: dict[int, int] = dict(zip(sequence.prompt, repeat(1)))
    for token in sequence.tokens[sequence.n_prompt : position]:
        numbers[token] = numbers.get(token, 0) + 2
    return np.array(list(numbers), np.int32), np.array(list(numbers.values()), np.int32)
