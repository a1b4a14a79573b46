"""One kernel for all layers gives what a kernel a product gives, writes the same cache, and cannot hang."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from rosellm.errors import RecipeError
from rosellm.models.arch import Norm
from rosellm.models.model import Transformer
from rosellm.roseinfer import exhibits
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.layers.fused import FewRowsLayers
from rosellm.roseinfer.recipe import RECIPES
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from tests.helpers import (
    DTYPES,
    TRITON_DEVICES,
    greedy_sequences,
    random_model,
    random_prompts,
    small_config,
    small_engine,
)
from tests.roseinfer.kernels.kernel_checks import assert_near

persistent_layers = load_exhibit("persistent_layers")
PERSISTENT_ROWS, PersistentLayers = persistent_layers.PERSISTENT_ROWS, persistent_layers.PersistentLayers
MODELS = {
    "small": {},
    "gqa": {"n_heads": 4, "n_kv_heads": 2},
    "odd": {"d_model": 48, "n_heads": 3, "n_kv_heads": 1, "d_ff": 90, "n_layers": 3},
    "long_sums": {"d_model": 32, "n_layers": 1, "d_ff": 1100, "norm": Norm("layer", 1e-3)},
}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}
MORE = (("small", 1, [17]), ("gqa", 64, [37]), ("odd", 16, [5, 18, 30]), ("long_sums", 4, [31, 32, 9]))


@pytest.fixture(autouse=True)
def few_ranges(monkeypatch):
    """In the interpreter, one program attends to all ranges of a context, and each takes milliseconds."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(persistent_layers, "BUSY", 8)


def engine_of(model: Transformer, exhibit: str, **options) -> Engine:
    recipe = replace(RECIPES["persistent_kernel"], exhibit=exhibit, runner=options.pop("runner", "eager"))
    return small_engine(model, recipe=recipe, kernels="triton", **options)


def run(
    model: Transformer, exhibit: str, lengths: list[int], n_steps: int, block_size: int, **options
) -> tuple[Tensor, ...]:
    """Logits of a prefill and the decode steps after it, and both caches, which held NaN before."""
    n_blocks = sum((n + n_steps) // block_size + 1 for n in lengths)
    engine = engine_of(model, exhibit, num_kv_blocks=n_blocks, block_size=block_size, **options)
    assert isinstance(engine.step.worker.layers_for(1), PersistentLayers) == (exhibit != "none")
    for cache in (engine.blocks.k_cache, engine.blocks.v_cache):
        cache.fill_(float("nan"))
    sequences = greedy_sequences(engine, random_prompts(lengths), n_steps + 1)
    engine.prefill(sequences)
    logits = [engine.step.last_logits().clone()]
    for _ in range(n_steps):
        engine.decode(sequences)
        logits.append(engine.step.last_logits().clone())
    return torch.cat(logits), engine.blocks.k_cache, engine.blocks.v_cache


def assert_agree(model: Transformer, lengths: list[int], n_steps: int, **options) -> None:
    one, many = (
        run(model, exhibit, lengths, n_steps, **options) for exhibit in ("persistent_layers", "none")
    )
    assert many[0].isfinite().all()
    for found, expected in zip(one, many, strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        found, expected = (x.nan_to_num().flatten()[None] for x in (found, expected))
        assert_near(found, expected, TOLERANCE[model.dtype])


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize(
    ("shape", "block_size", "lengths"),
    [("small", 4, [3, 5]), *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)],
)
def test_one_kernel_gives_the_logits_and_the_cache_of_many(shape, block_size, lengths, device):
    model = random_model(1, small_config(**MODELS[shape])).to(device)
    assert_agree(model, lengths, 1, block_size=block_size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_at_a_real_size_a_hundred_replays_give_what_many_kernels_give(rows, dtype):
    """In 16 bits one step: tokens of later ones may differ."""
    config = small_config(d_model=768, n_heads=12, n_layers=12, vocab_size=1000, n_positions=1024)
    model, lengths = random_model(8, config, std=0.02).to("cuda", dtype), [513, 64, 1, 129, 700, 512, 2, 900]
    n_steps = 100 if dtype == torch.float32 else 1
    assert_agree(model, lengths[:rows], n_steps, block_size=64, runner="graph")


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU here")
def test_a_program_whose_company_does_not_come_gives_up_and_its_request_fails(monkeypatch):
    """Two programs, of which the interpreter begins the second when the first has ended."""
    monkeypatch.setattr(persistent_layers, "PATIENCE", 3)
    two_programs = partial(PersistentLayers, programs=2)
    monkeypatch.setattr(persistent_layers, "PersistentLayers", lambda *given: two_programs(*given[:2]))
    engine = engine_of(random_model(6), "persistent_layers", warm_up=False)
    (output,) = OfflineScheduler(engine).run([[1, 2]], SamplingParams(temperature=0.0, max_tokens=3))
    assert (output.finish_reason, len(output.token_ids)) == ("failed", 1)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_more_rows_are_left_to_the_other_layers(device):
    layers_for = engine_of(random_model(0).to(device), "persistent_layers").step.worker.layers_for
    assert isinstance(layers_for(1), PersistentLayers)
    assert layers_for(1) is layers_for(PERSISTENT_ROWS)
    assert isinstance(layers_for(PERSISTENT_ROWS + 1), FewRowsLayers)


def test_without_a_checkout_the_exhibit_is_missing_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(exhibits, "EXHIBITS", tmp_path)
    monkeypatch.delitem(sys.modules, persistent_layers.__name__)
    with pytest.raises(RecipeError, match="^.*requires a checkout.*$"):
        small_engine(random_model(0), recipe="persistent_kernel")
