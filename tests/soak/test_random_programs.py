"""Random programs of operations, and how a failure is told: short, and as Python that replays it.

A test run draws the same few programs each time; ``make soak`` draws a million operations anew.
"""

from __future__ import annotations

import pytest

from tests.soak.block_driver import BlockDriver
from tests.soak.engine_driver import EngineDriver
from tests.soak.planted_faults import (
    keep_the_blocks_of_the_cancelled,
    leak_a_block,
    share_a_block_that_is_written,
    slow_ends,
    swallow_text,
)
from tests.soak.prefix_driver import PrefixDriver
from tests.soak.programs import Driver, Program, ProgramFailed, random_program, run_random
from tests.soak.scheduler_driver import ModelSchedulerDriver, SchedulerDriver
from tests.soak.streaming_driver import StreamingDriver

SHARES = {
    ModelSchedulerDriver: 0.005,
    EngineDriver: 0.005,
    StreamingDriver: 0.045,
    PrefixDriver: 0.245,
    SchedulerDriver: 0.3,
    BlockDriver: 0.4,
}
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("driver", SHARES)
def test_random_programs_keep_every_invariant(
    driver: type[Driver], part: int, n_operations: int, seed: int, record_property
) -> None:
    seen = run_random(driver, round(n_operations * SHARES[driver] / PARTS), f"{seed}/{part}")
    record_property(driver.__name__, dict(seen))


@pytest.mark.parametrize(
    ("driver", "plant", "most"),
    [
        (BlockDriver, leak_a_block, 3),
        (PrefixDriver, share_a_block_that_is_written, 2),
        (SchedulerDriver, share_a_block_that_is_written, 4),
        (SchedulerDriver, keep_the_blocks_of_the_cancelled, 3),
        (StreamingDriver, swallow_text, 4),
    ],
)
def test_a_planted_fault_is_found_and_told_as_a_short_program_that_replays_it(
    driver: type[Driver], plant, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(ProgramFailed) as failed:
        run_random(driver, 20_000, "planted")
    program = failed.value.program
    assert len(program.operations) <= most
    told = str(failed.value).partition("\n")[2]
    with pytest.raises(type(failed.value.__cause__)):
        exec(told, {"Program": Program, driver.__name__: driver})
    monkeypatch.undo()
    program.run()


def test_a_soak_takes_no_end_that_is_being_told_for_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_ends(monkeypatch)
    run_random(StreamingDriver, 100, "slow")


@pytest.mark.parametrize("driver", SHARES)
def test_a_seed_names_its_programs(driver: type[Driver]) -> None:
    once, again, another = (random_program(driver, seed) for seed in ("1/2", "1/2", "1/3"))
    assert once == again != another
    assert once.run() == again.run()
