"""A cause that was planted in steps that really run is the one that is found."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rosellm.errors import RecipeError
from rosellm.lab.diagnose.diagnosis import Diagnosis, diagnose
from rosellm.lab.diagnose.steps import Loop
from rosellm.lab.diagnose.trials import try_all, try_in_turns
from tests.helpers import random_model, random_prompts, uncached_logits

WIDTH, LAYERS = 256, 4


class Layers(nn.Module):
    """Products one after the other; ``between`` stands after each."""

    def __init__(self, between=lambda x: None, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        self.between, self.width = between, width

    @torch.inference_mode()
    def step(self, batch: int = 1) -> None:
        x = torch.ones(batch, self.width)
        for layer in self.layers:
            x = layer(x)
            self.between(x)


@pytest.fixture(autouse=True)
def no_look_for_other_load(monkeypatch):
    """It takes two seconds."""
    monkeypatch.setattr("rosellm.lab.diagnose.diagnosis.other_load", lambda device: "")


def loop(between=lambda x: None, batch: int = 1, width: int = WIDTH) -> Loop:
    model = Layers(between, width)
    return Loop(lambda: model.step(batch), model, batch)


def diagnosed(steps: Loop, holds: Callable[[list[str]], bool]) -> Diagnosis:
    """The first of twenty diagnoses whose causes are so, or the last: other work may slow what it times."""
    for _ in range(20):
        found = diagnose(steps)
        if holds(found.causes):
            break
    return found


ONE, CACHE = torch.zeros(1), torch.zeros(8, 2**18)


def sleeping(x) -> None:
    time.sleep(0.005)


def tiny(x) -> None:
    for _ in range(100):
        ONE.add_(1)


def grow(x) -> None:
    torch.cat((CACHE, CACHE[:1]))


def weights_only() -> Loop:
    model = nn.Linear(2048, 1024, bias=False)
    return Loop(model.weight.sum, model, 1)


# cause → steps that it takes most of, what its sentence names, what its profile counts
PLANTED = {
    "Python": (lambda: loop(sleeping), "test_planted_causes.sleeping", lambda p: p.step_us > LAYERS * 5000),
    "copies": (lambda: loop(grow), "`cat`", lambda p: p.allocated > LAYERS * CACHE.nbytes),
    "calls": (lambda: loop(tiny), "operators", lambda p: p.calls == LAYERS * 101 + 1),
    "bandwidth": (weights_only, "16-bit weights", lambda p: p.reads <= 1),
    "compute": (lambda: loop(batch=512, width=512), "in float32", lambda p: p.reads == 1),
}


@pytest.mark.parametrize(
    "cause",
    [one if one in ("Python", "copies") else pytest.param(one, marks=pytest.mark.slow) for one in PLANTED],
)
def test_what_was_planted_is_the_cause_that_is_found(cause):
    make, told, is_counted = PLANTED[cause]
    found = diagnosed(make(), lambda causes: causes[:1] == [cause] or (cause == "calls" and cause in causes))
    (finding,) = (one for one in found.findings if one.cause == cause)
    assert cause == "calls" or found.causes[0] == cause
    assert told in finding.sentence and is_counted(found.profile)


def test_no_cache_is_found_by_the_operations_of_the_products():
    model = random_model(0)
    [prompt] = random_prompts([30])
    found = diagnose(Loop(lambda: uncached_logits(model, prompt), model, 1))
    assert found.profile.computed == pytest.approx(30 * found.profile.work.flops, rel=0.2)
    assert "again" in found.causes
    assert diagnose(loop()).profile.computed == loop().work.flops


@pytest.mark.slow
def test_a_forward_for_each_sequence_reads_the_weights_again():
    model = Layers(width=512)
    found = diagnose(Loop(lambda: [model.step() for _ in range(8)], model, 8))
    assert found.profile.reads == 8 and "reread" in found.causes
    together = diagnose(loop(batch=8, width=512))
    assert together.profile.reads == 1 and "reread" not in together.causes


@pytest.mark.slow
def test_an_item_in_every_layer_is_counted_and_a_single_one_a_step_is_how_tokens_arrive():
    found = diagnose(loop(lambda x: x[0, 0].item()))
    assert found.profile.waits == LAYERS and 0 < found.profile.waits_share < 0.5
    assert found.profile.waits_share >= 0.1 or "waits" not in found.causes
    once, value = Layers(), torch.ones(1)
    one = diagnose(Loop(lambda: (once.step(), value.item()), once, 1)).profile
    assert one.waits == 1 and one.waits_share == 0


def test_turns_find_the_faster_side_and_by_how_much():
    slow, fast = loop(sleeping), loop(lambda x: time.sleep(0.002))
    trial = try_in_turns(slow, fast)
    assert trial.sign == 1 and 1.5 < trial.ratio < 5
    assert try_in_turns(fast, slow).sign == -1


def test_what_cannot_be_tried_is_told_and_the_others_are_tried():
    def refuse() -> Loop:
        raise RecipeError("it cannot run")

    def too_large() -> Loop:
        raise torch.OutOfMemoryError

    trials, refused = try_all(loop(), {"none": refuse, "same": loop, "large": too_large})
    assert [trial.name for trial in trials] == ["same"]
    assert refused == {
        "none": "it cannot run",
        "large": "does not fit into the memory left; take a smaller batch or context",
    }
