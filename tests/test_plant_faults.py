"""The faults that ``python -m tests.plant_faults`` plants are never stale, and there is one in every room."""

from pathlib import Path

from tests.plant_faults import FAULTS, ROOMS, found, holders

ROOT = Path(__file__).parents[1]


def test_every_faults_text_stands_in_one_file_and_its_tests_exist():
    stale = [fault.part for fault in FAULTS if len(holders(fault, ROOT)) != 1 or fault.old == fault.new]
    assert stale == []
    assert all(found(ROOT / "tests", fault.tests) for fault in FAULTS)


def test_there_are_forty_faults_and_one_in_every_room():
    folders = {holders(fault, ROOT)[0].parent.relative_to(ROOT).as_posix() for fault in FAULTS}
    rooms = {folder.removeprefix("rosellm/") for folder in folders}
    assert len(FAULTS) >= 40 and rooms >= ROOMS
