"""The counts of penalised requests: whose they are, and what they say."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from rosellm.roseinfer.cache.token_counts import TokenCounts, seen_tokens
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from tests.helpers import CPU

ROWS, VOCAB = 4, 6
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)
MOVES = st.lists(st.tuples(st.booleans(), st.integers(0, ROWS - 1), TOKENS, TOKENS), max_size=30)


def make_sequence(prompt: list[int], output: list[int], **params) -> Sequence:
    sequence = Sequence(1, prompt, SamplingParams(**params), 1)
    sequence.tokens += output
    return sequence


def by_hand(prompt: list[int], output: list[int]) -> list[int]:
    return [2 * output.count(token) + (token in prompt) for token in range(VOCAB)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(moves=MOVES)
def test_every_holder_has_a_row_of_its_own_that_says_what_it_has_seen(moves):
    counts = TokenCounts(ROWS, VOCAB, CPU)
    held: dict[int, tuple[Sequence, int, list[int]]] = {}
    for leaves, who, prompt, output in moves:
        if leaves and who in held:
            counts.drop(held.pop(who)[0])
        elif who not in held:
            sequence = make_sequence(prompt, output, presence_penalty=0.5)
            position = len(sequence.tokens) - 1
            held[who] = sequence, counts.hold(sequence, position), by_hand(prompt, output[:-1])
        places = [place for _, place, _ in held.values()]
        assert len(set(places)) == len(places) and all(1 <= place <= ROWS for place in places)
        assert all(counts.table[place - 1].tolist() == seen for _, place, seen in held.values())


def test_a_sequence_that_is_held_again_keeps_its_place_and_is_counted_afresh():
    counts, sequence = TokenCounts(ROWS, VOCAB, CPU), make_sequence([1, 1], [2], frequency_penalty=1.0)
    place = counts.hold(sequence, 2)
    counts.table[place - 1] += 7
    sequence.tokens.append(3)
    assert counts.hold(sequence, 3) == place
    assert counts.table[place - 1].tolist() == by_hand([1], [2])


def test_a_request_without_penalties_needs_no_table():
    counts = TokenCounts(ROWS, 10**12, CPU)
    assert counts.hold(make_sequence([1], [], top_k=3), 0) == 0
    counts.drop(make_sequence([1], []))


def test_positions_of_the_prompt_leave_nothing_of_the_output():
    sequence = make_sequence([5, 0, 5], [0, 0])
    for position in range(4):
        assert seen_tokens(sequence, position, VOCAB, CPU).tolist() == by_hand([5, 0], [])
    assert seen_tokens(sequence, 5, VOCAB, CPU).tolist() == by_hand([5, 0], [0, 0])
