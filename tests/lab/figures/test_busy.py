"""The ladder as steps and the GPU's share of them: in notebooks, and as README.md's picture."""

import re

import pytest

from rosellm.lab.figures.busy import INKS, README_BATCH, busy_chart, busy_svg, steps_of
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.records import find, number, results_folder
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER, SIDE_BRANCHES

BATCHES = ("1", "8", "64", "256")


@pytest.mark.parametrize("batch", BATCHES)
def test_every_rung_up_to_the_best_is_drawn_with_its_recorded_step_and_busy_share(batch):
    recorded = {rung: Ledger.from_dict(one) for rung, one in find().figures("ledger", batch).items()}
    names = [rung for rung in LADDER if rung in recorded and rung not in SIDE_BRANCHES]
    shown = [rung for rung in names[: names.index(BEST_RUNG) + 1] if not recorded[rung].is_disturbed]
    works, waits = busy_chart(find(), batch).data
    assert list(works.y[1]) == shown and shown[0] == "dense"
    for rung, busy, idle, text in zip(shown, works.x, waits.x, waits.text, strict=True):
        assert busy + idle == pytest.approx(recorded[rung].step_us)
        assert busy / (busy + idle) == pytest.approx(min(1, recorded[rung].busy))
        assert text.startswith(f"{number(recorded[rung].step_us)} µs, ")


def test_act_two_begins_where_the_gpu_runs_on_its_own():
    steps = steps_of(find(), 64)
    first, second = ([step for step in steps if step.act.startswith(act)] for act in ("Act I:", "Act II:"))
    assert second[0].rung == "resident_step" and first[-1].rung == "one_table"
    assert min(step.share for step in second) > 0.9 > max(step.share for step in first)


@pytest.mark.parametrize("name", INKS)
def test_the_picture_of_readme_is_the_records(name):
    """Renewed by ``python -m rosellm.lab.figures.busy``."""
    drawn = busy_svg(find(), README_BATCH, INKS[name])
    assert (results_folder() / f"busy-{name}.svg").read_text(encoding="utf-8") == drawn
    widths = re.findall(r'width="([\d.]+)" height="16"', drawn)
    whole, busy = widths[0::2], widths[1::2]
    steps = steps_of(find(), README_BATCH)
    scale = float(whole[0]) / steps[0].us
    assert [float(one) / scale for one in whole] == pytest.approx([step.us for step in steps], abs=1)
    assert [float(one) / scale for one in busy] == pytest.approx([step.busy_us for step in steps], abs=1)
