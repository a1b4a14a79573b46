"""Attention of a row's last token and drafts, against a token at a time: both kernels that can do it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from rosellm.models.rope import Rotary
from rosellm.roseinfer.kernels.attention_plan import Plan, Variant
from rosellm.roseinfer.kernels.prefill import Launch, prefill_attention
from rosellm.roseinfer.kernels.prefill_tiles import Tiles
from rosellm.roseinfer.kernels.verify_attention import (
    MOST_QUERIES,
    fastest_variant,
    takes,
    verify_attention,
    verify_attention_ref,
)
from tests.roseinfer.kernels.kernel_checks import HOPPER, TOLERANCE, every_place, guarded, normals

CACHES = "k_cache_layer", "v_cache_layer"
EDGES = -1, 0, 1, 15, 63, 64, 65, 127, 128, 130


def make_case(
    seed: int, dtype: torch.dtype, device: str, *, n_kv: int, group: int, head_dim: int, k: int,
    block_size: int, longest: int, parts: int = 1, rotary: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Rows of random lengths, some inert, each with a random number of drafts; unused slots are NaN."""
    rng, normal, places = random.Random(seed), normals(seed), k + 1
    drawn = [rng.choice((rng.choice(EDGES), rng.randint(0, longest))) for _ in range(rng.randint(1, 5))]
    starts = [min(start, longest) for start in drawn]
    counts = [rng.randint(1, places) if start >= 0 else 0 for start in starts]
    verified = [a + i if i < n else -1 for a, n in zip(starts, counts, strict=True) for i in range(places)]
    width = (longest + places) // block_size + 1
    table = torch.randperm(len(starts) * width, generator=torch.Generator().manual_seed(seed))
    table = table.view(len(starts), width).int()
    caches = {name: normal(table.numel(), n_kv, block_size, head_dim).to(dtype) for name in CACHES}
    for row, start in enumerate(starts):
        for token in range(max(start, 0), width * block_size):
            for cache in caches.values():
                cache[table[row, token // block_size], :, token % block_size] = math.nan
    sizes = (len(verified), (group + 2) * n_kv, head_dim)
    fused = normal(*((parts, *sizes) if parts > 1 else sizes)).to(torch.float32 if parts > 1 else dtype)
    names = ("q", "k_new", "v_new")
    new = zip(names, fused.to(device).split((group * n_kv, n_kv, n_kv), dim=-2), strict=True)
    norms = [normal(head_dim).abs().to(dtype).to(device) for _ in range(2 if rotary == "norms" else 0)]
    angles = normal(width * block_size, head_dim).to(device)
    return {
        **dict(new),
        **{name: cache.to(device) for name, cache in caches.items()},
        "block_table": table.to(device),
        "positions": torch.tensor(starts, dtype=torch.int32, device=device),
        "verified_positions": torch.tensor(verified, dtype=torch.int32, device=device),
        "scale": head_dim**-0.5,
        "rotary": Rotary(angles, *(norms or (None, None)), 1e-6) if rotary else None,
    }


def spoil_a_draft(case: dict[str, Any]) -> None:
    """The third token of each row that has as many gets an infinite value and a NaN in its key."""
    places = len(case["verified_positions"]) // len(case["positions"])
    case["v_new"][..., 2::places, 0, 3] = math.inf
    case["k_new"][..., 2::places, 0, 0] = math.nan


def attend_by_tiles(case: dict[str, Any]) -> Tensor:
    """Each row's new tokens as a chunk of a prompt."""
    case = dict(case)
    starts, verified, rotary = (case.pop(name) for name in ("positions", "verified_positions", "rotary"))
    assert rotary is None
    rows = torch.arange(len(starts), dtype=torch.int32, device=starts.device)
    places = len(verified) // len(starts)
    counts = (verified.view(-1, places) >= 0).sum(dim=1).int()
    columns = [rows * places, counts, starts.clamp_min(0), rows * places, starts.clamp_min(0), rows]
    tiles = Tiles(torch.stack([*columns, rows * 0, rows * 0 + 1]), 16, are_drafts=True)
    return prefill_attention(**case, tiles=tiles, launch=Launch(16, 4, 2, 1))


def assert_equals_a_token_at_a_time(case: dict, found: Tensor, expected: Tensor, spec: dict) -> None:
    """The live verify rows' outputs, and the caches; where the spec is not finite, neither is the kernel."""
    live = case["verified_positions"] >= 0
    found, expected = found[live], expected[live]
    whole = expected.isfinite().all(dim=-1)
    assert torch.equal(found.isfinite().all(dim=-1), whole)
    tolerance = {"atol": 3 * TOLERANCE[found.dtype], "rtol": 3 * TOLERANCE[found.dtype]}
    torch.testing.assert_close(found[whole], expected[whole], **tolerance)
    for name in CACHES:
        torch.testing.assert_close(case[name], spec[name], equal_nan=True, **tolerance)


@guarded
@every_place
@pytest.mark.parametrize("is_spoilt", [False, True], ids=["finite", "a draft that is not finite"])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_as_a_chunk_of_a_prompt_equal_a_token_at_a_time(device, dtype, seed, is_spoilt):
    sizes = {"n_kv": 2, "group": 1 + seed, "head_dim": (16, 20, 32)[seed], "k": (7, 3, 15)[seed]}
    case = make_case(seed, dtype, device, **sizes, block_size=16, longest=100)
    if is_spoilt:
        spoil_a_draft(case)
    spec = {name: case[name].clone() for name in CACHES}
    expected = verify_attention_ref(**case | spec)
    assert_equals_a_token_at_a_time(case, attend_by_tiles(case), expected, spec)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs wgmma, which Hopper GPUs have")
@pytest.mark.parametrize("seed", range(60))
def test_the_kernel_with_keys_in_flight_equals_a_token_at_a_time_over_random_shapes(seed):
    draw, dtype = random.Random(seed), (torch.bfloat16, torch.float16)[seed % 2]
    sizes = {"n_kv": draw.randint(1, 4), "head_dim": draw.choice((64, 128))}
    sizes |= {"k": draw.choice((1, 2, 3, 7, 15)), "block_size": draw.choice((64, 128)), "longest": 900}
    sizes["group"] = draw.choice([g for g in (1, 2, 3, 4, 7, 8) if g * (sizes["k"] + 1) <= MOST_QUERIES])
    assert takes(sizes["group"] * (sizes["k"] + 1), sizes["head_dim"], sizes["block_size"])
    rotary, parts = draw.choice(("", "plain", "norms")), draw.choice((1, 1, 2, 4))
    case = make_case(seed, dtype, "cuda", **sizes, parts=parts, rotary=rotary)
    if seed % 3 == 0:
        spoil_a_draft(case)
    rows = len(case["positions"])
    tile, stages = draw.choice(((64, 1), (64, 2), (64, 3), (128, 1), (128, 2)))
    pieces = rows * draw.choice((0, 1, 2, 3, 20))
    variant = Variant(tile, pieces, draw.choice((4, 8)), stages)
    spec = {name: case[name].clone() for name in CACHES}
    expected = verify_attention_ref(**case | spec)
    found = verify_attention(**case, plan=Plan(variant))
    assert_equals_a_token_at_a_time(case, found, expected, spec)
    inert = (case["positions"] < 0).repeat_interleave(sizes["k"] + 1)
    assert (found[inert] == 0).all()


@pytest.mark.parametrize("rows", [1, 3, 8, 64])
@pytest.mark.parametrize("longest", [1, 512, 513, 8000])
def test_long_rows_are_split_into_one_piece_per_multiprocessor_and_all_fit(rows, longest):
    variant = fastest_variant(rows, 8, longest, 132, 64, 128)
    assert variant.pieces % rows == 0 and variant.pieces * 8 <= 132
    assert bool(variant.pieces) == (longest > 512 and rows <= 8)
    assert variant.stages * variant.tile * 128 * 4 < 200_000  # bytes of keys and values
