"""Attention of several new tokens per row: spec and kernel, against a token at a time."""

from __future__ import annotations

import random

import pytest
import torch

from rosellm.models.rope import Rotary
from rosellm.roseinfer.kernels.attention_plan import Variant, make_plan, make_plan_ref
from rosellm.roseinfer.kernels.verify_attention import verify_attention, verify_attention_ref
from tests.roseinfer.kernels.kernel_checks import TOLERANCE, every_place, guarded, normals

GEOMETRIES = {  # query heads, KV heads, head size
    "one head a group": (3, 3, 16),
    "groups": (8, 2, 32),
    "odd": (6, 2, 20),
}
VARIANTS = {
    "whole": Variant(16),
    "pipelined": Variant(32, stages=2),
    "cut": Variant(16, pieces=5, lead=1),
    "many pieces": Variant(16, pieces=40),
}


def inputs(seed: int, device: str, dtype: torch.dtype, geometry: str, k: int, parts: int, rotates: bool):
    """Rows of random lengths, some inert, each with a random number of live verify rows."""
    rng, draw = random.Random(seed), normals(seed)
    n_heads, n_kv, head_dim = GEOMETRIES[geometry]
    n_rows, block_size, width, places = 4, 16, 8, k + 1
    positions, verified = [], []
    for _ in range(n_rows):
        position = rng.choice((-1, 0, 1, 15, 16, 40, 100))
        live = rng.randint(1, places) if position >= 0 else 0
        positions.append(position)
        verified += [position + i if i < live else -1 for i in range(places)]
    table = torch.randperm(n_rows * width).view(n_rows, width).int()
    caches = [draw(n_rows * width, n_kv, block_size, head_dim).to(dtype) for _ in range(2)]
    sizes = (n_rows * places, n_heads + 2 * n_kv, head_dim)
    fused = draw(*((parts, *sizes) if parts > 1 else sizes)).to(torch.float32 if parts > 1 else dtype)
    rotary = None
    if rotates:
        norms = [draw(head_dim).abs().to(dtype).to(device) for _ in range(2)]
        rotary = Rotary(draw(width * block_size, head_dim).to(device), *norms, 1e-6)
    q, k_new, v_new = fused.to(device).split((n_heads, n_kv, n_kv), dim=-2)
    rows = [torch.tensor(x, dtype=torch.int32, device=device) for x in (positions, verified)]
    named = {"q": q, "k_new": k_new, "v_new": v_new, "block_table": table.to(device), "rotary": rotary}
    return named | {"positions": rows[0], "verified_positions": rows[1], "scale": head_dim**-0.5}, caches


@guarded
@every_place
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("geometry", "k", "parts", "rotates"),
    [
        ("one head a group", 7, 1, False),
        ("groups", 7, 3, True),
        ("odd", 3, 1, True),
        ("groups", 16, 1, False),
    ],
)
def test_outputs_and_cache_are_those_of_a_token_at_a_time(
    device, dtype, variant, geometry, k, parts, rotates
):
    for seed in range(3 if device == "cuda" else 1):
        named, caches = inputs(seed, device, dtype, geometry, k, parts, rotates)
        expected_caches, found_caches = ([x.clone().to(device) for x in caches] for _ in range(2))
        expected = verify_attention_ref(
            **named, k_cache_layer=expected_caches[0], v_cache_layer=expected_caches[1]
        )
        make = make_plan if named["positions"].is_cuda else make_plan_ref
        plan = make(named["positions"], VARIANTS[variant])
        found = verify_attention(
            **named, k_cache_layer=found_caches[0], v_cache_layer=found_caches[1], plan=plan
        )
        live = named["verified_positions"] >= 0
        tolerance = {"atol": 3 * TOLERANCE[dtype], "rtol": 3 * TOLERANCE[dtype]}
        torch.testing.assert_close(found[live], expected[live], **tolerance)
        for one, other in zip(found_caches, expected_caches, strict=True):
            torch.testing.assert_close(one, other, **tolerance)
        inert = (named["positions"] < 0).repeat_interleave(k + 1)
        assert (found[inert] == 0).all()


@every_place
@pytest.mark.parametrize("variant", ["whole", "cut"])
def test_a_draft_that_is_not_finite_spoils_no_token_before_it(device, dtype, variant):
    """As in single steps, it spoils its own output and those after it."""
    named, caches = inputs(1, device, dtype, "groups", 7, 1, True)
    live = named["verified_positions"].view(4, 8) >= 0
    (row,) = (live.sum(dim=1) > 3).nonzero()[0].tolist()
    named["v_new"][8 * row + 2, 1, 3] = float("inf")
    named["k_new"][8 * row + 2, 0, 0] = float("nan")
    k_cache, v_cache = (x.clone().to(device) for x in caches)
    expected = verify_attention_ref(**named, k_cache_layer=k_cache, v_cache_layer=v_cache)
    k_cache, v_cache = (x.clone().to(device) for x in caches)
    make = make_plan if named["positions"].is_cuda else make_plan_ref
    plan = make(named["positions"], VARIANTS[variant])
    found = verify_attention(**named, k_cache_layer=k_cache, v_cache_layer=v_cache, plan=plan)
    first, spoilt = 8 * row, slice(8 * row + 2, 8 * row + int(live[row].sum()))
    for out in (expected, found):
        assert out[first : first + 2].isfinite().all()
        for head in (0, 4):  # of the KV head with the key, and of that with the value
            assert not out[spoilt, head].isfinite().all(dim=1).any()
