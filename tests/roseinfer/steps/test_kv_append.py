"""The append kernels copy bits exactly as their spec does; the engine's variants all write the same cache."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from rosellm.roseinfer.steps.kv_append import INDICES, AppendGate, FreshIndices, build_append
from torch import Tensor

from rosellm.errors import RecipeError
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager, Slots
from rosellm.roseinfer.kernels.table import TORCH, TRITON, Kernels, choose_kernels
from rosellm.roseinfer.kv_append_triton import (
    kv_append_bytes,
    kv_append_ref,
    kv_append_rows_ref,
    kv_append_triton,
    kv_append_triton_full_batch,
    kv_append_triton_identity_pos,
)
from rosellm.roseinfer.recipe import recipe_choices
from tests.helpers import BITS, CPU, DTYPES, TRITON_DEVICES, bits

TRITON_VARIANTS = [v for v in recipe_choices()["append"] if v != "index_put"]


def random_bits(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bit pattern at all: NaN payloads, infinities, subnormals, negative zero."""
    limits = torch.iinfo(BITS[dtype.itemsize])
    integers = torch.randint(limits.min, limits.max, shape, generator=generator).to(BITS[dtype.itemsize])
    return integers.view(dtype)


def make_case(
    batch: int, n_heads: int, head_dim: int, block_size: int, dtype, device: str, seed: int = 0
) -> dict:
    """Caches of random bits and new tokens as slices of a fused projection; no two tokens share a slot."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n_blocks = batch + 3
    fused = random_bits(generator, dtype, batch + 2, 3 * n_heads, head_dim).to(device)
    index = {"dtype": torch.int32, "device": device}
    return {
        "k_cache_layer": random_bits(generator, dtype, n_blocks, n_heads, block_size, head_dim).to(device),
        "v_cache_layer": random_bits(generator, dtype, n_blocks, n_heads, block_size, head_dim).to(device),
        "key_new": fused[:batch, n_heads : 2 * n_heads],
        "value_new": fused[:batch, 2 * n_heads :],
        "batch_idx": torch.tensor(rng.sample(range(batch), batch), **index),
        "block_idx": torch.tensor(rng.sample(range(n_blocks), batch), **index),
        "pos": torch.tensor([rng.randrange(block_size) for _ in range(batch)], **index),
    }


def without(case: dict, *names: str, **changes) -> dict:
    return {name: value for name, value in case.items() if name not in names} | changes


def assert_same_caches(case: dict, kernel, spec, **arguments) -> None:
    """Every slot of both caches, written or not, is bit-identical after ``kernel`` and after ``spec``."""
    mine = without(case, **arguments) | {n: case[n].clone() for n in ("k_cache_layer", "v_cache_layer")}
    theirs = mine | {n: case[n].clone() for n in ("k_cache_layer", "v_cache_layer")}
    kernel(**mine)
    spec(**theirs)
    for name in ("k_cache_layer", "v_cache_layer"):
        assert torch.equal(bits(mine[name]), bits(theirs[name]))
        assert not torch.equal(bits(mine[name]), bits(case[name]))


def append_by_loops(*, k_cache_layer, v_cache_layer, key_new, value_new, batch_idx, block_idx, pos) -> None:
    for row, block, slot in zip(batch_idx.tolist(), block_idx.tolist(), pos.tolist(), strict=True):
        for head in range(key_new.shape[1]):
            k_cache_layer[block, head, slot] = key_new[row, head]
            v_cache_layer[block, head, slot] = value_new[row, head]


def check_kernels(case: dict) -> None:
    """All three kernels against the spec."""
    rows = without(case, "batch_idx")
    pos = int(case["pos"][0])
    assert_same_caches(case, kv_append_triton, kv_append_ref)
    assert_same_caches(rows, kv_append_triton_identity_pos, kv_append_rows_ref)
    assert_same_caches(rows, kv_append_triton_full_batch, kv_append_rows_ref, pos=pos)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_specs_write_each_token_to_its_slot_and_nothing_else(dtype):
    case = make_case(5, 3, 8, 4, dtype, "cpu")
    identity = torch.arange(5, dtype=torch.int32)
    assert_same_caches(case, kv_append_ref, append_by_loops)
    rows = without(case, "batch_idx")
    assert_same_caches(rows, kv_append_rows_ref, lambda **a: append_by_loops(**a, batch_idx=identity))
    same = torch.full((5,), 2, dtype=torch.int32)
    loops = lambda **a: append_by_loops(**(a | {"pos": same}), batch_idx=identity)  # noqa: E731
    assert_same_caches(rows, kv_append_rows_ref, loops, pos=2)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_the_kernels_equal_the_spec_bit_for_bit(head_dim, dtype, device):
    check_kernels(make_case(6, 3, head_dim, 8, dtype, device, seed=head_dim))


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("seed", range(8))
def test_the_kernels_equal_the_spec_over_random_shapes(seed, device):
    rng = random.Random(seed)
    shape = rng.randrange(1, 12), rng.randrange(1, 6), rng.choice((8, 20, 24, 64)), rng.choice((1, 2, 16))
    check_kernels(make_case(*shape, rng.choice(DTYPES), device, seed))


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_the_generic_kernel_appends_a_subset_of_the_rows(device):
    case = make_case(7, 2, 32, 4, torch.float32, device)
    some = {name: case[name][:3] for name in ("batch_idx", "block_idx", "pos")}
    assert_same_caches(case, kv_append_triton, kv_append_ref, **some)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("pos", [0, 1, 15])
def test_the_full_batch_kernel_takes_any_scalar_position(pos, device):
    rows = without(make_case(3, 2, 32, 16, torch.float16, device), "batch_idx")
    assert_same_caches(rows, kv_append_triton_full_batch, kv_append_rows_ref, pos=pos)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [128, 2048])
def test_the_kernels_equal_the_spec_at_a_real_size(batch, dtype):
    check_kernels(make_case(batch, 12, 64, 64, dtype, "cuda"))


@pytest.mark.gpu
def test_the_kernels_reach_past_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 32 << 30:
        pytest.skip("needs 32 GiB of free GPU memory")
    case = make_case(4, 12, 64, 64, torch.float16, "cuda")
    n_blocks = 2**31 // (12 * 64 * 64) + 100
    caches = [torch.zeros(n_blocks, 12, 64, 64, dtype=torch.float16, device="cuda") for _ in range(2)]
    case |= {"k_cache_layer": caches[0], "v_cache_layer": caches[1]}
    case["block_idx"] = torch.arange(n_blocks - 4, n_blocks, dtype=torch.int32, device="cuda")
    check_kernels(case)


def test_bytes_of_an_append_count_a_read_and_a_write_of_key_and_value():
    assert kv_append_bytes(3, 2, 8, torch.float16) == 3 * 2 * 8 * 2 * 2 * 2


# The variants as an engine builds them

LAYERS, HEADS, DIM, BLOCK = 2, 2, 32, 4


def run_append(
    variant: str,
    indices: str,
    kernels: Kernels,
    gate: AppendGate,
    slots: list[Slots],
    device,
    pool: str = "per_layer",
) -> Tensor:
    """Two steps of an append; both caches ``[2, L, N_BLOCKS, H, BLOCK_SIZE, D]``."""
    generator = torch.Generator().manual_seed(1)
    blocks = KVBlockManager(LAYERS, HEADS, DIM, BLOCK, 16, device, torch.float32, pool=pool)
    append = build_append(variant, indices, kernels, torch.device(device), gate)
    batch = len(slots[0].pos)
    for shift in (0, 8):
        fused = torch.randn(LAYERS, batch, 3 * HEADS, DIM, generator=generator).to(device)
        keys, values = list(fused[:, :, HEADS : 2 * HEADS]), list(fused[:, :, 2 * HEADS :])
        moved = [Slots([b + shift for b in s.block_idx], s.pos) for s in slots]
        append(blocks, keys, values, moved)
    return torch.stack((blocks.k_cache, blocks.v_cache))


def slots_of(positions: list[int]) -> list[Slots]:
    rng = random.Random(0)
    return [Slots(rng.sample(range(8), len(positions)), positions) for _ in range(LAYERS)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("positions", [[2, 2, 2], [0, 3, 1], [1]], ids=str)
@pytest.mark.parametrize("indices", recipe_choices()["indices"])
@pytest.mark.parametrize("variant", TRITON_VARIANTS)
def test_every_variant_writes_what_index_put_writes(variant, indices, positions, device):
    slots, gate = slots_of(positions), AppendGate(1)
    kernels = choose_kernels("auto", "fixed", torch.device(device))
    expected = run_append("index_put", "fresh", TORCH, gate, slots, device)
    assert torch.equal(run_append(variant, indices, kernels, gate, slots, device), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("positions", [[2, 2, 2], [0, 3, 1], [1]], ids=str)
@pytest.mark.parametrize("indices", recipe_choices()["indices"])
@pytest.mark.parametrize("variant", recipe_choices()["append"])
def test_the_slots_of_a_shared_pool_are_written_in_every_layer(variant, indices, positions, device):
    slots, gate = slots_of(positions)[:1], AppendGate(1)
    kernels = choose_kernels("auto", "fixed", torch.device(device))
    expected = run_append("index_put", "fresh", TORCH, gate, slots * LAYERS, device)
    assert torch.equal(run_append(variant, indices, kernels, gate, slots, device, "shared"), expected)


@pytest.mark.parametrize(
    ("variant", "positions", "lists"),
    [
        ("index_put", [1, 2], 3),
        ("generic", [1, 2], 3),
        ("full_batch", [1, 1], 1),
        ("identity_pos", [1, 1], 1),
        ("identity_pos", [1, 2], 2),
    ],
)
def test_index_lists_are_sent_once_a_pool(variant, positions, lists, monkeypatch):
    class Counting(FreshIndices):
        def __call__(self, rows):
            tensors = super().__call__(rows)
            sent.append(len(tensors))
            return tensors

    monkeypatch.setitem(INDICES, "fresh", Counting)
    slots, gate = slots_of(positions), AppendGate(1)
    sent: list[int] = []
    run_append(variant, "fresh", TORCH, gate, slots, "cpu")
    run_append(variant, "fresh", TORCH, gate, slots[:1], "cpu", "shared")
    assert sent == [lists * LAYERS] * 2 + [lists] * 2


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("variant", TRITON_VARIANTS)
def test_every_variant_runs_on_triton(variant, device):
    slots, gate = slots_of([1, 1, 1]), AppendGate(1)
    expected = run_append("index_put", "fresh", TORCH, gate, slots, device)
    assert torch.equal(run_append(variant, "reused", TRITON, gate, slots, device), expected)


def counting_kernels(calls: Counter) -> Kernels:
    def count(name):
        def kernel(**arguments):
            calls[name, type(arguments["pos"]).__name__] += 1
            getattr(TORCH, name)(**arguments)

        return kernel

    names = ("kv_append", "kv_append_full_batch", "kv_append_identity_pos")
    return replace(TORCH, **{name: count(name) for name in names})


@pytest.mark.parametrize(
    ("variant", "positions", "kernel"),
    [
        ("index_put", [1, 1], None),
        ("generic", [1, 1], ("kv_append", "Tensor")),
        ("full_batch", [1, 1], ("kv_append_full_batch", "int")),
        ("full_batch", [1, 2], ("kv_append", "Tensor")),
        ("identity_pos", [1, 1], ("kv_append_full_batch", "int")),
        ("identity_pos", [1, 2], ("kv_append_identity_pos", "Tensor")),
    ],
)
def test_each_variant_launches_its_kernel_once_a_layer(variant, positions, kernel):
    calls = Counter()
    run_append(variant, "fresh", counting_kernels(calls), AppendGate(1), slots_of(positions), "cpu")
    assert calls == ({kernel: 2 * LAYERS} if kernel else {})


@pytest.mark.parametrize(("min_batch", "used"), [(0, True), (2, True), (3, True), (4, False), (None, False)])
def test_the_gate_opens_from_its_minimum_batch_on(min_batch, used):
    calls = Counter()
    run_append(
        "identity_pos", "reused", counting_kernels(calls), AppendGate(min_batch), slots_of([0, 1, 2]), "cpu"
    )
    assert bool(calls) == used


@pytest.mark.parametrize(
    ("environment", "min_batch"),
    [
        ({}, 128),
        ({"ROSELLM_TRITON_KV_APPEND": "1"}, 128),
        ({"ROSELLM_TRITON_KV_APPEND": "0"}, None),
        ({"ROSELLM_TRITON_KV_APPEND_MIN_BATCH": "7"}, 7),
        ({"ROSELLM_TRITON_KV_APPEND": "0", "ROSELLM_TRITON_KV_APPEND_MIN_BATCH": "7"}, None),
    ],
)
def test_the_environment_sets_the_gate(monkeypatch, environment, min_batch):
    set_environment(monkeypatch, environment)
    assert AppendGate.from_environment() == AppendGate(min_batch)


@pytest.mark.parametrize(
    "environment",
    [
        {"ROSELLM_TRITON_KV_APPEND": "yes"},
        {"ROSELLM_TRITON_KV_APPEND": ""},
        {"ROSELLM_TRITON_KV_APPEND_MIN_BATCH": "-1"},
        {"ROSELLM_TRITON_KV_APPEND_MIN_BATCH": "many"},
        {"ROSELLM_TRITON_KV_APPEND_MIN_BATCH": "²"},
    ],
)
def test_a_bad_switch_is_refused_by_name(monkeypatch, environment):
    set_environment(monkeypatch, environment)
    with pytest.raises(RecipeError, match=next(iter(environment))):
        AppendGate.from_environment()


def set_environment(monkeypatch, environment: dict[str, str]) -> None:
    for name in ("ROSELLM_TRITON_KV_APPEND", "ROSELLM_TRITON_KV_APPEND_MIN_BATCH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "launch"),
    [("cuda", "fixed"), ("torch", "autotuned"), ("", "fixed")],
    ids=["unknown", "untunable", "empty"],
)
def test_kernels_that_cannot_be_had_are_refused(name, launch):
    with pytest.raises(RecipeError):
        choose_kernels(name, launch, CPU)


def test_a_cpu_takes_the_torch_twins_unless_asked():
    assert choose_kernels("auto", "fixed", CPU) is TORCH
