"""Notebook 28: one step of Qwen3-0.6B, recorded three times."""

from rosellm.lab.records import model_ladder
from rosellm.lab.records.records import REFERENCE, Results, results_folder
from rosellm.roseinfer.recipe import BEST_RUNG
from tests.claims.prose import prose, said
from tests.claims.reading import wrong


def test_the_three_records_of_one_step_are_those_named():
    told = said(
        prose("28"), r"three records: (\d+) µs in whole runs above, (\d+) µs here, (\d+) µs in the ledger"
    )
    results, qwen = Results(results_folder() / REFERENCE), "Qwen3-0.6B"
    records = (
        model_ladder.mean_step_us(results, qwen, "D1"),
        model_ladder.recorded_ladder(results, qwen, "D1")[BEST_RUNG],
        model_ladder.recorded_ledgers(results, qwen)["D1"].step_us,
    )
    assert wrong(list(zip(records, told, strict=True))) == []
