"""The simulated engine: counted by hand, and against a live run."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rosellm.lab.records.simulation import StepTimes, measure_step_times, simulate
from rosellm.roseinfer.bench.arrivals import Arrival
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OnlineScheduler
from tests.helpers import random_model, small_config

PLAIN = StepTimes(decode_s=(1.0, 0.0, 0.0), prefill_s=(0.0, 0.1))


def token_times(arrivals: list[Arrival], times: StepTimes = PLAIN, rows: int = 8, **config) -> list:
    made = simulate(arrivals, times, SchedulerConfig(**config), rows)
    return [[round(t, 6) for t in one.token_times] for one in made]


def test_a_request_is_prefilled_when_it_comes_and_then_decodes() -> None:
    assert token_times([Arrival(2.0, 10, 3)]) == [[3.0, 4.0, 5.0]]


def test_a_request_that_finds_no_place_waits_for_one() -> None:
    assert token_times([Arrival(0.0, 10, 3), Arrival(0.0, 10, 2)], rows=1) == [[1, 2, 3], [4, 5]]


def test_a_long_prompt_delays_running_requests_by_a_chunk_at_a_time() -> None:
    arrivals = [Arrival(0.0, 10, 9), Arrival(1.5, 40, 1)]
    whole, _ = token_times(arrivals)
    assert whole[:4] == [1.0, 2.0, 3.0, 8.0]  # it comes before the second step ends: 3.0 + 4.0 + 1.0
    chunked, long = token_times(arrivals, prefill_chunk=10)
    assert chunked[:7] == [1.0, 2.0, 3.0, 5.0, 7.0, 9.0, 11.0]
    assert long == [10.0]


@given(
    arrivals=st.lists(
        st.builds(Arrival, st.floats(0, 50), st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=20
    ),
    rows=st.integers(1, 5),
    budget=st.integers(1, 50),
    chunk=st.none() | st.integers(1, 50),
)
def test_every_request_gets_its_tokens_in_order_after_it_came(arrivals, rows, budget, chunk) -> None:
    config = SchedulerConfig(prefill_token_budget=budget, prefill_chunk=chunk)
    times = StepTimes(decode_s=(0.5, 0.1, 0.01), prefill_s=(0.2, 0.03))
    made = simulate(arrivals, times, config, rows)
    for arrival, one in zip(sorted(arrivals, key=lambda a: a.seconds), made, strict=True):
        assert one.arrival == arrival.seconds < one.token_times[0]
        assert len(one.token_times) == arrival.new_tokens and all(gap > 0 for gap in one.itl)
    running = [(one.token_times[0], 1) for one in made] + [(one.token_times[-1], -1) for one in made]
    together = 0
    for _, change in sorted(running):
        together += change
        assert together <= rows


def test_times_are_fitted_to_what_was_measured() -> None:
    exact = StepTimes(decode_s=(2e-4, 3e-6, 4e-9), prefill_s=(5e-4, 6e-7))
    decodes = [(n, c, exact.decode(n, n * c)) for n in (1, 8, 64) for c in (16, 256, 1024)]
    fitted = StepTimes.fit(decodes, [(n, exact.prefill(n)) for n in (1, 100, 5000)])
    assert fitted.decode_s == pytest.approx(exact.decode_s) and fitted.prefill_s == pytest.approx(
        exact.prefill_s
    )


def test_a_live_run_takes_the_time_that_its_steps_foretell() -> None:
    """Within half and twice: the machine is shared, and the host's work between the steps is left out."""
    config = small_config(n_positions=300, d_model=128, n_layers=4)
    engine = Engine(random_model(0, config), recipe="packed_prefill", max_batch_size=8)
    times = measure_step_times(engine, (1, 4, 8), (16, 128, 256), (8, 64, 256))
    arrivals = [Arrival(0.0, 8 + 23 * i % 200, 5 + 11 * i % 60) for i in range(24)]
    simulated = simulate(arrivals, times, SchedulerConfig(), 8)
    scheduler = OnlineScheduler(engine)
    params = [SamplingParams(temperature=0.0, max_tokens=a.new_tokens, ignore_eos=True) for a in arrivals]
    ids = scheduler.add_requests([[1] * a.prompt_tokens for a in arrivals], params)
    while scheduler.has_unfinished:
        scheduler.step()
    live = [scheduler.take_result(i).metrics for i in ids]
    for figure in (lambda one: one.latency, lambda one: one.ttft):
        expected, found = (sum(map(figure, metrics)) for metrics in (simulated, live))
        assert 0.5 < found / expected < 2
