"""Heads before attention: the spec against the models' own code, the kernel against the spec."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rosellm.models.rope import Rotary
from rosellm.roseinfer.kernels.rotary import position_heads_ref, positioned_ref
from tests.helpers import bits
from tests.roseinfer.kernels import kernel_checks as check

N_POSITIONS, WILD = 40, -(2**31)
POSITIONS = [0, 7, -1, N_POSITIONS - 1, 3, WILD]


def make_rotary(
    head_dim: int, norms: bool, dtype: torch.dtype, device: str, n_positions: int = N_POSITIONS
) -> Rotary:
    generator = torch.Generator().manual_seed(head_dim)
    angles = 10 * torch.rand(n_positions, head_dim // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    weights = 0.5 + torch.rand(2, head_dim, generator=generator).to(device, dtype)
    return Rotary(cos_sin, *(weights if norms else (None, None)), eps=1e-5)


def make_heads(
    rows: int, n_heads: int, n_kv: int, head_dim: int, dtype=torch.float32, device: str = "cpu"
) -> Tensor:
    """What a fused projection gives: q, k and v ``[N, H + 2 H_kv, D]``."""
    return check.normals(rows)(rows, n_heads + 2 * n_kv, head_dim).to(device, dtype)


def strided(positions: list[int], device: str) -> Tensor:
    """A column of a wider tensor."""
    columns = torch.full((len(positions), 3), 2**30, dtype=torch.int32, device=device)
    columns[:, 1] = torch.tensor(positions)
    return columns[:, 1]


def assert_heads_equal_spec(fused: Tensor, n_heads: int, positions: list[int], norms: bool = True) -> None:
    """q and k are the spec's; v, the positions and the weights stay as they are."""
    n_kv, before = (fused.shape[1] - n_heads) // 2, fused.clone()
    q, k, _ = fused.split((n_heads, n_kv, n_kv), dim=1)
    rotary = make_rotary(fused.shape[2], norms, fused.dtype, fused.device)
    case = {"q": q, "k": k, "positions": strided(positions, fused.device), "rotary": rotary}
    check.assert_equals_spec("position_heads", case, written=("q", "k"))
    assert torch.equal(bits(fused[:, -n_kv:]), bits(before[:, -n_kv:]))


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


@pytest.mark.parametrize("norms", [False, True])
def test_the_spec_changes_the_given_heads_in_place(norms):
    """A negative position counts as 0."""
    fused, rotary = make_heads(6, 3, 1, 8), make_rotary(8, norms, torch.float32, "cpu")
    before, positions = fused.clone(), torch.tensor(POSITIONS, dtype=torch.int32)
    position_heads_ref(q=fused[:, :3], k=fused[:, 3:4], positions=positions, rotary=rotary)
    heads = zip(before[:, :4].split((3, 1), dim=1), (rotary.q_norm, rotary.k_norm), strict=True)
    q, k = (positioned_ref(x, norm, positions.clamp_min(0), rotary) for x, norm in heads)
    assert torch.equal(fused, torch.cat((q, k, before[:, 4:]), dim=1))


@check.every_place
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("n_heads", "n_kv", "head_dim"), [(1, 1, 2), (3, 1, 20), (5, 5, 16), (14, 2, 64), (6, 3, 96), (2, 1, 128)]
)
def test_the_kernel_equals_the_spec(n_heads, n_kv, head_dim, norms, device, dtype):
    fused = make_heads(len(POSITIONS), n_heads, n_kv, head_dim, dtype, device)
    assert_heads_equal_spec(fused, n_heads, POSITIONS, norms)
