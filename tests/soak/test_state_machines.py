"""Random operations on the engine's parts keep every invariant: few in a test run, a million in a soak."""

from __future__ import annotations

import pytest

from tests.soak.block_driver import BlockDriver
from tests.soak.programs import Driver, run_machine
from tests.soak.scheduler_driver import SchedulerDriver

SHARES = {BlockDriver: 0.3, SchedulerDriver: 0.7}  # each takes half of the time
OPERATIONS_EACH = 40  # in a program, on average
REACHED = {
    BlockDriver: {
        "KVCacheExhausted raised",
        "KeyError raised",
        "shared blocks",
        "matched tokens",
        "evictions",
    },
    SchedulerDriver: {"length", "stop", "cancelled", "failed", "faults", "prefix hits", "preemptions"}
    | {"OverloadError raised", "PromptError raised", "RoseError raised"},
}


@pytest.mark.parametrize("driver", REACHED)
def test_every_invariant_holds_and_what_the_driver_is_for_is_reached(driver):
    seen = run_machine(driver, 80)  # whatever else the process has loaded, on which draws depend
    assert seen["operations"] >= 1000
    assert {name for name, n in seen.items() if n} >= REACHED[driver]


@pytest.mark.parametrize("driver", SHARES)
def test_every_invariant_holds_in_a_soak(driver: type[Driver], pytestconfig):
    n_operations = pytestconfig.getoption("soak")
    if not n_operations:
        pytest.skip("make soak draws a million operations")
    run_machine(driver, round(n_operations * SHARES[driver] / OPERATIONS_EACH), fixed=False)
