"""``--correct``: after the tests, write the recorded figures into README, docs and notebooks."""

from __future__ import annotations

from tests.claims import reading


def pytest_addoption(parser):
    parser.addoption("--correct", action="store_true", help="write recorded figures into pages and notebooks")


def pytest_sessionfinish(session):
    if session.config.getoption("--correct"):
        reading.correct()
