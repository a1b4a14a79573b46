"""Chart a decode step on every rung, and the share of it in which the GPU works."""

from __future__ import annotations

from typing import Any, NamedTuple

from rosellm.atomic import write_text
from rosellm.lab.figures.charts import Chart, finish, text_table
from rosellm.lab.figures.palette import BLUE, GRID, PALE
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.machines import name_of
from rosellm.lab.records.notebooks import ACTS, NOTEBOOKS, Act
from rosellm.lab.records.records import Results, find, number, results_folder
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER, SIDE_BRANCHES

NAMES = "the GPU works", "the GPU waits"
LONGER = "profiled kernels overlap less: busy time beyond the step is drawn as 100%"
README_BATCH = 8
INKS = {"light": "#3f464f", "dark": "#d0d7de"}


def act_of(rung: str) -> Act | None:
    """Return the act with the rung's notebook; None for a rung without one in the course."""
    number = NOTEBOOKS.get(rung, "")[:2]
    return next((act for act in ACTS if number in act.numbers), None)


class Step(NamedTuple):
    """A rung's decode step in µs, and the GPU's busy time in a profiled step, which may be longer."""

    rung: str
    act: str
    us: float
    busy_us: float

    @property
    def works_us(self) -> float:
        """The part of ``us`` in which the GPU works."""
        return min(self.busy_us, self.us)

    @property
    def share(self) -> float:
        return self.works_us / self.us


def steps_of(results: Results, batch: int | str) -> list[Step]:
    """Return the steps of all rungs up to the best one that have an undisturbed ledger at ``batch``.

    A rung without a notebook belongs to the act of the rung below it, the first rung to the first act. Raises
    ``RecordError``.
    """
    recorded = results.figures("ledger", str(batch))
    found, act = [], next(filter(None, map(act_of, LADDER)))
    for rung in LADDER:
        act = act_of(rung) or act
        if rung in recorded and rung not in SIDE_BRANCHES:
            ledger = Ledger.from_dict(recorded[rung])
            if not ledger.is_disturbed:
                found.append(Step(rung, act.name, ledger.step_us, ledger.busy_us))
        if rung == BEST_RUNG:
            break
    return found


def busy_chart(results: Results, batch: int | str) -> Chart:
    """Draw a bar per rung: the µs of a step in which the GPU works, then those in which it waits."""
    steps = steps_of(results, batch)
    labels = [[step.act for step in steps], [step.rung for step in steps]]
    chart = Chart()
    columns = [step.works_us for step in steps], [step.us - step.works_us for step in steps]
    written = [""] * len(steps), [_label(step) for step in steps]
    for name, values, text, colour in zip(NAMES, columns, written, (BLUE, PALE), strict=True):
        chart.add_bar(x=values, y=labels, orientation="h", name=name, text=text, marker_color=colour)
    chart.update_traces(textposition="outside", cliponaxis=False)
    chart.update_xaxes(range=[0, 1.4 * max(step.us for step in steps)], title=_axis_title(steps))
    chart.update_yaxes(autorange="reversed", showgrid=False, ticks="", dividercolor=GRID)
    chart.update_layout(barmode="stack")
    table = text_table(["", "step, µs", "GPU busy, µs", "GPU busy"], [_row(step) for step in steps])
    chart.table = "\n".join([table, *_notes(steps)])
    rows = "1 sequence" if str(batch) == "1" else f"{batch} sequences"
    title = f"One decode step of {rows}, GPT-2 small in fp16, {name_of(results)}"
    return finish(chart, title, 20 * len(steps), legend=NAMES)


def _axis_title(steps: list[Step]) -> dict[str, Any]:
    return {"text": "<br>".join(["µs", *_notes(steps)]), "font_size": 11}


def _notes(steps: list[Step]) -> list[str]:
    return [LONGER] if any(step.busy_us > step.us for step in steps) else []


def _row(step: Step) -> list[str | float]:
    return [step.rung, step.us, step.busy_us, f"{step.share:.0%}"]


def _label(step: Step) -> str:
    return f"{number(step.us)} µs, {step.share:.0%} busy"


def write_pictures() -> None:
    """Write the chart of README.md, for light and dark pages; needs Chrome or Chromium."""
    chart = busy_chart(find(), README_BATCH).update_layout(width=1024)
    for name, ink in INKS.items():
        svg = chart.update_layout(font_color=ink).to_image("svg").decode()
        write_text(results_folder() / f"busy-{name}.svg", svg)


if __name__ == "__main__":
    write_pictures()
