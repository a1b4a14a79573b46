"""Draw passes over the weights on one time axis, a lane for each way of running the same requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from rosellm.lab.figures.charts import Chart, ChartError, finish, text_table
from rosellm.lab.figures.palette import BLUE, GREEN, ORANGE
from rosellm.roseinfer.exhibits import load_exhibit

_passes = load_exhibit("passes")
KINDS, Pass, counted = _passes.KINDS, _passes.Pass, _passes.counted

COLOURS = dict(zip(KINDS, (BLUE, ORANGE, GREEN), strict=True))
TITLES = dict(zip(KINDS, ("decode step", "prompts alone", "both in one pass"), strict=True))


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
