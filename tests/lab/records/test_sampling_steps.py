"""What sampling costs a step: whole steps of every mode, in turns on one engine."""

import time

import pytest
import torch

from rosellm.lab.records import experiment, sampling_steps
from rosellm.lab.records.bench import Bench
from rosellm.lab.records.records import Results, find
from rosellm.lab.records.sampling_steps import GREEDY, MODES, measure_modes, modes_of
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.kernels.filtered_head import filtered_tiles_ref
from rosellm.roseinfer.layers.choosers import mode_of
from rosellm.roseinfer.steps.logprob_ring import LogprobRing
from rosellm.roseinfer.steps.worker import Worker
from tests.helpers import CPU, random_model, small_config
from tests.lab.measuring import measured, refusal

costs = load_exhibit("sampling_costs")

CHOOSERS = {
    GREEDY: "greedy",
    "temperature": "drawn",
    "top-p": "filtered",
    "top-k, top-p": "filtered",
    "+ penalties": "penalised",
    "logprobs": "greedy",
    "top-k, top-p: one row": "filtered",
    "logprobs: one row": "greedy",
    "greedy, all logits": "greedy",
    "top-k, top-p, sorted": "filtered",
}
MODEL_S, LOGPROBS_S = 0.004, 0.006


@pytest.fixture(scope="module")
def model():
    return random_model(0)


def slowed(function, seconds: float):
    def run(*arguments):
        time.sleep(seconds)
        return function(*arguments)

    return run


@pytest.mark.parametrize("name", MODES)
def test_a_mode_asks_the_chooser_for_what_its_name_says_in_all_rows_or_in_the_first(name):
    params = MODES[name].params(5, 9)
    assert mode_of(params) == CHOOSERS[name]
    greedy = MODES[GREEDY].params(5, 9)
    changed = [one != plain for one, plain in zip(params, greedy, strict=True)]
    plain = "greedy" in name
    assert changed == [not plain] + 4 * [not (plain or MODES[name].only_first)]
    assert {one.max_tokens for one in params} == {9} and len({one.seed for one in params}) == 5


@pytest.mark.slow
def test_each_mode_costs_a_whole_step_and_log_probabilities_come_on_top(model, monkeypatch):
    monkeypatch.setattr(Worker, "decode", slowed(Worker.decode, MODEL_S))
    monkeypatch.setattr(LogprobRing, "begin", slowed(LogprobRing.begin, LOGPROBS_S))
    turns_us = measure_modes(model, "split_kv", 2, 20, turns=1, seconds=0.0)
    assert list(turns_us) == list(MODES)
    both, alone = (MODEL_S + LOGPROBS_S) * 1e6, MODEL_S * 1e6
    for name, (us,) in turns_us.items():
        assert us > (both if "logprobs" in name else alone), name


def test_modes_take_turns_on_one_engine_a_head_and_the_first_turn_is_not_counted(model, monkeypatch):
    asked, engines = [], []
    monkeypatch.setattr(sampling_steps, "turn_us", lambda bench, seconds: told(bench, seconds))

    def told(bench: Bench, seconds: float) -> float:
        engines.append(bench.engine)
        asked.append((bench.params, seconds))
        return float(len(asked))

    turns_us = measure_modes(model, "split_kv", 1, 20, turns=2, seconds=3.0)
    names = list(modes_of(1))
    assert [seconds for _, seconds in asked] == [3.0] * 24
    heads = [[engine.recipe.head for engine in engines[i::8]] for i in range(8)]
    assert heads == 6 * [3 * ["fused"]] + 2 * [3 * ["logits"]] and len(set(engines)) == 2
    assert [params for params, _ in asked] == 3 * [MODES[name].params(1, 34) for name in names]
    assert turns_us == {name: [9.0 + i, 17.0 + i] for i, name in enumerate(names)}


@pytest.mark.slow
def test_the_command_records_every_turn_and_its_median_and_they_are_read_back(tmp_path, capsys):
    asked = "--model=rose-tiny-qwen3", "--batches=1,3", "--context=20", "--repeats=3"
    record = measured(tmp_path, "sampling_steps", *asked)
    assert record["environment"]["device_name"] and record["model"] == "rose-tiny-qwen3"
    figures = record["figures"]
    assert figures["context"] == 20 and figures["modes"]["top-p"]["wish"]["top_p"] == 0.9
    for batch, modes in figures["batches"].items():
        assert list(modes) == list(modes_of(int(batch)))
        for one in modes.values():
            assert len(one["turns_us"]) == 3 and one["median_us"] == sorted(one["turns_us"])[1] > 0
    (steps,) = costs.recorded_modes(Results(tmp_path)).values()
    assert list(steps) == [1, 3] and steps[3]["top-p"] == figures["batches"]["3"]["top-p"]["turns_us"]
    assert capsys.readouterr().out.count("B=") == 2


def test_a_batch_size_measured_alone_leaves_the_others_of_its_context_in_the_record(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sampling_steps, "measure_modes", lambda *_asked: {GREEDY: [1.0]})
    for batch in ("8", "1"):
        measured(tmp_path, "sampling_steps", "--context=20", f"--batches={batch}")
    assert list(costs.recorded_modes(Results(tmp_path))["rose-tiny"]) == [1, 8]
    capsys.readouterr()
    monkeypatch.setattr(experiment, "get_parts", lambda *_given: pytest.fail("loaded before refusing"))
    told = refusal(capsys, tmp_path, "sampling_steps", "--context=30", "--batches=8")
    assert "would lose 1, measured with another context" in told


def test_a_committed_record_has_every_mode_of_every_batch():
    for model_name, batches in costs.recorded_modes(find()).items():
        for batch, modes in batches.items():
            assert list(modes) == list(modes_of(batch)), f"{model_name}, {batch}"


def test_a_filtered_row_moves_its_logits_and_a_penalised_one_its_counts_too():
    arch = small_config(vocab_size=128)
    state = DeviceState(6, 2, CPU)
    state.temperatures.fill_(1.0)
    state.top_k.fill_(3)
    tiles = filtered_tiles_ref(hidden=torch.ones(6, 32), weight=torch.ones(128, 32), state=state)
    counts = torch.zeros(6, arch.vocab_size, dtype=torch.int32)
    logits_bytes = tiles.logits.numel() * 4
    found = costs.extra_bytes(arch, 6)
    assert found["top-k, top-p"] == 6 * found["top-k, top-p: one row"] == logits_bytes
    assert found["+ penalties"] == logits_bytes + counts[:6].numel() * counts.itemsize
    assert found["temperature"] == 0


@pytest.mark.parametrize(("batch", "runs"), [(1, 1), (64, 1), (65, 2), (256, 4)])
def test_log_probabilities_read_the_head_once_a_run(batch, runs):
    arch = small_config()
    one, many = (costs.extra_bytes(arch, n)["logprobs"] for n in (1, batch))
    logits = (one - 2 * 101 * 32) * batch
    assert many - logits == runs * 2 * 101 * 32
    assert costs.extra_bytes(arch, batch)["logprobs: one row"] == one


def test_what_a_mode_adds_is_the_difference_of_medians():
    turns = {GREEDY: [9.0, 10.0, 30.0], "top-p": [1.0, 14.0, 15.0]}
    assert costs.extra_us(turns) == {"top-p": 4.0}
