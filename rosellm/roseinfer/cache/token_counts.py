"""Assignment of rows in the device's table of token counts and biases to requests that need them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import repeat

import numpy as np

from rosellm.roseinfer.ranks.group import Call
from rosellm.roseinfer.request import Sequence

MOST_COUNTED = 2**14 - 1
BARRED = 1 << 15
BANNED = -math.inf
MOST_BEGINNINGS = 1024
WORD_COLUMNS = 3 * MOST_BEGINNINGS  # a multiple of 16, for aligned rows

Entries = tuple[np.ndarray, np.ndarray]


class TokenCounts:
    """The host's assignment of the rows of a device table to requests that need them.

    The table is int32 ``[S, V + WORD_COLUMNS]``. An entry of its first V columns holds what changes the logit
    of a token. The upper 16 bits are its bias in float16, minus infinity for a banned token. The next bit,
    ``BARRED``, bans the token in one step only. The lower 15 bits are twice the number of times that the
    token occurs in the output, at most ``MOST_COUNTED``, plus 1 if the token is in the prompt. The last
    output token is not yet included: the step that reads it as input counts it (``penalties.count_tokens``).

    From the other columns, ``[3, MOST_BEGINNINGS]``, that step finds the tokens to bar. They hold the
    beginnings of all bad words: those of one word, from its first token to all but its last, then those of
    the next word. Each beginning has three numbers, where 0 and below mean none:

    - 1 + its last token;
    - 1 + the token that is barred after it, for the longest beginning of a word;
    - 1 if the output, except for its last token, ends with the beginning.

    Steps that draft have further rows below, for the counts of drafts (``penalties.fork_counts``).

    call: ``Worker.call``; every rank's worker holds the table.
    """

    def __init__(self, n_rows: int, call: Call) -> None:
        self._call = call
        self._place_of: dict[Sequence, int] = {}
        self._free = list(range(n_rows))  # min-heap
        self._stopping_from: dict[Sequence, int] = {}  # the ``_first_stop`` of sequences not yet there

    def hold(self, sequences: list[Sequence], positions: list[int]) -> list[int]:
        """Assign table rows to sequences with penalties or biases, and upload the entries of their tokens.

        positions: only tokens before a sequence's position are counted.

        Returns 1 + the table row of each sequence, or 0 for a sequence that needs none. All entries are sent
        in one copy, for which the host does not wait.
        """
        penalised = [i for i, s in enumerate(sequences) if s.params.is_penalised]
        places = [0] * len(sequences)
        for i in penalised:
            places[i] = 1 + self._take(sequences[i])
        if penalised:
            fills = [int(float16_bits(_default_bias(sequences[i]))) for i in penalised]
            entries = [entries_of(sequences[i], positions[i]) for i in penalised]
            words = [_word_entries(sequences[i], positions[i]) for i in penalised]
            rows = [places[i] - 1 for i in penalised]
            self._write(rows, fills, rows * 2, entries + words)
        return places

    def drop(self, sequence: Sequence) -> None:
        """Free the table row, if any, of a sequence that has left the batch."""
        place = self._place_of.pop(sequence, None)
        self._stopping_from.pop(sequence, None)
        if place is not None:
            heapq.heappush(self._free, place)

    def allow_stops(self, position_of: Callable[[Sequence], int]) -> None:
        """Lift the ban on stop tokens for sequences that the next step may end, despite ``min_tokens``.

        position_of: returns a sequence's number of cached tokens when the next step begins.
        """
        if not self._stopping_from:
            return
        due = [s for s, first in self._stopping_from.items() if position_of(s) >= first]
        if due:
            stops = [_stops_of(s, self._stopping_from.pop(s)) for s in due]
            self._write([], [], [self._place_of[s] for s in due], stops)

    def _take(self, sequence: Sequence) -> int:
        if sequence not in self._place_of:
            self._place_of[sequence] = heapq.heappop(self._free)
        if sequence.params.min_tokens:
            self._stopping_from[sequence] = _first_stop(sequence)
        return self._place_of[sequence]

    def _write(self, cleared: list[int], fills: list[int], places: list[int], entries: list[Entries]) -> None:
        """Fill table rows ``cleared`` with ``fills``, then write ``entries[i]`` to row ``places[i]``."""
        tokens, numbers = (np.concatenate(arrays) for arrays in zip(*entries, strict=True))
        place = np.repeat(places, [len(own) for own, _ in entries])
        words = np.concatenate((cleared, fills, place, tokens, numbers)).astype(np.int32)
        self._call("write_counts", words, len(cleared))


def entries_of(sequence: Sequence, position: int, counted: int | None = None) -> Entries:
    """Return the tokens whose entries differ from the row's default, and these entries: both int32 ``[n]``.

    position: number of cached tokens when a step begins.
    counted: number of tokens whose occurrences are counted; None means ``position``.
    """
    counts: dict[int, int] = dict(zip(sequence.prompt, repeat(1)))
    for token in sequence.tokens[sequence.n_prompt : position if counted is None else counted]:
        counts[token] = min(counts.get(token, 0) + 2, 2 * MOST_COUNTED)
    biases, default = _biases(sequence, position), _default_bias(sequence)
    tokens = list(counts | biases)
    bits = float16_bits([biases.get(token, default) for token in tokens])
    return np.array(tokens, np.int32), bits | np.array([counts.get(t, 0) for t in tokens], np.int32)


def _word_entries(sequence: Sequence, position: int) -> Entries:
    """Return the beginnings of bad words as :func:`entries_of` does; columns count from the row's end."""
    output = sequence.tokens[sequence.n_prompt : position]
    beginnings = [
        (1 + word[n - 1], 1 + word[n] if n == len(word) - 1 else 0, _ends_with(output, word[:n]))
        for word in sequence.bad_words
        for n in range(1, len(word))
    ]
    numbers = np.array(beginnings, np.int32).reshape(-1, 3).T
    columns = np.arange(-WORD_COLUMNS, 0, dtype=np.int32).reshape(3, -1)[:, : len(beginnings)]
    return columns.ravel(), numbers.ravel()


