"""Charts of recorded models against another engine and the floor."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from rosellm.bench.prompts import make_prompts, new_tokens
from rosellm.bench.workloads import MODEL_WORKLOADS, Workload
from rosellm.lab.figures.charts import Chart, finish, text_table
from rosellm.lab.figures.lines import log_ticks
from rosellm.lab.figures.palette import BLUE, GRID, ORANGE, PALETTE, TEXT
from rosellm.lab.records.floors import Ceiling, prefill_floors_us
from rosellm.lab.records.machines import name_of
from rosellm.lab.records.records import (
    LEASE_RIVAL,
    Results,
    modern_rivals,
    number,
    one_lease,
    recorded_models,
    short_name,
)
from rosellm.models.arch import Arch
from rosellm.models.families.table import KNOWN_SHAPES, read_arch

RIVAL = "vLLM 0.22.1"
BYTES = 2  # per element, in the models' dtype
OURS = "this engine"


class Row(NamedTuple):
    """One workload of one model: our median, the rival's, and the floor, in ``unit``; None if unknown."""

    workload: str
    ours: float | None
    rival: float | None
    floor: float | None
    unit: str


def table(results: Results, model: str) -> list[Row]:
    """Return a row per workload that has a record or a rival's figure."""
    theirs = modern_rivals(model).get(RIVAL, {})
    rows = (_row(results, model, w, theirs) for w in MODEL_WORKLOADS)
    return [row for row in rows if row.ours is not None or row.rival is not None]


def lease_table(results: Results, model: str) -> list[Row]:
    """Return ``table`` for the session that ran both engines; results: the machine that defines the floor."""
    figures = one_lease(model)
    return [
        Row(name, *figures[name], floor(results, model, name), unit_of(workload))
        for name, workload in MODEL_WORKLOADS.items()
        if name in figures
    ]


def floor(results: Results, model: str, name: str) -> float | None:
    """Return the bound of a recorded run in its workload's unit; None without its record and ceilings.

    All requests run together. Each decode step reads the weights and the cached keys and values once, and
    prompts are multiplied, both at the rates in the device's record ``ceilings``.
    """
    path = results.folder / model / f"{name}.json"
    if not path.is_file() or "ceilings" not in results.names():
        return None
    record = json.loads(path.read_text())
    arch, options = read_arch(record["model_shape"]), Namespace(**record["options"])
    prompts, new = [len(one) for one in make_prompts(options, vocab_size=2)], new_tokens(options)
    ceiling, total = Ceiling.of(results.figures("ceilings")), sum(prompts)
    least = prefill_floors_us(arch, len(prompts), total / len(prompts), BYTES, ceiling)
    us = least["GEMM"] + least["head"]
    us += sum(prefill_floors_us(arch, 1, tokens, BYTES, ceiling)["attention"] for tokens in prompts)
    read = sum((n - 1) * prompt + n * (n - 1) / 2 for prompt, n in zip(prompts, new, strict=True))
    weights = (max(new) - 1) * arch.n_step_parameters * BYTES
    us += (weights + read * arch.kv_bytes_per_token(BYTES)) / ceiling.bytes_per_us
    unit = unit_of(MODEL_WORKLOADS[name])
    return us / 1e3 if unit == "ms" else (total if unit == "prompt tok/s" else sum(new)) / us * 1e6


def _row(results: Results, model: str, name: str, rival: dict) -> Row:
    path = results.folder / model / f"{name}.json"
    ours = figure(json.loads(path.read_text()), MODEL_WORKLOADS[name]) if path.is_file() else None
    least = floor(results, model, name)
    return Row(name, ours, rival.get(name), least, unit_of(MODEL_WORKLOADS[name]))


def unit_of(workload: Workload) -> str:
    """Return a workload's unit: TTFT in ms, or prompt tokens or new tokens per second."""
    if workload.max_new_tokens > 1:
        return "tok/s"
    return "ms" if workload.num_requests == 1 else "prompt tok/s"


def figure(record: dict[str, Any], workload: Workload) -> float:
    """Return the median over a record's repeats, in the workload's unit."""
    (result,) = record["results"].values()
    medians, unit = result["medians"], unit_of(workload)
    if unit == "ms":
        return medians["ttft_p50_s"] * 1e3
    if unit == "tok/s":
        return medians["total_throughput_tok_s"]
    return workload.num_requests * (workload.prompt_tokens or 1) / medians["total_time_s"]


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
