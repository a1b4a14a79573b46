"""The rows that the device keeps: their views and bytes, and how a row advances."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rosellm.roseinfer.cache.device_state import (
    FIELDS,
    INERT,
    INT32_MAX,
    NO_STOP,
    POSITION,
    ROUNDS,
    DeviceState,
    row_bytes,
)
from rosellm.roseinfer.kernels.advance import advance as advance_triton, advance_ref
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import NOT_FINITE, SamplingParams
from tests.helpers import CPU, INTERPRETED, ON_GPU, TRITON_DEVICES

LARGEST = 2**63 - 1
ADVANCES = ["reference", INTERPRETED, ON_GPU]
quick = settings(max_examples=50, deadline=None, derandomize=True)


def advance_on(device: str):
    """The spec, or the kernel and where it runs."""
    return (advance_ref, CPU) if device == "reference" else (advance_triton, torch.device(device))


# Rows and views.


@pytest.mark.parametrize("width", [1, 4, 7])
def test_the_views_are_separate_words_of_rows_that_are_inert_at_first(width):
    state = DeviceState(3, width, CPU)
    assert (state.positions == INERT).all() and (state.ring == INERT).all()
    assert state.table.shape == (3, width) and state.ring.shape == (ROUNDS, 3)
    views = ["tokens", "positions", "limits", "stops", "rounds", "top_k", "seeds", "temperatures", "top_p"]
    views += ["min_p", "repetition", "presence", "frequency", "counts", "prompts", "table"]
    state.rows.zero_()
    for i, name in enumerate(views):
        getattr(state, name)[1] = i + 1
    for i, name in enumerate(views):
        view = getattr(state, name)
        assert (view[1] == i + 1).all() and not view[0].any() and not view[2].any()
    assert state.seeds.dtype == torch.int64
    assert state.temperatures.dtype == state.top_p.dtype == torch.float32


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


@pytest.mark.parametrize("logit", [-1e8, -1e4, -4.0, 4.0, 1e4, 1e8])
@pytest.mark.parametrize("extreme", [5e-324, 1e-38, 1e39, 1.79e308, 10**300], ids=float)
def test_a_rows_repetition_penalty_leaves_logits_of_any_size_finite_and_of_their_sign(extreme, logit):
    by = row_of(make_sequence([1], repetition_penalty=extreme), 0, 0).repetition
    logit = torch.tensor([logit])
    assert by > 0
    for penalised in (logit / by, logit * by):
        assert penalised.isfinite() and penalised.sign() == logit.sign()


# Advancing.

VALUES = st.sampled_from([-math.inf, -1.0, 0.0, 0.5, math.inf])
TOKENS = st.integers(0, 5)
ROW = st.fixed_dictionaries(
    {
        "tokens": TOKENS,
        "positions": st.integers(-2, 8),
        "limits": st.integers(1, 11),
        "stops": st.integers(-1, 5),
        "rounds": st.integers(0, ROUNDS - 1) | st.just(ROUNDS - 1),
    }
)


@st.composite
def cases(draw):
    """Rows, the slots that advance, tiles of (value, index) or tokens without values, and the stop tokens."""
    rows = draw(st.lists(ROW, min_size=1, max_size=5))
    slots = draw(st.permutations(range(len(rows))))[: draw(st.integers(1, len(rows)))]
    tiles, stop_tokens = draw(st.integers(1, 5)), tuple(draw(st.lists(TOKENS, max_size=3)))
    choice = TOKENS | st.just(NOT_FINITE)
    if draw(st.booleans()):
        choice = st.lists(st.tuples(VALUES, TOKENS), min_size=tiles, max_size=tiles)
    return rows, slots, [draw(choice) for _ in slots], stop_tokens


def choose(choice) -> int:
    """The token of a row: the lowest index of the highest value."""
    if isinstance(choice, int):
        return choice
    best = max(value for value, _ in choice)
    return NOT_FINITE if math.isinf(best) else min(index for value, index in choice if value == best)


def advance_by_hand(
    rows: list[dict], slots: list[int], choices: list, stop_tokens: tuple[int, ...]
) -> tuple[list[dict], dict]:
    """The rows afterwards, and what is in the ring: (round, slot) → token."""
    rows, ring = [dict(row) for row in rows], {}
    for slot, choice in zip(slots, choices, strict=True):
        row, token = rows[slot], choose(choice)
        ring[row["rounds"], slot] = token if row["positions"] >= 0 else INERT
        row["rounds"] = (row["rounds"] + 1) % ROUNDS
        if row["positions"] < 0:
            row["positions"] = INERT
            continue
        length = row["positions"] + 2  # the tokens cached before, the one cached now, the new one
        row["positions"] += 1
        stopped = row["stops"] >= 0 and token in (row["stops"], *stop_tokens)
        if token == NOT_FINITE or stopped or length >= row["limits"]:
            row["positions"] = INERT
        if token != NOT_FINITE:
            row["tokens"] = token
    return rows, ring


def state_of(rows: list[dict], device: torch.device, stop_tokens: tuple[int, ...] = ()) -> DeviceState:
    """Rows with these fields; all other words are 99."""
    state = DeviceState(len(rows), 3, device, stop_tokens)
    state.rows.fill_(99)
    for i, row in enumerate(rows):
        for name, value in row.items():
            getattr(state, name)[i] = value
    return state


def advance(kernel, state: DeviceState, slots: list[int], choices: list) -> None:
    place, values, indices = state.rows.device, None, [[choice] for choice in choices]
    if not isinstance(choices[0], int):
        values = torch.tensor([[value for value, _ in choice] for choice in choices], device=place)
        indices = [[index for _, index in choice] for choice in choices]
    indices = torch.tensor(indices, dtype=torch.int32, device=place)
    kernel(state=state, slots=torch.tensor(slots, device=place), values=values, indices=indices)
    if place.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("device", ADVANCES)
def test_rows_advance_as_by_hand(device):
    kernel, place = advance_on(device)

    @quick
    @given(case=cases())
    def check(case):
        rows, slots, choices, stop_tokens = case
        state = state_of(rows, place, stop_tokens)
        advance(kernel, state, slots, choices)
        expected, sent = advance_by_hand(rows, slots, choices, stop_tokens)
        assert torch.equal(state.rows.cpu(), state_of(expected, CPU).rows)
        ring = torch.full_like(state.ring, INERT)
        for (count, slot), token in sent.items():
            ring[count, slot] = token
        assert torch.equal(state.ring, ring)

    check()


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_the_kernel_chooses_among_as_many_tiles_as_a_vocabulary_has(device):
    kernel, place = advance_on(device)
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(40, (6, 393), generator=generator).float()
    values[5] = -math.inf
    indices = (torch.arange(393) * 128 + torch.randint(128, (6, 393), generator=generator)).int()
    row = {"positions": 4, "limits": 100, "stops": NO_STOP, "rounds": 0, "tokens": 1}
    mine, theirs = state_of([row] * 6, place), state_of([row] * 6, CPU)
    slots = torch.arange(6)
    kernel(state=mine, slots=slots.to(place), values=values.to(place), indices=indices.to(place))
    advance_ref(state=theirs, slots=slots, values=values, indices=indices)
    assert torch.equal(mine.rows.cpu(), theirs.rows) and torch.equal(mine.ring, theirs.ring)
    assert theirs.rows[:, POSITION].tolist() == [5] * 5 + [INERT]
