"""Random operations on the engine's parts keep every invariant: few in a test run, a million in a soak."""

from __future__ import annotations

import pytest

from tests.soak.block_driver import BlockDriver
from tests.soak.programs import Driver, run_machine
from tests.soak.scheduler_driver import SchedulerDriver

ENDS = {"length", "stop", "cancelled", "failed"}
SHARES = {BlockDriver: 0.6, SchedulerDriver: 0.4}
OPERATIONS_EACH = 40  # in a program, on average


@pytest.mark.parametrize(
    ("driver", "n_examples", "n_operations", "reached"),
    [
        (
            BlockDriver,
            40,
            1000,
            {"KVCacheExhausted raised", "KeyError raised", "shared blocks", "matched tokens", "evictions"},
        ),
        (
            SchedulerDriver,
            30,
            1200,
            ENDS
            | {"OverloadError raised", "PromptError raised", "RoseError raised"}
            | {"faults", "prefix hits", "preemptions"},
        ),
    ],
)
def test_every_invariant_holds_and_what_the_driver_is_for_is_reached(
    driver, n_examples, n_operations, reached
):
    seen = run_machine(driver, n_examples)
    assert seen["operations"] >= n_operations
    assert {name for name, n in seen.items() if n} >= reached


@pytest.mark.parametrize("driver", SHARES)
def test_every_invariant_holds_in_a_soak(driver: type[Driver], pytestconfig, record_property):
    n_operations = pytestconfig.getoption("soak")
    if not n_operations:
        pytest.skip("make soak draws a million operations")
    seen = run_machine(driver, round(n_operations * SHARES[driver] / OPERATIONS_EACH), fixed=False)
    record_property(driver.__name__, dict(seen))
