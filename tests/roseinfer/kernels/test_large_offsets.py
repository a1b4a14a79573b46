"""Offsets of rows past 2**31 elements: every kernel reads and writes where they say.

The tensors lie in sparse files, of which only what is touched takes memory. Below each lie as many elements
as an offset that wraps around would go back.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rosellm.roseinfer.kernels import linear
from rosellm.roseinfer.kernels.prefill import Launch, prefill_attention, prefill_attention_ref
from rosellm.roseinfer.kernels.prefill_tiles import make_tiles
from rosellm.rosetrainer.paged_attention import paged_attention_decode, paged_attention_decode_ref

STRIDE = 2**27  # of rows: the sixteenth is the first that 32 bits do not reach
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU here")
pytestmark = [interpreted, pytest.mark.filterwarnings("ignore:overflow")]


def far_apart(folder: Path, rows: Tensor) -> Tensor:
    """The rows ``[N, ...]``, ``STRIDE`` elements from each other."""
    size = 2**31 + STRIDE * len(rows)
    memory = torch.from_file(str(folder / "memory"), shared=True, size=size, dtype=rows.dtype)
    inner = rows[0].stride()
    return memory[2**31 :].as_strided(rows.shape, (STRIDE, *inner)).copy_(rows)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_a_product_reads_inputs_that_many_rows_and_columns_put_far_away(tmp_path):
    """One of very many ranges of K, so that rows are wide and the kernel's loop is short."""
    x, weight, out = normal(17, 16), normal(1, 16), torch.full((17, 1), float("nan"))
    linear._some_rows_kernel[(1, 2, 1)](
        far_apart(tmp_path, x),
        weight,
        None,
        None,
        x,
        out,
        17,
        1,
        K=STRIDE,
        PARTS=STRIDE // 16,
        BLOCK_M=16,
        BLOCK_N=16,
        BLOCK_K=16,
        BIAS=False,
        ACTIVATION="none",
        DEPENDENT=False,
    )
    torch.testing.assert_close(out, x @ weight.t())


def test_prefill_attention_reads_new_tokens_that_are_far_apart(tmp_path):
    kernel, spec = partial(prefill_attention, launch=Launch(16, 4, 3)), prefill_attention_ref
    tokens, tiles = normal(34, 3, 16), make_tiles([0], [34], None, 16, "cpu")
    found, expected = (
        attend(
            **dict(zip(("q", "k_new", "v_new"), fused.split(1, dim=1), strict=True)),
            **empty_caches(n_blocks=9),
            block_table=torch.arange(9, dtype=torch.int32)[None],
            tiles=tiles,
            scale=0.25,
        )
        for attend, fused in ((kernel, far_apart(tmp_path, tokens)), (spec, tokens))
    )
    torch.testing.assert_close(found, expected)


def empty_caches(n_blocks: int) -> dict[str, Tensor]:
    return {name: torch.zeros(n_blocks, 1, 4, 16) for name in ("k_cache_layer", "v_cache_layer")}


def test_paged_attention_reads_rows_that_are_far_apart(tmp_path):
    tokens = normal(18, 3, 16)
    found, expected = (
        attend(
            **dict(zip(("q", "k_new", "v_new"), fused.split(1, dim=1), strict=True)),
            **empty_caches(n_blocks=18),
            block_table=torch.arange(18, dtype=torch.int32)[:, None],
            context_lens=torch.zeros(18, dtype=torch.int32),
            scale=0.25,
        )
        for attend, fused in (
            (paged_attention_decode, far_apart(tmp_path, tokens)),
            (paged_attention_decode_ref, tokens),
        )
    )
    torch.testing.assert_close(found, expected)
