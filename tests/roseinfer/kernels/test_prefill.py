"""Packed prefill attention: the torch spec against token by token softmax, the kernel against the spec."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from rosellm.roseinfer.kernels.prefill import (
    BLOCK_M,
    Launch,
    prefill_attention,
    prefill_attention_ref,
    room_for,
)
from rosellm.roseinfer.kernels.prefill_tiles import (
    LONG_PREFIX,
    PIECE_KEYS,
    make_tiles,
    pieces_for,
    tile_columns,
)
from tests.helpers import CPU, DTYPES, TRITON_DEVICES, bits

NAN = float("nan")
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
}
TENSORS = ("q", "k_new", "v_new", "k_cache_layer", "v_cache_layer", "block_table")
small_tiles = partial(prefill_attention, launch=Launch(16, 4, 3))


@dataclass
class Case:
    """Sequences whose first ``starts`` tokens are cached and whose next ``counts`` are new.

    whole: q, k and v of every token of each sequence, ``[start + count, H or H_kv, D]``.
    """

    starts: list[int]
    counts: list[int]
    rows: list[int]
    whole: list[tuple[Tensor, Tensor, Tensor]]
    arguments: dict

    def call(self, kernel, tile_size: int = BLOCK_M, pieces: list[int] | None = None) -> Tensor:
        device = self.arguments["q"].device
        tiles = make_tiles(self.starts, self.counts, self.rows, tile_size, device, pieces)
        return kernel(**self.arguments, tiles=tiles)

    def slot(self, b: int, position: int) -> tuple[int, int]:
        block_size = self.arguments["k_cache_layer"].shape[2]
        return int(self.arguments["block_table"][self.rows[b], position // block_size]), position % block_size

    def copy(self, device: torch.device | str) -> Case:
        """The same values in memory of their own."""
        moved = {name: self.arguments[name].to(device, copy=True) for name in TENSORS}
        return Case(self.starts, self.counts, self.rows, self.whole, self.arguments | moved)

    def caches(self) -> tuple[Tensor, Tensor]:
        return self.arguments["k_cache_layer"], self.arguments["v_cache_layer"]


def make_case(
    starts: list[int],
    counts: list[int],
    *,
    n_heads: int = 2,
    n_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    scale: float = 1.0,
) -> Case:
    """Random values. Slots that hold no cached token are NaN, table entries without a block are wild.

    q, k_new and v_new are slices of a fused projection; the table has more rows than sequences, in any order.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n_blocks = [-(-(a + n) // block_size) for a, n in zip(starts, counts, strict=True)]
    rows = rng.sample(range(len(starts) + 2), len(starts))
    order = rng.sample(range(sum(n_blocks) + 2), sum(n_blocks) + 2)
    table = torch.full((len(starts) + 2, max(n_blocks) + 1), 2**30, dtype=torch.int32)
    cache = torch.full((2, len(order), n_kv_heads, block_size, head_dim), NAN, dtype=dtype)
    widths, fused, whole = (n_heads, n_kv_heads, n_kv_heads), [], []
    for row, start, count, n in zip(rows, starts, counts, n_blocks, strict=True):
        table[row, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32)
        tokens = torch.randn(start + count, sum(widths), head_dim, generator=generator).to(dtype)
        whole.append(tokens.split(widths, dim=1))
        position = torch.arange(start)
        blocks, slots = table[row, position // block_size], position % block_size
        cache[0, blocks, :, slots], cache[1, blocks, :, slots] = (x[:start] for x in whole[-1][1:])
        fused.append(tokens[start:])
    q, k_new, v_new = torch.cat(fused).to(device).split(widths, dim=1)
    arguments = {
        "q": q,
        "k_new": k_new,
        "v_new": v_new,
        "k_cache_layer": cache[0].to(device),
        "v_cache_layer": cache[1].to(device),
        "block_table": table.to(device),
        "scale": scale * head_dim**-0.5,
    }
    return Case(starts, counts, rows, whole, arguments)


def token_by_token(case: Case) -> Tensor:
    """Ordinary softmax attention in fp64 over the whole sequences, one token and head at a time."""
    out = []
    for (q, k, v), start in zip(case.whole, case.starts, strict=True):
        group = q.shape[1] // k.shape[1]
        keys, values = (x.double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        for t in range(start, len(q)):
            for head, query in enumerate(q[t].double()):
                weights = (keys[head, : t + 1] @ query * case.arguments["scale"]).softmax(dim=0)
                out.append(weights @ values[head, : t + 1])
    return torch.stack(out).view(case.arguments["q"].shape)


def assert_equals_spec(kernel, case: Case, tile_size: int = BLOCK_M, pieces: list[int] | None = None) -> None:
    """Same output; the very same caches, bit for bit. The spec runs on the CPU, and knows no pieces."""
    twin = case.copy(CPU)
    out, spec = case.call(kernel, tile_size, pieces), twin.call(prefill_attention_ref, tile_size)
    assert out.shape == spec.shape and out.dtype == spec.dtype
    assert torch.isfinite(spec).all()
    torch.testing.assert_close(out.cpu(), spec, **TOLERANCE[out.dtype])
    for written, expected in zip(case.caches(), twin.caches(), strict=True):
        assert torch.equal(bits(written.cpu()), bits(expected))


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Memory handed out for outputs is NaN, so that an element that a kernel leaves unwritten shows."""
    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, *size, **options) -> Tensor:
        out = new_empty(self, *size, **options)
        return out.fill_(NAN) if out.is_floating_point() else out

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


SEQUENCES = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(0, 99)), min_size=0, max_size=8
)


@given(SEQUENCES, st.integers(1, 70))
def test_tiles_cover_every_new_token_once_and_name_its_sequence(sequences, tile_size):
    starts, counts, rows = (list(x) for x in zip(*sequences, strict=True)) if sequences else ([], [], [])
    expected = {}
    for b, (start, count, row) in enumerate(sequences):
        first = sum(counts[:b])
        expected |= {first + i: (start + i, first, start, row) for i in range(count)}
    covered = []
    for first, size, position, sequence_first, start, row, *piece in tile_columns(
        starts, counts, rows, tile_size
    ).T:
        assert piece == [0, 1]
        assert 1 <= size <= tile_size and (first - sequence_first) % tile_size == 0
        covered += [(first + i, (position + i, sequence_first, start, row)) for i in range(size)]
    assert len(covered) == len(expected) and dict(covered) == expected


@given(SEQUENCES, st.integers(1, 70))
def test_tiles_that_attend_to_more_tokens_come_first(sequences, tile_size):
    starts, counts, rows = (list(x) for x in zip(*sequences, strict=True)) if sequences else ([], [], [])
    _, size, position, *_ = tile_columns(starts, counts, rows, tile_size)
    assert (np.diff(position + size) <= 0).all()


def test_sequences_share_the_cache_in_sections_of_the_longest_first():
    starts, counts = [0, 3000, 0, 0], [2048, 1000, 2048, 2048]
    _, size, position, *_, rows, _, _ = tile_columns(starts, counts, None, 512)
    assert set(rows[:6]) == {0, 1} and set(rows[6:]) == {2, 3} and len(rows) == 14
    assert all((np.diff((position + size)[part]) <= 0).all() for part in (slice(6), slice(6, None)))


@given(SEQUENCES, st.integers(1, 70), st.lists(st.integers(1, 9), min_size=8, max_size=8))
def test_the_pieces_of_a_tile_follow_each_other_in_the_place_of_the_tile(sequences, tile_size, pieces):
    starts, counts, rows = (list(x) for x in zip(*sequences, strict=True)) if sequences else ([], [], [])
    rows = list(range(len(rows)))
    whole = tile_columns(starts, counts, rows, tile_size)
    cut = tile_columns(starts, counts, rows, tile_size, pieces[: len(rows)])
    expected = [[*tile[:6], i, pieces[tile[5]]] for tile in whole.T for i in range(pieces[tile[5]])]
    assert cut.T.tolist() == expected


@given(st.integers(0, 5000), st.integers(0, 1000), st.integers(0, 99), st.integers(1, 70))
def test_the_tiles_of_one_sequence_are_those_it_has_among_others(start, count, row, tile_size):
    alone = tile_columns([start], [count], [row], tile_size)
    among = tile_columns([start], [count], [row], tile_size, pieces=[1])
    assert alone.dtype == among.dtype and alone.flags.c_contiguous and alone.tolist() == among.tolist()


PREFIXES = st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 300)), min_size=1, max_size=8)


@given(PREFIXES, st.integers(0, 300), st.sampled_from((None, 1000, 4096)))
def test_tiles_are_cut_into_no_more_pieces_than_there_is_room_for(sequences, room, window):
    starts, counts = zip(*sequences, strict=True)
    pieces = pieces_for(starts, counts, 64, room, 16, window)
    if pieces is None:
        return
    assert tile_columns(starts, counts, None, 64, pieces).shape[1] <= room
    assert max(starts) >= LONG_PREFIX and max(pieces) > 1
    for start, n in zip(starts, pieces, strict=True):
        seen = min(start, window or start)
        assert n == 1 if seen < LONG_PREFIX else 1 <= n <= 0.5 + (seen / PIECE_KEYS / 16) ** 0.5


@pytest.mark.parametrize(
    "starts, counts, room, window, expected",
    [
        ([15_000], [512], 16, None, [2]),
        ([15_000], [64], 16, None, [8]),
        ([15_000], [1], 16, None, [8]),
        ([1024], [64], 16, None, [2]),
        ([2048], [256], 16, None, None),  # to combine two pieces takes longer than 1024 keys
        ([12_000, 3000], [64, 64], 16, None, [5, 2]),
        ([15_000], [64], 16, 4096, [4]),
        ([15_000], [64], 16, 1000, None),
        ([1023], [64], 16, None, None),
        ([15_000], [1024], 16, None, None),
        ([15_000], [64], 0, None, None),
        ([], [], 16, None, None),
    ],
)
def test_long_prefixes_before_few_tokens_are_cut_so(starts, counts, room, window, expected):
    assert pieces_for(starts, counts, 64, room, 16, window) == expected


@pytest.mark.parametrize(
    "n_heads, group, head_dim, expected",
    [(16, 2, 128, 16), (32, 4, 128, 8), (32, 4, 64, 16), (12, 1, 64, 22), (25, 5, 80, 10)],
)
def test_there_is_room_for_two_programs_an_sm(n_heads, group, head_dim, expected):
    assert room_for(torch.bfloat16, head_dim, n_heads, group, 132) == expected


@pytest.mark.parametrize("seed", range(5))
def test_the_spec_is_causal_softmax_attention_over_prefix_and_new_tokens(seed):
    rng = random.Random(seed)
    kv_heads = rng.choice((1, 2, 3))
    case = make_case(
        [0, *(rng.randrange(14) for _ in range(3))],
        [rng.randrange(1, 14) for _ in range(4)],
        n_heads=kv_heads * rng.choice((1, 2, 4)),
        n_kv_heads=kv_heads,
        head_dim=rng.choice((8, 20, 32)),
        block_size=rng.choice((1, 2, 4)),
        seed=seed,
    )
    out = case.call(prefill_attention_ref, tile_size=5)
    torch.testing.assert_close(out.double(), token_by_token(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [prefill_attention, prefill_attention_ref], ids=["kernel", "spec"])
def test_only_the_slots_of_new_tokens_change_and_hold_their_bits(kernel, dtype, device):
    case = make_case([5, 0, 21], [9, 70, 1], n_heads=4, dtype=dtype, device=device)
    expected = [cache.clone() for cache in case.caches()]
    for b, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
        for position in range(start, start + count):
            block, slot = case.slot(b, position)
            for cache, values in zip(expected, case.whole[b][1:], strict=True):
                cache[block, :, slot] = values[position].to(device)
    inputs = {name: case.arguments[name].clone() for name in ("q", "k_new", "v_new", "block_table")}
    case.call(kernel, tile_size=64)
    for cache, wanted in zip(case.caches(), expected, strict=True):
        assert torch.equal(bits(cache), bits(wanted))
    for name, before in inputs.items():
        assert torch.equal(case.arguments[name], before)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim, block_size", [(64, 64), (64, 8), (80, 8), (8, 1), (128, 64)])
def test_the_kernel_equals_the_spec(head_dim, block_size, dtype, device):
    case = make_case(
        [0, 0, 5, 64, 77, 150],
        [1, 64, 65, 1, 70, 130],
        n_kv_heads=1,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
        seed=head_dim,
    )
    assert_equals_spec(prefill_attention, case)
