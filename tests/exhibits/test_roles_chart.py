"""Ledgers by role as bars."""

from rosellm.lab.records.account import Row
from rosellm.roseinfer.exhibits import load_exhibit
from tests.ledgers import ROWS, ledger_of

_exhibit = load_exhibit("roles_chart")
by_role, roles_chart = _exhibit.by_role, _exhibit.roles_chart


def test_a_bar_is_the_whole_step_and_the_one_below_it_its_floors():
    ledgers = {"one": ledger_of(ROWS), "half": ledger_of(ROWS[:2])}
    chart = roles_chart(ledgers, "title")
    assert [bar.name for bar in chart.data] == ["GEMM", "head", "other work", "idle"]
    steps, floors = ([sum(bar.x[i] for bar in chart.data) for i in at] for at in ((0, 2), (1, 3)))
    assert steps == [100, 100] and floors == [35, 50]
    assert chart.layout.yaxis.ticktext[::2] == ("<b>one</b>, 100 µs  ", "<b>half</b>, 70.0 µs  ")
    assert "idle" in chart.table and "−" not in chart.table


def test_roles_add_up_to_the_step_and_their_floors_to_its_floor():
    rows = (*ROWS, Row("append", "work", 3.0, 0.03, 1, 2.0), Row("attention", "work", 4.0, 0.04, 1, 1.0))
    roles = by_role(ledger_of(rows))
    assert list(roles) == ["GEMM", "head", "attention", "other work", "idle"]
    assert roles["attention"] == (7.0, 3.0) and roles["idle"] == (25.0, None)
    assert sum(time.us for time in roles.values()) == sum(row.us for row in rows)
    assert sum(time.floor_us or 0 for time in roles.values()) == ledger_of(rows).floor_us
