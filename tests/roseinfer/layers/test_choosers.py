"""The choice of tokens on the device: each row's by its own request."""

from __future__ import annotations

import pytest
import torch

from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.device_state import DeviceState, row_bytes
from rosellm.roseinfer.cache.token_counts import seen_tokens
from rosellm.roseinfer.kernels.advance import advance_ref
from rosellm.roseinfer.kernels.draw import draw
from rosellm.roseinfer.kernels.table import TORCH
from rosellm.roseinfer.layers.choosers import Chooser, FusedChooser, LogitsChooser
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import NOT_FINITE, SamplingParams
from tests.helpers import random_model
from tests.sampler import Sampler

WISHES = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.3},
    "top_k": {"temperature": 0.8, "top_k": 7},
    "top_p": {"temperature": 1.1, "top_p": 0.6},
    "greedy with top_k": {"temperature": 0.0, "top_k": 3},
    "min_p": {"temperature": 1.2, "min_p": 0.3},
    "penalised": {"temperature": 0.0, "repetition_penalty": 3.0, "presence_penalty": 1.0},
    "penalised top_p": {"top_p": 0.7, "frequency_penalty": 1.5},
}
POSITION = 4


def fused(model: Transformer) -> FusedChooser:
    return FusedChooser(model, TORCH, torch.zeros(4, model.config.vocab_size, dtype=torch.int32))


def choose(chooser: Chooser, hidden: torch.Tensor, wishes: list[dict], seed: int) -> list[int]:
    """The token that each row takes; rows have seeds ``seed``, ``seed + 1`` …"""
    rows = [SamplingParams(max_tokens=9, seed=seed + i, **wish) for i, wish in enumerate(wishes)]
    state = DeviceState(len(rows), 2, torch.device("cpu"))
    for i, params in enumerate(rows):
        sequence = Sequence(i, [1, 2, 3], params, ())
        sequence.tokens += [2, 4]
        chooser.counts[i] = 0
        for token, number in zip(*seen_tokens(sequence, POSITION), strict=True):
            chooser.counts[i, token] = int(number)
        counts = i + 1 if params.is_penalised else 0
        words = torch.frombuffer(bytearray(row_bytes(sequence, POSITION, 0, counts)), dtype=torch.int32)
        state.rows[i, : len(words)] = words
    values, indices = chooser(hidden, state, chooser.mode(rows))
    advance_ref(state=state, slots=torch.arange(len(rows)), values=values, indices=indices)
    return state.ring[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", WISHES)
def test_a_rows_token_is_that_of_its_own_wish_whatever_shares_the_batch(name):
    chooser = fused(random_model(0))
    hidden = torch.randn(2, random_model(0).config.d_model, generator=torch.Generator().manual_seed(3))
    for seed in range(20):
        (alone,) = choose(chooser, hidden[:1], [WISHES[name]], seed)
        for other in WISHES.values():
            assert choose(chooser, hidden, [WISHES[name], other], seed)[0] == alone


@pytest.mark.parametrize("name", WISHES)
def test_a_rows_token_is_that_of_the_host_driven_sampler(name):
    """Whose logits, and those of the device's full logits, are the same here."""
    model = random_model(0)
    hidden = torch.randn(1, model.config.d_model, generator=torch.Generator().manual_seed(8))
    choosers = fused(model), LogitsChooser(model.logits, TORCH, torch.zeros(4, 101, dtype=torch.int32))
    for seed in range(20):
        sequence = Sequence(0, [1, 2, 3], SamplingParams(seed=seed, **WISHES[name]), ())
        sequence.tokens += [2, 4]
        expected = Sampler()(model.logits(hidden), [sequence])
        for chooser in choosers:
            assert choose(chooser, hidden, [WISHES[name]], seed) == expected


def test_a_filtered_rows_token_is_the_draw_that_is_specified():
    model = random_model(0)
    chooser = fused(model)
    hidden = torch.randn(4, model.config.d_model, generator=torch.Generator().manual_seed(5))
    wishes = [WISHES["top_k"], WISHES["drawn"], WISHES["top_p"], WISHES["greedy"]]
    tokens = choose(chooser, hidden, wishes, 50)
    settings = ([w.get("temperature"), w.get("top_k", 0), w.get("top_p", 1.0), 0.0] for w in wishes)
    seeds, positions = torch.arange(50, 54), torch.full((4,), POSITION + 1)
    assert tokens == draw(model.logits(hidden), *torch.tensor(list(settings)).T, seeds, positions).tolist()


def test_a_filtered_row_without_finite_logits_has_no_token_and_its_neighbours_have_theirs():
    chooser = fused(random_model(0))
    hidden = torch.randn(3, random_model(0).config.d_model, generator=torch.Generator().manual_seed(6))
    wishes = [WISHES["drawn"], WISHES["top_k"], WISHES["greedy"]]
    expected = choose(chooser, hidden, wishes, 7)
    hidden[1] = float("nan")
    assert choose(chooser, hidden, wishes, 7) == [expected[0], NOT_FINITE, expected[2]]


def test_rows_with_a_temperature_only_are_drawn_without_a_sort_and_get_the_same_tokens(monkeypatch):
    """As in a batch with a filtered row, whose vocabulary is sorted."""
    chooser = LogitsChooser(random_model(0).logits, TORCH, torch.zeros(4, 101, dtype=torch.int32))
    hidden = torch.randn(3, random_model(0).config.d_model, generator=torch.Generator().manual_seed(4))
    drawn = [WISHES["drawn"], WISHES["greedy"]]
    with_filtered = [choose(chooser, hidden, [*drawn, WISHES["top_p"]], seed)[:2] for seed in range(40)]
    monkeypatch.setattr(torch.Tensor, "sort", None)
    assert [choose(chooser, hidden[:2], drawn, seed) for seed in range(40)] == with_filtered
