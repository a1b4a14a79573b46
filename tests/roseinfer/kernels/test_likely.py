"""The kernels of log-probabilities against their torch reference."""

from __future__ import annotations

import pytest
import torch

from rosellm.roseinfer.kernels.likely import TILE, likely_words, store_likely, store_likely_ref
from rosellm.roseinfer.sampling import MOST_LOGPROBS
from tests.roseinfer.kernels.kernel_checks import every_device, every_twin, guarded

pytestmark = guarded


def stored(store, logits: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return what ``store`` writes to a ring of poison, at a different slot and round for each row."""
    n = len(logits)
    slots, rounds = torch.arange(n).flip(0), torch.arange(n) % 2
    state = torch.zeros(n, 3, dtype=torch.int32)
    state[slots, 1], state[slots, 2] = tokens.cpu().int(), (rounds + 1).int()
    ring = torch.full((2, n, likely_words(logits.shape[1])), -7, dtype=torch.int32, device=logits.device)
    slots, state = slots.to(logits.device), state.to(logits.device)
    store(logits=logits, tokens=state[:, 1], rounds=state[:, 2], slots=slots, wanted=wanted, ring=ring)
    assert (ring[1 - rounds, slots.cpu()] == -7).all()  # the other rounds keep what they hold
    return ring[rounds, slots.cpu()].cpu()


@every_device
@pytest.mark.parametrize("vocab", [31, TILE, 3 * TILE + 5, pytest.param(151936, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_the_kernels_store_what_the_reference_stores(device, vocab, scale):
    random = torch.Generator().manual_seed(vocab)
    logits = (scale * torch.randn(5, vocab + 3, generator=random)).to(device)[:, :vocab]
    tokens = torch.randint(vocab, (5,), generator=random).to(device)
    tokens[3], tokens[4] = logits[3].argmax(), -1  # the most likely token; no token
    wanted = torch.tensor([0, 1, 5, MOST_LOGPROBS, 3], device=device)
    found, expected = (stored(store, logits, tokens, wanted) for store in (store_likely, store_likely_ref))
    half = expected.shape[1] // 2
    for row, n in enumerate(wanted.tolist()):
        assert found[row, : 1 + n].tolist() == expected[row, : 1 + n].tolist()
        logprobs = (own[row, half : half + 1 + n].view(torch.float32) for own in (found, expected))
        torch.testing.assert_close(*logprobs, rtol=1e-5, atol=1e-5)
        assert found[row, -1] == expected[row, -1]
        assert (found[row, 1 + n : half] == -7).all()  # no more tokens than the row wants


@every_device
def test_of_equal_logits_the_lower_token_comes_first(device):
    logits = torch.zeros(1, 2 * TILE, device=device)
    logits[0, [5, TILE + 1, TILE + 2]] = 1.0
    found = stored(store_likely, logits, torch.tensor([7]), torch.tensor([6], device=device))
    assert found[0, :7].tolist() == [7, 5, TILE + 1, TILE + 2, 0, 1, 2]
    assert found[0, -1] == 4


@every_twin
def test_a_row_with_a_negative_slot_stores_nothing(kernels, device):
    ring = torch.full((2, 3, likely_words(40)), -7, dtype=torch.int32, device=device)
    columns = torch.zeros(2, 3, dtype=torch.int32, device=device)
    slots, wanted = torch.tensor([[-1, 2], [1, 1]], device=device)
    logits = torch.zeros(2, 40, device=device)
    kernels.store_likely(
        logits=logits, tokens=columns[0], rounds=columns[1], slots=slots, wanted=wanted, ring=ring
    )
    assert (ring[:, :2] == -7).all() and (ring[0] == -7).all()
    assert ring[1, 2, 0] == 0
