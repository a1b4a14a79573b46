"""Record the passes over the weights that an engine makes, and draw them on one time axis."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from time import perf_counter
from typing import Any, NamedTuple

from rosellm.lab.figures.charts import Chart, ChartError, finish, text_table
from rosellm.lab.figures.palette import BLUE, GREEN, ORANGE
from rosellm.lab.records.watched_step import Begun, watched
from rosellm.roseinfer.engine import Engine

DECODE, PROMPTS, JOINED = "decode", "prompts", "joined"
KINDS = DECODE, PROMPTS, JOINED
COLOURS = dict(zip(KINDS, (BLUE, ORANGE, GREEN), strict=True))
TITLES = dict(zip(KINDS, ("decode step", "prompts alone", "both in one pass"), strict=True))


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


def pass_timeline(
    ways: Mapping[str, Sequence[Pass]], lasts_us: Callable[[Pass], float], title: str, most_us: float
) -> Chart:
    """Draw the passes in the first ``most_us`` µs of each way, each as long as ``lasts_us`` says.

    Raises ``ChartError`` if there are no passes.
    """
    if not any(ways.values()):
        raise ChartError("there is no pass to draw")
    chart = Chart()
    for kind in KINDS:
        bars = [bar for name, passes in ways.items() for bar in _bars(name, passes, kind, lasts_us, most_us)]
        names, starts, lengths, said = zip(*bars, strict=True) if bars else ((), (), (), ())
        chart.add_bar(
            x=lengths,
            y=names,
            base=starts,
            orientation="h",
            name=TITLES[kind],
            marker={"color": COLOURS[kind], "line": {"width": 1, "color": "white"}},
            hovertext=said,
            hovertemplate=f"{TITLES[kind]}: %{{hovertext}}, %{{x:.4g}} µs<extra></extra>",
        )
    chart.update_layout(barmode="overlay", barcornerradius=0)
    chart.update_xaxes(title_text="µs", range=[0, most_us])
    chart.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    rows = [[name, *counted(passes).values(), sum(map(lasts_us, passes))] for name, passes in ways.items()]
    chart.table = text_table(["all passes", *TITLES.values(), "µs in all"], rows)
    return finish(chart, title, 60 * len(ways), legend=list(TITLES.values()))


def _bars(
    name: str, passes: Sequence[Pass], kind: str, lasts_us: Callable[[Pass], float], most_us: float
) -> list[tuple[str, float, float, str]]:
    """Return lane, start, length and hover text of each pass of a kind."""
    starts = accumulate(map(lasts_us, passes), initial=0.0)
    return [
        (name, start, lasts_us(one), f"{one.rows} rows, {one.tokens} prompt tokens")
        for start, one in zip(starts, passes, strict=False)
        if one.kind == kind and start < most_us
    ]
