"""One kernel for all layers gives what a kernel a product gives, writes the same cache, and cannot hang."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rosellm.errors import RecipeError
from rosellm.models.arch import Norm
from rosellm.models.model import Transformer
from rosellm.roseinfer import exhibits
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.cache.kv_blocks import KVBlocks
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.kernels.attention_plan import Variant
from rosellm.roseinfer.kernels.table import TRITON
from rosellm.roseinfer.layers.attention import PagedAttention
from rosellm.roseinfer.layers.fused import FewRowsLayers, Layers, build_layers
from rosellm.roseinfer.recipe import LADDER
from tests.helpers import (
    DTYPES,
    TRITON_DEVICES,
    generate,
    random_model,
    random_prompts,
    small_config,
    small_engine,
)
from tests.roseinfer.kernels.kernel_checks import assert_near

persistent_layers = load_exhibit("persistent_layers")
PERSISTENT_ROWS, PersistentLayers = persistent_layers.PERSISTENT_ROWS, persistent_layers.PersistentLayers
persistent_for_few = persistent_layers.persistent_for_few
NORM = Norm("layer", 1e-3)
MODELS = {
    "small": {},
    "gqa": {"n_heads": 4, "n_kv_heads": 2},
    "odd": {"d_model": 48, "n_heads": 3, "n_kv_heads": 1, "d_ff": 90, "n_layers": 3, "norm": NORM},
    "long_sums": {"d_model": 32, "n_layers": 1, "d_ff": 1100},
}
SMALL_M = ("fused", "epilogue", "small_m")
REAL_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
NAN, WILD, TILE = float("nan"), 2**30, 16
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU here")


@pytest.fixture(autouse=True)
def few_ranges(monkeypatch):
    """In the interpreter, one program attends to all ranges of a context, and each takes milliseconds."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(persistent_layers, "BUSY", 8)


def few_and_persistent(model: Transformer) -> tuple[Layers, Layers]:
    layers_for = build_layers(*SMALL_M, model, TRITON)
    return layers_for(1), persistent_for_few(layers_for, model, TRITON)(1)


def make_attention(
    model: Transformer, positions: list[int], block_size: int = 4, tile: int = TILE, seed: int = 0
) -> PagedAttention:
    """A state with random tokens over a random cache, in which slots without a token are NaN."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    counts = [max(position, -1) // block_size + 1 for position in positions]
    n_blocks = sum(counts) + 2
    shape = config.n_layers, config.n_kv_heads, config.head_dim, block_size, n_blocks
    blocks = KVBlocks(*shape, model.device, model.dtype)
    state = DeviceState(len(positions), max(counts) + 1, model.device)
    state.positions.copy_(torch.tensor(positions))
    state.tokens.copy_(torch.randint(config.vocab_size, (len(positions),), generator=generator))
    order = torch.randperm(n_blocks, generator=generator).tolist()
    table = torch.full(state.table.shape, WILD, dtype=torch.int32)
    held = torch.zeros(n_blocks, block_size, dtype=torch.bool)
    for row, (position, count) in enumerate(zip(positions, counts, strict=True)):
        for i in range(count):
            table[row, i] = block = order.pop()
            held[block, : max(0, position - i * block_size)] = True
    state.table.copy_(table)
    for cache in (blocks.k_cache, blocks.v_cache):
        filled = torch.randn(cache.shape, generator=generator)
        cache.copy_(torch.where(held[None, :, None, :, None], filled, NAN))
    plan = TRITON.plan_attention(state.positions, Variant(tile))
    rotary = [None] * config.n_layers
    return PagedAttention(TRITON.append_and_attend, plan, blocks, state, config.scale, rotary)


def caches(attend: PagedAttention) -> tuple[Tensor, Tensor]:
    return torch.nan_to_num(attend.blocks.k_cache), torch.nan_to_num(attend.blocks.v_cache)


def run(layers: Layers, attend: PagedAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and both caches."""
    return layers(attend.state.tokens, attend.state.positions, attend).clone(), *caches(attend)


