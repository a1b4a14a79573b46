"""Planned step times: linear in what floors say, cut over ranks, summed over them as recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rosellm.errors import OptionError
from rosellm.lab.records.floors import Ceiling
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.roseinfer.exhibits import load_exhibit

steps = load_exhibit("planned_steps")
Achieved, Cut, StepModel = steps.Achieved, steps.Cut, steps.StepModel
Sums, read_sums = steps.Sums, steps.read_sums

LLAMA = Cut(KNOWN_SHAPES["meta-llama/Llama-3.1-8B"], Ceiling(4.4e6, 7e8))
ACHIEVED = Achieved((12.0, 1.0, 0.25, 1.2, 4.0), (40.0, 1.1, 0.0, 1.6, 1.4, 0.0))


def test_two_ranks_halve_weights_and_cache_and_sum_twice_a_layer() -> None:
    pair = replace(LLAMA, ranks=2)
    layers, weights, several, attention, _ = pair.decode(8, 4000)
    whole = LLAMA.decode(8, 4000)
    assert layers == whole[0]
    halves = [whole[1] / 2, whole[2] / 2, whole[3] / 2]
    assert [weights, several, attention] == pytest.approx(halves, rel=0.01)
    alone, free, dear = (StepModel(cut, ACHIEVED, 8, sums) for cut, sums in TWO_KINDS)
    assert alone.decode(8, 0) / 2 < free.decode(8, 0) < alone.decode(8, 0)
    assert dear.decode(8, 0) - free.decode(8, 0) == pytest.approx((2 * 32 + 1) * 5.0 / 1e6)
    assert dear.prefill(1, 64) - free.prefill(1, 64) == pytest.approx((2 * 32 + 1) * 5.0 / 1e6)


TWO_KINDS = (
    (LLAMA, None),
    (replace(LLAMA, ranks=2), Sums(2, (8192,), (0.0,))),
    (replace(LLAMA, ranks=2), Sums(2, (8192,), (5.0,))),
)


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(OptionError, match="tensor_parallel_size 3"):
        replace(LLAMA, ranks=3).decode(1, 0)


@pytest.mark.parametrize("model, few", [("meta-llama/Llama-3.1-8B", 1), ("meta-llama/Llama-3.2-1B", 8)])
def test_a_sum_of_few_rows_also_costs_the_norm_that_one_ranks_products_take_along(model, few) -> None:
    pair = replace(LLAMA, whole=KNOWN_SHAPES[model], ranks=2)
    plain, with_norm = (StepModel(pair, ACHIEVED, 32, Sums(2, (8192,), (5.0,), us)) for us in (0.0, 2.0))
    norms_us = 2 * pair.whole.n_layers * 2.0
    assert with_norm.decode(few, 0) - plain.decode(few, 0) == pytest.approx(norms_us / 1e6)
    assert with_norm.decode(few + 1, 0) == plain.decode(few + 1, 0)
    assert with_norm.prefill(1, 8) == plain.prefill(1, 8)


FIGURES = {
    "ranks": 2,
    "us": {
        "none": {"8": {"median": 2.0}, "64": {"median": 3.0}, "512": {"median": 4.0}},
        "library": {"8": {"median": 22.0}, "64": {"median": 23.0}, "512": {"median": 34.0}},
        "one_shot": {"8": {"median": 7.0}, "64": {"median": 9.0}},
    },
}
KB = 1024


def test_a_sum_costs_what_the_fastest_way_takes_beyond_the_norm() -> None:
    sums = read_sums(FIGURES)
    assert sums(8 * KB) == 5.0 and sums(64 * KB) == 6.0 and sums(512 * KB) == 30.0
    assert sums(36 * KB) == 5.5 and sums(0) == 5.0
    assert sums(960 * KB) == pytest.approx(54.0)  # beyond the last: 24 µs for 448 KB
    assert read_sums(FIGURES, "library")(8 * KB) == 20.0
    assert sums.norm_us == 2.0


def test_more_ranks_read_from_each_other_one_or_pass_large_sums_round_a_ring() -> None:
    eight = Sums(2, (8 * KB, 64 * KB, 8192 * KB), (5.0, 6.0, 1005.0)).among(8)
    assert eight.ranks == 8 and eight(8 * KB) == 5.0 and eight(64 * KB) == 12.0
    assert eight(8192 * KB) == 7 * 5.0 + 1.75 * 1000.0
    assert read_sums(FIGURES).among(2) == read_sums(FIGURES)
