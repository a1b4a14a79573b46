"""The choice of tokens on the device: each row's by its own request."""

from __future__ import annotations

import pytest
import torch

from rosellm.roseinfer.cache.device_state import DeviceState, row_bytes
from rosellm.roseinfer.kernels.advance import advance_ref
from rosellm.roseinfer.kernels.table import TORCH
from rosellm.roseinfer.layers.choosers import FusedChooser
from rosellm.roseinfer.layers.sampler import draw
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import NOT_FINITE, SamplingParams
from tests.helpers import random_model

WISHES = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.3},
    "top_k": {"temperature": 0.8, "top_k": 7},
    "top_p": {"temperature": 1.1, "top_p": 0.6},
    "greedy with top_k": {"temperature": 0.0, "top_k": 3},
}
POSITION = 4


def choose(chooser: FusedChooser, hidden: torch.Tensor, wishes: list[dict], seed: int) -> list[int]:
    """The token that each row takes; rows have seeds ``seed``, ``seed + 1`` …"""
    rows = [SamplingParams(max_tokens=9, seed=seed + i, **wish) for i, wish in enumerate(wishes)]
    state = DeviceState(len(rows), 2, torch.device("cpu"))
    for i, params in enumerate(rows):
        sequence = Sequence(i, [1] * (POSITION + 1), params, 1, None)
        words = torch.frombuffer(bytearray(row_bytes(sequence, POSITION, 0)), dtype=torch.int32)
        state.rows[i, : len(words)] = words
    values, indices = chooser(hidden, state, chooser.mode(rows))
    advance_ref(state=state, slots=torch.arange(len(rows)), values=values, indices=indices)
    return state.ring[0].tolist()


@pytest.mark.parametrize("name", WISHES)
def test_a_rows_token_is_that_of_its_own_wish_whatever_shares_the_batch(name):
    chooser = FusedChooser(random_model(0), TORCH)
    hidden = torch.randn(2, random_model(0).config.d_model, generator=torch.Generator().manual_seed(3))
    for seed in range(20):
        (alone,) = choose(chooser, hidden[:1], [WISHES[name]], seed)
        for other in WISHES.values():
            assert choose(chooser, hidden, [WISHES[name], other], seed)[0] == alone


def test_full_logits_decide_for_nobody_who_does_not_ask_for_them():
    """What makes the full logits rounds in another way; so a row that shares a batch must not notice it."""
    chooser = FusedChooser(random_model(0), TORCH)
    hidden = torch.randn(3, random_model(0).config.d_model, generator=torch.Generator().manual_seed(4))
    wishes = [WISHES["greedy"], WISHES["drawn"], WISHES["top_k"]]
    expected = choose(chooser, hidden, wishes, 11)
    logits = chooser.logits(hidden)
    chooser.logits = lambda _hidden: logits.flip(1)
    changed = choose(chooser, hidden, wishes, 11)
    assert changed[:2] == expected[:2] and changed[2] != expected[2]


def test_a_filtered_rows_token_is_the_draw_that_is_specified():
    model = random_model(0)
    chooser = FusedChooser(model, TORCH)
    hidden = torch.randn(4, model.config.d_model, generator=torch.Generator().manual_seed(5))
    wishes = [WISHES["top_k"], WISHES["drawn"], WISHES["top_p"], WISHES["greedy"]]
    tokens = choose(chooser, hidden, wishes, 50)
    settings = ([w.get("temperature"), w.get("top_k", 0), w.get("top_p", 1.0)] for w in wishes)
    temperature, top_k, top_p = torch.tensor(list(settings)).T
    seeds, positions = torch.arange(50, 54), torch.full((4,), POSITION + 1)
    assert tokens == draw(model.logits(hidden), temperature, top_k, top_p, seeds, positions).tolist()


def test_a_filtered_row_without_finite_logits_has_no_token_and_its_neighbours_have_theirs():
    chooser = FusedChooser(random_model(0), TORCH)
    hidden = torch.randn(3, random_model(0).config.d_model, generator=torch.Generator().manual_seed(6))
    wishes = [WISHES["drawn"], WISHES["top_k"], WISHES["greedy"]]
    expected = choose(chooser, hidden, wishes, 7)
    hidden[1] = float("nan")
    assert choose(chooser, hidden, wishes, 7) == [expected[0], NOT_FINITE, expected[2]]