def assert_agree(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    assert expected[0].isfinite().all()
    assert_near(found[0], expected[0], tolerance)
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(mine != 0, theirs != 0)
        assert_near(mine.flatten()[None], theirs.flatten()[None], tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize(
    ("shape", "block_size", "tile"),
    [("small", 1, 16), ("gqa", 64, 16), ("odd", 16, 64), ("long_sums", 3, 512), ("small", 4, 16)],
)
def test_one_kernel_gives_the_states_and_the_cache_of_many(shape, block_size, tile, device):
    model = random_model(1, small_config(**MODELS[shape])).to(device)
    layers = few_and_persistent(model)
    for positions in ([37], [5, -1, 18], [31, 32, 9]):
        many, one = (run(some, make_attention(model, positions, block_size, tile)) for some in layers)
        assert_agree(one, many, 1e-4)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("rows", [1, PERSISTENT_ROWS])
def test_only_inert_rows_write_nothing_and_are_finite(rows, device):
    model = random_model(3).to(device)
    attend = make_attention(model, [-1] * rows)
    attend.state.table.zero_()
    assert run(few_and_persistent(model)[1], attend)[0].isfinite().all()
    assert attend.blocks.k_cache.isnan().all() and attend.blocks.v_cache.isnan().all()


@interpreted
def test_a_program_whose_company_does_not_come_gives_up_with_nan(monkeypatch):
    """Two programs, of which the interpreter begins the second when the first has ended."""
    monkeypatch.setattr(persistent_layers, "PATIENCE", 3)
    model = random_model(6)
    assert run(PersistentLayers(model, TRITON, programs=2), make_attention(model, [4]))[0].isnan().all()


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_more_rows_are_left_to_the_other_layers(device):
    model = random_model(0).to(device)
    others = build_layers(*SMALL_M, model, TRITON)
    layers_for = persistent_for_few(others, model, TRITON)
    assert isinstance(layers_for(1), PersistentLayers)
    assert layers_for(1) is layers_for(PERSISTENT_ROWS)
    assert layers_for(PERSISTENT_ROWS + 1) is others(PERSISTENT_ROWS + 1)
    assert isinstance(layers_for(PERSISTENT_ROWS + 1), FewRowsLayers)


def test_without_a_checkout_the_exhibit_is_missing_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(exhibits, "EXHIBITS", tmp_path)
    monkeypatch.delitem(sys.modules, persistent_layers.__name__)
    with pytest.raises(RecipeError, match="requires a checkout") as raised:
        small_engine(random_model(0), recipe="persistent_kernel")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_an_engine_with_one_kernel_gives_the_same_tokens(device, monkeypatch):
    calls, run_layers = [], PersistentLayers.__call__

    def counted(self: PersistentLayers, ids: Tensor, positions: Tensor, attend: PagedAttention) -> Tensor:
        calls.append(len(ids))
        return run_layers(self, ids, positions, attend)

    monkeypatch.setattr(PersistentLayers, "__call__", counted)
    model, prompts = random_model(7).to(device), random_prompts([3, 9], seed=3)
    expected = generate(small_engine(model, recipe="paged"), prompts, 3)
    recipe = replace(LADDER["persistent_kernel"], runner="eager")
    assert generate(small_engine(model, recipe=recipe, kernels="triton"), prompts, 3) == expected
    assert calls == [2, 2]


LENGTHS = [1000, 513, 64, 0, -1, 129, 700, 512]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_at_a_real_size_a_hundred_replays_give_what_many_kernels_give(rows, dtype):
    """Each replay has other tokens, lengths and a fresh cache; all give what ordinary launches give."""
    config = small_config(d_model=768, n_heads=12, n_layers=12, vocab_size=1000, n_positions=1024)
    model = random_model(8, config, std=0.02).to("cuda", dtype)
    few, persistent = few_and_persistent(model)
    assert persistent.programs == torch.cuda.get_device_properties(0).multi_processor_count
    attend = make_attention(model, LENGTHS[:rows], block_size=64, tile=256)
    state, blocks = attend.state, attend.blocks
    state.table.clamp_(max=blocks.max_blocks_per_layer - 1)
    start, longest = caches(attend), state.positions.clone()

    def refill(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        state.tokens.copy_(torch.randint(model.config.vocab_size, (rows,), generator=generator))
        state.positions.copy_(torch.where(longest > 0, (longest - 37 * seed) % (longest + 1), longest))
        blocks.k_cache.copy_(start[0])
        blocks.v_cache.copy_(start[1])

    refill(0)
    run(persistent, attend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = persistent(state.tokens, state.positions, attend)
    for seed in range(1, 101):
        refill(seed)
        graph.replay()
        found = hidden.clone(), *caches(attend)
        refill(seed)
        assert_agree(found, run(few, attend), REAL_TOLERANCE[dtype])
