"""Attention over ranges of a context equals attention over the whole; where an engine chooses it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rosellm.roseinfer.kernels import split as split_attention
from rosellm.roseinfer.kernels.attention import append_and_attend_ref
from rosellm.roseinfer.kernels.split import (
    SPLIT_CONTEXT,
    SPLIT_ROWS,
    SPLIT_TILE,
    is_worth_splitting,
    make_split_append_and_attend,
    num_splits_for,
)
from rosellm.roseinfer.kernels.table import TORCH, TRITON
from rosellm.roseinfer.layers.attention import SPLIT, SplitAppendAndAttend
from rosellm.roseinfer.recipe import BEFORE, LADDER
from tests.helpers import DTYPES, TRITON_DEVICES, generate, random_model, random_prompts, small_engine
from tests.roseinfer.kernels.kernel_checks import (
    PLACES,
    assert_near,
    assert_replays_equal_ordinary_launches,
    guarded_outputs,  # noqa: F401
)
from tests.roseinfer.kernels.test_attention import (
    CACHES,
    LARGE,
    assert_equals_spec,
    bits,
    make_case,
    with_own_caches,
)

guarded = pytest.mark.usefixtures("guarded_outputs")
TILE = 16


def assert_splits_equal_spec(case: dict, splits: int) -> None:
    assert_equals_spec(case, make_split_append_and_attend(lambda rows: splits))


# The kernels.


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("block_size", [4, 64])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_ranges_equal_the_spec_at_the_edges_of_tiles_and_ranges(splits, block_size, device, dtype):
    shape = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "block_size": block_size, "tile": TILE}
    edges = [0, 1, TILE - 1, TILE, TILE + 1, splits * TILE - 1, splits * TILE, splits * TILE + 1, -1]
    edges += [2 * splits * TILE + 5, 3]
    for first in range(0, len(edges), 4):
        case = make_case(edges[first : first + 4], **shape, dtype=dtype, device=device, seed=first)
        assert_splits_equal_spec(case, splits)


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("seed", range(6))
def test_ranges_equal_the_spec_over_random_shapes(seed, device, dtype):
    rng = random.Random(seed)
    kv_heads, block_size = rng.choice((1, 2)), rng.choice((2, 3, 16, 64))
    case = make_case(
        [rng.randrange(-2, 6 * block_size) for _ in range(rng.randrange(1, 4))],
        n_heads=kv_heads * rng.choice((1, 2, 3)),
        n_kv_heads=kv_heads,
        head_dim=rng.choice((16, 20, 64)),
        block_size=block_size,
        dtype=dtype,
        device=device,
        seed=seed,
        tile=rng.choice((16, 64)),
    )
    assert_splits_equal_spec(case, rng.choice((2, 4)))


@guarded
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_tile_and_the_ranges_that_engines_take_equal_the_spec(rows, device):
    positions = [1000, SPLIT_CONTEXT, 5][:rows]
    case = make_case(positions, n_heads=1, n_kv_heads=1, block_size=64, device=device, tile=SPLIT_TILE)
    assert_equals_spec(case, make_split_append_and_attend())


@guarded
@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_inert_rows_give_zero_and_write_nothing(device):
    case = make_case([-1, -7, -(2**31)], device=device)
    before = with_own_caches(case)
    assert torch.equal(make_split_append_and_attend()(**case), torch.zeros_like(case["q"]))
    for name in CACHES:
        assert torch.equal(bits(case[name]), bits(before[name]))


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_large_scores_do_not_overflow(device):
    case = make_case([40, 17], device=device, scale=300.0, tile=TILE)
    spec = append_and_attend_ref(**with_own_caches(case))
    torch.testing.assert_close(make_split_append_and_attend()(**case), spec, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 2, 3, SPLIT_ROWS])
def test_the_ranges_of_a_context_are_a_power_of_two(rows):
    assert num_splits_for(rows).bit_count() == 1


# Where it is chosen.


def test_few_rows_with_a_long_context_are_worth_splitting():
    assert is_worth_splitting(1, SPLIT_CONTEXT) and is_worth_splitting(SPLIT_ROWS, SPLIT_CONTEXT)
    assert not is_worth_splitting(1, SPLIT_CONTEXT - 1)
    assert not is_worth_splitting(SPLIT_ROWS + 1, SPLIT_CONTEXT)


def test_below_the_gate_the_unsplit_kernel_runs():
    bind = SplitAppendAndAttend(TRITON, blocks=None)
    assert bind.variant(8, SPLIT_CONTEXT) == SPLIT
    assert bind(None, SPLIT).kernel is TRITON.split_append_and_attend
    for rows, longest in ((8, SPLIT_CONTEXT - 1), (16, 1000)):
        assert bind.variant(rows, longest) != SPLIT
        assert bind(None, bind.variant(rows, longest)).kernel is TRITON.append_and_attend


def test_the_rung_changes_nothing_but_the_attention():
    assert BEFORE["split_kv"] == "dependent_launch"
    assert LADDER["dependent_launch"].difference(LADDER["split_kv"]) == {"attention": ("paged", "split")}


@pytest.mark.parametrize(
    ("kernels", "device"),
    [(TORCH, "cpu"), *(pytest.param(TRITON, *d.values, id=d.id, marks=d.marks) for d in TRITON_DEVICES)],
)
def test_an_engine_whose_contexts_pass_the_gate_gives_the_same_tokens(kernels, device, monkeypatch):
    monkeypatch.setattr(split_attention, "SPLIT_CONTEXT", 8)
    model, prompts, calls = random_model(5).to(device), random_prompts([3, 9], seed=3), []

    def counted(**arguments) -> Tensor:
        calls.append(int(arguments["positions"].max()))
        return kernels.split_append_and_attend(**arguments)

    expected = generate(small_engine(model, recipe="paged"), prompts, 3)
    recipe = replace(LADDER["split_kv"], runner="eager")
    own = replace(kernels, split_append_and_attend=counted)
    assert generate(small_engine(model, recipe=recipe, kernels=own), prompts, 3) == expected
    assert calls and min(calls) >= 8
    calls.clear()
    assert generate(small_engine(model, recipe=recipe, kernels=own), prompts[:1], 3) == expected[:1]
    assert not calls


# A GPU's own.


@guarded
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_ranges_equal_the_spec_at_a_real_size(rows, shape, dtype):
    positions = [1023, 513, 64, 0, -1, 129, 1000, 512][:rows]
    case = make_case(positions, **LARGE[shape], dtype=dtype, device="cuda", tile=SPLIT_TILE)
    assert_equals_spec(case, make_split_append_and_attend())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
def test_dependent_launches_in_a_replayed_graph_equal_ordinary_ones(rows):
    """Projection, attention, projection; each replay starts from the same caches, with other lengths."""
    heads, width = LARGE["gpt2"]["n_heads"], 768
    lengths = [1000, 900, 63, 0, -1, 512, 300, 128][:rows]
    case = make_case(lengths, **LARGE["gpt2"], dtype=torch.float16, device="cuda", tile=SPLIT_TILE)
    for name in CACHES:
        case[name] = torch.nan_to_num(case[name])
    case["block_table"].clamp_(max=len(case["k_cache_layer"]) - 1)
    start, longest = with_own_caches(case), case["positions"].clone()
    x = torch.zeros(rows, width, device="cuda", dtype=torch.float16)
    into, out = (torch.randn(n * width, width, device="cuda").half() / width**0.5 for n in (3, 1))
    biases = [torch.zeros(len(weight), device="cuda", dtype=torch.float16) for weight in (into, out)]

    def refill(seed: int) -> None:
        x.copy_(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)))
        case["positions"].copy_(torch.where(longest > 0, (longest - 37 * seed) % (longest + 1), longest))
        for name in CACHES:
            case[name].copy_(start[name])

    def chain(kernels) -> tuple[Tensor, ...]:
        qkv = kernels.few_rows_linear(x=x, weight=into, bias=biases[0]).view(rows, 3 * heads, -1)
        q, k_new, v_new = qkv.split(heads, dim=1)
        new = {"q": q, "k_new": k_new, "v_new": v_new}
        mixed = kernels.split_append_and_attend(**case | new)
        again = kernels.split_append_and_attend(**case | new | {"q": mixed + 0})
        y = kernels.few_rows_linear(x=again.view(rows, width), weight=out, bias=biases[1])
        return mixed, again, y, *(case[name].flatten(1) for name in CACHES)

    assert_replays_equal_ordinary_launches(chain, refill)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
def test_split_and_unsplit_attention_agree_at_the_gate(rows):
    case = make_case([SPLIT_CONTEXT] * rows, **LARGE["gpt2"], dtype=torch.float16, device="cuda")
    whole = TRITON.append_and_attend(**with_own_caches(case))
    ranges = TRITON.split_append_and_attend(**with_own_caches(case) | {"tile": SPLIT_TILE})
    assert_near(ranges, whole)
