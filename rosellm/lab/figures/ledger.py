"""A step's ledger as a chart, and the change from one ledger to another as a waterfall."""

from __future__ import annotations

from rosellm.lab.figures import bars
from rosellm.lab.figures.charts import Chart, show
from rosellm.lab.figures.compare import say
from rosellm.lab.records.bench import Bench
from rosellm.lab.records.host_functions import host_table
from rosellm.lab.records.ledger import Ledger, step_ledger, tokens_needed
from rosellm.lab.records.records import number
from rosellm.models.model import GPT
from rosellm.roseinfer.recipe import Recipe


def show_ledger(ledger: Ledger, title: str | None = None) -> None:
    """Displays the chart, then the table of causes and that of the host's functions."""
    show(ledger_chart(ledger, title))
    say(f"{ledger.table()}\n\n{host_table(ledger.functions)}")


def ledger_chart(ledger: Ledger, title: str | None = None) -> Chart:
    """One bar for the step and, if known, one for the floor."""
    rows = {ledger.name: ledger.us_by_cause()}
    if floors := {row.cause: row.floor_us for row in ledger.rows if row.floor_us is not None}:
        rows["floor"] = floors
    title = title or f"Where a step's {number(ledger.step_us)} µs go, batch {ledger.batch}"
    return bars.stacked_time(rows, title=title, unit="µs", with_values=True)


def waterfall(before: Ledger, after: Ledger, title: str | None = None) -> Chart:
    """From one step's time to another's, cause by cause."""
    old, new = before.us_by_cause(), after.us_by_cause()
    changes = {cause: new.get(cause, 0.0) - old.get(cause, 0.0) for cause in {**old, **new}}
    title = title or f"{before.name} → {after.name}: what became of each microsecond, batch {after.batch}"
    ends = (before.name, before.step_us), (after.name, after.step_us)
    return bars.waterfall(ends[0], changes, ends[1], "µs", title=title)


def live_waterfall(
    model: GPT, before: str | Recipe, after: str | Recipe, prompts: list[list[int]], steps: int = 8
) -> Chart:
    """From a decode step of one recipe to one of another, both measured live on the same prompts.

    The prompts must leave room for :func:`tokens_needed` new tokens. Raises ``LedgerError``.
    """
    room = tokens_needed(steps) + 1
    old, new = (step_ledger(Bench(model, one, prompts, room), steps) for one in (before, after))
    return waterfall(old, new)
