"""What sampling costs a step: whole steps of every mode, in turns on one engine."""

import time

import pytest

from rosellm.lab.records.bench import Bench
from rosellm.lab.records.records import Results
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.layers.choosers import mode_of
from rosellm.roseinfer.steps.logprob_ring import LogprobRing
from rosellm.roseinfer.steps.worker import Worker
from tests.helpers import random_model
from tests.lab.measuring import measured

costs, sampling_steps = load_exhibit("sampling_costs"), load_exhibit("sampling_steps")
GREEDY, MODES = sampling_steps.GREEDY, sampling_steps.MODES
measure_modes, modes_of = sampling_steps.measure_modes, sampling_steps.modes_of

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
def test_the_command_records_every_turn_and_its_median_and_they_are_read_back(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sampling_steps, "BATCHES", (3,))
    monkeypatch.setattr(sampling_steps, "CONTEXT", 20)
    record = measured(tmp_path, "sampling_steps", "--model=rose-tiny-qwen3", "--repeats=3")
    assert record["environment"]["device_name"] and record["model"] == "rose-tiny-qwen3"
    figures = record["figures"]
    assert figures["context"] == 20 and figures["modes"]["top-p"]["wish"]["top_p"] == 0.9
    for batch, modes in figures["batches"].items():
        assert list(modes) == list(modes_of(int(batch)))
        for one in modes.values():
            assert len(one["turns_us"]) == 3 and one["median_us"] == sorted(one["turns_us"])[1] > 0
    (steps,) = costs.recorded_modes(Results(tmp_path)).values()
    assert list(steps) == [3] and steps[3]["top-p"] == figures["batches"]["3"]["top-p"]["turns_us"]
    assert capsys.readouterr().out.count("B=") == 1
