"""Logits of prefill and of each decode step against ``transformers`` with its own cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from rosellm.errors import RecipeError
from rosellm.models.arch import Arch
from rosellm.models.checkpoint import SHIPPED_MODELS, checkpoint_folder, load_config
from rosellm.models.families.table import FAMILIES as SUPPORTED, read_arch
from rosellm.models.weights import load_model
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER
from rosellm.roseinfer.steps.resident import ResidentStep
from rosellm.roseinfer.steps.speculative import SpeculativeStep
from tests.helpers import greedy_sequences, random_prompts, small_engine
from tests.models.family_checks import sizes, their_model

N_TOKENS = 10
LENGTHS = [1, 8, 9, 21]
PROMPT_SEED = 9
BOUNDS = {torch.float32: 4e-6, torch.float16: 6e-3, torch.bfloat16: 4e-2}
"""Of the steps' largest differences of two logits over the largest logit, the mean; twice that of each.

Some roundings (2^-24, 2^-11, 2^-8) a layer.
"""
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# A small model of every family, in the fields of its own config; windows are shorter than what is read.
FAMILIES = {
    "gpt2": {},
    "llama": {"rope_parameters": LLAMA3 | {"rope_theta": 500.0, "original_max_position_embeddings": 16}},
    "mistral": {"sliding_window": 6, "head_dim": 12},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "phi3": {"sliding_window": 11, "num_key_value_heads": 6},
}
NAMES = (*FAMILIES, *SHIPPED_MODELS)
WAYS = {rung: {"recipe": rung} for rung in LADDER} | {
    "deterministic": {"recipe": BEST_RUNG, "deterministic": True}
}
MAIN_WAYS = ("dense", "paged", BEST_RUNG, "one_pass", "deterministic")
ON_EVERY_RUNG = ("gpt2", "qwen3", "mistral")  # of the models whose logits are compared


@cache
def arch_of(name: str) -> Arch:
    if name in SHIPPED_MODELS:
        return load_config(checkpoint_folder(name))
    return read_arch(sizes(name) | {"model_type": name} | FAMILIES[name])


def serves(way: str, name: str) -> bool:
    try:
        LADDER[WAYS[way]["recipe"]].check_serves(arch_of(name))
    except RecipeError:
        return False
    return True


def runs(*values: Any, ways: Iterable[str] = WAYS, names: Iterable[str] = NAMES) -> Iterator[Any]:
    """Models on each device by all ways that serve them; tuned launches would be interpreted on a CPU."""
    for device, name, way in product(("cpu", "cuda"), names, ways):
        is_tuned = LADDER[WAYS[way]["recipe"]].launch == "autotuned"
        if serves(way, name) and (device == "cuda" or not is_tuned):
            case = name, way, device, *values
            marks = [pytest.mark.gpu] * (device == "cuda")
            yield pytest.param(*case, id="-".join(map(str, case)), marks=marks)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def save(name: str) -> Path:
        if name in SHIPPED_MODELS:
            return checkpoint_folder(name)
        path = tmp_path_factory.mktemp(name)
        their_model(name, seed=2, **FAMILIES[name]).save_pretrained(path)
        return path

    return save


def prompts_for(folder: Path) -> list[list[int]]:
    return random_prompts(LENGTHS, seed=PROMPT_SEED, vocab_size=load_config(folder).vocab_size)


@cache
@torch.inference_mode()
def theirs(folder: Path, dtype: torch.dtype, device: str) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy tokens ``[B][N]`` and logits ``[N][B, V]`` fp32, each prompt by itself, a token at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    model = model.to(device).eval()
    tokens, logits = [], []
    for prompt in prompts_for(folder):
        ids, past, rows, chosen = torch.tensor([prompt], device=device), None, [], []
        for _ in range(N_TOKENS):
            step = model(ids, past_key_values=past, use_cache=True)
            past = step.past_key_values
            rows.append(step.logits[0, -1].float().cpu())
            chosen.append(int(rows[-1].argmax()))
            ids = torch.tensor([chosen[-1:]], device=device)
        tokens.append(chosen)
        logits.append(torch.stack(rows))
    return tokens, list(torch.stack(logits, dim=1))


def errors(folder: Path, way: str, device: str, dtype: torch.dtype) -> list[float]:
    """The largest error of our logits of prefill and of each decode step, in parts of the largest logit.

    We are fed their tokens, whatever we would choose.
    """
    tokens, expected = theirs(folder, dtype, device)
    engine = small_engine(load_model(str(folder), torch.device(device), dtype), **WAYS[way])
    sequences = greedy_sequences(engine, prompts_for(folder), N_TOKENS + 1)
    found = []
    for step, theirs_then in enumerate(expected):
        if step == 0:
            engine.prefill(sequences)
        else:
            for sequence, row in zip(sequences, tokens, strict=True):
                sequence.tokens[-1] = row[step - 1]
            engine.decode(sequences)
        ours = engine.step.last_logits().float().cpu()
        found.append((ours - theirs_then).abs().max().item())
    largest = max(step.abs().max().item() for step in expected)
    return [error / largest for error in found]


CASES = [one for dtype in BOUNDS for one in (*runs(dtype, ways=MAIN_WAYS), *runs(dtype, names=ON_EVERY_RUNG))]


@pytest.mark.parametrize(("name", "way", "device", "dtype"), CASES)
def test_logits_of_prefill_and_every_step_are_those_of_transformers(
    saved, monkeypatch, name, way, device, dtype
):
    monkeypatch.setattr(SpeculativeStep, "_n_drafts", ResidentStep._n_drafts)  # one token per step
    found = errors(saved(name), way, device, dtype)
    print(f"{name} {way} {device} {dtype}: prefill {found[0]:.1e}, steps {max(found[1:]):.1e}")
    assert mean(found) <= BOUNDS[dtype] and max(found) <= 2 * BOUNDS[dtype]


def test_every_family_is_compared_on_every_rung_but_those_that_refuse_it():
    assert set(FAMILIES) == set(SUPPORTED)
    assert [arch_of(name).family for name in FAMILIES] == list(FAMILIES)
    refusing = {(name, rung) for name in FAMILIES for rung in LADDER if not serves(rung, name)}
    assert refusing == {(name, "persistent_kernel") for name in FAMILIES if name != "gpt2"}
