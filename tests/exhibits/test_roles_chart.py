"""Ledgers by role."""

from rosellm.lab.records.account import Row
from rosellm.roseinfer.exhibits import load_exhibit
from tests.ledgers import ROWS, ledger_of

by_role = load_exhibit("roles_chart").by_role


def test_roles_add_up_to_the_step_and_their_floors_to_its_floor():
    rows = (*ROWS, Row("append", "work", 3.0, 0.03, 1, 2.0), Row("attention", "work", 4.0, 0.04, 1, 1.0))
    roles = by_role(ledger_of(rows))
    assert list(roles) == ["GEMM", "head", "attention", "other work", "idle"]
    assert roles["attention"] == (7.0, 3.0) and roles["idle"] == (25.0, None)
    assert sum(time.us for time in roles.values()) == sum(row.us for row in rows)
    assert sum(time.floor_us or 0 for time in roles.values()) == ledger_of(rows).floor_us
