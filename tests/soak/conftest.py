"""How many random operations are run, from which seed, and what is told of them at the end."""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from time import perf_counter

import pytest

FEW, FIXED_SEED = 2_000, 0
STARTED = perf_counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak")
    group.addoption("--soak", type=int, metavar="N", help=f"operations in random programs (default {FEW:,})")
    group.addoption("--soak-seed", type=int, metavar="SEED", help="draw the programs of an earlier run")


def pytest_configure(config: pytest.Config) -> None:
    """A soak draws new programs each time, a test run the same ones, so that it can be relied upon."""
    option, handed_over = config.option, getattr(config, "workerinput", {})
    option.soak = getattr(option, "soak", None)
    option.soak_seed = getattr(option, "soak_seed", None)
    if option.soak_seed is None:
        fresh = FIXED_SEED if option.soak is None else secrets.randbits(32)
        option.soak_seed = handed_over.get("soak_seed", fresh)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """pytest-xdist: all workers draw from one seed."""
    node.workerinput["soak_seed"] = node.config.option.soak_seed


@pytest.fixture(scope="session")
def n_operations(pytestconfig: pytest.Config) -> int:
    return pytestconfig.option.soak or FEW


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    return pytestconfig.option.soak_seed


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if config.option.soak is None:
        return
    seen: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for driver, counted in report.user_properties:
                seen[driver].update(counted)
    total = sum(counted["operations"] for counted in seen.values())
    terminalreporter.section("soak")
    for driver, counted in seen.items():
        figures = ", ".join(f"{name} {n:,}" for name, n in sorted(counted.items()))
        terminalreporter.line(f"{driver}: {figures}")
    seconds = perf_counter() - STARTED
    terminalreporter.line(f"{total:,} operations, seed {config.option.soak_seed}, {seconds:.1f} s")
