"""The tuner, with planted times for the steps of a GPU: what it keeps, and who uses what it has kept."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

from rosellm.errors import OptionError
from rosellm.models.model import Transformer
from rosellm.models.quantized import QuantizedRows, RowFormat
from rosellm.roseinfer import tuning
from rosellm.roseinfer.kernels import few_rows, linear, ring, tuned
from rosellm.roseinfer.kernels.few_rows import few_rows_linear, few_rows_linear_ref
from rosellm.roseinfer.kernels.linear import some_rows_linear
from rosellm.roseinfer.kernels.table import TRITON
from rosellm.roseinfer.kernels.tuned import Choice, Gemm, LayersKey
from rosellm.roseinfer.tuning import candidates, gemms_of, tune, tune_or_load
from rosellm.triton_or_none import next_power_of_2
from tests.helpers import CPU, random_model, small_config, small_engine
from tests.roseinfer.kernels.kernel_checks import assert_near, quantized

RING = Choice(2, None)
SIZES = {"d_model": 1024, "n_heads": 16, "d_ff": 2048, "n_layers": 1}


def quantised_model(form):
    return Transformer.allocate(small_config(**SIZES), CPU, torch.bfloat16, quantization=form)


@pytest.fixture
def table(monkeypatch):
    """An empty table of choices, on what passes for a Hopper GPU."""
    found = {}
    monkeypatch.setattr(tuned, "table", lambda: found)
    monkeypatch.setattr(ring, "runs_on", lambda device, dtype: True)
    return found


@pytest.fixture
def engine(table):
    model = random_model(0, small_config(**SIZES))
    return small_engine(model, kernels=TRITON, max_batch_size=2, num_kv_blocks=4)


@pytest.fixture
def planted(table, monkeypatch):
    """Steps whose µs are 100, or what is planted for a choice in force when they were captured."""
    times: dict = {}

    def captured(self, layers, rows):
        variants = getattr(self.worker.layers_for, "variants", {})
        kind = next((k for k, v in variants.items() if v is layers), None)
        chosen = {key: one for key, one in table.items() if key.rows == rows}
        us = [times[it] for it in [*chosen.items(), (rows, kind)] if it in times]
        return min(us, default=100.0)

    monkeypatch.setattr(tuning, "compile_ahead", lambda runs: None)
    monkeypatch.setattr(tuning._Steps, "captured", captured)
    monkeypatch.setattr(tuning, "step_us", lambda us: us)
    return times


def test_what_makes_a_step_one_per_cent_shorter_is_kept_and_nothing_else(engine, table, planted):
    one, two = (gemms_of(engine.model, rows) for rows in (1, 2))
    faster, hardly = candidates(one[0])[-1], candidates(one[1])[0]
    planted |= {(one[0], faster): 90.0, (one[1], hardly): 89.5, (two[3], candidates(two[3])[0]): 99.5}
    found = tune(engine.step, engine.model)
    (choice,) = found["choices"]
    assert choice["step_us"] == {"before": [100.0] * 5, "after": [90.0] * 5}
    assert dict(tuned.parsed(found["choices"])) == table == {one[0]: faster}
    assert found["steps"]["1"]["after"] == [90.0] * 5 and found["steps"]["2"]["after"] == [100.0] * 5


def test_the_library_takes_over_the_rows_for_which_it_is_faster(engine, table, planted):
    gemm = gemms_of(engine.model, 2)[0]
    planted |= {(gemm, candidates(gemm)[0]): 95.0, (2, "library"): 80.0}
    (kind,) = tune(engine.step, engine.model)["choices"]  # the tuned GEMM is not used, and not recorded
    layers_for = engine.step.worker.layers_for
    assert kind["kind"] == "library" and len(table) == 1 and layers_for(2) is layers_for.variants["library"]
    assert layers_for(1) is layers_for.variants["few"]


@pytest.mark.parametrize(
    ("form", "n_tuned"), [("fp8", {128: 4, 256: 3, 512: 0}), ("int8", {512: 4}), ("int4", {256: 4, 512: 0})]
)
def test_of_a_quantised_model_the_gemms_of_our_ring_are_tuned_for_its_format(form, n_tuned, table, planted):
    model, wide = quantised_model(form), (128,)
    engine = small_engine(model, kernels=TRITON, max_batch_size=512, num_kv_blocks=4)
    layers_for = engine.step.worker.layers_for
    tried = {rows: gemms_of(model, rows, layers_for) for rows in n_tuned}
    assert {rows: len(gemms) for rows, gemms in tried.items()} == n_tuned
    qkv, up, down, _ = gemms_of(model, 2)
    in_16_bits = {Gemm(*up[:4]): RING, LayersKey(2, model.config.n_layer_parameters): "library"}
    table |= in_16_bits
    planted |= {(qkv, Choice(4, wide)): 95.0, (down, Choice(8, (64,))): 90.0, (up, Choice(1, wide)): 99.5}
    found = tune(engine.step, model)
    assert found["steps"]["2"] == {"before": [100.0] * 5, "after": [90.0] * 5}
    kept = dict(tuned.parsed(json.loads(json.dumps(found["choices"]))))
    assert kept == {qkv: Choice(4, wide), down: Choice(8, (64,))} and table == in_16_bits | kept
    products = layers_for(2).products
    assert products.qkv_parts_of(2, qkv.n, qkv.k) == 4 and products.parts_of(2, down.n, down.k) == 8


def test_the_projection_whose_partial_sums_nobody_adds_up_is_not_tuned(table):
    attending = replace(TRITON, append_and_attend=lambda **operands: TRITON.append_and_attend(**operands))
    for kernels, n_tuned in ((TRITON, 4), (attending, 3)):
        engine = small_engine(quantised_model("int8"), kernels=kernels, num_kv_blocks=4)
        assert len(gemms_of(engine.model, 2, engine.step.worker.layers_for)) == n_tuned


def test_a_model_is_tuned_once_for_all_processes_in_each_format(table, planted, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    models = [random_model(0, small_config(**SIZES)), quantised_model("int8"), quantised_model("int4")]
    sizes = {"kernels": TRITON, "max_batch_size": 2, "num_kv_blocks": 4, "tune": True}
    gemms = [gemms_of(model, 2)[0] for model in models]
    planted |= {(gemm, candidates(gemm)[-1]): 90.0 - 5 * i for i, gemm in enumerate(gemms)}
    for model in models:
        small_engine(model, **sizes)
    assert list(table) == gemms
    monkeypatch.setattr(tuning, "tune", lambda *_arguments: pytest.fail("tuned again"))
    for model, gemm in zip(models, gemms, strict=True):
        table.clear()
        small_engine(model, **sizes)
        assert table == {gemm: candidates(gemm)[-1]}
    assert [path.name for path in (tmp_path / "rosellm/tiles").iterdir()] == ["cpu.json"]


def test_a_model_is_tuned_from_the_rules_for_all_its_numbers_of_rows(engine, table, planted, monkeypatch):
    """Whatever is in force: otherwise its choices would lack what an engine before it has found."""
    monkeypatch.setattr(tuning, "candidates", lambda gemm: [])  # of some shapes there are none
    gemm, other = gemms_of(engine.model, 2)[0], Gemm(2, 8, 8, "none")
    table |= {gemm: RING, other: RING}
    assert tune(engine.step, engine.model)["choices"] == [] and table == {other: RING}


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_the_last_number_of_rows_covers_the_most(rows, table, planted):
    engine = small_engine(random_model(0, small_config(**SIZES)), kernels=TRITON, max_batch_size=rows)
    assert max(map(int, tune(engine.step, engine.model)["steps"])) == next_power_of_2(rows)


@pytest.mark.parametrize("text", ["{", "[1]", '{"%s": {}}'])
def test_a_file_that_does_not_hold_choices_is_named(text, engine, planted, tmp_path):
    tune_or_load(engine.step, engine.model, tmp_path)
    (path,) = tmp_path.iterdir()
    (name,) = json.loads(path.read_text())
    path.write_text(text.replace("%s", name))
    with pytest.raises(OptionError, match=f"cannot use the tuned choices in {path}"):
        tune_or_load(engine.step, engine.model, tmp_path)


def test_without_a_hopper_gpu_there_is_nothing_to_tune():
    with pytest.raises(OptionError, match="Hopper"):
        small_engine(random_model(0), tune=True)


@pytest.mark.parametrize("seed", range(20))
def test_candidates_divide_k_and_fit_the_ring(seed):
    draw = random.Random(seed)
    activation = draw.choice(("none", "gelu", "swiglu"))
    form = draw.choice((None, None, "fp8", "int4"))
    rows, n, k = 1 << draw.randrange(9), 8 * draw.randint(8, 2000), 8 * draw.randint(2, 1600)
    gemm = Gemm(rows, n, k, activation, form)
    for parts, tile in candidates(gemm):
        assert parts == 1 or activation == "none"
        if form is not None:
            assert tile in [(64,), (128,)] and gemm.k > (2 * parts - 1) * ring.BLOCK_K
        elif gemm.rows == 1:
            assert few_rows.FewRowsShape(*tile).held <= tuning.MOST_HELD
        elif tile is None:
            assert gemm.rows <= 128 and gemm.k >= 2 * parts * ring.BLOCK_K - ring.BLOCK_K
        else:
            assert gemm.k % (parts * tile[2]) == 0


def test_a_gemm_takes_its_tuned_kernel_if_its_ranges_of_k_are_those(table, monkeypatch):
    x, weight = torch.ones(5, 256), torch.ones(32, 256)
    monkeypatch.setattr(ring, "ring_linear", lambda **_operands: "ring")
    monkeypatch.setattr(ring, "is_faster", lambda *_arguments: False)
    table[Gemm(8, 32, 256, "none")] = RING
    assert some_rows_linear(x=x, weight=weight, parts=2) == "ring"
    assert isinstance(some_rows_linear(x=x, weight=weight), torch.Tensor)
    table[Gemm(8, 32, 256, "none")] = Choice(1, (16, 16, 64, 4, 2))
    assert linear.tile_of(x, weight, "none", 1) == (16, 16, 64, 4, 2)
    assert linear.tile_of(x, weight, "none", 2) != (16, 16, 64, 4, 2)


@pytest.mark.parametrize(("form", "gemm"), [("int8", "ring.ring_linear"), ("int4", "grouped_ring_linear")])
def test_a_ring_of_codes_has_its_tuned_number_of_weight_rows(form, gemm, table, monkeypatch):
    monkeypatch.setattr(f"rosellm.roseinfer.kernels.linear.{gemm}", lambda **given: given["block_n"])
    x = QuantizedRows.of(torch.ones(5, 256), RowFormat("int8", 1))
    given = {"x": x, "weight": quantized(torch.ones(32, 256), form)}
    table |= {Gemm(8, 32, 256, "none", form): Choice(2, (128,)), Gemm(8, 32, 256, "none"): Choice(1, (16,))}
    assert some_rows_linear(**given, parts=2) == 128 and some_rows_linear(**given, parts=1) is None


def test_a_gemm_of_one_row_takes_its_tuned_tile(table, monkeypatch):
    seen = []
    options = few_rows._options.__wrapped__
    monkeypatch.setattr(few_rows, "_options", lambda *given: seen.append(given[2]) or options(*given))
    x, weight = torch.randn(1, 512).half(), torch.randn(48, 512).half()
    table[Gemm(1, 48, 512, "none")] = Choice(1, (8, 2, 64, 2, 4, 1))
    assert_near(few_rows_linear(x=x, weight=weight), few_rows_linear_ref(x=x, weight=weight))
    few_rows_linear(x=x, weight=weight, shape=lambda *_sizes: few_rows.FewRowsShape(4, 1, 64, 1, 4, 1))
    assert [cut.block_n for cut in seen] == [8, 4]


def test_the_packages_choices_are_read_and_each_made_a_step_shorter(monkeypatch):
    monkeypatch.setattr(tuned, "gpu_name", lambda: "nvidia-h200")
    models = json.loads((tuned.FOLDER / "nvidia-h200.json").read_text())["models"]
    choices = [choice for model in models.values() for choice in model["choices"]]
    assert dict(tuned.parsed(choices)) == tuned.table.__wrapped__() and len(choices) > 10
    assert all(tuning.is_shorter(choice["step_us"]) for choice in choices)
