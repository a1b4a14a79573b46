"""Charts of recorded models against another engine and the floor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from rosellm.lab.figures.charts import Chart, finish, text_table
from rosellm.lab.figures.lines import log_ticks
from rosellm.lab.figures.palette import BLUE, GRID, ORANGE, PALETTE, TEXT
from rosellm.lab.records.machines import name_of
from rosellm.lab.records.model_runs import Row, lease_table, recorded_models, short_name, table
from rosellm.lab.records.records import LEASE_RIVAL, Results, number
from rosellm.models.arch import Arch
from rosellm.models.families.table import KNOWN_SHAPES

OURS = "this engine"


def recorded_shapes(results: Results) -> dict[str, Arch]:
    """Return the recorded models by short name, in ascending order of weights."""
    known = {short_name(name): arch for name, arch in KNOWN_SHAPES.items()}
    shapes = {name: known[name] for name in recorded_models(results) if name in known}
    return dict(sorted(shapes.items(), key=lambda one: one[1].n_step_parameters))


def medians(results: Results, model: str, workload: str) -> dict[str, Any]:
    """Return all medians of a model's recorded whole run. Raises RecordError."""
    record = Results(results.folder / model).load(workload)
    return next(iter(record["results"].values()))["medians"]


def speed_up(row: Row) -> float | None:
    """Return our speedup over the rival, for times and throughputs alike; None if either is unknown."""
    if not row.ours or not row.rival:
        return None
    return row.rival / row.ours if row.unit == "ms" else row.ours / row.rival


def shares_of_floor(row: Row) -> tuple[float | None, float | None]:
    """Return our share of the floor and the rival's: 1 is as fast as the floor; None if unknown."""
    return _share(row.ours, row), _share(row.rival, row)


def _share(value: float | None, row: Row) -> float | None:
    if not value or not row.floor:
        return None
    return row.floor / value if row.unit == "ms" else value / row.floor


def against_floor(machines: Sequence[Results], model: str) -> Chart:
    """Draw a dot per engine and workload: its share of the floor, on a log axis common to all models.

    machines: the first provides the floor, and both engines ran in one session on that GPU; the other
    machines' dots are shares of the same floor.
    """
    results, *others = machines
    rows = lease_table(results, model)
    beside = {name_of(other): _ours(other, model) for other in others}
    every = [share for name in recorded_models(results) for row in lease_table(results, name)
             for share in shares_of_floor(row) if share]  # fmt: skip
    every += [s for own in beside.values() for row in rows if (s := _share(own.get(row.workload), row))]
    low, high = math.log10(min(every) * 80), math.log10(max(1.0, *every) * 125)
    names, chart = [row.workload for row in rows], Chart()
    for row in rows:
        ours, theirs = shares_of_floor(row)
        if ours and theirs:
            ends = {"x": [ours * 100, theirs * 100], "y": [row.workload] * 2}
            chart.add_scatter(**ends, mode="lines", line={"color": GRID, "width": 3}, hoverinfo="skip")
    chart.update_traces(showlegend=False)
    columns = {OURS: [row.ours for row in rows], LEASE_RIVAL: [row.rival for row in rows]}
    columns |= {name: [own.get(row.workload) for row in rows] for name, own in beside.items()}
    for (name, own), look in zip(columns.items(), _looks(), strict=False):
        _add_shares(chart, rows, name, own, *look)
    chart.add_vline(x=100, line={"color": TEXT, "dash": "dash", "width": 1.5})
    chart.update_xaxes(type="log", range=[low, high], title_text="% of the floor", **log_ticks(low, high))
    order = {"categoryorder": "array", "categoryarray": names, "autorange": "reversed"}
    chart.update_yaxes(type="category", showgrid=False, ticks="", **order)
    us, them, *rest = columns.values()
    floors, units = [row.floor for row in rows], [row.unit for row in rows]
    cells = zip(names, us, them, floors, units, *rest, strict=True)
    chart.table = text_table(["", OURS, LEASE_RIVAL, "floor", "unit", *beside], cells)
    title = f"{model} on {results.device_name}: whole runs; dashed: the floor"
    return finish(chart, title, 24 * len(rows), legend=[*columns])


def _looks() -> Iterator[tuple[str, str]]:
    """Yield colour and symbol: this engine's, the rival's, then those of other machines."""
    yield from ((BLUE, "circle"), (ORANGE, "diamond"))
    yield from cycle((colour, "square") for colour in PALETTE[2:])


def _add_shares(
    chart: Chart, rows: Sequence[Row], name: str, own: Sequence[float | None], colour: str, symbol: str
) -> None:
    shares = [_share(value, row) for value, row in zip(own, rows, strict=True)]
    told = [f"{number(v)} {row.unit}, floor {number(row.floor)}" for v, row in zip(own, rows, strict=True)]
    chart.add_scatter(
        x=[share and share * 100 for share in shares],
        y=[row.workload for row in rows],
        name=name,
        mode="markers",
        marker={"color": colour, "symbol": symbol, "size": 10},
        hovertext=told,
        hoverinfo="name+text",
        showlegend=True,
    )


def _ours(results: Results, model: str) -> dict[str, float | None]:
    return {row.workload: row.ours for row in table(results, model)}
