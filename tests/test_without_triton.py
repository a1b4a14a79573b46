"""Where Triton is not installed, as on macOS and Windows, the torch kernels run and Triton's are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HIDDEN = """
import sys

sys.modules["triton"] = None  # an import of it fails
"""


def run_without_triton(source: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN + source],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_shipped_model_generates_on_every_rung_whose_kernels_torch_has() -> None:
    told = run_without_triton("""
from rosellm import LLM, SamplingParams
from rosellm.errors import RecipeError
from rosellm.roseinfer.recipe import LADDER

import rosellm.lab.rung
params = SamplingParams(temperature=0, max_tokens=3)
for rung in (None, *LADDER):
    try:
        llm = LLM(device="cpu", rung=rung, max_batch_size=2)
    except RecipeError as error:
        print(rung, error)
    else:
        (result,) = llm.generate(["def add(a, b):\\n    return"], params, use_tqdm=False)
        assert result.outputs[0].text.startswith(" a")
""")
    assert told.splitlines() == [
        "autotune Triton (Linux only) is not installed; use device='cpu' with the torch kernels"
    ]


def test_triton_kernels_are_refused_in_one_line_and_there_is_nothing_to_compile_ahead() -> None:
    told = run_without_triton("""
from rosellm.errors import RecipeError
from rosellm.models.loading import load_parts
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels.compile_ahead import compile_ahead
from rosellm.roseinfer.kernels.norm import embed
from rosellm.roseinfer.kv_append_triton import kv_append_triton_full_batch
import torch

compile_ahead([lambda: print("compiled")])
one = torch.ones(1, 1, 1, 1)
for call in (
    lambda: Engine(*load_parts("rose-tiny", "cpu"), kernels="triton"),
    lambda: embed(ids=one[0, 0, 0], positions=one[0, 0, 0], tokens=one[0, 0], places=one[0, 0]),
    lambda: kv_append_triton_full_batch(
        k_cache_layer=one, v_cache_layer=one, key_new=one, value_new=one, block_idx=one, pos=0
    ),
):
    try:
        call()
    except RecipeError as error:
        print(error)
""")
    lines = told.splitlines()
    assert len(lines) == 3 and all("is not installed; use" in line for line in lines)
