"""Logits of prefill and of each decode step against ``transformers`` with its own cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER
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
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8, "rope_theta": 100.0}
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 10_000.0}
# Shapes that no family's own model above has; d_model is 48, and contexts are longer than YaRN's original.
RARE: dict[str, tuple[str, dict]] = {
    "group-8-yarn": (
        "llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16, "rope_parameters": YARN}
    ),
    "group-4-linear": (
        "mistral", {"num_attention_heads": 8, "num_key_value_heads": 2, "rope_parameters": LINEAR}
    ),
    "group-2-norms": ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}),
    "wide-heads": ("qwen2", {"head_dim": 22}),
    "odd-vocabulary": ("llama", {"vocab_size": 257, "tie_word_embeddings": True}),
}  # fmt: skip
NAMES = (*FAMILIES, *SHIPPED_MODELS, *RARE)
WAYS = {rung: {"recipe": rung} for rung in LADDER} | {
    "deterministic": {"recipe": BEST_RUNG, "deterministic": True}
}
MAIN_WAYS = ("dense", "paged", BEST_RUNG, "one_pass", "deterministic")
ON_EVERY_RUNG = ("gpt2", "qwen3", "mistral")  # of the models whose logits are compared


@dataclass(frozen=True)
class Theirs:
    """A model of ``transformers`` after its greedy run: tokens ``[B][N]``, logits ``[N][B, V]`` fp32."""

    tokens: list[list[int]]
    logits: list[Tensor]


@cache
def arch_of(name: str) -> Arch:
    if name in SHIPPED_MODELS:
        return load_config(checkpoint_folder(name))
    family, fields = RARE.get(name) or (name, FAMILIES[name])
    return read_arch(sizes(family) | {"model_type": family} | fields)


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
        family, fields = RARE.get(name) or (name, FAMILIES[name])
        their_model(family, seed=2, **fields).save_pretrained(path)
        return path

    return save


@pytest.fixture
def folder(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Path:
    """Of the model named ``request.param``."""
    return saved(request.param)


def prompts_for(folder: Path) -> list[list[int]]:
    return random_prompts(LENGTHS, seed=PROMPT_SEED, vocab_size=load_config(folder).vocab_size)


@cache
@torch.inference_mode()
def theirs(folder: Path, dtype: torch.dtype, device: str) -> Theirs:
    """Each prompt by itself, a token at a time over ``past_key_values``."""
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
    return Theirs(tokens, list(torch.stack(logits, dim=1)))


def engine_of(folder: Path, way: str, device: str, dtype: torch.dtype = torch.float32) -> Engine:
    return small_engine(load_model(str(folder), torch.device(device), dtype), **WAYS[way])


def errors(folder: Path, way: str, device: str, dtype: torch.dtype, expected: Theirs) -> list[float]:
    """The largest error of our logits of prefill and of each decode step, in parts of the largest logit.

    We are fed their tokens, whatever we would choose.
    """
    engine = engine_of(folder, way, device, dtype)
    sequences = greedy_sequences(engine, prompts_for(folder), N_TOKENS + 1)
    engine.prefill(sequences)
    steps = [engine.step.last_logits().float().cpu().clone()]
    for step in range(N_TOKENS - 1):
        for sequence, row in zip(sequences, expected.tokens, strict=True):
            sequence.tokens[-1] = row[step]
        engine.decode(sequences)
        steps.append(engine.step.last_logits().float().cpu().clone())
    for sequence in sequences:
        engine.release(sequence)
    engine.check_integrity()
    largest = max(step.abs().max().item() for step in expected.logits)
    found = zip(steps, expected.logits, strict=True)
    return [(ours - theirs).abs().max().item() / largest for ours, theirs in found]


@pytest.mark.parametrize(
    ("folder", "way", "device", "dtype"),
    [
        one
        for dtype in BOUNDS
        for some in ({"ways": MAIN_WAYS}, {"names": ON_EVERY_RUNG})
        for one in runs(dtype, **some)
    ],
    indirect=["folder"],
)
def test_logits_of_prefill_and_every_step_are_those_of_transformers(folder, way, device, dtype):
    expected = theirs(folder, dtype, device)
    found = errors(folder, way, device, dtype, expected)
    print(f"{folder.name} {way} {device} {dtype}: prefill {found[0]:.1e}, steps {max(found[1:]):.1e}")
    assert mean(found) <= BOUNDS[dtype] and max(found) <= 2 * BOUNDS[dtype]


def test_every_family_is_compared_on_every_rung_but_those_that_refuse_it():
    assert set(FAMILIES) == set(SUPPORTED)
    assert [arch_of(name).family for name in FAMILIES] == list(FAMILIES)
    refusing = {(name, rung) for name in FAMILIES for rung in LADDER if not serves(rung, name)}
    assert refusing == {(name, "persistent_kernel") for name in FAMILIES if name != "gpt2"}
