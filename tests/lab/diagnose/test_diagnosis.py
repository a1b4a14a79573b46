"""What can be diagnosed, what is told of it, and what is refused."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from rosellm import LLM
from rosellm.errors import PromptError
from rosellm.lab.diagnose import diagnosis, trials
from rosellm.lab.diagnose.diagnosis import MOST_CHARACTERS, Diagnosis, diagnose, steps_of
from rosellm.lab.diagnose.steps import (
    EngineSteps,
    Loop,
    SubjectError,
    TransformersSteps,
    multiplied_parameters,
)
from rosellm.models.checkpoint import SHIPPED_MODELS, checkpoint_folder
from rosellm.models.loading import load_parts
from tests.helpers import FAMILIES, random_model, small_config, small_engine
from tests.lab.diagnose.planted import WORK, profile, shares


def theirs(name: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint_folder(name), dtype=torch.float32)


@pytest.fixture(autouse=True)
def on_a_quiet_machine(monkeypatch):
    """Whatever else runs beside the tests."""
    monkeypatch.setattr(diagnosis, "other_load", lambda device: "")
    monkeypatch.setattr(trials, "MOST_SPREAD", math.inf)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED_MODELS)
def test_the_work_of_a_step_is_the_same_in_transformers_and_here(name):
    model, (our_model, _) = theirs(name), load_parts(name, "cpu")
    work, ours = TransformersSteps(model, 2, 30).work, EngineSteps(our_model, None, 2, 30).work
    assert work.n_matrices == (ours.n_matrices if name == "rose-tiny" else 5 * 7 + 1)  # q, k, v; gate, up
    assert work.n_weights == our_model.config.n_step_parameters == ours.n_weights
    assert work.kv_bytes == 2 * 30 * our_model.config.kv_bytes_per_token(4) == ours.kv_bytes


def test_keys_and_values_outside_a_sliding_window_are_not_read_here():
    arch = small_config(**FAMILIES["mistral"])
    for context, attended in ((3, 3), (5, 5), (30, 5)):
        work = EngineSteps(random_model(0, arch), None, 2, context).work
        assert work.kv_bytes == 2 * attended * arch.kv_bytes_per_token(4) and work.context == context


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_transformers_steps_are_those_of_one_generate_and_its_configuration_is_left_alone(static):
    model = theirs("rose-tiny-qwen3")
    end = model.generation_config.eos_token_id
    steps = TransformersSteps(model, 2, 30, static)
    for _ in range(2):  # every preparation starts anew
        steps.prepare()
        assert len(steps.run(3)) == 3 and len(steps.run(4)) == 4
    prompts = steps._prompts
    lengths = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    whole = model.generate(prompts, attention_mask=torch.ones_like(prompts), **lengths)
    assert torch.equal(steps._tokens, whole) and model.generation_config.eos_token_id == end


def assert_told_for_a_cpu(found: Diagnosis) -> None:
    assert all(len(line) <= MOST_CHARACTERS for line in str(found).splitlines())
    text = " ".join(str(found).split())
    told = ("tokens a second", "times its floor", "GB/s", "GFLOP/s", "Tried here:", "Not determined:")
    assert all(one in text for one in told) and not re.search("GPU|CUDA|kernel|launch", text)


@pytest.mark.slow
def test_a_model_of_transformers_is_diagnosed_and_compared_with_this_engine():
    found = diagnose(theirs("rose-tiny"), batch=2, context=20)
    tried = {"transformers, static cache", "batch 4", "bfloat16 weights", "this engine, split_kv"}
    assert {trial.name for trial in found.trials} == tried
    assert found.profile.computed == pytest.approx(found.profile.work.flops, rel=0.1)
    assert_told_for_a_cpu(found)


@pytest.mark.slow
def test_an_llm_is_diagnosed_with_its_own_rung_and_left_as_it_was():
    llm = LLM(rung="no_mask", max_batch_size=2)
    found = diagnose(llm, batch=2, context=20)
    assert found.profile.name == "no_mask" and found.profile.work.batch == 2
    tried = {trial.name: trial for trial in found.trials}
    assert {"split_kv", "batch 4", "bfloat16 weights"} <= set(tried) and "batch 4: " in str(found)
    llm.engine.check_integrity()
    assert_told_for_a_cpu(found)


def test_a_deterministic_engine_is_diagnosed_with_its_own_recipe():
    engine = small_engine(random_model(0), recipe="split_kv", deterministic=True)
    steps = steps_of(engine, 2, 8)
    assert isinstance(steps, EngineSteps) and steps.recipe == engine.recipe
    assert steps.name == "a recipe of your own"


@pytest.mark.parametrize(("kind", "n"), [(EngineSteps, 4), (TransformersSteps, 5), (Loop, 3)])
def test_what_is_not_determined_has_a_next_step(kind, n):
    planted = profile(stretched=1.6, work=replace(WORK, kv_bytes=None), rows=shares(0.9))
    told = list(diagnosis._undetermined(object.__new__(kind), planted, (), None))
    next_step = "; (a larger|compile|replace|give|run|save) "
    assert len(told) == n and all(re.search(next_step, one) for one in told)
    assert "mostly GEMM" in told[0] and "1.60 times as long" in told[1] and "kv_bytes" in told[2]


def test_sizes_out_of_range_and_what_cannot_be_diagnosed_are_refused():
    tiny = LLM(rung="dense", max_batch_size=1)
    for subject, sizes, error, told in (
        (tiny, {"batch": 0}, SubjectError, "batch is 0; it must be a whole number from 1 to 4096"),
        (tiny, {"batch": True}, SubjectError, "batch is True"),
        (tiny, {"batch": 10**30}, SubjectError, "it must be a whole number from 1 to 4096"),
        (tiny, {"context": 1.5}, SubjectError, "context is 1.5"),
        (tiny, {"context": 495}, PromptError, "use a context of at most 494"),
        ("a string", {}, SubjectError, "str cannot be diagnosed; give an LLM, an Engine"),
    ):
        with pytest.raises(error, match=re.escape(told)):
            diagnose(subject, **sizes)
    with pytest.raises(SubjectError, match="a step that can be called, and a model with parameters"):
        Loop(print, nn.Identity(), 1)


def test_tables_of_which_a_row_a_token_is_read_are_no_work_but_a_tied_head_is():
    tables = {"tokens": nn.Embedding(10, 4), "places": nn.Embedding(5, 4)}
    model = nn.ModuleDict(tables | {"head": nn.Linear(4, 10, bias=False)})
    untied = multiplied_parameters(model)
    model["head"].weight = model["tokens"].weight
    assert multiplied_parameters(model) == untied == (40, 1)