def _ends_with(output: list[int], tokens: list[int]) -> bool:
    return output[len(output) - len(tokens) :] == tokens


def _stops_of(sequence: Sequence, position: int) -> Entries:
    """Return the stop tokens and their entries, as :func:`entries_of` does."""
    entries = dict(zip(*entries_of(sequence, position), strict=True))
    default, stops = float16_bits(_default_bias(sequence)), np.array(sequence.late_tokens, np.int32)
    return stops, np.array([entries.get(token, default) for token in sequence.late_tokens], np.int32)


def dense_entries(sequence: Sequence, vocab_size: int) -> np.ndarray:
    """Return the entries of all tokens, int32 ``[V]``, from which the next token is chosen."""
    row = np.full(vocab_size, float16_bits(_default_bias(sequence)), np.int32)
    tokens, entries = entries_of(sequence, len(sequence.tokens) - 1, len(sequence.tokens))
    row[tokens] = entries
    begun = [word for word in sequence.bad_words if len(word) > 1 and _ends_with(sequence.output, word[:-1])]
    row[[word[-1] for word in begun]] |= BARRED
    return row


def float16_bits(biases: float | list[float]) -> np.ndarray:
    """Return the entries, int32, of tokens with these biases and without counts."""
    return np.array(biases, np.float16).view(np.int16).astype(np.int32) << 16


def _biases(sequence: Sequence, position: int) -> dict[int, float]:
    """Return the biases that differ from the row's default.

    While fewer tokens than ``min_tokens`` can have been generated, stop tokens are banned.
    """
    params, allowed = sequence.params, sequence.params.allowed_token_ids
    biases = dict.fromkeys(allowed or (), 0.0)
    given = params.logit_bias or {}
    biases |= {token: bias for token, bias in given.items() if allowed is None or token in biases}
    stops = sequence.late_tokens if position < _first_stop(sequence) else ()
    bad = [word[0] for word in sequence.bad_words if len(word) == 1]
    return biases | dict.fromkeys((*bad, *stops), BANNED)


def _default_bias(sequence: Sequence) -> float:
    return 0.0 if sequence.params.allowed_token_ids is None else BANNED


def _first_stop(sequence: Sequence) -> int:
    """Return the number of cached tokens from which a step may choose a stop token."""
    return sequence.n_prompt + sequence.params.min_tokens - 1
