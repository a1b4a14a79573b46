"""Files are there whole or not at all, whatever stops the writer."""

from __future__ import annotations

import multiprocessing
import random
import time
from itertools import count
from pathlib import Path

import pytest

from rosellm.atomic import replacing, write_text

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


def write_for_ever(path: Path) -> None:
    for number in count():
        write_text(path, f"{number % 10}" * 100_000)


@pytest.mark.slow
def test_a_reader_never_finds_half_a_file_though_writers_are_killed_at_random(tmp_path: Path) -> None:
    path, chance = tmp_path / "record.json", random.Random(0)
    write_text(path, "0" * 100_000)
    for _ in range(25):
        writer = multiprocessing.get_context("fork").Process(target=write_for_ever, args=(path,))
        writer.start()
        time.sleep(chance.uniform(0.01, 0.03))
        writer.kill()
        writer.join()
        text = path.read_text()
        assert text == text[0] * 100_000
