"""Random operations on a driver, under its checks: a hypothesis state machine draws and shrinks them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from math import prod
from typing import Any, ClassVar

from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

BYTE = 256


class Driver:
    """A subject and a plain model of what it must do; ``seen`` counts what has happened to it.

    weights: operation → how often it is drawn. Each is a method of two numbers from 0 to 255, which choose
    among what is there; False says that there was nothing to do, and that nothing was done. axes: the options
    that a subject is made with, chosen by the number of a variant.
    """

    weights: ClassVar[dict[str, int]]
    axes: ClassVar[dict[str, tuple]]

    def __init__(self, variant: int) -> None:
        self.options: dict[str, Any] = {}
        for name, values in self.axes.items():
            variant, place = divmod(variant, len(values))
            self.options[name] = values[place]
        self.seen: Counter[str] = Counter()
        self.open(**self.options)

    @classmethod
    def n_variants(cls) -> int:
        return prod(map(len, cls.axes.values()))

    def open(self, **options: Any) -> None:
        """Make the subject."""
        raise NotImplementedError

    def check(self) -> None:
        """Every invariant that holds between two operations."""
        raise NotImplementedError

    def end(self) -> None:
        """Let go of everything: nothing may be left, and nobody waiting."""
        raise NotImplementedError

    def stop(self) -> None:
        """After a failure too: no thread stays behind."""

    def refused(self, error: type[Exception], call: Callable[[], object]) -> None:
        """The call raises ``error``."""
        try:
            call()
        except error:
            self.seen[f"{error.__name__} raised"] += 1
        else:
            raise AssertionError(f"{error.__name__} was not raised")

    def apply(self, name: str, a: int, b: int) -> None:
        if getattr(self, name)(a, b) is not False:
            self.seen["operations"] += 1
            self.check()


def one_of(name: str) -> Callable[[Callable], Callable]:
    """An operation on one of the driver's ``name``, which its first number chooses; none: nothing is done."""

    def on_one(operation: Callable) -> Callable:
        @wraps(operation)
        def chosen(self: Driver, a: int, b: int) -> bool | None:
            there = list(getattr(self, name))
            return operation(self, there[a % len(there)], b) if there else False

        return chosen

    return on_one


def machine_of(driver: type[Driver], seen: Counter[str] | None = None) -> type[RuleBasedStateMachine]:
    """A hypothesis state machine that draws a driver's programs, and adds up what it has seen."""
    total = Counter() if seen is None else seen
    names = st.sampled_from([name for name, weight in driver.weights.items() for _ in range(weight)])
    byte = st.integers(0, BYTE - 1)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.driver: Driver | None = None

        @initialize(variant=st.integers(0, driver.n_variants() - 1))
        def make(self, variant: int) -> None:
            self.driver = driver(variant)

        @rule(name=names, a=byte, b=byte)
        def apply(self, name: str, a: int, b: int) -> None:
            self.driver.apply(name, a, b)

        def teardown(self) -> None:
            if self.driver is None:
                return
            try:
                self.driver.end()
            finally:
                self.driver.stop()
                total.update(self.driver.seen)

    Machine.__name__ = f"{driver.__name__}Machine"
    return Machine


def run_machine(driver: type[Driver], n_examples: int, fixed: bool = True, length: int = 60) -> Counter[str]:
    """Run ``n_examples`` programs of at most ``length`` operations; return what was seen.

    fixed: the same programs each time; else those of ``--hypothesis-seed``.
    """
    seen: Counter[str] = Counter()
    run_state_machine_as_test(
        machine_of(driver, seen),
        settings=settings(
            max_examples=n_examples,
            stateful_step_count=length,
            deadline=None,
            derandomize=fixed,
            database=None,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),  # an explanation is no Python
            print_blob=False,
        ),
    )
    return seen
