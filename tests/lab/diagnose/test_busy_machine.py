"""A busy machine is named, and then nothing is compared; a ratio stands only where it counts."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rosellm.lab.diagnose import ceilings, diagnosis as module, trials
from rosellm.lab.diagnose.ceilings import Ceilings
from rosellm.lab.diagnose.diagnosis import Diagnosis, diagnose_steps
from rosellm.lab.diagnose.trials import Trial
from tests.lab.diagnose.planted import profile

QUIET = Ceilings(50e3, 40e3, 100e3, 1.0, 2**20)
CALM, STORMY = Trial("better", 150.0, 100.0, 1.5, 1), Trial("better", 483.0, 100.0, 4.83, 0, spread=3.2)


def test_a_ratio_is_given_only_where_it_counts():
    assert "1.50× the tokens a second, a step of 100 µs against 150" in str(CALM)
    assert "×" not in str(replace(CALM, sign=0)) and "no difference" in str(replace(CALM, sign=0))
    told = str(STORMY)
    assert "not determined; 3 times the same steps took up to 3.20× as long: end what" in told


@pytest.mark.parametrize(
    ("after", "tried", "why"),
    [
        (QUIET, (CALM,), ""),
        (QUIET, (), ""),
        (replace(QUIET, read_bytes_per_us=150e3), (CALM,), "it reads 3.00 times as fast"),
        (replace(QUIET, flops_per_us=30e3), (CALM,), "it multiplies 3.33 times as fast"),
        (QUIET, (STORMY,), "the same steps took up to 3.20 times as long"),
        (QUIET, (CALM, STORMY), "the same steps took up to 3.20 times as long"),
    ],
)
def test_what_shows_that_a_machine_is_busy(after, tried, why):
    found = module._why_busy(QUIET, after, tried)
    assert found.startswith(why) and bool(found) == bool(why)


def test_a_busy_machines_diagnosis_compares_nothing_and_tells_the_next_step():
    text = str(Diagnosis(profile(), (), (CALM,), (), "a CPU", "it reads 3 times as fast at one moment"))
    assert "This machine is busy" in text and "run again" in text and "×" not in text
    assert "end what else runs (`top` or `nvidia-smi` lists it)" in " ".join(text.split())


class Mine:
    name, work = "mine", profile().work


@pytest.fixture
def measured(monkeypatch):
    """A machine whose ceilings are those of this list in turn, then ``QUIET`` for ever."""
    found: list[Ceilings] = []
    monkeypatch.setattr(module, "overload", str)
    monkeypatch.setattr(module, "profile_of", lambda steps: profile(ceilings=QUIET))
    monkeypatch.setattr(module, "find_ceilings", lambda *_: found.pop(0) if found else QUIET)
    return found


def test_the_stages_are_told_as_they_begin(measured):
    stages: list[str] = []
    diagnose_steps(Mine(), progress=stages.append)  # type: ignore[arg-type]
    assert len(stages) == 1 and "profiling steps of mine" in stages[0]


@pytest.mark.parametrize(("disturbed", "is_busy"), [(0, False), (2, False), (3, True)])
def test_ceilings_that_differ_are_measured_three_times(measured, disturbed, is_busy):
    measured += [replace(QUIET, read_bytes_per_us=150e3)] * disturbed
    assert bool(diagnose_steps(Mine()).busy) == is_busy  # type: ignore[arg-type]


def test_on_a_machine_that_is_busy_at_the_start_nothing_is_tried(measured, monkeypatch):
    monkeypatch.setattr(module, "overload", lambda: "programs waited")
    monkeypatch.setattr(module, "_candidates", lambda *_: pytest.fail("a candidate was asked for"))
    found = diagnose_steps(Mine())  # type: ignore[arg-type]
    assert found.busy == "programs waited" and found.trials == ()
    assert str(found).startswith("This machine is busy: programs waited. No time here can be trusted;")


@pytest.mark.parametrize(
    ("pressure", "load", "told"),
    [
        ("some avg10=83.10 avg60=1.00 avg300=0.00 total=7\nfull avg10=0.00\n", 0.0, "waited .* 83 % of the"),
        ("some avg10=12.00 avg60=99.00 avg300=99.00 total=7\nfull avg10=0.00\n", 99.0, "^$"),
        (None, 4.5, "in the last minute 4.50 programs wanted to run on its 4 cores"),
        (None, 4.0, "^$"),
    ],
)
def test_more_programs_than_cores_are_an_overload(monkeypatch, tmp_path, pressure, load, told):
    if pressure:
        (tmp_path / "cpu").write_text(pressure)
    monkeypatch.setattr(ceilings, "PRESSURE", tmp_path / "cpu")
    monkeypatch.setattr(ceilings.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(ceilings.os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    assert re.search(told, ceilings.overload())


@pytest.mark.parametrize(
    ("used", "told"),
    [("0", ""), ("5", ""), (None, ""), ("[N/A]", ""), ("93", "run on its GPU, 93 % of the time")],
)
def test_kernels_of_other_programs_are_seen_at_the_last_look_too(monkeypatch, used, told):
    looks = ["0"] * (ceilings.LOOKS - 1) + [used]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1-2"))
    monkeypatch.setattr(ceilings.time, "sleep", lambda _: None)
    monkeypatch.setattr(ceilings, "first_line_of", lambda *_: looks.pop(0))
    found = ceilings.gpu_in_use(torch.device("cuda"))
    assert not looks and found.endswith(told) and bool(found) == bool(told)


@pytest.mark.parametrize(("disturbed", "runs"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_a_disturbed_trial_is_dropped_and_repeated_twice_at_most(monkeypatch, disturbed, runs):
    found = [STORMY] * disturbed + [CALM] * 3
    made: list[Trial] = []
    monkeypatch.setattr(trials, "mean_us", lambda side: 1.0)
    monkeypatch.setattr(trials, "_in_turns", lambda *_: made.append(found[len(made)]) or made[-1])
    trial = trials.try_in_turns(Mine(), Mine())  # type: ignore[arg-type]
    assert len(made) == runs and trial is made[-1]
    assert trial.is_disturbed == (disturbed > 2)
