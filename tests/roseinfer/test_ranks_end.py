"""However a rank ends, so do the others: with its error, within seconds, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import psutil
import pytest

from rosellm import LLM, SamplingParams
from rosellm.errors import RankError
from rosellm.models.part import Part
from rosellm.roseinfer.ranks.watch import HUNG_AFTER, LOOK_S, _Counts, _Work
from rosellm.roseinfer.steps.worker import Worker
from rosellm.roseinfer.tensor_parallel import Load, load_ranks
from tests.roseinfer.ranks import (
    LOADED_WITHIN_S,
    WITHIN_S,
    have_ended,
    other_ranks,
    program,
    ranks_of,
    run,
    seconds_until,
    spawned_by,
)

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP]
SCRIPT = """
from rosellm import LLM, SamplingParams
import multiprocessing, sys
llm = LLM(tensor_parallel_size=2, device="cpu")
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
while True:
    llm.generate("import os", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True), use_tqdm=False)
"""


@pytest.fixture
def llm() -> LLM:
    return LLM(tensor_parallel_size=2, device="cpu", max_batch_size=4)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=lambda how: how.name
)
def test_a_rank_that_dies_or_hangs_while_it_runs_ends_the_engine_with_its_error(llm, how):
    pids, sent = other_ranks(), []

    def end() -> None:
        sent.append(time.monotonic())
        os.kill(pids[0], how)

    threading.Timer(0.5, end).start()
    said = "was killed by SIGKILL" if how == signal.SIGKILL else "made no progress for 6 seconds"
    with pytest.raises(RankError, match=f"rank 1 of 2 {said}"):
        while True:
            llm.generate(["import os"] * 4, LONG, use_tqdm=False)
    assert time.monotonic() - sent[0] < WITHIN_S
    assert have_ended(pids)
    with pytest.raises(RankError, match=said):
        llm.generate("again", LONG, use_tqdm=False)


def test_only_a_rank_whose_count_stays_the_same_look_after_look_hangs():
    beats = [1, 1, 0]
    counts = _Counts(beats, range(3), is_stopped=lambda rank: False)
    for look in range(2 * HUNG_AFTER):  # rank 0 moves at every other look, rank 2 has not begun
        beats[0] += look % 2
        assert counts.look() == (1 if look >= HUNG_AFTER - 1 else None)


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


@pytest.mark.slow
def test_a_rank_whose_step_never_ends_ends_the_engine_with_its_error(tmp_path):
    loaded = load_ranks(2, StuckLoad("rose-tiny", "cpu", begun=tmp_path / "begun"))
    engine = loaded.build(loaded.model, loaded.tokenizer, max_batch_size=4)
    pids = other_ranks()
    with pytest.raises(RankError, match="rank 1 of 2 made no progress for 6 seconds"):
        run(engine, [[1, 2, 3]], LONG)
    assert time.monotonic() - float((tmp_path / "begun").read_text()) < WITHIN_S
    assert have_ended(pids)


@pytest.mark.slow
@pytest.mark.parametrize("computes", [False, True], ids=["poll", "compute"])
def test_threads_that_only_poll_are_not_taken_for_a_command_at_work(monkeypatch, computes):
    monkeypatch.setattr(psutil.Process, "children", lambda _: [])
    ended, work, seen = threading.Event(), _Work(), []

    def spend() -> None:
        while not ended.wait(0 if computes else 0.005):  # gloo's do a hundred times a second, and are several
            pass

    threads = [threading.Thread(target=spend) for _ in range(2)]
    for thread in threads:
        thread.start()
    work.look()
    for _ in range(4):
        time.sleep(LOOK_S)
        work.look()
        seen.append(work.is_done())
    ended.set()
    for thread in threads:
        thread.join()
    assert any(seen) if computes else not all(seen)


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_it_loads_ends_the_start_with_its_error():
    with program("-c", SCRIPT) as script:
        (pid,) = spawned_by(script, 1)
        os.kill(pid, signal.SIGSTOP)
        said = script.communicate(timeout=LOADED_WITHIN_S)[1]
    assert "RankError: rank 1 of 2 made no progress for 6 seconds" in said
    assert have_ended([pid])


@pytest.mark.slow
def test_a_rank_that_dies_while_nothing_runs_is_told_at_the_next_request(llm):
    pids = other_ranks()
    os.kill(pids[0], signal.SIGKILL)
    seconds_until(lambda: have_ended(pids))
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        llm.generate("import os", LONG, use_tqdm=False)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_other_three():
    engine = ranks_of("rose-tiny", 4)
    pids = other_ranks()
    assert len(pids) == 3
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        run(engine, [[1, 2, 3]] * 4, replace(LONG, max_tokens=200))
    assert have_ended(pids)


@pytest.mark.slow
def test_an_error_of_a_rank_is_told_by_its_words(llm):
    with pytest.raises(RankError, match="rank 1 of 2 failed: .*no_such_command"):
        llm.engine.group.send(("no_such_command", []))
        llm.generate("import os", LONG, use_tqdm=False)
    assert not other_ranks()


@pytest.mark.slow
def test_an_error_of_rank_0_ends_the_others_and_is_itself_raised(llm, monkeypatch):
    class Broken(Exception):
        pass

    def broken(*_: object) -> None:
        raise Broken

    monkeypatch.setattr(llm.engine.step.worker, "decode", broken)
    with pytest.raises(Broken):
        llm.generate("import os", LONG, use_tqdm=False)
    assert not other_ranks()
    with pytest.raises(RankError, match="rank 0 failed"):
        llm.generate("import os", LONG, use_tqdm=False)


@pytest.mark.slow
def test_a_dropped_llm_ends_its_ranks():
    llm = LLM(tensor_parallel_size=2, device="cpu")
    llm.generate("import os", SamplingParams(max_tokens=4), use_tqdm=False)
    pids = other_ranks()
    assert len(pids) == 1
    del llm
    seconds_until(lambda: have_ended(pids))


BUSY = """
from rosellm import LLM, SamplingParams
import ctypes, multiprocessing
llm = LLM(tensor_parallel_size=2, device="cpu")
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
ctypes.PyDLL(None).sleep(8)  # holding the lock of the interpreter
print(len(llm.generate("import os", SamplingParams(max_tokens=4), use_tqdm=False)), flush=True)
"""


@pytest.mark.slow
def test_a_program_that_keeps_rank_0_from_counting_between_requests_ends_nothing():
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[1:] == ["1"], done.stderr


@pytest.fixture
def script() -> Iterator[subprocess.Popen]:
    """A program of a few lines whose LLM runs for ever."""
    with program("-c", SCRIPT) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS, ids=lambda how: how.name)
def test_when_rank_0_ends_or_hangs_no_other_rank_is_left(script, how):
    pids = [int(pid) for pid in script.stdout.readline().split()]
    assert len(pids) == 1
    time.sleep(0.5)
    to_all = how == signal.SIGINT  # as a terminal sends Ctrl-C
    (os.killpg if to_all else os.kill)(script.pid, how)
    seconds_until(lambda: have_ended(pids))
    if to_all:
        assert "KeyboardInterrupt" in script.communicate(timeout=WITHIN_S)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, is_read", [(signal.SIGTERM, True), (signal.SIGKILL, False)], ids=["SIGTERM", "SIGKILL-and-unread"]
)
def test_when_rank_0_ends_while_ranks_load_no_rank_is_left_even_if_none_reads_what_it_says(how, is_read):
    with program("-c", SCRIPT) as script:
        pids = spawned_by(script, 1)
        time.sleep(0.3)  # of the seconds that the rank's imports take
        if not is_read:
            script.stderr.close()
        os.kill(script.pid, how)
        seconds_until(lambda: have_ended(pids), LOADED_WITHIN_S)
        assert not is_read or "rank 1: rank 0 exited; shutting down" in script.stderr.read()
