"""The sum over ranks with residual and norm: one rank's kernel, the others' part played by the test."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rosellm.models.part import Part
from rosellm.roseinfer.kernels.peer_sums import HALVES, make_sum_add_norm, peer_bytes, sum_add_norm_ref
from rosellm.roseinfer.ranks.peer_memory import FULL, SHARED, PeerMemory, share_files
from tests.roseinfer.kernels.kernel_checks import assert_near, every_device

ROWS, MOST_ROWS, WIDTH = 3, 4, 80


def memory(part: Part, dtype: torch.dtype, device: str) -> tuple[PeerMemory, list[Tensor]]:
    """One rank's view; each rank's memory as rows ``[HALVES, size, MOST_ROWS, WIDTH]``."""
    n_bytes = peer_bytes(MOST_ROWS, WIDTH, dtype.itemsize, part.size)
    each = [torch.full((n_bytes,), FULL, dtype=torch.uint8, device=device) for _ in range(part.size)]
    addresses = torch.tensor([one.data_ptr() for one in each], device=device)
    rows = [one.view(dtype).view(HALVES, part.size, MOST_ROWS, WIDTH) for one in each]
    return PeerMemory(part, each[part.rank], addresses), rows


def is_empty(rows: Tensor) -> bool:
    return bool((rows.contiguous().view(torch.uint8) == FULL).all())


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank, n_ranks", [(0, 1), (0, 2), (1, 2), (2, 4)])
@pytest.mark.parametrize(("kind", "n_parts"), [("rms", 1), ("layer", 1), ("rms", 4)])
def test_the_kernel_is_its_specification_in_both_halves(device, dtype, rank, n_ranks, kind, n_parts):
    torch.manual_seed(rank)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    part, others = Part(rank, n_ranks), [other for other in range(n_ranks) if other != rank]
    peers, each = memory(part, dtype, device)
    sum_add_norm = make_sum_add_norm(peers, MOST_ROWS)
    scale, *rest = torch.randn(3, WIDTH, device=device).to(dtype)
    bias, shift = rest if kind == "layer" else (None, None)
    for half in 0, 1, 0:
        partial = torch.randn(n_ranks, n_parts, ROWS, WIDTH, device=device)
        partial = partial.to(dtype) if n_parts == 1 else partial
        partial[:, :, 0, 0] = 0.0
        partial[rank, :, 1, 0], x = float("nan"), torch.randn(ROWS, WIDTH, device=device).to(dtype)
        sent = partial.float().sum(dim=1).to(dtype)  # of each rank
        for other in others:
            assert is_empty(each[other][half, rank, ROWS:])
            each[other][half, rank].view(torch.uint8).fill_(FULL)  # it has read what was there before
            each[rank][half, other, :ROWS] = sent[other]
        norm = {"bias": bias, "scale": scale, "shift": shift, "eps": 1e-5}
        expected_x = x.clone()
        expected = sum_add_norm_ref(partial=partial, x=expected_x, **norm)
        out = sum_add_norm(x=x, delta=partial[rank], **norm)
        for mine, theirs in ((x, expected_x), (out, expected)):
            assert mine[1].isnan().any() and torch.equal(mine.isnan(), theirs.isnan())
            assert_near(mine.nan_to_num(), theirs.nan_to_num(), tolerance)
        assert is_empty(each[rank][half])  # what was said has been heard
        for other in others:
            said = each[other][half, rank, :ROWS]
            assert_near(said.nan_to_num(), sent[rank].nan_to_num(), tolerance)
            assert torch.equal(said.isnan(), sent[rank].isnan())


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_value_with_all_bits_set_arrives_as_another_nan(device, dtype):
    """It would look as if it had not arrived, for ever."""
    peers, each = memory(Part(0, 2), dtype, device)
    each[0][0, 1] = 0.0
    full = torch.full((1, MOST_ROWS, WIDTH * dtype.itemsize), FULL, dtype=torch.uint8, device=device)
    x, scale = (torch.ones(shape, device=device, dtype=dtype) for shape in ((MOST_ROWS, WIDTH), (WIDTH,)))
    out = make_sum_add_norm(peers, MOST_ROWS)(x=x, delta=full.view(dtype), scale=scale, shift=None, eps=1e-5)
    assert out.isnan().all() and each[1][0, 0].isnan().all()
    words = each[1][0, 0].view(torch.int32 if dtype == torch.float32 else torch.int16)
    assert (words != -1).all()


def test_memory_of_ranks_that_never_meet_is_removed_and_nobody_waits():
    def fail() -> None:
        raise ConnectionError

    before = set(SHARED.glob("rosellm-*"))
    with pytest.raises(ConnectionError):
        share_files(dist.HashStore(), Part(0, 2), 64, met=fail)
    assert set(SHARED.glob("rosellm-*")) <= before
