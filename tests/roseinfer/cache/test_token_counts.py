"""The counts of penalised requests: whose they are, and what they say."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from rosellm.roseinfer.cache.token_counts import WORD_COLUMNS, TokenCounts
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams

ROWS, VOCAB = 4, 6
WHO = st.integers(0, ROWS - 1)
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)
JOINERS = st.dictionaries(WHO, st.tuples(TOKENS, TOKENS, st.booleans()))
MOVES = st.lists(st.tuples(st.sets(WHO), JOINERS, st.integers(0, 20)), max_size=20)


class HeldCounts(TokenCounts):
    """Counts whose table is an array on the host, written as the worker writes the device's."""

    def __init__(self) -> None:
        super().__init__(ROWS, self.write)
        self.table = np.zeros((ROWS, VOCAB + WORD_COLUMNS), np.int32)

    def write(self, name: str, words: np.ndarray, n: int) -> None:
        assert name == "write_counts"
        place, token, number = words[2 * n :].reshape(3, -1)
        self.table[words[:n]] = words[n : 2 * n, None]
        self.table[place, token] = number


def make_sequence(prompt: list[int], output: list[int], **params) -> Sequence:
    sequence = Sequence(1, prompt, SamplingParams(**params))
    sequence.tokens += output
    return sequence


def counted_by_hand(sequence: Sequence, position: int) -> list[int]:
    output = sequence.tokens[sequence.n_prompt : position]
    return [2 * output.count(token) + (token in sequence.prompt) for token in range(VOCAB)]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(moves=MOVES)
def test_every_holder_has_a_row_of_its_own_that_says_what_it_has_seen_so_far(moves):
    """Several join together, some of them without penalties; who holds a row already is counted afresh."""
    counts = HeldCounts()
    held: dict[int, Sequence] = {}
    places: dict[int, int] = {}
    expected: dict[int, list[int]] = {}
    for leaving, joining, position in moves:
        for who in leaving & held.keys():
            counts.drop(held.pop(who))
        penalties = {who: {"presence_penalty": 0.5 * own} for who, (_, _, own) in joining.items()}
        sequences = {
            who: held.get(who) or make_sequence(prompt, output, **penalties[who])
            for who, (prompt, output, _) in joining.items()
        }
        positions = [min(position, len(sequence.tokens)) for sequence in sequences.values()]
        got = counts.hold([*sequences.values()], positions)
        for (who, sequence), place, at in zip(sequences.items(), got, positions, strict=True):
            assert bool(place) == sequence.params.is_penalised
            assert who not in held or place == places[who]
            if place:
                held[who], places[who], expected[who] = sequence, place, counted_by_hand(sequence, at)
        taken = {places[who] for who in held}
        assert len(taken) == len(held) and taken <= set(range(1, ROWS + 1))
        assert all(counts.table[places[who] - 1, :VOCAB].tolist() == expected[who] for who in held)
