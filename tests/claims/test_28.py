"""Notebook 28: one step of Qwen3-0.6B in three records, the ends of GPT-2's ladder, the largest weights."""

from rosellm.lab.figures import models
from rosellm.lab.records.records import REFERENCE, Results, read_us, results_folder
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import BEST_RUNG
from tests.claims.prose import claim, prose

model_ladder = load_exhibit("model_ladder")


def test_the_three_records_of_one_step_are_those_named():
    words = r"three records: (\d+) µs in whole runs above, (\d+) µs here, (\d+) µs in the ledger"
    results, qwen = Results(results_folder() / REFERENCE), "Qwen3-0.6B"
    records = (
        model_ladder.mean_step_us(results, qwen, "D1"),
        model_ladder.recorded_ladder(results, qwen, "D1")[BEST_RUNG],
        model_ladder.recorded_ledgers(results, qwen)["D1"].step_us,
    )
    claim(prose("28"), words, *records)


def test_the_ladders_ends_and_the_largest_models_weights_take_what_is_said():
    results = Results(results_folder() / REFERENCE)
    ladder = model_ladder.gpt2_ladder(results, "D1")
    values = [ladder[rung] / 1e3 for rung in ("dense", BEST_RUNG)]
    weights = models.recorded_shapes(results)["Llama-3.1-8B"].n_step_parameters * 2
    claim(prose("28"), r"recorded step went from ([\d.]+) to ([\d.]+) ms", *values)
    alone = r"the 8B model, whose weights alone take ([\d.]+) ms"
    claim(prose("28"), alone, read_us(results, weights) / 1e3)
