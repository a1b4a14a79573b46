"""Packed prefill attention: the torch spec against a plain computation, the kernel against the spec."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from rosellm.roseinfer.kernels import prefill_ring
from rosellm.roseinfer.kernels.paged_cache import layer_arguments
from rosellm.roseinfer.kernels.prefill import BLOCK_M, Launch, prefill_attention, prefill_attention_ref
from rosellm.roseinfer.kernels.prefill_tiles import make_tiles
from tests.helpers import DTYPES, LARGE, bits
from tests.roseinfer.kernels import kernel_checks as check
from tests.roseinfer.kernels.paged_cases import CACHES, attention_by_loops, paged_case

pytestmark = check.guarded
SMALL_TILES = Launch(16, 4, 3)
HEADS = (1, 20), (2, 64), (8, 128)  # queries that share keys, width
TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # over thousands of keys
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def rows_of(starts: list[int]) -> list[int]:
    """Of the block table: not the first, and in another order."""
    return list(range(len(starts), 0, -1))


def make_case(
    starts: list[int],
    counts: list[int],
    *,
    tile_size: int = BLOCK_M,
    pieces: list[int] | None = None,
    window: int | None = None,
    **sizes,
) -> dict:
    case = paged_case(starts, counts, rows_of(starts), **({"block_size": 8} | sizes)) | {"window": window}
    tiles = make_tiles(starts, counts, rows_of(starts), tile_size, case.pop("positions").device, pieces)
    return case | {"tiles": tiles}


def assert_attends_as_specified(case: dict, tolerance: float | None = None, **options) -> None:
    """The very same caches, bit for bit. The spec runs on the CPU, and knows no pieces."""
    tolerance = tolerance or TOLERANCE[case["q"].dtype]
    check.assert_equals_spec(
        "prefill_attention", case, exact=CACHES, tolerance=tolerance, spec_on="cpu", **options
    )


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("seed", range(5))
def test_the_spec_writes_the_tokens_and_attends_to_those_up_to_each(seed, window):
    rng = random.Random(seed)
    kv_heads, starts = rng.choice((1, 2, 3)), [0, *(rng.randrange(14) for _ in range(3))]
    counts = [rng.randrange(1, 14) for _ in starts]
    sizes = {"n_heads": kv_heads * rng.choice((1, 2, 4)), "n_kv_heads": kv_heads, "seed": seed}
    sizes |= {"head_dim": rng.choice((8, 20, 32)), "block_size": rng.choice((1, 2, 4))}
    case = make_case(starts, counts, tile_size=5, window=window, **sizes)
    theirs, rows = check.copied(case), rows_of(starts)
    positions = chain(*(range(a, a + n) for a, n in zip(starts, counts, strict=True)))
    each = chain(*([row] * n for row, n in zip(rows, counts, strict=True)))
    check.assert_near(prefill_attention_ref(**case), attention_by_loops(theirs, each, positions, window))
    assert all(torch.equal(bits(case[name]), bits(theirs[name])) for name in CACHES)


SIZES = [
    *({"head_dim": head_dim, "block_size": 64} for head_dim in (64, 128)),
    *({"head_dim": head_dim} for head_dim in (64, 80)),
    {"head_dim": 8, "block_size": 1},
    *({"window": window} for window in (1, 20, 64, 200)),
]


@check.every_device
@dtypes
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_equals_the_spec(sizes, dtype, device):
    case = make_case([0, 5, 64, 150], [64, 65, 1, 70], n_kv_heads=1, **sizes, dtype=dtype, device=device)
    assert_attends_as_specified(case)


@check.every_device
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=3),
    st.integers(1, 3),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((16, 20, 64)),
    st.sampled_from((1, 2, 8, 64)),
    st.sampled_from(DTYPES),
)
def test_the_kernel_equals_the_spec_over_random_shapes(
    device, sequences, kv_heads, group, head_dim, block_size, dtype
):
    starts, counts = (list(x) for x in zip(*sequences, strict=True))
    sizes = {"n_heads": kv_heads * group, "n_kv_heads": kv_heads, "head_dim": head_dim}
    sizes |= {"block_size": block_size, "dtype": dtype, "device": device, "tile_size": 16}
    assert_attends_as_specified(make_case(starts, counts, **sizes), launch=SMALL_TILES)


@check.every_device
@pytest.mark.parametrize(
    "tile_size, block_n, heads, group",
    [
        *((16, 16, 1, 1), (32, 16, 1, 1), (64, 32, 1, 1), (128, 64, 1, 1)),
        *((16, 16, heads, group) for heads, group in ((2, 2), (2, 4), (4, 4), (4, 6), (2, 3))),
    ],
)
def test_every_tile_shape_and_heads_that_share_a_program_equal_the_spec(
    tile_size, block_n, heads, group, device
):
    starts, counts = ([0, 3], [130, 30]) if group == 1 else ([0, 30], [20, 3])
    case = make_case(starts, counts, tile_size=tile_size, n_heads=group, n_kv_heads=1, device=device)
    assert_attends_as_specified(case, launch=Launch(block_n, 4, 3, heads))


@pytest.mark.slow
@check.every_device
@dtypes
@pytest.mark.parametrize(
    "window, group, head_dim",
    [*((None, *head) for head in HEADS), (1, 1, 64), (20, 2, 64), (64, 8, 20), (500, 1, 128)],
)
def test_tiles_in_pieces_equal_the_spec_even_if_a_piece_has_no_key_in_the_window(
    window, group, head_dim, dtype, device
):
    sizes = {"n_heads": group, "n_kv_heads": 1, "head_dim": head_dim, "dtype": dtype, "device": device}
    case = make_case([0, 63, 1000], [150, 65, 3], pieces=[2, 5, 8], window=window, **sizes)
    assert_attends_as_specified(case)


@check.every_device
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 8), (128, 64)])
def test_tiles_of_64_give_the_same_bits_whatever_the_chunks(head_dim, block_size, device, monkeypatch):
    monkeypatch.setattr(prefill_ring, "FEW_TOKENS", 64)
    sizes = {"n_kv_heads": 1, "head_dim": head_dim, "block_size": block_size}
    case = make_case([0], [200], **sizes, dtype=torch.bfloat16, device=device)
    chunked, found = check.copied(case), []
    for done in range(0, 200, 64):
        new = {name: case[name][done : done + 64] for name in ("q", "k_new", "v_new")}
        tiles = make_tiles([done], [len(new["q"])], rows_of([0]), BLOCK_M, device)
        found.append(prefill_attention(**chunked | new | {"tiles": tiles}))
    assert torch.equal(bits(torch.cat(found)), bits(prefill_attention(**case)))


@pytest.mark.gpu
@pytest.mark.skipif(not check.HOPPER, reason="needs wgmma, which Hopper GPUs have")
@pytest.mark.parametrize("seed", range(48))
def test_warps_that_divide_the_work_equal_the_spec_and_one_group_of_warps_bit_by_bit(seed, monkeypatch):
    """Bits are equal if starts are multiples of 64; empty tiles follow those of the prompts."""
    monkeypatch.setattr(prefill_ring, "FEW_TOKENS", 0)
    rng, unit = random.Random(seed), (1, 64)[seed % 2]
    kv_heads, prompts = rng.choice((1, 2, 8)), rng.choice((1, 3, 12))
    starts = [unit * rng.randrange(rng.choice((1, 384 // unit))) for _ in range(prompts)]
    counts = [rng.randrange(1, rng.choice((3, 130, 400))) for _ in starts]
    sizes = {"n_heads": kv_heads * rng.choice((2, 4, 6)), "n_kv_heads": kv_heads, "head_dim": 128}
    sizes |= {"block_size": rng.choice((64, 128)), "dtype": rng.choice((torch.bfloat16, torch.float16))}
    case = make_case(starts, counts, **sizes, device="cuda", seed=seed)
    columns = F.pad(case["tiles"].columns, (0, rng.choice((0, 1, 300))))
    case["tiles"] = replace(case["tiles"], columns=columns)
    new, caches = (case[name] for name in ("q", "k_new", "v_new")), (case[name] for name in CACHES)
    assert prefill_ring.takes(case["q"], layer_arguments(*new, *caches)[2], case["tiles"], None)
    mine, theirs = check.copied(case), check.copied(case)
    assert_attends_as_specified(case, dependent=rng.random() < 0.5)
    if unit == 64:
        one_group = prefill_attention(**theirs, launch=Launch(64, 4, 3))
        assert torch.equal(bits(prefill_attention(**mine)), bits(one_group))


@check.every_device
def test_large_scores_do_not_overflow(device):
    case = make_case([9, 0], [17, 40], tile_size=16, device=device, scale=300.0)
    assert_attends_as_specified(case, 1e-3, launch=SMALL_TILES)


@check.interpreted
@pytest.mark.filterwarnings("ignore:overflow")
def test_the_kernel_reads_new_tokens_that_are_far_apart():
    case = make_case([0], [34], tile_size=16, n_heads=1, n_kv_heads=1, head_dim=16, far=True)
    assert_attends_as_specified(case, launch=SMALL_TILES)


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("shape", LARGE)
def test_the_kernel_equals_the_spec_at_a_real_size(shape, dtype):
    starts, counts = [0, 0, 0, 63, 64, 500, 1000, 17], [1, 512, 1023, 65, 64, 300, 1, 128]
    assert_attends_as_specified(make_case(starts, counts, **LARGE[shape], dtype=dtype, device="cuda"))


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("shape", LARGE)
def test_tiles_in_pieces_equal_the_spec_at_a_real_size(shape, window, dtype):
    sizes = LARGE[shape] | {"pieces": [1, 2, 3, 16, 5], "window": window, "dtype": dtype, "device": "cuda"}
    assert_attends_as_specified(make_case([0, 63, 2000, 4096, 8000], [100, 65, 64, 1, 512], **sizes))
