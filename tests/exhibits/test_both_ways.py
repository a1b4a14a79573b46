"""Prompts joined with a decode step and apart from it: what is drawn, tabled and said of the record."""

import pytest

from rosellm.bench.workloads import Workload
from rosellm.lab.figures.charts import ChartError
from rosellm.roseinfer.exhibits import load_exhibit
from tests.helpers import random_model

both_ways, Pass = load_exhibit("both_ways"), load_exhibit("passes").Pass
pass_timeline = load_exhibit("pass_timeline").pass_timeline


def test_passes_are_drawn_one_after_the_other_with_their_numbers_below() -> None:
    own = [Pass("prompts", 0, 9, 1.0), Pass("decode", 2, 0, 1.0), Pass("joined", 2, 5, 1.0)]
    chart = pass_timeline({"one": own, "other": own[:1]}, lambda one: 10.0 * (one.rows + 1), "title", 35.0)
    drawn = {bar.name: list(bar.base) for bar in chart.data}
    assert drawn == {"decode step": [10.0], "prompts alone": [0.0, 0.0], "both in one pass": []}
    assert chart.table.splitlines()[-2].split() == ["one", "1", "1", "1", "70.0"]
    with pytest.raises(ChartError, match="no pass"):
        pass_timeline({"one": []}, lambda one: 1.0, "title", 1.0)


FASTER = {"apart": [100.0, 101.0], "joined": [110.0, 111.0]}


def made_up_figures(tok_s: dict[str, list[float]]) -> dict:
    runs = {
        way: {"passes": {"decode": 5, "prompts": 9 - 4 * (way == "joined"), "joined": 0},
              "repeats": [{"total_throughput_tok_s": one} for one in own]}
        for way, own in tok_s.items()
    }  # fmt: skip
    return {"runs": runs}


def test_the_verdict_counts_only_turns_that_do_not_overlap() -> None:
    verdict = both_ways.verdict_of(made_up_figures(FASTER))
    assert verdict.word == "faster" and verdict.change == "+10.0 %"
    both = made_up_figures({"apart": [100.0, 101.0], "joined": [90.0, 120.0]})
    assert both_ways.verdict_of(both).word == "no difference beyond the noise"


def test_the_verdict_is_told_with_what_was_predicted() -> None:
    told = both_ways.told_verdict("gpt2", made_up_figures(FASTER), predicted=(0.03, 0.1))
    assert told == "**gpt2: kept.** Joined, W8 changes by +10.0 % (faster), as predicted: +3% to +10%."
    slower = made_up_figures({"apart": FASTER["joined"], "joined": FASTER["apart"]})
    assert "not kept" in (told := both_ways.told_verdict("gpt2", slower, (0.03, 0.1))) and "not as" in told


def test_tables_have_a_row_for_each_size_and_each_way() -> None:
    medians = {"itl_beside_p50_s": 0.001, "itl_beside_p99_s": 0.002, "long_prompt_ttft_s": 0.05}
    kinds = {kind: {"medians": medians} for kind in ("chunked", "whole")}
    figures = {
        "beside_us": {"8": {"128": {"apart": [300.0, 320.0], "joined": [248.0, 248.0]}}},
        "long_prompt": {"options": [], "apart": kinds, "joined": kinds},
    }
    assert both_ways.beside_rows(figures) == [[8, 128, 310.0, 248.0, "−20.0 %"]]
    rows = both_ways.long_rows(figures)
    assert rows[0] == ["chunked", "apart", 1.0, 2.0, 50.0] and [row[:2] for row in rows[2:]] == [
        ["whole", "apart"],
        ["whole", "joined"],
    ]


def test_both_ways_give_the_same_tokens_and_the_joined_one_takes_fewer_passes() -> None:
    workload = Workload("small", 16, 14, 4, prompt_tokens=9, min_new_tokens=3, min_prompt_tokens=2)
    runs = both_ways.both_ways(random_model(0), workload)
    assert runs["apart"].tokens == runs["joined"].tokens and len(runs["joined"].tokens) == 16
    assert len(runs["joined"].passes) < len(runs["apart"].passes)
