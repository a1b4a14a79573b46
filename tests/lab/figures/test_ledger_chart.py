"""A step's ledger as pictures."""

import pytest

from rosellm.lab.figures import ledger as figures
from rosellm.lab.figures.charts import Chart
from rosellm.lab.figures.ledger import ledger_chart, live_waterfall, show_ledger, waterfall
from rosellm.lab.records.account import Row
from rosellm.lab.records.bench import get_model, make_prompts
from tests.ledgers import ROWS, ledger_of


def test_the_chart_is_a_bar_of_the_step_and_one_of_its_floor():
    chart = ledger_chart(ledger_of(ROWS))
    totals = [n.text for n in chart.layout.annotations]
    assert totals == ["<b>100 µs</b>", "<b>35.0 µs</b>"]
    assert [bar.name for bar in chart.data] == ["GEMM", "head", "copies", "between kernels", "host"]
    assert chart.data[0].text == ("GEMM 60.0", "GEMM 30.0")
    assert chart.data[-1].x == (10, None)


def test_without_floors_the_chart_is_one_bar():
    rows = [Row("GEMM", "work", 5.0, 1.0, 4)]
    assert [n.text for n in ledger_chart(ledger_of(rows)).layout.annotations] == ["<b>5.00 µs</b>"]


def test_a_waterfall_leads_from_one_step_to_the_other():
    after = [Row("GEMM", "work", 40.0, 0.5, 48), Row("norm", "work", 15.0, 0.2, 1), ROWS[3], ROWS[1]]
    chart = waterfall(ledger_of(ROWS, "old"), ledger_of(after, "new"))
    assert chart.layout.yaxis.ticktext == ("<b>old</b>", "GEMM", "host", "copies", "norm", "<b>new</b>")
    assert chart.data[0].x == (100, -20, -10, -5, 15, 80)
    assert chart.data[0].base == (0, 100, 80, 70, 65, 0)


def test_one_call_shows_the_chart_and_both_tables(monkeypatch):
    shown = []
    monkeypatch.setattr(figures, "show", shown.append)
    monkeypatch.setattr(figures, "say", shown.append)
    show_ledger(ledger_of(ROWS))
    chart, text = shown
    assert isinstance(chart, Chart)
    assert "| GEMM |" in text and "| `step.HostStep.__call__` | 30.0 | 75.0 % | 1 |" in text
    assert "| **together** | **40.0** | 100.0 % | |" in text


def test_two_recipes_are_compared_here_and_now():
    tiny = get_model("rose-tiny", "cpu")
    prompts = make_prompts(2, [3, 9], tiny.config.vocab_size)
    table = live_waterfall(tiny, "dense", "paged", prompts, steps=2).table.splitlines()
    assert table[2].split()[0] == "dense" and table[-1].split()[0] == "paged"
    *changes, last = (float(line.split()[-1].replace(",", "").replace("−", "-")) for line in table[2:])
    assert sum(changes) == pytest.approx(last, rel=0.01)
