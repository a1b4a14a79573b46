"""Chart the phases of processes from their start to the end of their first runs, on one time axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rosellm.lab.figures.charts import Chart, finish, text_table
from rosellm.lab.figures.palette import BLUE, GREEN, MAGENTA, ORANGE, PALE, SKY, VIOLET, fill
from rosellm.lab.records.arrivals import WORKLOAD
from rosellm.lab.records.parameters import model_path
from rosellm.lab.records.sizes import Size

STYLES = {
    "import": (PALE, ""),
    "load": (SKY, ""),
    "build": (VIOLET, ""),
    "warm up": (ORANGE, ""),
    "until the first token": (MAGENTA, ""),
    "rest of run 1": (BLUE, ""),
    "run 2": (GREEN, ""),
    "run 3": (GREEN, "/"),
}


def process_options(
    size: Size, model: str, load_format: str = "auto", device: str = "auto", dtype: str = "auto"
) -> list[str]:
    """Return options for the scheduler's benchmark: W8, no larger than ``size``."""
    options = size.options(WORKLOAD) | {
        "--hf-model-id": model_path(model),
        "--load-format": load_format,
        "--device": device,
        "--dtype": dtype,
    }
    return [str(text) for pair in options.items() for text in pair]


def parts_s(process: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase of a process recorded by ``first_process``, in order."""
    first, second, third = process["runs"]
    parts = {name.replace("_", " "): seconds for name, seconds in process["parts_s"].items()}
    begun = first["first_token_s"]
    runs = (begun, first["seconds"] - begun, second["seconds"], third["seconds"])
    return parts | dict(zip(list(STYLES)[4:], runs, strict=True))


def first_runs_chart(processes: Mapping[str, dict[str, Any]], title: str) -> Chart:
    """Draw a stacked bar for each named process; its phases follow each other, in seconds."""
    parts = {name: parts_s(process) for name, process in processes.items()}
    chart = Chart()
    for part, style in STYLES.items():
        chart.add_bar(
            x=[one[part] for one in parts.values()],
            y=list(parts),
            orientation="h",
            name=part,
            marker=fill(*style),
            hovertemplate=f"{part}: %{{x:.3g}} s<extra></extra>",
        )
    chart.update_layout(barmode="stack")
    chart.update_xaxes(title_text="seconds from the start of the process")
    chart.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    rows = [[part, *(one[part] for one in parts.values())] for part in STYLES]
    chart.table = text_table(["seconds", *parts], rows)
    return finish(chart, title, 46 * len(parts), legend=list(STYLES))
