"""Prompts cut into tiles, and tiles into pieces: all tokens once, and pieces within their room."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from rosellm.roseinfer.kernels.prefill_tiles import LONG_PREFIX, PIECE_KEYS, pieces_for, tile_columns

# start, count, row of the table, pieces
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(0, 99), st.integers(1, 9)), max_size=8
)
PREFIXES = st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 300)), min_size=1, max_size=8)


def columns_of(sequences: list[tuple[int, ...]]) -> list[list[int]]:
    return [list(x) for x in zip(*sequences, strict=True)] if sequences else [[], [], [], []]


@given(SEQUENCES, st.integers(1, 70))
def test_tiles_cover_every_new_token_once_those_that_attend_to_more_come_first(sequences, tile_size):
    starts, counts, rows, _ = columns_of(sequences)
    expected, covered = {}, []
    for b, (start, count, row, _) in enumerate(sequences):
        first = sum(counts[:b])
        expected |= {first + i: (start + i, first, start, row) for i in range(count)}
    columns = tile_columns(starts, counts, rows, tile_size)
    for first, size, position, sequence_first, start, row, *piece in columns.T:
        assert piece == [0, 1]
        assert 1 <= size <= tile_size and (first - sequence_first) % tile_size == 0
        covered += [(first + i, (position + i, sequence_first, start, row)) for i in range(size)]
    assert len(covered) == len(expected) and dict(covered) == expected
    assert (np.diff(columns[2] + columns[1]) <= 0).all()


@given(SEQUENCES, st.integers(1, 70))
def test_the_pieces_of_a_tile_follow_each_other_in_the_place_of_the_tile(sequences, tile_size):
    starts, counts, _, pieces = columns_of(sequences)
    whole = tile_columns(starts, counts, None, tile_size)
    cut = tile_columns(starts, counts, None, tile_size, pieces)
    expected = [[*tile[:6], i, pieces[tile[5]]] for tile in whole.T for i in range(pieces[tile[5]])]
    assert cut.T.tolist() == expected


@given(st.integers(0, 5000), st.integers(0, 1000), st.integers(0, 99), st.integers(1, 70))
def test_the_tiles_of_one_sequence_are_those_it_has_among_others(start, count, row, tile_size):
    alone = tile_columns([start], [count], [row], tile_size)
    among = tile_columns([start], [count], [row], tile_size, pieces=[1])
    assert alone.dtype == among.dtype and alone.flags.c_contiguous and alone.tolist() == among.tolist()


@given(PREFIXES, st.integers(0, 300), st.sampled_from((None, 1000, 4096)))
def test_tiles_are_cut_into_no_more_pieces_than_there_is_room_for(sequences, room, window):
    starts, counts = columns_of(sequences)
    pieces = pieces_for(starts, counts, 64, room, 16, window)
    if pieces is None:
        return
    assert tile_columns(starts, counts, None, 64, pieces).shape[1] <= room
    assert max(starts) >= LONG_PREFIX and max(pieces) > 1
    for start, n in zip(starts, pieces, strict=True):
        seen = min(start, window or start)
        assert n == 1 if seen < LONG_PREFIX else 1 <= n <= 0.5 + (seen / PIECE_KEYS / 16) ** 0.5
