"""The fit finds what a device achieves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rosellm.lab.records.records import find
from rosellm.lab.scale.fitting import fit, read_runs
from rosellm.lab.scale.step_model import Achieved

KNOWN = Achieved((11.0, 1.05, 0.2, 1.15, 4.0), (38.0, 1.1, 0.1, 1.6, 1.4, 12.0), 190.0)


def test_known_coefficients_are_found_again() -> None:
    recorded = read_runs(find())
    assert next(run for run in recorded if run.workload == "L32K").requests[0].prompt_tokens == 32000
    found = fit(replace(run, measured_us=run.planned_us(KNOWN)) for run in recorded)
    assert found.decode == pytest.approx(KNOWN.decode) and found.prefill == pytest.approx(KNOWN.prefill)
    assert found.host_us == pytest.approx(KNOWN.host_us)
