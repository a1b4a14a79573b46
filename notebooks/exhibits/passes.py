"""Record the passes over the weights that an engine makes."""

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
    """One pass over the weights.

    kind: one of ``KINDS``.
    rows: number of decoding sequences.
    tokens: number of prompt tokens.
    seconds: duration by the engine's clock.
    """

    kind: str
    rows: int
    tokens: int
    seconds: float


@contextmanager
def watched_joins(engine: Engine) -> Iterator[list[float]]:
    """Record when an engine begins passes that join prompts with a decode step.

    Yields a list of times (``perf_counter``) that grows during the context; it stays empty if the engine's
    step cannot join prompts.
    """
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
    """Call ``run``; return the passes that ``engine`` made meanwhile, in the order in which they ended."""
    with watched_joins(engine) as began, watched(engine) as steps:
        run()
    prefills = [one.began for one in steps if one.kind == "prefill"]
    return _merged(steps, {prefills[bisect_right(prefills, at) - 1] for at in began})


def _merged(steps: Iterable[Begun], joined: set[float]) -> list[Pass]:
    """Convert steps to passes: a decode step and the prefill joined with it become one pass.

    joined: the values of ``began`` of such prefills.
    """
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
