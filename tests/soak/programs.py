"""Random operations on a driver, under its checks: a hypothesis state machine draws and shrinks them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

BYTES = st.integers(0, 255)


class Driver:
    """A subject and a plain model of what it must do; ``seen`` counts what has happened to it.

    weights: operation → how often it is drawn. Each is a method of two numbers from 0 to 255, which choose
    among what is there; False says that there was nothing to do, and that nothing was done. axes: the options
    that the subject is made with, by ``open``. ``check`` asserts every invariant that holds between two
    operations; ``end`` lets go of everything: nothing may be left.
    """

    weights: ClassVar[dict[str, int]]
    axes: ClassVar[dict[str, tuple]]
    open: Callable
    check: Callable[[], None]
    end: Callable[[], None]

    def __init__(self, options: dict[str, Any]) -> None:
        self.seen: Counter[str] = Counter()
        self.open(**options)

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


def run_machine(driver: type[Driver], n_examples: int, fixed: bool = True, length: int = 60) -> Counter[str]:
    """Run ``n_examples`` programs of at most ``length`` operations; return what was seen.

    fixed: the same programs each time; else those of ``--hypothesis-seed``.
    """
    seen: Counter[str] = Counter()
    names = st.sampled_from([name for name, weight in driver.weights.items() for _ in range(weight)])
    options = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in driver.axes.items()})

    class Machine(RuleBasedStateMachine):
        subject: Driver | None = None

        @initialize(options=options)
        def make(self, options: dict[str, Any]) -> None:
            self.subject = driver(options)

        @rule(name=names, a=BYTES, b=BYTES)
        def apply(self, name: str, a: int, b: int) -> None:
            self.subject.apply(name, a, b)

        def teardown(self) -> None:
            if self.subject is not None:
                self.subject.end()
                seen.update(self.subject.seen)

    Machine.__name__ = f"{driver.__name__}Machine"
    run_state_machine_as_test(
        Machine,
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
