"""The rows that the device keeps: their views and bytes, and how a row advances."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from rosellm.roseinfer.cache.device_state import (
    FIELDS,
    INERT,
    INT32_MAX,
    NO_STOP,
    ROUNDS,
    DeviceState,
    row_bytes,
)
from rosellm.roseinfer.kernels.advance import advance, advance_ref
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import NOT_FINITE, SamplingParams
from tests.helpers import CPU, TRITON_DEVICES

LARGEST = 2**63 - 1
quick = settings(max_examples=50, deadline=None, derandomize=True)


# A row as bytes.


def make_sequence(prompt: list[int], eos: tuple[int, ...] = (), **params) -> Sequence:
    return Sequence(1, prompt, SamplingParams(**params), eos)


def row_of(sequence: Sequence, position: int, rounds: int) -> DeviceState:
    state = DeviceState(2, 3, CPU)
    words = np.frombuffer(row_bytes(sequence, position, rounds), np.int32)
    state.rows[1, :FIELDS] = torch.from_numpy(words.copy())
    return state.at(torch.tensor([1]))


def as_float32(x: float) -> float:
    """As float32 holds it, its largest number instead of infinity."""
    return np.float32(min(x, float(np.finfo(np.float32).max))).item()


@quick
@given(
    prompt=st.lists(st.integers(0, INT32_MAX), min_size=4, max_size=4),
    eos=st.lists(st.integers(0, INT32_MAX), max_size=3).map(tuple),
    position=st.integers(0, 3),
    rounds=st.integers(0, ROUNDS - 1),
    temperature=st.floats(0, 1.79e308) | st.sampled_from([0, 1, 1e-300, 1e308, 3.4028235677973366e38]),
    top_p=st.floats(5e-324, 1),
    min_p=st.floats(0, 1),
    penalties=st.tuples(st.floats(1e-30, 1e30), st.floats(-2, 2), st.floats(-2, 2)),
    integers=st.fixed_dictionaries(
        {
            "top_k": st.integers(0, LARGEST) | st.just(LARGEST),
            "seed": st.integers(0, LARGEST) | st.sampled_from([0, 2**32 - 1, 2**32, LARGEST]),
            "max_tokens": st.integers(1, 10_000),
            "ignore_eos": st.booleans(),
        }
    ),
)
def test_a_row_holds_what_the_sequence_says(
    prompt, eos, position, rounds, temperature, top_p, min_p, penalties, integers
):
    floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    names = [f"{kind}_penalty" for kind in ("repetition", "presence", "frequency")]
    sequence = make_sequence(prompt, eos, **floats, **dict(zip(names, penalties, strict=True)), **integers)
    row = row_of(sequence, position, rounds)
    assert (row.tokens, row.positions, row.rounds) == (prompt[position], position, rounds)
    assert row.limits == len(prompt) + integers["max_tokens"]
    assert row.stops == (eos[0] if eos and not integers["ignore_eos"] else NO_STOP)
    assert row.top_k == min(integers["top_k"], INT32_MAX) and row.seeds == integers["seed"]
    assert row.prompts == len(prompt) and row.counts == 0
    found = row.temperatures, row.top_p, row.min_p, row.repetition, row.presence, row.frequency
    assert [view.item() for view in found] == list(map(as_float32, (*floats.values(), *penalties)))
    assert row.temperatures.item() < math.inf


# Advancing.

CHOICES = torch.tensor([-math.inf, -1.0, 0.0, 0.5, math.inf])


def state_of(rows: dict[str, Tensor], device: str, stop_tokens: tuple[int, ...]) -> DeviceState:
    """Rows with these fields; all other words are 99."""
    state = DeviceState(len(rows["tokens"]), 3, torch.device(device), stop_tokens)
    state.rows.fill_(99)
    for name, values in rows.items():
        getattr(state, name).copy_(values)
    return state


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_the_kernel_advances_rows_as_the_reference_does(device):
    """Among few tokens, so that equal values, stop tokens and limits are met; 0 tiles: tokens are given."""

    @quick
    @given(st.integers(0, 10**9), st.sampled_from([0, 1, 5, 393]))
    def check(seed, n_tiles):
        draw = torch.Generator().manual_seed(seed)

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high + 1, shape, generator=draw, dtype=torch.int32)

        n = int(integers(1, 5))
        rows = {"tokens": integers(0, 5, n), "positions": integers(-2, 8, n), "limits": integers(1, 11, n)}
        rows |= {"stops": integers(-1, 5, n), "rounds": integers(0, ROUNDS - 1, n)}
        rows["rounds"][0] = ROUNDS - 1
        stop_tokens = tuple(integers(0, 5, int(integers(0, 3))).tolist())
        slots = torch.randperm(n, generator=draw)[: int(integers(1, n))]
        indices, values = integers(NOT_FINITE if n_tiles == 0 else 0, 5, len(slots), max(n_tiles, 1)), None
        if n_tiles:
            values = CHOICES[integers(0, int(integers(0, 4)), len(slots), n_tiles).long()]
        ours, theirs = (state_of(rows, place, stop_tokens) for place in (device, "cpu"))
        given = {"slots": slots, "indices": indices, "values": values}
        advance_ref(state=theirs, **given)
        advance(state=ours, **{name: x if x is None else x.to(device) for name, x in given.items()})
        if device == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(ours.rows.cpu(), theirs.rows) and torch.equal(ours.ring, theirs.ring)

    check()


@pytest.mark.parametrize(
    ("row", "token", "expected"),
    [
        ({}, 4, (4, 6, 4)),
        ({"limits": 7}, 4, (4, INERT, 4)),
        ({"stops": 4}, 4, (4, INERT, 4)),
        ({"stops": 3}, 2, (2, INERT, 2)),
        ({"stops": NO_STOP}, 2, (2, 6, 2)),
        ({}, NOT_FINITE, (1, INERT, NOT_FINITE)),
        ({"positions": INERT}, 4, (1, INERT, INERT)),
    ],
    ids=["goes on", "limit", "its stop token", "another stop token", "stops nowhere", "not finite", "inert"],
)
def test_a_row_takes_its_token_and_ends_where_it_must(row, token, expected):
    """expected: the row's token and position, and what is in the ring."""
    row = {"tokens": 1, "positions": 5, "limits": 99, "stops": 9, "rounds": ROUNDS - 1} | row
    state = state_of({name: torch.tensor([value]) for name, value in row.items()}, "cpu", (2,))
    state.ring.fill_(-7)
    advance_ref(state=state, slots=torch.tensor([0]), values=None, indices=torch.tensor([[token]]).int())
    assert (state.tokens.item(), state.positions.item(), state.ring[ROUNDS - 1].item()) == expected
    assert state.rounds.item() == 0 and (state.ring[:-1] == -7).all()


def test_a_row_takes_the_lowest_index_of_its_highest_value():
    fields = {"tokens": 1, "positions": 5, "limits": 99, "stops": NO_STOP, "rounds": 3}
    state = state_of({name: torch.full((2,), value) for name, value in fields.items()}, "cpu", ())
    values = torch.tensor([[0.5, -1.0, 0.5, 0.5], [0.5, math.inf, 0.5, 0.5]])
    indices = torch.tensor([[8, 1, 3, 5]] * 2).int()
    advance_ref(state=state, slots=torch.arange(2), values=values, indices=indices)
    assert state.ring[3].tolist() == [3, NOT_FINITE]
