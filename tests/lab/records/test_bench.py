"""The measurements that notebooks and records rest on."""

import pytest
import torch

from rosellm.lab.records import bench
from rosellm.lab.records.bench import LEAST_TOKENS, Bench, decode_tokens, make_prompts, run_recipe
from rosellm.lab.records.parameters import ParameterError
from rosellm.lab.records.recordings import count_step
from rosellm.lab.records.trace import Event, Trace
from rosellm.models.arch import Arch
from rosellm.models.model import Transformer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.serving.admission import SchedulerConfig

RUNGS = ["dense", "paged", "no_mask", "pinned_h2d", "identity_pos"]


@pytest.fixture(scope="module")
def model():
    config = Arch(vocab_size=61, n_positions=64, n_layers=2, n_heads=2, d_model=16)
    return Transformer.allocate(config, torch.device("cpu"), torch.float32).initialise(0, std=0.3)


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(3, [2, 5], 61)


@pytest.mark.parametrize("rung", ["dense", "resident_step", "split_kv"])
@pytest.mark.parametrize(("tokens", "timed"), [(1, 1), (5, 1), (9, 4)])
def test_a_run_yields_the_tokens_asked_for_and_times_the_steps_after_the_counted_one(
    model, prompts, rung, tokens, timed
):
    run = run_recipe(model, rung, prompts, tokens)
    assert run.tokens == decode_tokens(model, rung, prompts, tokens)
    assert {len(row) for row in run.tokens} == {tokens}
    assert len(run.step_seconds) == timed and run.step_ms > 0


def test_a_run_to_be_timed_reaches_the_last_position_and_is_refused_beyond(model):
    fits, longer = (make_prompts(2, 64 - LEAST_TOKENS + more, 61) for more in (0, 1))
    assert [len(row) for row in run_recipe(model, "paged", fits, 2).tokens] == [2, 2]
    with pytest.raises(ParameterError, match="decodes 6 tokens, and after a prompt of 59 .* 64 positions"):
        run_recipe(model, "paged", longer, 2)


@pytest.mark.parametrize("rung", ["dense", "split_kv"])
def test_long_prompts_are_prefilled_within_a_schedulers_budget_to_the_same_tokens(model, rung, monkeypatch):
    prompts, chunks = make_prompts(3, [5, 20, 3], 61), []
    whole = Bench(model, rung, prompts, 6)
    begin = Engine.begin_prefill

    def noted(engine, sequences, counts=None):
        chunks.append(counts)
        return begin(engine, sequences, counts)

    monkeypatch.setattr(Engine, "begin_prefill", noted)
    monkeypatch.setattr(bench, "SchedulerConfig", lambda: SchedulerConfig(prefill_token_budget=10))
    cut = Bench(model, rung, prompts, 6)
    assert chunks == [[5, 5], [10], [5, 3]]
    for one in (whole, cut):
        one.decode(5)
    assert cut.tokens == whole.tokens


def test_work_is_counted_in_the_range_that_launched_it_even_if_it_runs_later():
    launched_inside = Event("kernel", "kernel", start=30.0, duration=5.0, started=3.0)
    launched_outside = Event("kernel", "kernel", start=31.0, duration=5.0, started=12.0)
    trace = Trace([Event("r", "range", 0.0, 10.0, 0.0), launched_inside, launched_outside])
    assert trace.within("r").kernels == 1
    assert trace.kernels == 2


def test_equality_holds_for_every_rung_also_at_a_single_token(model):
    for rungs, lengths, tokens in ((RUNGS, [1, 3], 6), ([*RUNGS, "split_kv"], [1, 63], 1)):
        figures = bench.equality(model, rungs, lengths, batch=2, new_tokens=tokens)
        assert all(one["tokens_equal"] and one["first_difference"] is None for one in figures.values())


def test_the_first_difference_is_told_with_the_gap_of_its_logits():
    expected = torch.zeros(2, 2, 6)
    expected[1, 1, 4:] = torch.tensor([3.0, 2.5])  # step 1, row 1
    found = bench.first_difference(expected, [[1, 2], [3, 4]], [[1, 2], [3, 5]])
    assert found == {"token": 1, "request": 1, "logit_gap": 0.5}


@pytest.mark.gpu
def test_host_to_device_copies_in_the_table_range_fall_from_one_a_layer_to_one():
    model = Transformer.allocate(
        Arch(vocab_size=61, n_positions=128, n_layers=3, n_heads=2, d_model=64),
        torch.device("cuda"),
        torch.float16,
    ).initialise(0)
    prompts = make_prompts(4, [2, 5], 61)
    expected = {
        "no_mask": ("table_copies", 3),
        "pinned_h2d": ("table_copies", 1),
        "cuda_graph": ("append_kernels_a_layer", 4),
        "triton_append": ("append_kernels_a_layer", 1),
        "identity_pos": ("append_copies_a_layer", 2),
        "reused_index_buffers": ("append_copies_a_layer", pytest.approx(1 / 3)),
    }
    runs = {rung: run_recipe(model, rung, prompts, 8, gate_from=1) for rung in ("paged", *expected)}
    counts = {rung: count_step(run.trace, 3) for rung, run in runs.items()}
    assert {rung: (name, counts[rung][name]) for rung, (name, _) in expected.items()} == expected
    assert counts["triton_append"]["append_copies_a_layer"] == 3
    assert counts["no_mask"]["kernels"] < counts["paged"]["kernels"]
