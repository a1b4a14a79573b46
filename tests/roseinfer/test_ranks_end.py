"""However a rank ends, so do the others: with its error, within seconds, and no process is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from rosellm import LLM, SamplingParams
from rosellm.errors import RankError
from rosellm.models.part import Part
from rosellm.roseinfer.ranks.watch import HUNG_AFTER, _Counts
from rosellm.roseinfer.steps.worker import Worker
from rosellm.roseinfer.tensor_parallel import Load, load_ranks
from tests.roseinfer.ranks import (
    LOADED_WITHIN_S,
    WITHIN_S,
    assert_ends,
    have_ended,
    other_ranks,
    program,
    seconds_until,
    spawned_by,
    tokens_of,
)

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
HANGS = "rank 1 of 2 made no progress for 6 seconds"
START = """
from rosellm import LLM, SamplingParams
import ctypes, multiprocessing
llm = LLM(tensor_parallel_size=2, device="cpu")
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
"""
FOR_EVER = f"""{START}
while True:
    llm.generate("import os", params, use_tqdm=False)
"""
BUSY_BETWEEN = f"""{START}
ctypes.PyDLL(None).sleep(8)  # holding the lock of the interpreter
llm.generate("import os", params, use_tqdm=False)
"""
slow = pytest.mark.slow


def is_named(how: object) -> str | None:
    return how.name if isinstance(how, signal.Signals) else None


# Another rank ends.


@pytest.mark.parametrize(
    ("n_ranks", "how", "error"),
    [
        (2, signal.SIGKILL, "rank 1 of 2 was killed by SIGKILL"),
        pytest.param(2, signal.SIGSTOP, HANGS, marks=slow),
        pytest.param(4, signal.SIGKILL, "of 4 was killed by SIGKILL", marks=slow),
    ],
    ids=is_named,
)
def test_a_rank_that_dies_or_hangs_while_it_runs_ends_all_with_its_error(n_ranks, how, error):
    llm = LLM(tensor_parallel_size=n_ranks, device="cpu", max_batch_size=4)
    pids = other_ranks()
    assert len(pids) == n_ranks - 1
    assert_ends(llm, ["import os"] * 4, pids[-1], how, 0.5, error)
    assert have_ended(pids)


@slow
def test_a_rank_that_is_stopped_while_it_loads_ends_the_start_with_its_error():
    with program("-c", FOR_EVER) as script:
        (pid,) = spawned_by(script, 1)
        os.kill(pid, signal.SIGSTOP)
        assert f"RankError: {HANGS}" in script.communicate(timeout=LOADED_WITHIN_S)[1]
    assert have_ended([pid])


@dataclass(frozen=True)
class StuckLoad(Load):
    """Of a rank 1 that never ends its twentieth decode step, whose begin it writes into a file.

    Its process and other threads go on.
    """

    begun: Path = Path()

    def part(self, part: Part):
        if part.rank == 1:
            decode, calls = Worker.decode, count(1)

            def stuck(*step: object) -> None:
                if next(calls) < 20:
                    return decode(*step)
                self.begun.write_text(str(time.monotonic()))
                threading.Event().wait()

            Worker.decode = stuck
        return super().part(part)


@slow
def test_a_rank_whose_step_never_ends_ends_the_engine_with_its_error(tmp_path):
    loaded = load_ranks(2, StuckLoad("rose-tiny", "cpu", begun=tmp_path / "begun"))
    engine = loaded.build(loaded.model, loaded.tokenizer, max_batch_size=4)
    pids = other_ranks()
    with pytest.raises(RankError, match=HANGS):
        tokens_of(engine, [[1, 2, 3]], LONG)
    assert time.monotonic() - float((tmp_path / "begun").read_text()) < WITHIN_S
    assert have_ended(pids)


@slow
def test_a_rank_that_dies_while_nothing_runs_or_a_dropped_llm_leaves_nobody():
    llm = LLM(tensor_parallel_size=2, device="cpu")
    pids = other_ranks()
    os.kill(pids[0], signal.SIGKILL)
    seconds_until(lambda: have_ended(pids))
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        llm.generate("import os", LONG, use_tqdm=False)
    other = LLM(tensor_parallel_size=2, device="cpu")
    other.generate("import os", SamplingParams(max_tokens=4), use_tqdm=False)
    pids = other_ranks()
    assert len(pids) == 1
    del other
    seconds_until(lambda: have_ended(pids))


@slow
def test_an_error_of_either_rank_is_raised_and_ends_the_other(monkeypatch):
    llm = LLM(tensor_parallel_size=2, device="cpu", max_batch_size=4)
    with pytest.raises(RankError, match="rank 1 of 2 failed: .*no_such_command"):
        llm.engine.group.send(("no_such_command", []))
        llm.generate("import os", LONG, use_tqdm=False)
    assert not other_ranks()
    other = LLM(tensor_parallel_size=2, device="cpu", max_batch_size=4)
    monkeypatch.setattr(other.engine.step.worker, "decode", lambda *_: 1 / 0)
    for error, message in ((ZeroDivisionError, ""), (RankError, "rank 0 failed")):
        with pytest.raises(error, match=message):
            other.generate("import os", LONG, use_tqdm=False)
        assert not other_ranks()


# What is, and what is not, a rank that hangs.


def test_only_a_rank_whose_count_stays_the_same_poll_after_poll_hangs():
    beats = [1, 1, 0]
    counts = _Counts(beats, range(3), is_stopped=lambda rank: False)
    for poll in range(2 * HUNG_AFTER):  # rank 0 moves at every other poll, rank 2 has not begun
        beats[0] += poll % 2
        assert counts.look() == (1 if poll >= HUNG_AFTER - 1 else None)


@slow
def test_a_program_that_keeps_rank_0_from_counting_between_requests_ends_nothing():
    done = subprocess.run([sys.executable, "-c", BUSY_BETWEEN], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


# Rank 0 ends.


@slow
@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize(
    "how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name
)
def test_when_rank_0_ends_or_hangs_no_other_rank_is_left_even_if_none_reads_its_output(how, loads):
    """While they load, or once they run."""
    with program("-c", FOR_EVER) as script:
        pids = spawned_by(script, 1) if loads else [int(pid) for pid in script.stdout.readline().split()]
        assert len(pids) == 1
        time.sleep(0.3)
        if how == signal.SIGKILL:
            script.stderr.close()
        to_all = how == signal.SIGINT  # as a terminal sends Ctrl-C
        (os.killpg if to_all else os.kill)(script.pid, how)
        seconds_until(lambda: have_ended(pids), LOADED_WITHIN_S)
        if to_all:
            assert "KeyboardInterrupt" in script.communicate(timeout=WITHIN_S)[1]
        if loads and how == signal.SIGTERM:
            assert "rank 1: rank 0 exited; shutting down" in script.stderr.read()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_end_of_a_fork_leaves_the_ranks_of_its_parent():
    llm = LLM(tensor_parallel_size=2, device="cpu", num_kv_blocks=64)
    (end,) = [one for one in weakref.finalize._registry if one.peek()[0] is llm.engine]
    fork = multiprocessing.get_context("fork").Process(target=end)  # as at its exit
    fork.start()
    fork.join(WITHIN_S)
    assert fork.exitcode == 0 and llm.generate("import os", use_tqdm=False)
