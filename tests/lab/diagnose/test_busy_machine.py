"""A busy machine is named, and then nothing is compared; a ratio stands only where it counts."""

from types import SimpleNamespace

import pytest
import torch

from rosellm.lab.diagnose import ceilings, diagnosis as module, trials
from rosellm.lab.diagnose.diagnosis import diagnose
from rosellm.lab.diagnose.steps import Steps
from rosellm.lab.diagnose.trials import Trial
from tests.helpers import CPU
from tests.lab.diagnose.planted import profile

CALM, STORMY = Trial("better", 150.0, 100.0, 1.5, 1), Trial("better", 483.0, 100.0, 4.83, 0, spread=3.2)


class Mine(Steps):
    name, work = "mine", profile().work

    def prepare(self):
        pass

    def run(self, n):
        return [1.0, 2.0]


@pytest.fixture
def quiet(monkeypatch):
    """A quiet machine, on which steps of which nothing is wrong were profiled."""
    monkeypatch.setattr(module, "other_load", lambda device: "")
    monkeypatch.setattr(module, "profile_of", lambda steps: profile())


@pytest.mark.parametrize(
    ("tried", "why"),
    [((CALM,), ""), ((), ""), ((CALM, STORMY), "the same steps took up to 3.20 times as long")],
)
def test_steps_that_take_ever_different_times_show_that_a_machine_is_busy(quiet, monkeypatch, tried, why):
    monkeypatch.setattr(module, "try_all", lambda *_: (tried, {}))
    found = diagnose(Mine())
    assert found.busy.startswith(why) and bool(found.busy) == bool(why)
    if why:
        assert "×" not in str(found) and str(found).startswith("This machine is busy: ")
        assert "end what else runs (`top` or `nvidia-smi` lists it)" in " ".join(str(found).split())


def test_on_a_machine_that_is_busy_at_the_start_nothing_is_tried_and_stages_are_told(quiet, monkeypatch):
    monkeypatch.setattr(module, "other_load", lambda device: "others run")
    monkeypatch.setattr(module, "candidates_for", lambda *_: pytest.fail("a candidate was asked for"))
    stages: list[str] = []
    found = diagnose(Mine(), progress=stages.append)
    assert found.busy == "others run" and found.trials == ()
    assert len(stages) == 1 and "profiling steps of mine" in stages[0]


@pytest.mark.parametrize(
    ("cpu", "gpu", "told"),
    [
        (99.0, "0", "other programs keep its 4 cores busy 99 % of the time"),
        (50.0, "5", ""),
        (0.0, None, ""),
        (0.0, "[N/A]", ""),
        (0.0, "93", "other programs' kernels run on its GPU, 93 % of the time"),
    ],
)
def test_programs_on_all_cores_and_kernels_at_the_last_look_are_other_load(monkeypatch, cpu, gpu, told):
    looks = ["0"] * (ceilings.LOOKS - 1) + [gpu]
    monkeypatch.setattr(ceilings.psutil, "cpu_percent", lambda interval: cpu)
    monkeypatch.setattr(ceilings.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1-2"))
    monkeypatch.setattr(ceilings.time, "sleep", lambda _: None)
    monkeypatch.setattr(ceilings, "first_line_of", lambda *_: looks.pop(0))
    assert ceilings.other_load(torch.device("cuda")) == told
    assert ceilings.other_load(CPU) == (told if cpu > 90 else "")


@pytest.mark.parametrize(("disturbed", "runs"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_a_disturbed_trial_is_dropped_and_repeated_twice_at_most(monkeypatch, disturbed, runs):
    spread, made = [300.0, 100.0], []

    def mean_us(side: Steps) -> float:  # after two warm-ups, two sides in four turns
        made.append(side)
        run, turn = divmod(len(made) - 3, 2 * trials.TURNS)
        return spread[turn // 2 % 2] if 0 <= run < disturbed else 100.0

    monkeypatch.setattr(trials, "mean_us", mean_us)
    trial = trials.try_in_turns(Mine(), Mine())
    assert len(made) == 2 + runs * 2 * trials.TURNS
    assert trial.is_disturbed == (disturbed > 2)
