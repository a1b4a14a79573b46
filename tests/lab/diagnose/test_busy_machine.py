"""A busy machine is named, and then nothing is compared; a ratio stands only where it counts."""

from dataclasses import replace

import pytest

from rosellm.lab.diagnose import diagnosis as module
from rosellm.lab.diagnose.ceilings import Ceilings
from rosellm.lab.diagnose.diagnosis import Diagnosis, diagnose_steps
from rosellm.lab.diagnose.trials import Trial
from tests.lab.diagnose.planted import profile

QUIET = Ceilings(50e3, 40e3, 100e3, 1.0, 2**20)
CALM, STORMY = Trial("better", 100.0, 1.5, 1), Trial("better", 100.0, 4.83, 0, spread=3.2)


def test_a_ratio_is_given_only_where_it_counts():
    assert "1.50× the tokens a second" in str(CALM)
    assert "×" not in str(replace(CALM, sign=0)) and "no difference" in str(replace(CALM, sign=0))
    assert "not compared; the same steps took up to 3.20× as long" in str(STORMY)


@pytest.mark.parametrize(
    ("after", "tried", "why"),
    [
        (QUIET, (CALM,), ""),
        (QUIET, (), ""),
        (replace(QUIET, read_bytes_per_us=150e3), (CALM,), "it reads 3.00 times as fast"),
        (replace(QUIET, flops_per_us=30e3), (CALM,), "it multiplies 3.33 times as fast"),
        (QUIET, (STORMY,), "the same steps took up to 3.20 times as long"),
        (QUIET, (CALM, STORMY), ""),
    ],
)
def test_what_shows_that_a_machine_is_busy(after, tried, why):
    found = module._why_busy(QUIET, after, tried)
    assert found.startswith(why) and bool(found) == bool(why)


def test_a_busy_machines_diagnosis_compares_nothing():
    text = str(Diagnosis(profile(), (), (CALM,), (), "a CPU", "it reads 3 times as fast at one moment"))
    assert "This machine is busy" in text and "run again" in text and "×" not in text


def test_the_stages_are_told_as_they_begin(monkeypatch):
    planted = profile(ceilings=QUIET)
    monkeypatch.setattr(module, "profile_of", lambda steps: planted)
    monkeypatch.setattr(module, "find_ceilings", lambda *_: QUIET)
    stages: list[str] = []

    class Steps:
        name, work = "mine", planted.work

    diagnose_steps(Steps(), progress=stages.append)  # type: ignore[arg-type]
    assert len(stages) == 1 and "profiling steps of mine" in stages[0]
