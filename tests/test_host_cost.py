"""The command that measures the cost of the host runs what users run."""

import pytest

from tests import host_cost


def test_it_reports_every_way_to_ask_for_tokens(capsys: pytest.CaptureFixture) -> None:
    host_cost.main(["--rows", "4", "--new-tokens", "6", "--repeats", "1", "--step-us", "200"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == list(host_cost.WAYS)
    assert all(float(line[1]) > 200 * 5 / 6 for line in lines)
