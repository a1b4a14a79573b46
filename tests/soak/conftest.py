"""``--soak N``: how many random operations to run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("soak").addoption("--soak", type=int, metavar="N", help="random operations to run")


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """After a soak, what happened to each driver."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    if config.getoption("soak"):
        for driver, counted in (own for report in reports for own in report.user_properties):
            terminalreporter.line(f"{driver}: " + ", ".join(f"{k} {n:,}" for k, n in sorted(counted.items())))
