"""A step's ledger as pictures."""

from rosellm.lab.figures.ledger import waterfall
from rosellm.lab.records.account import Row
from tests.ledgers import ROWS, ledger_of


def test_a_waterfall_leads_from_one_step_to_the_other():
    after = [Row("GEMM", "work", 40.0, 0.5, 48), Row("norm", "work", 15.0, 0.2, 1), ROWS[3], ROWS[1]]
    chart = waterfall(ledger_of(ROWS, "old"), ledger_of(after, "new"))
    assert chart.data[0].y == ("<b>old</b>", "GEMM", "host", "copies", "norm", "<b>new</b>")
    assert chart.data[0].x == (100, -20, -10, -5, 15, 80)
    assert chart.data[0].measure == ("absolute", *["relative"] * 4, "total")
