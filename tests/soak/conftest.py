"""``--soak N``: how many random operations to run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("soak").addoption("--soak", type=int, metavar="N", help="random operations to run")
