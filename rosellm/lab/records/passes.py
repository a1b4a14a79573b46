"""The passes over the weights that a run takes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

from rosellm.lab.records.watched_step import Begun, watched
from rosellm.roseinfer.engine import Engine

DECODE, PROMPTS, JOINED = "decode", "prompts", "joined"
KINDS = DECODE, PROMPTS, JOINED


class Pass(NamedTuple):
    """One pass over the weights for ``rows`` decoding sequences, ``tokens`` prompt tokens, or both."""

    kind: str
    rows: int
    tokens: int
    seconds: float


@contextmanager
def watched_joins(engine: Engine) -> Iterator[list[float]]:
    """Yield the list of times at which joined passes of an engine begin; empty if it joins nothing."""
    step: Any = engine.step
    began: list[float] = []
    if not hasattr(step, "joined"):
        yield began
        return
    begin = step._begin_joined  # noqa: SLF001

    def noted(*args: Any) -> None:
        began.append(perf_counter())
        begin(*args)

    step._begin_joined = noted  # noqa: SLF001
    try:
        yield began
    finally:
        del step._begin_joined  # noqa: SLF001


def passes_of(engine: Engine, run: Callable[[], object]) -> list[Pass]:
    """Return the passes that a run on the engine takes, in the order in which they ended."""
    with watched_joins(engine) as began, watched(engine) as steps:
        run()
    prefills = [one.began for one in steps if one.kind == "prefill"]
    return _merged(steps, {prefills[bisect_right(prefills, at) - 1] for at in began})


def _merged(steps: Iterable[Begun], joined: set[float]) -> list[Pass]:
    """Merge each decode step with the prefill that joined it; joined: when such prefills began."""
    passes: list[Pass] = []
    for one in steps:
        if one.kind == "decode":
            passes.append(Pass(DECODE, one.rows, 0, one.seconds))
        elif one.began in joined:
            decode = passes.pop()
            passes.append(Pass(JOINED, decode.rows, one.tokens, decode.seconds + one.seconds))
        else:
            passes.append(Pass(PROMPTS, 0, one.tokens, one.seconds))
    return passes


def counted(passes: Iterable[Pass]) -> dict[str, int]:
    """Count the passes of each kind."""
    kinds = [one.kind for one in passes]
    return {kind: kinds.count(kind) for kind in KINDS}
