"""Counter-based random numbers: the published vectors, the formula, and independence."""

from __future__ import annotations

import math

import pytest
import torch

from rosellm.roseinfer.kernels import noise
from rosellm.roseinfer.kernels.noise import WORD, gumbel_noise, gumbel_noise_triton, philox4x32
from tests.helpers import ON_GPU
from tests.roseinfer.kernels.kernel_checks import every_device

LARGEST_SEED = 2**63 - 1
DEVICES = ["cpu", ON_GPU]
# Random123, tests/kat_vectors: counter, key and result of philox4x32-10.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """One block in Python integers, as the paper writes it."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ k0, b & WORD, (a >> 32) ^ x3 ^ k1, a & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return [x0, x1, x2, x3]


def noise_by_hand(seed: int, position: int, column: int) -> float:
    first, second, _, _ = philox_by_hand([position, 0, 0, 0], [seed & WORD, seed >> 32])
    word = column * 0x9E3779B1 + first & WORD
    word = (word ^ word >> 16) * 0x21F0AAAD & WORD
    word = ((word ^ word >> 15) + second) * 0x735A2D97 & WORD
    return -math.log(-math.log1p(-((word ^ word >> 15) + 0.5) / 2**32))


def random_rows(n: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and positions."""
    generator = torch.Generator().manual_seed(3)
    limits = LARGEST_SEED, 2**31 - 1
    return tuple(torch.randint(0, limit, (n,), generator=generator).to(device) for limit in limits)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, expected):
    assert philox_by_hand(words(counter), words(key)) == words(expected)
    found = philox4x32(*(tuple(torch.tensor([word]) for word in words(text)) for text in (counter, key)))
    assert [int(word) for word in found] == words(expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, LARGEST_SEED])
@pytest.mark.parametrize("position", [0, 1, 1023, 2**31 - 1])
def test_noise_is_that_of_seed_position_and_index(seed, position, device):
    seeds, positions = torch.tensor([5, seed], device=device), torch.tensor([9, position], device=device)
    found = gumbel_noise(seeds, positions, 50257)[1]
    for column in (0, 1, 2, 1000, 50256):
        assert found[column].item() == pytest.approx(noise_by_hand(seed, position, column), abs=2e-6)


def assert_triton_gives_the_noise_of_the_specification(seeds, positions, vocab_size: int) -> None:
    found, expected = (f(seeds, positions, vocab_size) for f in (gumbel_noise_triton, gumbel_noise))
    assert found.shape == expected.shape and found.dtype == expected.dtype
    close = 1e-6 if seeds.is_cuda else 3e-7  # its one instruction for a logarithm errs by more
    torch.testing.assert_close(found, expected, rtol=close, atol=close)


@every_device
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 1024, 2500])
def test_triton_gives_the_noise_of_the_specification(vocab_size, position_dtype, device):
    """Seeds and positions may be columns of a state."""
    seeds, positions = random_rows(4, device)
    columns = torch.stack((seeds, -seeds), dim=1), torch.stack((positions, -positions), dim=1)
    places = columns[1].to(position_dtype)[:, 0]
    assert_triton_gives_the_noise_of_the_specification(columns[0][:, 0], places, vocab_size)


@pytest.mark.gpu
def test_triton_gives_the_noise_of_a_whole_vocabulary_and_a_large_batch():
    assert_triton_gives_the_noise_of_the_specification(*random_rows(300, "cuda"), 50257)


@every_device
@pytest.mark.parametrize("make", [gumbel_noise, gumbel_noise_triton])
def test_noise_of_a_small_word_is_that_of_the_middle_between_two_words(make, device):
    seed, column = 1_596_515, 713  # found by search: its word is 2
    found = make(torch.tensor([seed], device=device), torch.tensor([0], device=device), column + 1)[0, column]
    assert found.item() == pytest.approx(-math.log(2.5 / 2**32), abs=1e-4)


@pytest.mark.parametrize(("word", "uniform"), [(0, 2.0**-24), (WORD, 1 - 2.0**-33)])
def test_the_extreme_words_give_finite_noise(monkeypatch, word, uniform):
    monkeypatch.setattr(noise, "hashed_words", lambda column, key: torch.full((1, 1), WORD - word))
    found = gumbel_noise(torch.tensor([1]), torch.tensor([1]), 1).item()
    assert found == pytest.approx(-math.log(-math.log(uniform)), rel=1e-6)


@pytest.mark.parametrize(
    ("seed", "position"), [(8, 3), (7, 4), (3, 7), (7 + 2**32, 3), (7 + 2**62, 3)], ids=str
)
def test_neighbouring_seeds_and_positions_have_uncorrelated_noise(seed, position):
    n = 50257
    rows = gumbel_noise(torch.tensor([7, seed]), torch.tensor([3, position]), n)
    assert abs(torch.corrcoef(rows)[0, 1].item()) < 4 / n**0.5
    assert abs(torch.corrcoef(torch.stack((rows[0, 1:], rows[1, :-1])))[0, 1].item()) < 4 / n**0.5
