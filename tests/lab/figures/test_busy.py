"""The ladder as steps and the GPU's share of them: in notebooks, and as README.md's picture."""

from xml.etree import ElementTree

import pytest

from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.records import find, number, results_folder
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER, SIDE_BRANCHES

busy = load_exhibit("busy")

BATCHES = ("1", "8", "64", "256")


@pytest.mark.parametrize("batch", BATCHES)
def test_every_rung_up_to_the_best_is_drawn_and_told_with_its_recorded_step_and_busy_time(batch):
    recorded = {rung: Ledger.from_dict(one) for rung, one in find().figures("ledger", batch).items()}
    names = [rung for rung in LADDER if rung in recorded and rung not in SIDE_BRANCHES]
    shown = [rung for rung in names[: names.index(BEST_RUNG) + 1] if not recorded[rung].is_disturbed]
    chart = busy.busy_chart(find(), batch)
    works, waits = chart.data
    assert list(works.y[1]) == shown and shown[0] == "dense"
    for rung, works_us, idle, text in zip(shown, works.x, waits.x, waits.text, strict=True):
        assert works_us + idle == pytest.approx(recorded[rung].step_us)
        assert works_us / (works_us + idle) == pytest.approx(min(1, recorded[rung].busy))
        assert text.startswith(f"{number(recorded[rung].step_us)} µs, ")
    _, _, *rows = chart.table.splitlines()
    told = {row.split()[0]: row.split()[2] for row in rows if row != busy.LONGER}
    assert told == {rung: number(recorded[rung].busy_us) for rung in shown}
    exceeds = any(recorded[rung].busy_us > recorded[rung].step_us for rung in shown)
    assert (rows[-1] == busy.LONGER) == (busy.LONGER in chart.layout.xaxis.title.text) == exceeds


@pytest.mark.parametrize("name", busy.INKS)
def test_the_picture_of_readme_tells_the_recorded_steps(name):
    """Renewed by ``python notebooks/exhibits/busy.py``."""
    chart = busy.busy_chart(find(), busy.README_BATCH)
    picture = ElementTree.parse(results_folder() / f"busy-{name}.svg")
    told = ["".join(text.itertext()) for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    works, waits = chart.data
    wanted = [chart.layout.title.text, *works.y[1], *dict.fromkeys(works.y[0]), *waits.text, *busy.NAMES]
    assert set(wanted) <= set(told)
