"""What ranks cannot run is refused in a line, before any process starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rosellm import LLM
from rosellm.errors import DeviceError, OptionError, RecipeError
from rosellm.roseinfer import tensor_parallel
from rosellm.roseinfer.recipe import LADDER, RECIPES

WRONG_HEADS = "does not divide the model's {} attention heads"
EARLY = (RecipeError, "needs rung 'fused_append' or a later one")
REFUSED = {
    "three": (OptionError, WRONG_HEADS.format(4), {"tensor_parallel_size": 3}),
    "qwen3": (OptionError, WRONG_HEADS.format(6), {"tensor_parallel_size": 4, "model": "rose-tiny-qwen3"}),
    **{rung: (*EARLY, {"rung": rung}) for rung in ("cuda_graph", "resident_step")},
    "recipe": (*EARLY, {"recipe": LADDER["packed_prefill"]}),
    "exhibit": (RecipeError, "needs exhibit='none'", {"rung": "persistent_kernel"}),
    "deterministic": (RecipeError, "needs numerics='fast'", {"deterministic": True}),
    "one_shot": (
        RecipeError,
        "is a Triton kernel",
        {"recipe": replace(LADDER["split_kv"], all_reduce="one_shot")},
    ),
    "rung": (RecipeError, "rung 'fast' is unknown", {"rung": "fast"}),
    "device": (DeviceError, "device 'tpu' is unknown", {"device": "tpu"}),
    **{
        f"size_{size!r}": (OptionError, "must be a whole number from 1 to 64", {"tensor_parallel_size": size})
        for size in (0, 65, 2.0, None)
    },
}


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "start_ranks", lambda *_: pytest.fail("a process would be started"))


@pytest.mark.parametrize("error, message, options", REFUSED.values(), ids=REFUSED)
def test_what_ranks_cannot_run_is_refused_before_any_starts(error, message, options):
    with pytest.raises(error, match=message) as raised:
        LLM(**{"tensor_parallel_size": 2, "device": "cpu"} | options)
    assert "\n" not in str(raised.value)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="tensor_parallel_size 2 needs as many GPUs; this machine has 1"):
        LLM(tensor_parallel_size=2, device="cuda")


def test_ranks_run_the_rungs_from_fused_append_on():
    first = list(RECIPES).index("fused_append")
    for name in list(RECIPES)[first:]:
        if RECIPES[name].exhibit == "none":
            RECIPES[name].check_ranks(2)
