"""Attention over quantised keys and values: they are rounded before anything attends to them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain

import pytest
import torch

from rosellm.models.quantized import CODES, QuantizedHeads, full, rounded_heads
from rosellm.roseinfer.kernels import prefill_ring
from rosellm.roseinfer.kernels.attention import append_and_attend_ref
from rosellm.roseinfer.kernels.attention_plan import Variant, make_plan
from rosellm.roseinfer.kernels.paged_cache import SMALLEST_DOT, layer_arguments
from rosellm.roseinfer.kernels.prefill import prefill_attention_ref
from rosellm.roseinfer.kernels.table import TORCH, TRITON
from rosellm.roseinfer.kernels.wide_prefixes import Prefixes, prefix_words, widen, widen_ref
from tests.helpers import DTYPES, INTERPRETED, ON_GPU
from tests.roseinfer.kernels import kernel_checks as check, test_attention, test_prefill
from tests.roseinfer.kernels.paged_cases import CACHES, attention_by_loops

pytestmark = check.guarded
# Triton's interpreter rounds to fp8 wrongly, just below powers of 2.
PLACES = [
    *(pytest.param(*INTERPRETED.values, "int8", dtype) for dtype in check.EXACT_IN_INTERPRETER),
    *(pytest.param("cuda", form, dtype, marks=ON_GPU.marks) for form in CODES for dtype in DTYPES),
]
IN_16_BITS = [place for place in PLACES if place.values[2] != torch.float32]
every_format = pytest.mark.parametrize(("device", "form", "dtype"), PLACES)
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # a key may be rounded otherwise


def quantised(case: dict, form: str) -> dict:
    """The case with quantised caches; slots that hold no token have a scale that is NaN."""
    for name in CACHES:
        plain = case[name]
        codes = torch.zeros(plain.shape, dtype=CODES[form], device=plain.device)
        case[name] = QuantizedHeads(codes, torch.zeros(plain.shape[:-1], device=plain.device), plain.dtype)
        case[name][:] = plain.nan_to_num()
        case[name].scales[plain.isnan().any(-1)] = float("nan")
    return case


def copied(case: dict) -> dict:
    """A copy of the case, with copies of its caches."""
    heads = {name: case[name] for name in CACHES}
    rest = check.copied({name: value for name, value in case.items() if name not in CACHES})
    return rest | {
        name: QuantizedHeads(one.codes.clone(), one.scales.clone(), one.dtype) for name, one in heads.items()
    }


def assert_equals_spec(name: str, case: dict, **options) -> None:
    """Outputs near, and caches within a code or so: another order of sums may round to another code."""
    theirs = copied(case)
    found, expected = getattr(TRITON, name)(**case, **options), getattr(TORCH, name)(**theirs)
    check.assert_near(found, expected, TOLERANCE[found.dtype])
    for cache in CACHES:
        mine, spec = full(case[cache]), full(theirs[cache])
        assert torch.equal(mine.isnan(), spec.isnan())
        off, size = (mine - spec).abs().nan_to_num(), spec.abs().nan_to_num()
        assert (off <= size / 7 + size.amax(-1, keepdim=True) / 100).all()
        assert (off > size / 500).float().mean() < (0.02 if found.dtype == torch.float32 else 0.2)


@pytest.mark.parametrize("form", CODES)
def test_the_specs_attend_to_what_the_cache_then_holds(form):
    case = quantised(test_attention.make_case([0, 13, -1, 4, 5, 8], n_heads=4, head_dim=20), form)
    positions = case["positions"].tolist()
    found, whole = append_and_attend_ref(**case), case | {name: full(case[name]) for name in CACHES}
    for new in ("k_new", "v_new"):
        whole[new] = rounded_heads(case[new], form)
    check.assert_near(found, attention_by_loops(whole, range(6), positions))

    starts, counts = [0, 5, 9], [7, 1, 4]
    case = quantised(test_prefill.make_case(starts, counts, n_heads=4, head_dim=20), form)
    found, whole = prefill_attention_ref(**case), case | {name: full(case[name]) for name in CACHES}
    for new in ("k_new", "v_new"):
        whole[new] = rounded_heads(case[new], form)
    each = chain(*([row] * n for row, n in zip(test_prefill.rows_of(starts), counts, strict=True)))
    places = chain(*(range(a, a + n) for a, n in zip(starts, counts, strict=True)))
    check.assert_near(found, attention_by_loops(whole, each, places))


@every_format
@pytest.mark.parametrize("seed", range(6))
def test_decode_attention_equals_the_spec_over_random_shapes(seed, device, form, dtype):
    rng = random.Random(seed)
    kv_heads, block_size = rng.choice((1, 2, 3)), rng.choice((3, 16, 24, 64))
    shape = {"n_heads": kv_heads * (1, 3, 5)[seed % 3], "n_kv_heads": kv_heads, "block_size": block_size}
    shape |= {"window": rng.choice((None, None, 9)), "rotary": ("", "plain", "norms")[seed // 2]}
    positions = [0, *(rng.randrange(-2, 3 * block_size) for _ in range(rng.randrange(1, 5)))]
    places = {"head_dim": rng.choice((16, 24)), "dtype": dtype, "device": device, "seed": seed}
    case = quantised(test_attention.make_case(positions, **shape, **places, parts=(1, 2)[seed % 2]), form)
    pieces = rng.choice((0, 5))
    variant = Variant((16, 32)[seed % 2], pieces, stages=1 + seed % 2, sort=int(not pieces))
    plan = make_plan(case["positions"], variant, case["window"])
    assert_equals_spec("append_and_attend", case | {"plan": plan})


@every_format
@pytest.mark.parametrize(("group", "head_dim"), [(2, 16), (2, 24), (1, 16)])
def test_tiles_in_flight_have_the_scales_of_their_own_tokens(group, head_dim, device, form, dtype):
    """Whole tiles after the first of a row, by TMA and by other loads."""
    sizes = {"n_heads": 2 * group, "n_kv_heads": 2, "head_dim": head_dim, "block_size": 64}
    case = quantised(test_attention.make_case([130, 191], **sizes, dtype=dtype, device=device), form)
    for name in CACHES:
        case[name].scales.mul_(1 + torch.arange(64, device=device) / 16)
    plan = make_plan(case["positions"], Variant(16, stages=2), None)
    assert_equals_spec("append_and_attend", case | {"plan": plan})


@every_format
@pytest.mark.parametrize("largest", [1e-4, 60_000.0, float("nan"), float("inf")])
def test_values_of_any_size_are_read_and_what_is_not_finite_stays_so(largest, device, form, dtype):
    sizes = {
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": 16,
        "block_size": 16,
        "dtype": dtype,
        "device": device,
    }
    case = quantised(test_attention.make_case([40, 20], **sizes), form)
    scales = case["v_cache_layer"].scales
    if not torch.tensor(largest).isfinite():
        scales[case["block_table"][0, 1], :, 3] = largest
    else:
        scales.mul_(largest / 4)
    theirs, plan = copied(case), make_plan(case["positions"], Variant(16), None)
    found, expected = (
        kernels.append_and_attend(**one, plan=plan) for kernels, one in ((TRITON, case), (TORCH, theirs))
    )
    assert torch.equal(found.isfinite().all((1, 2)), expected.isfinite().all((1, 2)))
    finite = expected.isfinite().all((1, 2))
    check.assert_near(found[finite], expected[finite], TOLERANCE[dtype])
    assert finite.all() == torch.tensor(largest).isfinite()


def with_copies(case: dict, starts: list[int]) -> dict:
    """A copy of the case, in which prefill attention copies the prefixes in the dtype of q first."""
    table, rows = case["block_table"].cpu(), torch.tensor(test_prefill.rows_of(starts))
    cached = torch.zeros(len(table), dtype=torch.int64).index_put_((rows,), torch.tensor(starts))
    words = prefix_words(cached.numpy(), table.numpy(), case["k_cache_layer"].shape[2])
    prefixes = Prefixes.of(torch.from_numpy(words).to(case["q"].device), len(table))
    return copied(case) | {"tiles": replace(case["tiles"], prefixes=prefixes)}


STARTS = [0, 5, 64, 150]


@every_format
@pytest.mark.parametrize(
    ("starts", "group", "head_dim", "block_size", "window"),
    [
        (STARTS, 1, 20, 8, None),
        (STARTS, 2, 64, 64, None),
        (STARTS, 4, 128, 64, None),
        ([0] * 4, 2, 128, 64, None),
        (STARTS, 2, 16, 16, 20),
        (STARTS, 2, 32, 24, None),
    ],
)
def test_prefill_attention_equals_the_spec_with_and_without_copies_of_prefixes(
    starts, group, head_dim, block_size, window, device, form, dtype, monkeypatch
):
    monkeypatch.setattr(prefill_ring, "FEW_TOKENS", 0)
    sizes = {"n_heads": 2 * group, "n_kv_heads": 2, "head_dim": head_dim, "block_size": block_size}
    sizes |= {"dtype": dtype, "device": device, "window": window}
    case = quantised(test_prefill.make_case(starts, [64, 65, 1, 70], **sizes), form)
    if window is None:
        copies = with_copies(case, starts)
        assert_equals_spec("prefill_attention", copies)
    assert_equals_spec("prefill_attention", case)
    if window is None:
        for name in CACHES:
            assert torch.equal(case[name].codes.float(), copies[name].codes.float())
            assert torch.equal(case[name].scales.nan_to_num(-1), copies[name].scales.nan_to_num(-1))


@pytest.mark.parametrize(("device", "form", "dtype"), IN_16_BITS)
@pytest.mark.parametrize(
    ("head_dim", "block_size", "pieces"), [(64, 64, None), (128, 64, None), (32, 24, [1, 2, 3, 1])]
)
def test_copies_of_prefixes_give_the_bits_of_a_cache_in_16_bits(
    head_dim, block_size, pieces, device, form, dtype, monkeypatch
):
    monkeypatch.setattr(prefill_ring, "FEW_TOKENS", 0)
    sizes = {"n_heads": 4, "n_kv_heads": 2, "head_dim": head_dim, "block_size": block_size}
    starts, counts = [0, 64, 192, 128], [64, 65, 1, 70]
    made = test_prefill.make_case(starts, counts, pieces=pieces, **sizes, dtype=dtype, device=device)
    copies = with_copies(quantised(made, form), starts)
    plain = copies | {name: full(copies[name]).to(dtype) for name in CACHES}
    found = TRITON.prefill_attention(**copies)  # rounds the new keys and values in place
    assert torch.equal(found, TRITON.prefill_attention(**plain))


@every_format
@pytest.mark.parametrize(("n_heads", "head_dim", "block_size"), [(1, 20, 8), (3, 64, 24), (2, 128, 64)])
def test_copied_blocks_equal_the_spec(n_heads, head_dim, block_size, device, form, dtype):
    sizes = {"n_heads": n_heads, "n_kv_heads": n_heads, "head_dim": head_dim, "block_size": block_size}
    case = quantised(test_prefill.make_case([150], [1], **sizes, dtype=dtype, device=device), form)
    caches = [case[name] for name in CACHES]
    for cache in caches:
        cache.scales.nan_to_num_(1e-3)
    _, paged, shape = layer_arguments(case["q"], case["k_new"], case["v_new"], *caches, SMALLEST_DOT)
    blocks = case["block_table"][1, :2].flip(0)
    copies = widen(cache=paged, shape=shape, blocks=blocks, dtype=dtype)
    for found, cache in zip(copies, caches, strict=True):
        assert torch.equal(found, widen_ref(cache=cache, blocks=blocks))
