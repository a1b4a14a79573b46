"""Heads before attention: the spec against the models' own code, the kernel against the spec."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rosellm.models.rope import Rotary
from rosellm.roseinfer.kernels.rotary import position_heads, position_heads_ref, positioned_ref
from tests.helpers import DTYPES, TRITON_DEVICES, bits
from tests.roseinfer.kernels.kernel_checks import PLACES, assert_near, assert_replays_equal_ordinary_launches
from tests.roseinfer.kernels.test_large_offsets import far_apart, interpreted

N_POSITIONS, WILD = 40, -(2**31)
POSITIONS = [0, 7, -1, N_POSITIONS - 1, 3, WILD]


def make_rotary(head_dim: int, norms: bool, dtype: torch.dtype, device: str) -> Rotary:
    generator = torch.Generator().manual_seed(head_dim)
    angles = 10 * torch.rand(N_POSITIONS, head_dim // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    weights = 0.5 + torch.rand(2, head_dim, generator=generator).to(device, dtype)
    return Rotary(cos_sin, *(weights if norms else (None, None)), eps=1e-5)


def make_heads(rows: int, n_heads: int, n_kv: int, head_dim: int, dtype: torch.dtype, device: str) -> Tensor:
    """What a fused projection gives: q, k and v ``[N, H + 2 H_kv, D]``."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, n_heads + 2 * n_kv, head_dim, generator=generator).to(device, dtype)


def strided(positions: list[int], device: str) -> Tensor:
    """A column of a wider tensor."""
    columns = torch.full((len(positions), 3), 2**30, dtype=torch.int32, device=device)
    columns[:, 1] = torch.tensor(positions)
    return columns[:, 1]


def assert_equals_spec(fused: Tensor, n_heads: int, positions: Tensor, rotary: Rotary) -> None:
    """q and k are the spec's; v, the positions and the weights stay as they are."""
    n_kv, theirs = (fused.shape[1] - n_heads) // 2, fused.clone()
    before, weights = positions.clone(), [None if x is None else x.clone() for x in rotary[:3]]
    for position, heads in ((position_heads, fused), (position_heads_ref, theirs)):
        q, k, _ = heads.split((n_heads, n_kv, n_kv), dim=1)
        position(q=q, k=k, positions=positions, rotary=rotary)
    assert theirs.isfinite().all()
    assert_near(fused, theirs)
    assert torch.equal(bits(fused[:, -n_kv:]), bits(theirs[:, -n_kv:]))
    assert torch.equal(positions, before)
    assert all(x is y or torch.equal(x, y) for x, y in zip(rotary[:3], weights, strict=True))


def test_positioned_heads_are_those_of_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    positions, q, k = torch.tensor([0, 7, 3]), torch.randn(3, 4, 20), torch.randn(3, 2, 20)
    rotary, norm = make_rotary(20, True, torch.float32, "cpu"), Qwen3RMSNorm(20, eps=1e-5)
    cos, sin = (half.repeat(1, 2) for half in rotary.cos_sin[positions].chunk(2, dim=1))
    for x, weight in ((q, rotary.q_norm), (k, rotary.k_norm), (q, None)):
        normed = x
        if weight is not None:
            norm.weight.data.copy_(weight)
            normed = norm(x).detach()
        expected, _ = apply_rotary_pos_emb(normed, normed, cos, sin)
        torch.testing.assert_close(positioned_ref(x, weight, positions, rotary), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [False, True])
def test_the_spec_changes_the_given_heads_in_place(norms, dtype):
    """A negative position counts as 0."""
    fused, rotary = make_heads(6, 3, 1, 8, dtype, "cpu"), make_rotary(8, norms, dtype, "cpu")
    before = fused.clone()
    positions = torch.tensor(POSITIONS, dtype=torch.int32)
    position_heads_ref(q=fused[:, :3], k=fused[:, 3:4], positions=positions, rotary=rotary)
    for i, position in enumerate(POSITIONS):
        own = slice(i, i + 1), torch.tensor([max(position, 0)])
        q = positioned_ref(before[own[0], :3], rotary.q_norm, own[1], rotary)
        k = positioned_ref(before[own[0], 3:4], rotary.k_norm, own[1], rotary)
        assert torch.equal(fused[i], torch.cat((q[0], k[0], before[i, 4:])))


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("n_heads", "n_kv", "head_dim"), [(1, 1, 2), (3, 1, 20), (5, 5, 16), (14, 2, 64), (6, 3, 96), (2, 1, 128)]
)
def test_the_kernel_equals_the_spec(n_heads, n_kv, head_dim, norms, device, dtype):
    fused = make_heads(len(POSITIONS), n_heads, n_kv, head_dim, dtype, device)
    rotary = make_rotary(head_dim, norms, dtype, device)
    assert_equals_spec(fused, n_heads, strided(POSITIONS, device), rotary)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_a_head_of_zeros_stays_zero_whatever_its_norm(device):
    fused = torch.zeros(2, 4, 16, device=device)
    assert_equals_spec(fused, 2, strided([5, 6], device), make_rotary(16, True, torch.float32, device))
    assert not fused.any()


@interpreted
@pytest.mark.filterwarnings("ignore:overflow")
def test_the_kernel_reads_rows_that_are_far_apart(tmp_path):
    fused = far_apart(tmp_path, make_heads(18, 2, 1, 16, torch.float32, "cpu"))
    assert_equals_spec(fused, 2, strided(list(range(18)), "cpu"), make_rotary(16, True, torch.float32, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("norms", [False, True])
def test_dependent_launches_in_a_replayed_graph_equal_ordinary_ones(norms):
    """Twice in a row, over the same heads."""
    fused = make_heads(64, 16, 8, 128, torch.float16, "cuda")
    start, rotary = fused.clone(), make_rotary(128, norms, torch.float16, "cuda")
    positions = strided([i % N_POSITIONS - 1 for i in range(64)], "cuda")
    q, k, _ = fused.split((16, 8, 8), dim=1)

    def refill(seed: int) -> None:
        fused.copy_(start * (1 + seed % 7) / 7)

    def chain(kernels) -> tuple[Tensor, ...]:
        for _ in range(2):
            kernels.position_heads(q=q, k=k, positions=positions, rotary=rotary)
        return (fused.flatten(1),)

    assert_replays_equal_ordinary_launches(chain, refill)
