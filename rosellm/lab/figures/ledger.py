"""Chart the change from one step's ledger to another as a waterfall."""

from __future__ import annotations

from rosellm.lab.figures import bars
from rosellm.lab.figures.charts import Chart
from rosellm.lab.records.ledger import Ledger


def waterfall(before: Ledger, after: Ledger) -> Chart:
    """Draw the change from one step's time to another's by cause."""
    old, new = before.us_by_cause(), after.us_by_cause()
    changes = {cause: new.get(cause, 0.0) - old.get(cause, 0.0) for cause in {**old, **new}}
    title = f"{before.name} → {after.name}: what became of each microsecond, batch {after.batch}"
    ends = (before.name, before.step_us), (after.name, after.step_us)
    return bars.waterfall(ends[0], changes, ends[1], "µs", title=title)
