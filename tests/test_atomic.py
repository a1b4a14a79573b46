"""Files are there whole or not at all, whatever stops the writer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rosellm.atomic import replacing, write_text

ROOT = Path(__file__).parents[1]
STOPPED = [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError(), SystemExit(143)]


@pytest.mark.parametrize("error", STOPPED, ids=lambda error: type(error).__name__)
def test_a_writer_that_is_stopped_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "record.json"
    write_text(path, "old")
    with pytest.raises(type(error)), replacing(path) as unfinished:
        unfinished.write_text("ne")
        assert path.read_text() == "old"
        raise error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_link_goes_on_pointing_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    path, link = tmp_path / "record.json", tmp_path / "link.json"
    path.write_text("old")
    link.symlink_to(path)
    write_text(link, "new")
    assert link.is_symlink() and path.read_text() == "new"


def test_a_writer_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "record.json"):
        pass
    assert list(tmp_path.iterdir()) == []


KILLER = """
import os, random, signal, sys, time
from itertools import count
from pathlib import Path
from rosellm.lab.records.records import Results
from rosellm.bench.record import write_record

folder, rng, old = Path(sys.argv[1]), random.Random(0), -1
record = lambda name: {"number": name, "figures": [name] * 10_000}

def read():
    assert Results(folder).names() == ["grid"]
    found = Results(folder).load("grid")
    assert found == record(found["number"])
    return found["number"]

write_record(folder / "grid.json", record(old))
for writer in range(25):
    process = os.fork()
    if not process:
        for number in count(writer * 1_000_000):
            write_record(folder / "grid.json", record(number))
    try:
        while read() == old:
            pass
        time.sleep(rng.uniform(0, 0.004))
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    old = read()
    assert old // 1_000_000 == writer
"""


@pytest.mark.slow
def test_a_record_s_reader_never_finds_half_of_it_though_writers_are_killed_at_random(tmp_path: Path) -> None:
    """A writer is killed once a record of its own was read, in the midst of whichever comes next."""
    killer = [sys.executable, "-c", KILLER, str(tmp_path)]
    done = subprocess.run(killer, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
