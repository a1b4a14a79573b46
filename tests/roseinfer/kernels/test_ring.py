"""The GEMM whose weights are in flight before its input is ready: its spec, on a GPU."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from rosellm.models.quantized import ROW_FORMS, QuantizedRows, RowFormat, full
from rosellm.roseinfer.kernels import ring
from rosellm.roseinfer.kernels.grouped_ring import grouped_ring_linear
from rosellm.roseinfer.kernels.linear import some_rows_linear, some_rows_linear_ref
from tests.roseinfer.kernels.compile_step_kernels import SHARED_MEMORY
from tests.roseinfer.kernels.kernel_checks import HOPPER, TOLERANCE, assert_near, quantized

ACTIVATIONS = "none", "gelu", "swiglu"


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs wgmma, which Hopper GPUs have")
@pytest.mark.parametrize("seed", range(80))
def test_products_of_any_shape_are_those_of_the_spec_whatever_the_memory_held(seed):
    draw, dtype = random.Random(seed), (torch.bfloat16, torch.float16)[seed % 2]
    torch.manual_seed(seed)
    form = (None, "fp8", "int8", "int4")[seed // 2 % 4]
    rows = draw.randint(1, ring.MOST_ROWS if form is None else 300)
    k = 128 * draw.randint(1, 63) if form == "int4" else (8 if form is None else 16) * draw.randint(1, 500)
    parts = draw.choice((1, 1, 2, 3, 4, 8))
    activation = "none" if parts > 1 else draw.choice(ACTIVATIONS)
    most = draw.choice((300, 5000, 30_000))  # less than a program per multiprocessor, up to several
    in_16s = activation == "swiglu" or form == "int4"
    n = 16 * draw.randint(1, most // 16) if in_16s else draw.randint(1, most)
    x, weight, bias = (torch.randn(size, device="cuda") for size in ((rows, k), (n, k), (n,)))
    x, weight = x.to(dtype), (weight / k**0.5).to(dtype)
    if form is not None:
        digits = draw.choice((1, 2))
        x, weight = QuantizedRows.of(x, RowFormat(ROW_FORMS[form], digits)), quantized(weight, form)
    given = {"x": x, "weight": weight, "activation": activation, "parts": parts}
    given["bias"] = bias.to(dtype) if draw.random() < 0.5 else None
    poison = torch.full((parts * rows * n,), float("nan"), device="cuda", dtype=dtype if parts == 1 else None)
    del poison
    gemm = grouped_ring_linear if form == "int4" else ring.ring_linear
    found = gemm(**given, dependent=draw.random() < 0.5, block_n=draw.choice((None, 64, 128)))
    assert_sums_are(found, given, 1e-2 if form == "fp8" else None)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs wgmma, which Hopper GPUs have")
@pytest.mark.parametrize("seed", range(24))
def test_a_row_that_programs_quantise_themselves_has_the_products_of_the_spec(seed):
    draw, form = random.Random(seed), ("fp8", "int8", "int4")[seed % 3]
    torch.manual_seed(seed)
    parts, n = draw.choice((1, 2, 3, 4, 8)), 16 * draw.randint(1, 500)
    k = 256 * parts * draw.randint(1, 16)
    x, weight = torch.randn(1, k, device="cuda"), torch.randn(n, k, device="cuda") / k**0.5
    x = (x * 10 ** draw.uniform(-3, 3)).to((torch.bfloat16, torch.float16)[seed // 3 % 2])
    given = {"x": x, "weight": quantized(weight.to(x.dtype), form), "parts": parts}
    given["form"] = RowFormat(ROW_FORMS[form], 2)
    assert ring.holds(1, k, parts)
    found, expected = some_rows_linear(**given, dependent=draw.random() < 0.5), some_rows_linear_ref(**given)
    assert_near(found, expected, 1e-2 if form == "fp8" else TOLERANCE.get(found.dtype, 2e-3))
    x[0, -1] = float("nan")
    assert not some_rows_linear(**given).view(parts, n)[-1].isfinite().any()


def assert_sums_are(found, given, tolerance=None):
    """Ranges of K are in whole tiles here, and equally long in the spec: their sums are compared.

    Tensor cores drop bits of sums of products in FP8.
    """
    if given["parts"] == 1:
        least = TOLERANCE[found.dtype]
        assert_near(found, some_rows_linear_ref(**given), max(tolerance or 0, least))
    else:
        whole = some_rows_linear_ref(**given | {"parts": 1, "x": full(given["x"]).float()})
        assert len(found) == given["parts"]
        assert_near(found.sum(dim=0), whole, tolerance or 2e-3)


@pytest.mark.parametrize(("n", "k"), [(768, 768), (768, 3072), (1024, 3072), (2048, 8192), (4096, 14336)])
def test_k_is_split_until_the_gpu_is_full_but_not_into_crumbs(n, k):
    parts = ring.parts_of(8, n, k)
    programs, tiles = parts * n // ring.BLOCK_N, k / parts / ring.BLOCK_K
    assert programs <= ring.NUM_SMS and tiles >= 3
    assert 2 * programs > ring.NUM_SMS or tiles < 8


def test_a_program_has_a_stage_to_fill_while_it_multiplies_another():
    """With a single stage, it would wait for ever for its second tile."""
    sizes = (8, 16, 32, 64, 128), (1, 132, 133, 448, 2000), (1, 2, 3, 40), (64, 128), (1, 2)
    for columns, programs, tiles, block_n, itemsize in product(*sizes):
        stages = ring.stages_of(columns, programs, tiles, block_n, itemsize)
        assert min(2, tiles) <= stages <= min(tiles, 2 * ring.MOST_STAGES // itemsize)
        assert stages * (block_n + columns) * ring.BLOCK_K * itemsize < SHARED_MEMORY[90]
        held = ring.held_of(ring.HELD_K)
        stages = ring.stages_of(8, programs, tiles, block_n, 1, held)
        assert min(2, tiles) <= stages and (stages * block_n + held * 8) * ring.BLOCK_K < SHARED_MEMORY[90]


def test_a_program_owns_128_weight_rows_only_with_many_rows_of_x_and_programs_enough():
    assert [ring.block_n_of(64, n, 1) for n in (4096, 16_384, 19_456, 28_672)] == [64, 64, 64, 128]
    assert ring.block_n_of(32, 28_672, 1) == ring.block_n_of(64, 28_672, 2) == 64


def test_on_a_cpu_no_product_is_by_ring():
    x, weight = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(4096, 64, dtype=torch.bfloat16)
    assert not ring.is_faster(x, weight, "gelu", 1)


@pytest.mark.parametrize(("n", "k", "can"), [(6144, 64, True), (6152, 64, False), (6144, 68, False)])
def test_only_what_tma_can_read_is_by_ring(n, k, can, monkeypatch):
    monkeypatch.setattr(ring, "runs_on", lambda *_arguments: True)
    x, weight = torch.zeros(8, k, dtype=torch.bfloat16), torch.zeros(n, k, dtype=torch.bfloat16)
    assert ring.is_faster(x, weight, "swiglu", 1) == can
