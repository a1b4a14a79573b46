"""Prompt attention in pieces."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from rosellm.errors import OptionError
from rosellm.roseinfer.kernels import prefill as module
from rosellm.roseinfer.kernels.prefill import BLOCK_M, Launch, launch_for, prefill_attention_ref
from rosellm.roseinfer.kernels.prefill_tiles import COLUMNS, Tiles, make_tiles, tile_columns
from tests.helpers import CPU, DTYPES, LARGE, TRITON_DEVICES, bits
from tests.roseinfer.kernels.test_prefill import (
    NAN,
    Case,
    assert_equals_spec,
    make_case,
    prefill_attention,
    small_tiles,
)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from((1, 2, 3)),
    head_dim=st.sampled_from((16, 20, 64)),
    block_size=st.sampled_from((1, 2, 8, 64)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_the_kernel_equals_the_spec_over_random_shapes(
    device, sequences, kv_heads, group, head_dim, block_size, dtype, seed
):
    starts, counts = (list(x) for x in zip(*sequences, strict=True))
    case = make_case(
        starts,
        counts,
        n_heads=kv_heads * group,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    assert_equals_spec(small_tiles, case, tile_size=16)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("block_m, block_n", [(16, 16), (32, 16), (64, 32), (128, 64)])
def test_every_tile_shape_equals_the_spec(block_m, block_n, device):
    case = make_case([0, 30, 3], [130, 65, 2], device=device)
    assert_equals_spec(partial(prefill_attention, launch=Launch(block_n, 4, 3)), case, block_m)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("heads, group", [(2, 2), (2, 4), (4, 4), (4, 6), (2, 3)])
def test_heads_that_share_a_program_equal_the_spec(heads, group, device):
    case = make_case([0, 30], [35, 20], n_heads=2 * group, n_kv_heads=2, device=device)
    assert_equals_spec(partial(prefill_attention, launch=Launch(16, 4, 3, heads)), case, 16)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 20, 64, 200])
def test_a_window_hides_what_lies_before_it(window, dtype, device):
    case = make_case([0, 70, 150], [150, 65, 3], n_kv_heads=1, dtype=dtype, device=device)
    case.arguments["window"] = window
    assert_equals_spec(prefill_attention, case)


@pytest.mark.slow
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("head_dim", [20, 64, 128])
def test_pieces_of_every_kind_of_head_equal_the_spec(head_dim, group, device):
    sizes = {"n_heads": group, "n_kv_heads": 1, "head_dim": head_dim, "block_size": 64}
    case = make_case([0, 1000, 100], [5, 65, 3], **sizes, dtype=torch.bfloat16, device=device)
    assert_equals_spec(prefill_attention, case, pieces=[1, 3, 2])


@pytest.mark.slow
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 20, 64, 500])
def test_tiles_in_pieces_equal_the_spec_even_if_a_piece_has_no_key_in_the_window(window, dtype, device):
    case = make_case([0, 63, 1000], [150, 65, 3], n_kv_heads=1, dtype=dtype, device=device)
    case.arguments["window"] = window
    assert_equals_spec(prefill_attention, case, pieces=[2, 5, 8])


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_a_kernel_that_knows_no_pieces_computes_tiles_as_a_whole(device):
    case = make_case([5, 100], [20, 3], device=device)
    twin = case.copy(device)
    tiles = make_tiles(case.starts, case.counts, case.rows, BLOCK_M, device, [3, 2])
    out = prefill_attention(**case.arguments, tiles=Tiles(tiles.columns, BLOCK_M))
    assert torch.equal(bits(out), bits(twin.call(prefill_attention)))
    spec = case.copy(CPU)
    expected = spec.copy(CPU).call(prefill_attention_ref)
    assert torch.equal(spec.call(prefill_attention_ref, pieces=[3, 2]), expected)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_tiles_of_64_give_the_same_bits_whatever_the_chunks(device):
    whole = make_case([0], [200], n_kv_heads=1, head_dim=64, dtype=torch.bfloat16, device=device)
    chunked = whole.copy(device)
    expected = whole.call(prefill_attention)
    out = torch.full_like(expected, NAN)
    for done in (0, 64, 128, 192):
        part, packed = next_chunk(chunked, done, 64)
        out[packed] = part.call(prefill_attention)
    assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_tiles_take_keys_of_a_divisor_of_64_and_rows_fill_the_warps(group, dtype, head_dim):
    launch = launch_for(dtype, head_dim, group)
    assert BLOCK_M % launch.block_n == 0 and group % launch.heads == 0
    if dtype != torch.float32:
        assert BLOCK_M * launch.heads == 16 * launch.num_warps


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("kernel", [small_tiles, prefill_attention_ref], ids=["kernel", "spec"])
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_a_prompt_in_chunks_equals_the_whole_prompt(chunk, kernel, device):
    whole = make_case([0, 4], [20, 17], device=device)
    chunked = whole.copy(device)
    expected = whole.call(kernel, tile_size=16)
    out = torch.full_like(expected, NAN)
    for done in range(0, max(whole.counts), chunk):
        part, packed = next_chunk(chunked, done, chunk)
        out[packed] = part.call(kernel, tile_size=16)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(chunked.caches(), whole.caches(), strict=True):
        assert torch.equal(bits(got), bits(wanted))


def next_chunk(case: Case, done: int, chunk: int) -> tuple[Case, Tensor]:
    """New tokens ``done`` … ``done + chunk`` of each sequence that has them; their packed rows."""
    alive = [b for b, count in enumerate(case.counts) if count > done]
    counts = [min(chunk, case.counts[b] - done) for b in alive]
    first = [sum(case.counts[:b]) + done for b in alive]
    packed = torch.cat([torch.arange(a, a + n) for a, n in zip(first, counts, strict=True)])
    packed = packed.to(case.arguments["q"].device)
    new = {name: case.arguments[name][packed] for name in ("q", "k_new", "v_new")}
    starts, rows, whole = zip(
        *((case.starts[b] + done, case.rows[b], case.whole[b]) for b in alive), strict=True
    )
    return Case(starts, counts, rows, whole, case.arguments | new), packed


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_large_scores_do_not_overflow(device):
    case = make_case([9, 0], [17, 40], device=device, scale=300.0)
    spec = case.copy(CPU).call(prefill_attention_ref, tile_size=16).to(device)
    torch.testing.assert_close(case.call(small_tiles, tile_size=16), spec, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_columns_may_lie_in_a_larger_buffer_whose_unused_tiles_are_empty(device):
    case = make_case([5, 0], [20, 3], device=device)
    columns = torch.from_numpy(tile_columns(case.starts, case.counts, case.rows, 16))
    buffer = torch.zeros(COLUMNS, 9, dtype=torch.int32, device=device)
    buffer[:, : columns.shape[1]] = columns
    twin = case.copy(device)
    out = small_tiles(**case.arguments, tiles=Tiles(buffer[:, :5], 16))
    torch.testing.assert_close(out, twin.call(small_tiles, tile_size=16), rtol=0, atol=0)
    for got, wanted in zip(case.caches(), twin.caches(), strict=True):
        assert torch.equal(bits(got), bits(wanted))


@pytest.mark.parametrize("block_m, block_n", [(64, 8), (64, 128), (32, 24)])
def test_key_tiles_that_do_not_divide_query_tiles_are_refused(block_m, block_n):
    with pytest.raises(OptionError, match=f"block_n={block_n}"):
        make_case([0], [3]).call(partial(prefill_attention, launch=Launch(block_n, 4, 3)), tile_size=block_m)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE)
def test_the_kernel_equals_the_spec_at_a_real_size(shape, dtype):
    starts, counts = [0, 0, 0, 63, 64, 500, 1000, 17], [1, 512, 1023, 65, 64, 300, 1, 128]
    assert_equals_spec(
        prefill_attention, make_case(starts, counts, **LARGE[shape], dtype=dtype, device="cuda")
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("shape", LARGE)
def test_tiles_in_pieces_equal_the_spec_at_a_real_size(shape, window, dtype):
    starts, counts = [0, 63, 2000, 4096, 8000], [100, 65, 64, 1, 512]
    case = make_case(starts, counts, **LARGE[shape], dtype=dtype, device="cuda")
    case.arguments["window"] = window
    assert_equals_spec(prefill_attention, case, pieces=[1, 2, 3, 16, 5])


@pytest.mark.gpu
def test_other_numbers_of_tiles_and_blocks_compile_nothing_new():
    compiled = module._prefill_attention_kernel.device_caches[torch.cuda.current_device()][0]
    make_case([0], [70], device="cuda").call(prefill_attention)
    before = len(compiled)
    for starts, counts in (([0], [1]), ([8] * 16, [3] * 16), ([0, 112], [17, 5])):
        make_case(starts, counts, device="cuda").call(prefill_attention)
    assert len(compiled) == before
    make_case([0], [70], device="cuda").call(prefill_attention, pieces=[2])
    before = len(compiled)
    for starts, counts in (([0], [1]), ([8] * 16, [3] * 16), ([0, 112], [17, 5])):
        make_case(starts, counts, device="cuda").call(prefill_attention, pieces=[3] * len(starts))
    assert len(compiled) == before
