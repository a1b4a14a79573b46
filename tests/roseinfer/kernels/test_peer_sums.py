"""The sum over ranks with residual and norm: one rank's kernel, the others' part played by the test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rosellm.models.part import Part
from rosellm.roseinfer.kernels.peer_sums import make_sum_add_norm, peer_bytes, sum_add_norm_ref
from rosellm.roseinfer.ranks.peer_memory import PeerMemory
from tests.roseinfer.kernels.kernel_checks import assert_near, every_device

ROWS, MOST_ROWS = 3, 4


def memory(part: Part, n_bytes: int, device: str) -> tuple[PeerMemory, list[Tensor]]:
    """The bytes of all ranks, on one device."""
    each = [torch.zeros(n_bytes, dtype=torch.uint8, device=device) for _ in range(part.size)]
    addresses = torch.tensor([one.data_ptr() for one in each], device=device)
    return PeerMemory(part, each[part.rank], addresses, []), each


def say(bytes_: Tensor, half: int, rank: int, n_ranks: int, values: Tensor, to: Tensor) -> None:
    """As ``rank`` does in its turn: its rows are there, and the flags of the reader ``to`` say so."""
    size = len(bytes_) // 2
    rows = bytes_[half * size :][size - MOST_ROWS * values[0].nbytes : size].view(values.dtype)
    rows.view(MOST_ROWS, -1)[: len(values)] = values
    flags_of(to, half, n_ranks)[: len(values), rank] = 1


def flags_of(bytes_: Tensor, half: int, n_ranks: int) -> Tensor:
    size = len(bytes_) // 2
    return bytes_[half * size :][: MOST_ROWS * n_ranks * 4].view(torch.int32).view(MOST_ROWS, n_ranks)


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank, n_ranks", [(0, 1), (0, 2), (1, 2), (2, 4)])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_kernel_is_its_specification_in_both_halves(device, dtype, rank, n_ranks, kind):
    torch.manual_seed(rank)
    width, part, others = 80, Part(rank, n_ranks), [other for other in range(n_ranks) if other != rank]
    peers, each = memory(part, peer_bytes(MOST_ROWS, width, dtype.itemsize, n_ranks), device)
    sum_add_norm = make_sum_add_norm(peers, MOST_ROWS)
    scale, *rest = torch.randn(3, width, device=device).to(dtype)
    bias, shift = rest if kind == "layer" else (None, None)
    for half in 0, 1, 0:
        partial = torch.randn(n_ranks, ROWS, width, device=device).to(dtype)
        x = torch.randn(ROWS, width, device=device).to(dtype)
        for other in others:
            flags_of(each[other], half, n_ranks)[:, rank] = 0  # it has read what was there before
            say(each[other], half, other, n_ranks, partial[other], each[rank])
        norm = {"bias": bias, "scale": scale, "shift": shift, "eps": 1e-5}
        expected_x = x.clone()
        expected = sum_add_norm_ref(partial=partial, x=expected_x, **norm)
        out = sum_add_norm(x=x, delta=partial[rank : rank + 1], **norm)
        for mine, theirs in ((x, expected_x), (out, expected)):
            assert_near(mine, theirs, 1e-5 if dtype == torch.float32 else 2e-2)
        assert (flags_of(each[rank], half, n_ranks) == 0).all()  # what was said has been heard
        assert all((flags_of(each[other], half, n_ranks)[:ROWS, rank] == 1).all() for other in others)
