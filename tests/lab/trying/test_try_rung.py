"""A reader's kernel climbs the ladder, or is refused with the reason."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from rosellm.errors import RecipeError
from rosellm.lab.records import step_time
from rosellm.lab.records.bench import get_model
from rosellm.lab.records.parameters import ParameterError
from rosellm.lab.trying import try_rung as module
from rosellm.lab.trying.called_by import ROLES, refusal
from rosellm.lab.trying.check_kernel import NAMES, KernelError
from rosellm.lab.trying.same_tokens import same_tokens
from rosellm.lab.trying.try_rung import GROUPED_MODEL, try_rung
from rosellm.roseinfer.kernels.table import TORCH
from rosellm.roseinfer.recipe import LADDER

SMALL = {"device": "cpu", "batch": 2, "context": 20, "seed": 3}


def my_norm(**operands):
    return TORCH.add_norm(**operands)


@pytest.fixture(scope="module")
def tried():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.EFFORT, "cpu", {"engines": 1, "seconds": 0.0, "turns": 1})
        patch.setattr(step_time, "STRETCH", 4)
        rung = try_rung("tried_one", base="dependent_launch", add_norm=my_norm, **SMALL)
        assert rung.step_times
    return rung


def test_a_right_kernel_climbs(tried, capsys):
    assert "add_norm PASSED 24 cases" in str(tried)
    assert "tried_one gives the tokens of dependent_launch on rose-tiny and rose-tiny-qwen3\n" in str(tried)
    assert tried.calls["add_norm"] > 10 and tried.base == "dependent_launch"
    tried.steps()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["dependent_launch", "tried_one", "tried_one:"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU here")
def test_beside_an_interpreted_base_or_kernel_nothing_is_timed(capsys):
    rung = try_rung("mine", base="autotune", paged_attention_decode=TORCH.paged_attention_decode, **SMALL)
    assert rung.is_interpreted and not any(verdict.interpreted for verdict in rung.verdicts)
    rung.steps()
    rung.ledger()
    rung.waterfall()
    assert capsys.readouterr().out.count("mine is not timed: Triton's interpreter") == 3
    assert re.search(r"^mine +–$", rung.ladder().table, re.MULTILINE)
    for ask in (lambda: rung.step_times, lambda: rung.ledgers):
        with pytest.raises(KernelError, match="not timed"):
            ask()


def test_a_wrong_kernel_does_not_climb():
    def wrong(*, x, **operands):
        return TORCH.add_norm(x=x.clone(), **operands)

    told = r"add_norm FAILED in case 1 \(seed 3\):\n.*x\[0, 0\].*never written"
    with pytest.raises(KernelError, match=told):
        try_rung("tried_one", base="dependent_launch", add_norm=wrong, **SMALL)


def test_a_kernel_that_only_the_engine_catches_is_refused_with_the_token():
    seen = []

    def tires(**operands):
        seen.append(len(operands["x"]))
        right = TORCH.add_norm(**operands)
        return right if len(seen) < 38 else right.zero_()

    told = r"tried_one on rose-tiny: new token \d of sequence 0 is .*dependent_launch's is"
    with pytest.raises(KernelError, match=told):
        try_rung("tried_one", base="dependent_launch", add_norm=tires, **SMALL)


def test_an_error_in_the_engine_names_the_kernel_and_the_call():
    def breaks(**operands):
        if operands["tokens"].shape[0] == 4096:
            raise ValueError("the vocabulary of rose-tiny")
        return TORCH.embed(**operands)

    told = "embed raised in the engine, in call 1: ValueError: the vocabulary of rose-tiny"
    with pytest.raises(KernelError, match=told):
        try_rung("tried_one", base="dependent_launch", embed=breaks, **SMALL)


REFUSED = [
    ("dependent_launch", "kv_append_identity_pos", "'fused', not 'identity_pos'; packed_prefill still does"),
    ("fused_append", "kv_append", "append is 'fused', not 'generic' or 'full_batch'; full_batch still does"),
    ("resident_step", "kv_append_full_batch", "step is 'resident', not 'host'; one_table still does"),
    ("paged", "kv_append_identity_pos", "'index_put', .*; the first that does is ident"),
    ("packed_prefill", "add_norm", "norm is 'separate', not 'fused'; the first that does is fused_norm"),
    ("small_gemm", "silu_mul", "gemm is 'small_m', .*; fused_head still does"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "kernel", "reason"), REFUSED)
def test_a_kernel_that_the_base_never_calls_is_refused_with_the_rung_that_does(base, kernel, reason):
    with pytest.raises(KernelError, match=f"{base} never calls {kernel}: .*{reason}"):
        try_rung("tried_one", base=base, **{kernel: getattr(TORCH, kernel)}, **SMALL)


@pytest.mark.slow
def test_a_kernel_that_only_another_model_calls_is_refused_with_that_model():
    told = "never calls position_heads with rose-tiny.*model='rose-tiny-qwen3'"
    with pytest.raises(KernelError, match=told):
        try_rung("tried_one", base="dependent_launch", position_heads=TORCH.position_heads, **SMALL)
    given = {"model": GROUPED_MODEL, "silu_mul": TORCH.silu_mul}
    grouped = try_rung("tried_one", base="fused_gelu", **given, **SMALL)
    assert grouped.calls["silu_mul"] > 0 and grouped.models == (GROUPED_MODEL,)


def test_bad_requests_are_refused_in_one_line():
    right = {"name": "tried_one", "base": "dependent_launch", "device": "cpu", "add_norm": my_norm}
    for wrong, error, message in (
        ({"base": "nothing"}, RecipeError, "rung 'nothing' is unknown"),
        ({"norm": my_norm}, KernelError, "no kernel 'norm' to replace: there are "),
        ({"choose_filtered": my_norm}, KernelError, "serves filters, penalties or quantised weights"),
        ({"add_norm": None}, KernelError, "add_norm=None cannot be called"),
        ({"batch": 0}, ParameterError, "batch is 0"),
        ({"context": 600}, ParameterError, "exceed the model's 512"),
        *(({"name": name}, KernelError, "give your rung a name") for name in ("dense", "", 3)),
    ):
        with pytest.raises(error, match=message) as caught:
            try_rung(**right | wrong)
        assert "\n" not in str(caught.value)
    with pytest.raises(KernelError, match="no kernel to replace"):
        try_rung("tried_one", base="dependent_launch", device="cpu")


def test_a_near_tie_of_greedy_logits_is_not_a_difference(monkeypatch):
    model = get_model("rose-tiny", "cpu", "float32")
    other = {"add_norm": lambda **o: TORCH.add_norm(**o) * 1.5}
    ours = replace(TORCH, name="one by one")
    with pytest.raises(KernelError, match="new token"):
        same_tokens("mine", "fused_norm", ours, other, {"rose-tiny": model})
    monkeypatch.setattr("rosellm.lab.trying.same_tokens.CLOSEST_CALL", 1e9)
    monkeypatch.setattr("rosellm.lab.trying.same_tokens.SAMPLED", [{"temperature": 0.0}])
    assert same_tokens("mine", "fused_norm", ours, other, {"rose-tiny": model})["rose-tiny"]["add_norm"]


@pytest.mark.slow
@pytest.mark.parametrize("rung", [one for one in LADDER if one not in ("autotune", "persistent_kernel")])
def test_what_is_said_of_a_rung_s_callers_is_what_its_engine_calls(rung):
    """Rungs whose kernels need Triton everywhere, or a GPU for their form, are left out."""
    models = {one: get_model(one, "cpu", "float32") for one in ("rose-tiny", GROUPED_MODEL)}
    called: set[str] = set()

    def noted(name):
        def kernel(*arguments, **operands):
            called.add(name)
            return getattr(TORCH, name)(*arguments, **operands)

        return kernel

    ours = replace(TORCH, name="one by one", **{name: noted(name) for name in NAMES})
    same_tokens("mine", rung, ours, {}, models)
    assert called == {name for name in NAMES if not refusal(name, rung)}


def test_every_kernel_has_callers_and_a_role():
    assert set(NAMES) == set(ROLES)
