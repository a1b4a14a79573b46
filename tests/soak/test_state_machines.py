"""The same operations as hypothesis state machines: 4,000 in a test run, the same each time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.soak.block_driver import BlockDriver
from tests.soak.engine_driver import EngineDriver
from tests.soak.planted_faults import leak_a_block
from tests.soak.prefix_driver import PrefixDriver
from tests.soak.programs import Driver, machine_of
from tests.soak.scheduler_driver import ModelSchedulerDriver, SchedulerDriver
from tests.soak.streaming_driver import StreamingDriver

ENDS = {"length", "stop", "cancelled", "failed"}
REFUSED = {"OverloadError raised", "PromptError raised", "RoseError raised"}


def run_machine(driver: type[Driver], n_examples: int, seen: Counter[str]) -> None:
    """Programs of at most 60 operations; derandomised, so that a test run can be relied upon."""
    run_state_machine_as_test(
        machine_of(driver, seen),
        settings=settings(
            max_examples=n_examples,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            database=None,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),  # an explanation is no Python
            print_blob=False,
        ),
    )


@pytest.mark.parametrize(
    ("driver", "n_examples", "n_operations", "reached"),
    [
        (BlockDriver, 45, 900, {"KVCacheExhausted raised", "KeyError raised", "shared blocks"}),
        (PrefixDriver, 40, 1200, {"matched tokens", "evictions"}),
        (SchedulerDriver, 25, 1200, ENDS | REFUSED | {"faults", "prefix hits", "preemptions"}),
        (StreamingDriver, 18, 700, ENDS | REFUSED | {"faults", "ClosedError raised", "WorkerError raised"}),
        pytest.param(
            EngineDriver, 30, 300, {"steps", "prompts cut", "lists passed again"}, marks=pytest.mark.slow
        ),
        pytest.param(
            ModelSchedulerDriver,
            40,
            700,
            ENDS | REFUSED | {"prefix hits", "preemptions"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_state_machine_keeps_every_invariant_and_reaches_what_it_is_for(
    driver: type[Driver], n_examples: int, n_operations: int, reached: set[str], record_property
) -> None:
    seen: Counter[str] = Counter()
    run_machine(driver, n_examples, seen)
    record_property(driver.__name__, dict(seen))
    assert seen["operations"] >= n_operations
    assert {name for name, n in seen.items() if n} >= reached


def test_hypothesis_tells_a_planted_fault_as_a_short_program_that_replays_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leak_a_block(monkeypatch)
    found = AssertionError, KeyError  # the second where blocks are let go at the end
    with pytest.raises(found) as failed:
        run_machine(BlockDriver, 100, Counter())
    _, *told = failed.value.__notes__
    assert sum(line.startswith("state.apply") for line in told) <= 3
    machine = machine_of(BlockDriver, Counter())
    with pytest.raises(found):
        exec("\n".join(told), {machine.__name__: machine})
