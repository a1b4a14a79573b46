"""Which kernel a step's attention takes."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rosellm.models.model import Transformer
from rosellm.roseinfer.assembly import build_cache
from rosellm.roseinfer.kernels import ring
from rosellm.roseinfer.kernels.attention_plan import Variant
from rosellm.roseinfer.kernels.table import TRITON, TRITON_DEPENDENT
from rosellm.roseinfer.layers.attention import Binder, build_binder
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.steps.worker import Worker
from tests.helpers import CPU, FAMILIES, small_config

NARROW = FAMILIES["qwen3"] | {"d_model": 256, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "n_layers": 1}
WIDE = NARROW | {"d_model": 2048, "d_ff": 64}
MANY_HEADS = NARROW | {"n_heads": 16, "n_kv_heads": 16}
SMALL_HEADS = NARROW | {"head_dim": 32}
OF_ANOTHER = replace(TRITON, append_and_attend=lambda **operands: TRITON.append_and_attend(**operands))


def binder_of(shape, kernels=TRITON, block_size=64, form=None) -> Binder:
    model = Transformer.allocate(small_config(**shape), CPU, torch.float32, quantization=form)
    binder = build_binder("split", kernels, build_cache(BEST_RUNG, model, block_size, 4), model)
    binder.num_sms = 132
    return binder


def in_flight(shape, rows: int, longest=300, **given) -> bool:
    return bool(Variant.parse(binder_of(shape, **given).variant(rows, longest, longest)).ring)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(ring, "runs_on", lambda *_arguments: True)


@pytest.mark.parametrize("kernels", [TRITON, TRITON_DEPENDENT], ids=["ordinary", "dependent"])
@pytest.mark.parametrize(("shape", "fewest"), [(NARROW, 1), (WIDE, 2), (MANY_HEADS, 2)])
def test_keys_are_in_flight_from_one_sequence_on_unless_its_gemms_would_lose(
    shape, fewest, kernels, on_hopper
):
    assert [in_flight(shape, rows, kernels=kernels) for rows in (1, 2, 8)] == [fewest == 1, True, True]


@pytest.mark.parametrize(("longest", "can"), [(128, False), (129, True), (512, True), (513, False)])
def test_for_gemms_of_quantised_weights_keys_of_one_sequence_are_in_flight_unless_they_are_few_or_many(
    longest, can, on_hopper
):
    assert in_flight(WIDE, 1, longest, form="int8") == can


@pytest.mark.parametrize(
    ("shape", "given"),
    [
        (NARROW, {"rows": 2, "longest": 5000}),
        (MANY_HEADS, {"rows": 64, "longest": 100}),
        (NARROW, {"rows": 2, "block_size": 16}),
        (SMALL_HEADS, {"rows": 2}),
        (NARROW, {"rows": 2, "kernels": OF_ANOTHER}),
    ],
    ids=["long rows are cut", "many short rows", "small blocks", "small heads", "a reader's kernel"],
)
def test_others_load_keys_as_before(shape, given, on_hopper):
    assert in_flight(NARROW, 2) and not in_flight(shape, **given)


@pytest.mark.parametrize("form", [None, "int8"])
@pytest.mark.parametrize("shape", [NARROW, MANY_HEADS, WIDE | {"window": 700}], ids=["few", "many", "window"])
def test_every_variant_that_a_batch_can_need_is_warmed_up(shape, form, on_hopper):
    """Whatever the lengths: a graph is captured for each before requests come."""
    binder, draw = binder_of(shape, form=form), random.Random(0)
    met = set()
    for _ in range(3000):
        most, rows = draw.choice((64, 1000, 5000, 20_000)), draw.choice((1, 2, 4, 8, 16, 64, 128))
        worker = SimpleNamespace(longest=most, variant=binder.variant)
        lengths = [draw.randint(0, draw.choice((50, most))) for _ in range(draw.randint(1, rows))]
        variant = binder.variant(rows, max(lengths), sum(lengths) / len(lengths))
        assert variant in Worker.variants(worker, rows)
        met.add(variant)
    assert len(met) > (5 if form is None else 4) and any(Variant.parse(variant).ring for variant in met)


def test_without_a_hopper_gpu_no_keys_are_in_flight():
    assert not in_flight(NARROW, 2)
