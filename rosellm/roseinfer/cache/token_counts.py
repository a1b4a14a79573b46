"""Device-side counts of the tokens that requests with penalties have seen."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as SequenceOf
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from rosellm.roseinfer.cache.staging import StagingBuffer
from rosellm.roseinfer.ranks.group import ALONE, Group
from rosellm.roseinfer.request import Sequence


class TokenCounts:
    """A table ``[S, V]`` int32, with a row for each request that has penalties.

    An entry is twice the token's number of occurrences in the output, plus 1 if it is in the prompt. The last
    output token is not included; a step counts it as it begins (``penalties.count_tokens``). Captured steps
    read the table by address, so it is allocated up front and never replaced; it is small compared with the
    KV cache (S = 256, V = 151,936: 156 MB).
    """

    def __init__(self, n_rows: int, vocab_size: int, device: torch.device, group: Group = ALONE) -> None:
        self.table = torch.zeros(n_rows, vocab_size, dtype=torch.int32, device=device)
        self._staging = StagingBuffer(device, torch.int32)
        self._place_of: dict[Sequence, int] = {}
        self._free = list(range(n_rows))  # min-heap
        self._write = group.broadcast("counts", self._apply_write)

    def hold(self, sequences: list[Sequence], positions: list[int]) -> list[int]:
        """Upload the counts of tokens before each sequence's position; return 1 + each sequence's table row.

        A sequence without penalties gets 0. Everything is sent in one copy; the host does not wait for it.
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
        """Free the table row of a sequence that has left the batch."""
        place = self._place_of.pop(sequence, None)
        if place is not None:
            heapq.heappush(self._free, place)

    def _take(self, sequence: Sequence) -> int:
        if sequence not in self._place_of:
            self._place_of[sequence] = heapq.heappop(self._free)
        return self._place_of[sequence]

    def _send(self, places: list[int], seen: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Overwrite these table rows with the given tokens and numbers, and 0 elsewhere."""
        n, lengths = len(places), [len(tokens) for tokens, _ in seen]
        host = self._staging.host(n + 3 * sum(lengths))
        host[:n] = places
        cells = host[n:].reshape(3, -1)
        cells[0] = np.repeat(places, lengths)
        for row, arrays in zip(cells[1:], zip(*seen, strict=True), strict=True):
            np.concatenate(arrays, out=row)
        self._write(host, n)

    def _apply_write(self, host: np.ndarray, n: int) -> None:
        """Apply the update to the table on the device; n: the number of rows."""
        sent = self._staging.put(host).send()
        place, token, number = sent[n:].view(3, -1)
        self.table.index_fill_(0, sent[:n].long(), 0)
        self.table[place.long(), token.long()] = number


def seen_tokens(sequence: Sequence, position: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct tokens of the prompt and of the output before ``position``, and their numbers.

    Both are ``[n]`` int32; the numbers are encoded as in ``TokenCounts``.
    """
    numbers: dict[int, int] = dict(zip(sequence.prompt, repeat(1)))
    for token in sequence.tokens[sequence.n_prompt : position]:
        numbers[token] = numbers.get(token, 0) + 2
    return np.array(list(numbers), np.int32), np.array(list(numbers.values()), np.int32)


def counts_of(sequences: SequenceOf[Sequence], vocab_size: int, device: torch.device) -> Tensor:
    """Return the counts of all tokens that each sequence has seen, ``[B, V]`` int32."""
    counts = torch.zeros(len(sequences), vocab_size, dtype=torch.int32)
    for row, sequence in zip(counts.numpy(), sequences, strict=True):
        tokens, numbers = seen_tokens(sequence, len(sequence.tokens))
        row[tokens] = numbers
    return counts.to(device)
