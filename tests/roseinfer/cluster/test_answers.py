"""The answers to one call: each request's once, in order, with its seed and its times."""

from __future__ import annotations

from time import perf_counter

import pytest
from hypothesis import given, settings, strategies as st

from rosellm import SamplingParams
from rosellm.roseinfer.cluster.answers import Answers
from rosellm.roseinfer.cluster.replica import Report
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.request import RequestMetrics


class Bar:
    """As tqdm's."""

    def __init__(self, total: int) -> None:
        self.total, self.n = total, 0

    def update(self, n: int) -> None:
        assert n > 0
        self.n += n


def output(tokens: list[int], began: float = 0.0) -> RequestOutput:
    metrics = RequestMetrics(began, [began + i for i in range(1, len(tokens) + 1)])
    return RequestOutput(77, [1], tokens, "stop", metrics, str)


def test_requests_that_draw_get_a_seed_each_and_others_stay_as_they_are():
    params = [
        SamplingParams(),
        SamplingParams(),
        SamplingParams(seed=5),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, seed=6),
    ]
    own = [order.params for order in Answers([[1]] * 5, params).orders.values()]
    assert own[2:] == params[2:]
    assert None not in (own[0].seed, own[1].seed) and own[0].seed != own[1].seed


def test_results_are_in_the_order_of_the_requests_and_numbered_from_the_first_id():
    answers = Answers([[1], [2], [3]], [SamplingParams()] * 3, first_id=10)
    assert [(order.request_id, order.prompt) for order in answers.orders.values()] == [
        (10, [1]),
        (11, [2]),
        (12, [3]),
    ]
    for request_id in (12, 10, 11):
        answers.take(Report(perf_counter(), {request_id: output([request_id])}, {}))
    assert [(one.request_id, one.token_ids) for one in answers.results()] == [
        (10, [10]),
        (11, [11]),
        (12, [12]),
    ]


def test_times_are_those_of_this_process_s_clock():
    before = perf_counter()
    answers = Answers([[1]], [SamplingParams()])
    there = 5000.0
    answers.take(Report(there + 3.0, {0: output([1, 2], began=there)}, {}))
    (result,) = answers.results()
    assert before <= result.metrics.arrival <= perf_counter()
    assert result.metrics.token_times == pytest.approx([perf_counter() - 2, perf_counter() - 1], abs=0.5)
    assert result.metrics.itl == pytest.approx([1.0])


steps = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.booleans()), max_size=60)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(steps)
def test_the_bar_counts_each_token_once_however_often_requests_run_again(reports):
    bar = Bar(total=4 * 20)
    answers = Answers([[1]] * 4, [SamplingParams(max_tokens=20)] * 4, bar)
    most, ended = [0] * 4, {}
    for request_id, n_tokens, ends in reports:
        if request_id in ended:
            continue
        if ends:
            ended[request_id] = n_tokens = max(n_tokens, most[request_id])  # it repeats what was told before
            answers.take(Report(0.0, {request_id: output([0] * n_tokens)}, {}))
        else:
            answers.take(Report(0.0, {}, {request_id: n_tokens}))
        most[request_id] = max(most[request_id], n_tokens)
    assert bar.n == sum(most)
    assert bar.total == 80 - sum(20 - n for n in ended.values())
