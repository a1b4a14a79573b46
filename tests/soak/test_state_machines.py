"""Random operations on the engine's parts keep every invariant: few in a test run, a million in a soak."""

from __future__ import annotations

import pytest

from rosellm.errors import KVCacheExhausted
from tests.soak.block_driver import BlockDriver
from tests.soak.planted_faults import (
    keep_the_blocks_of_the_cancelled,
    leak_a_block,
    share_a_block_that_is_written,
    swallow_text,
)
from tests.soak.prefix_driver import PrefixDriver
from tests.soak.programs import Driver, machine_of, run_machine
from tests.soak.scheduler_driver import SchedulerDriver
from tests.soak.streaming_driver import StreamingDriver

ENDS = {"length", "stop", "cancelled", "failed"}
REFUSED = {"OverloadError raised", "PromptError raised", "RoseError raised"}
SHARES = {BlockDriver: 0.4, SchedulerDriver: 0.3, PrefixDriver: 0.245, StreamingDriver: 0.055}
OPERATIONS_EACH = 40  # in a program, on average
LENGTH, MOST_OPERATIONS = 16, 10  # of a program that finds a planted fault, as drawn and shrunken


@pytest.mark.parametrize(
    ("driver", "n_examples", "n_operations", "reached"),
    [
        (BlockDriver, 45, 900, {"KVCacheExhausted raised", "KeyError raised", "shared blocks"}),
        (PrefixDriver, 40, 1200, {"matched tokens", "evictions"}),
        (SchedulerDriver, 25, 1200, ENDS | REFUSED | {"faults", "prefix hits", "preemptions"}),
        (StreamingDriver, 18, 700, ENDS | REFUSED | {"faults", "ClosedError raised", "WorkerError raised"}),
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


@pytest.mark.parametrize(
    ("driver", "plant"),
    [
        (BlockDriver, leak_a_block),
        (PrefixDriver, share_a_block_that_is_written),
        (SchedulerDriver, keep_the_blocks_of_the_cancelled),
        (StreamingDriver, swallow_text),
    ],
)
def test_a_planted_fault_is_found_and_printed_as_a_short_program_that_replays_it(driver, plant, monkeypatch):
    plant(monkeypatch)
    found = AssertionError, KeyError, KVCacheExhausted  # the state machine's checks, or the engine's own
    with pytest.raises(found) as failed:
        run_machine(driver, 400, length=LENGTH)
    _, *program = failed.value.__notes__
    assert sum(line.startswith("state.apply") for line in program) <= MOST_OPERATIONS
    machine = machine_of(driver)
    with pytest.raises(found):
        exec("\n".join(program), {machine.__name__: machine})
