"""The counts of penalised requests: whose they are, and what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rosellm.roseinfer.cache.token_counts import TokenCounts, seen_tokens
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams

ROWS, VOCAB = 4, 6
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)
JOINERS = st.dictionaries(st.integers(0, ROWS - 1), st.tuples(TOKENS, TOKENS, st.booleans()))
MOVES = st.lists(st.tuples(st.sets(st.integers(0, ROWS - 1)), JOINERS), max_size=20)


class HeldCounts(TokenCounts):
    """Counts whose table is an array on the host, written as the worker writes the device's."""

    def __init__(self) -> None:
        super().__init__(ROWS, self.write)
        self.table = np.zeros((ROWS, VOCAB), np.int32)

    def write(self, name: str, words: np.ndarray, n: int) -> None:
        assert name == "write_counts"
        place, token, number = words[n:].reshape(3, -1)
        self.table[words[:n]] = 0
        self.table[place, token] = number


def make_sequence(prompt: list[int], output: list[int], **params) -> Sequence:
    sequence = Sequence(1, prompt, SamplingParams(**params))
    sequence.tokens += output
    return sequence


def by_hand(prompt: list[int], output: list[int]) -> list[int]:
    return [2 * output.count(token) + (token in prompt) for token in range(VOCAB)]


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(moves=MOVES)
def test_every_holder_has_a_row_of_its_own_that_says_what_it_has_seen(moves):
    """Several join together, some of them without penalties."""
    counts = HeldCounts()
    held: dict[int, tuple[Sequence, int, list[int]]] = {}
    for leaving, joining in moves:
        for who in leaving & held.keys():
            counts.drop(held.pop(who)[0])
        new = {who: wish for who, wish in joining.items() if who not in held}
        sequences = [make_sequence(p, o, presence_penalty=0.5 * own) for p, o, own in new.values()]
        places = counts.hold(sequences, [len(s.tokens) - 1 for s in sequences])
        for (who, (prompt, output, own)), sequence, place in zip(new.items(), sequences, places, strict=True):
            assert bool(place) == own
            if own:
                held[who] = sequence, place, by_hand(prompt, output[:-1])
        taken = [place for _, place, _ in held.values()]
        assert len(set(taken)) == len(taken) and all(1 <= place <= ROWS for place in taken)
        assert all(counts.table[place - 1].tolist() == seen for _, place, seen in held.values())


def test_a_sequence_that_is_held_again_keeps_its_place_and_is_counted_afresh():
    counts, sequence = HeldCounts(), make_sequence([1, 1], [2], frequency_penalty=1.0)
    (place,) = counts.hold([sequence], [2])
    counts.table[place - 1] += 7
    sequence.tokens.append(3)
    assert counts.hold([sequence], [3]) == [place]
    assert counts.table[place - 1].tolist() == by_hand([1], [2])


@pytest.mark.parametrize(("position", "seen"), [*((i, []) for i in range(4)), (5, [0, 0])])
def test_positions_of_the_prompt_leave_nothing_of_the_output(position, seen):
    found = dict(zip(*seen_tokens(make_sequence([5, 0, 5], [0, 0]), position), strict=True))
    assert [found.get(token, 0) for token in range(VOCAB)] == by_hand([5, 0], seen)
