"""Where Triton is not installed, as on macOS and Windows, the torch kernels run and Triton's are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = """
import sys
sys.modules["triton"] = None  # an import of it fails

import torch
import rosellm.lab.rung
from rosellm import LLM, SamplingParams
from rosellm.errors import RecipeError
from rosellm.roseinfer.kernels.compile_ahead import compile_ahead
from rosellm.roseinfer.kernels.norm import embed
from rosellm.roseinfer.kv_append_triton import kv_append_triton_full_batch
from rosellm.roseinfer.recipe import LADDER

def generates(**options):
    llm = LLM(device="cpu", max_batch_size=2, **options)
    params = SamplingParams(temperature=0, max_tokens=3)
    (result,) = llm.generate(["def add(a, b):\\n    return"], params, use_tqdm=False)
    assert result.outputs[0].text.startswith(" a")

one = torch.ones(1, 1, 1, 1)
caches = {"k_cache_layer": one, "v_cache_layer": one, "key_new": one, "value_new": one}
calls = {str(rung): lambda rung=rung: generates(rung=rung) for rung in (None, *LADDER)}
calls["embed"] = lambda: embed(ids=one[0, 0, 0], positions=one[0, 0, 0], tokens=one[0, 0], places=one[0, 0])
calls["append"] = lambda: kv_append_triton_full_batch(**caches, block_idx=one, pos=0)
for name, call in calls.items():
    try:
        call()
    except RecipeError as error:
        print(name, error)
compile_ahead([lambda: print("compiled")])
"""


def test_every_rung_whose_kernels_torch_has_generates_and_the_others_are_refused_in_one_line() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", SOURCE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    autotune, *others = done.stdout.splitlines()
    told = "Triton (Linux only) is not installed; use device='cpu' with the torch kernels"
    assert autotune == f"autotune {told}"
    assert [line.split()[0] for line in others] == ["embed", "append"]
    assert all("is not installed; use" in line for line in others)
