"""Ledgers by role as bars."""

from rosellm.roseinfer.exhibits import load_exhibit
from tests.ledgers import ROWS, ledger_of

roles_chart = load_exhibit("roles_chart").roles_chart


def test_a_bar_is_the_whole_step_and_the_one_below_it_its_floors():
    ledgers = {"one": ledger_of(ROWS), "half": ledger_of(ROWS[:2])}
    chart = roles_chart(ledgers, "title")
    assert [bar.name for bar in chart.data] == ["GEMM", "head", "other work", "idle"]
    steps, floors = ([sum(bar.x[i] for bar in chart.data) for i in at] for at in ((0, 2), (1, 3)))
    assert steps == [100, 100] and floors == [35, 50]
    assert chart.layout.yaxis.ticktext[::2] == ("<b>one</b>, 100 µs  ", "<b>half</b>, 70.0 µs  ")
    assert "idle" in chart.table and "−" not in chart.table
