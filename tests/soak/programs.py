"""Random programs: operations drawn for a driver, run under its checks, and shrunk where one fails."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from time import perf_counter
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

Operation = tuple[str, int, int]
BYTE = 256


class Driver:
    """A subject and a plain model of what it must do; ``seen`` counts what has happened to it.

    weights: operation → how often it is drawn. Each is a method of two numbers from 0 to 255, which choose
    among what is there; False says that there was nothing to do, and that nothing was done. axes: the options
    that a subject is made with, chosen by the number of a variant. length: operations in a program at most.
    """

    weights: ClassVar[dict[str, int]]
    axes: ClassVar[dict[str, tuple]]
    length: ClassVar[int] = 150

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


@dataclass(frozen=True)
class Program:
    """Operations for a driver; printed as the Python that replays it."""

    driver: type[Driver]
    variant: int
    operations: tuple[Operation, ...]

    def run(self) -> Counter[str]:
        """What has been seen; raises what went wrong."""
        driver = self.driver(self.variant)
        try:
            for operation in self.operations:
                driver.apply(*operation)
            driver.end()
        finally:
            driver.stop()
        return driver.seen

    def failure(self) -> Exception | None:
        try:
            self.run()
        except Exception as error:  # whatever it is, a program that ends so has failed
            return error
        return None

    def __str__(self) -> str:
        lines = "".join(f"    {operation},\n" for operation in self.operations)
        return f"Program({self.driver.__name__}, {self.variant}, (\n{lines})).run()"


class ProgramFailed(AssertionError):
    """Tells the shrunk ``program``; its own failure is the cause."""

    def __init__(self, program: Program) -> None:
        super().__init__(f"replay it with\n{program}")
        self.program = program


def random_program(driver: type[Driver], seed: str) -> Program:
    draw = random.Random(seed)
    length = draw.randint(1, driver.length)
    names = draw.choices(list(driver.weights), list(driver.weights.values()), k=length)
    numbers = draw.randbytes(2 * length)
    operations = tuple(zip(names, numbers[::2], numbers[1::2], strict=True))
    return Program(driver, draw.randrange(driver.n_variants()), operations)


def run_random(driver: type[Driver], n_operations: int, seed: str) -> Counter[str]:
    """Programs until ``n_operations`` have been done; raises ``ProgramFailed``."""
    seen: Counter[str] = Counter()
    for number in count():
        if seen["operations"] >= n_operations:
            return seen
        program = random_program(driver, f"{seed}/{number}")
        try:
            seen += program.run()
            continue
        except Exception as error:
            failure = error
        shortest = shrink(program, type(failure))
        raise ProgramFailed(shortest) from shortest.failure() or failure


def shrink(program: Program, error: type[Exception], seconds: float = 30) -> Program:
    """A program that still fails so and is no larger: fewer operations, then smaller numbers.

    Parts are left out as in delta debugging (Zeller and Hildebrandt 2002), until none can be spared or the
    time is up.
    """
    until = perf_counter() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            if perf_counter() > until:
                return program
            if type(candidate.failure()) is error:
                program, smaller = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs one change away, the boldest first."""
    operations = program.operations
    size = len(operations)
    while size:
        for start in range(0, len(operations), size):
            yield replace(program, operations=operations[:start] + operations[start + size :])
        size //= 2
    for place, (name, *numbers) in enumerate(operations):
        for which, number in enumerate(numbers):
            for less in dict.fromkeys((0, number // 2, number - 1)):
                if 0 <= less < number:
                    changed = (name, *numbers[:which], less, *numbers[which + 1 :])
                    yield replace(
                        program, operations=(*operations[:place], changed, *operations[place + 1 :])
                    )


def machine_of(driver: type[Driver], seen: Counter[str]) -> type[RuleBasedStateMachine]:
    """A hypothesis state machine that draws a driver's programs, and adds up what it has seen."""
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
                seen.update(self.driver.seen)

    Machine.__name__ = f"{driver.__name__}Machine"
    return Machine
