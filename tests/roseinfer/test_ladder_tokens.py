"""Every rung keeps steps in order, logits and engines apart; a museum rung refuses what it cannot do."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from rosellm.errors import RecipeError, SamplingError
from rosellm.ladder.museum import STEPS
from rosellm.ladder.pools import TuplePool
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER
from rosellm.roseinfer.sampling import SamplingParams
from tests.helpers import (
    MODERN,
    WINDOWED,
    decode_all,
    generate,
    greedy_sequences,
    random_model,
    random_prompts,
    small_config,
    small_engine,
    uncached_greedy,
    uncached_logits,
)

N_TOKENS = 16
LENGTHS = [1, 2, 7, 8, 9, 17, 30]
PROMPTS = random_prompts(LENGTHS, seed=1)
TUNED = [name for name, recipe in LADDER.items() if recipe.launch == "autotuned"]
ON_TORCH = [name for name in LADDER if name not in TUNED]
HOST_DRIVEN = [name for name in ON_TORCH if name in STEPS]
RUNS = [pytest.param(rung, "cpu", id=f"{rung}-cpu") for rung in ON_TORCH] + [
    pytest.param(rung, "cuda", id=f"{rung}-gpu", marks=pytest.mark.gpu) for rung in LADDER
]
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU here")


MODELS = {
    "tied": (0, small_config(eos_token_ids=(3,))),
    "modern": (0, small_config(eos_token_ids=(3,), **MODERN)),
    "windowed": (1, small_config(eos_token_ids=(3,), **WINDOWED)),
}


def refuses(rung: str, model: str) -> bool:
    try:
        LADDER[rung].check_serves(MODELS[model][1])
    except RecipeError:
        return True
    return False


EVERY_RUN = [
    pytest.param(model, *run.values, id=f"{model}-{run.id}", marks=run.marks)
    for model in MODELS
    for run in RUNS
    if not refuses(run.values[0], model)
]
on_every_rung = pytest.mark.parametrize(("model", "rung", "device"), EVERY_RUN)


@cache
def expected(model: str) -> list[list[int]]:
    """The greedy tokens of each prompt by itself, without a cache."""
    gpt = random_model(*MODELS[model])
    return [uncached_greedy(gpt, prompt, N_TOKENS) for prompt in PROMPTS]


COUNTS = [N_TOKENS, 3, 9, 1, 12, 5, N_TOKENS]


def truncated(outputs: list[list[int]]) -> list[list[int]]:
    return [tokens[:n] for tokens, n in zip(outputs, COUNTS, strict=True)]


@on_every_rung
def test_steps_that_are_begun_ahead_are_collected_in_order(model, rung, device):
    engine = small_engine(random_model(*MODELS[model]).to(device), recipe=rung)
    sequences = greedy_sequences(engine, PROMPTS, N_TOKENS)
    kinds = []

    def collect(leave: int) -> None:
        for done in engine.step.collect(leave):
            kinds.append(done.kind)
            assert set(done.sequences) == set(sequences) and done.seconds > 0
            assert [s.output for s in sequences] == [row[: len(kinds)] for row in expected(model)]

    assert engine.begin_prefill(sequences) == sequences
    collect(engine.step.run_ahead)
    while not sequences[0].is_finished:
        collect(engine.step.run_ahead if engine.begin_decode(sequences) else 0)
    assert kinds == ["prefill"] + ["decode"] * (N_TOKENS - 1)


@pytest.mark.parametrize("rung", HOST_DRIVEN)
def test_slots_are_reserved_once_a_pool(rung, monkeypatch):
    engine, calls = small_engine(random_model(3), recipe=rung), []
    kind = type(engine.blocks.pools[0])
    reserve = kind.reserve_tokens
    monkeypatch.setattr(
        kind, "reserve_tokens", lambda pool, *a: calls.append(pool.number) or reserve(pool, *a)
    )
    generate(engine, PROMPTS, 2)
    assert calls == ([0] if rung == "one_table" else list(range(engine.config.n_layers)))
    assert isinstance(engine.blocks.pools[0], TuplePool)


BEYOND = {
    "logprobs": {"logprobs": 0},
    "penalties": {"repetition_penalty": 1.2},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
}


@pytest.mark.parametrize("asked", BEYOND)
@pytest.mark.parametrize("rung", ["dense", "one_table"])
def test_what_a_host_driven_rung_cannot_do_is_refused_in_a_line_when_it_is_asked_for(rung, asked):
    engine, params = small_engine(random_model(3), recipe=rung), SamplingParams(**BEYOND[asked])
    with pytest.raises(
        SamplingError, match=f"rung '{rung}' .* without {asked}; resident_step and later"
    ) as refusal:
        engine.make_sequence([1, 2], params)
    assert "\n" not in str(refusal.value)
    small_engine(random_model(3), recipe="resident_step").make_sequence([1, 2], params)


@pytest.mark.parametrize("rung", ON_TORCH)
def test_draws_by_temperature_beside_greedy_rows_are_those_of_the_resident_step(rung):
    def drawn(name: str) -> list[list[int]]:
        engine = small_engine(random_model(3), recipe=name)
        params = [
            SamplingParams(temperature=t, seed=9, max_tokens=8, ignore_eos=True) for t in (0.0, 0.7, 1.5)
        ]
        sequences = [engine.make_sequence(PROMPTS[i], p) for i, p in enumerate(params)]
        engine.prefill(sequences)
        return decode_all(engine, sequences)

    assert drawn(rung) == drawn("resident_step")


def forced_logits(engine: Engine, sequences: list, tokens: list[list[int]]) -> Tensor:
    """Logits ``[steps, B, V]`` of all steps when each row is fed its ``tokens``, whatever it would choose."""
    engine.prefill(sequences)
    logits = [engine.step.last_logits().clone()]
    for step in zip(*tokens, strict=True):
        for sequence, token in zip(sequences, step, strict=True):
            sequence.tokens[-1] = token
        engine.decode(sequences)
        logits.append(engine.step.last_logits().clone())
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-4), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=str
)
@pytest.mark.parametrize(("model", "rung", "device"), EVERY_RUN)
def test_every_rungs_logits_are_near_those_of_the_uncached_model(model, rung, device, dtype, bound):
    """Every rung decodes the same given tokens; ``bound`` is relative to the largest logit."""
    gpt = random_model(11, MODELS[model][1], std=0.1)
    tokens = random_prompts([9] * len(PROMPTS), seed=6)
    wanted = [uncached_logits(gpt, p + t)[len(p) - 1 :] for p, t in zip(PROMPTS, tokens, strict=True)]
    expected = torch.stack(wanted, dim=1)
    engine = small_engine(gpt.to(device, dtype), recipe=rung)
    found = forced_logits(engine, greedy_sequences(engine, PROMPTS, 10), tokens).float().cpu()
    assert (found - expected).abs().max() < bound * expected.abs().max()


def interleaved(a: Engine, b: Engine) -> tuple[list[list[int]], list[list[int]]]:
    """Both engines serve the mixed prompts, taking turns at every step."""
    batches = [greedy_sequences(engine, PROMPTS, COUNTS) for engine in (a, b)]
    for engine, sequences in zip((a, b), batches, strict=True):
        engine.prefill(sequences)
    while any(not s.is_finished for sequences in batches for s in sequences):
        for engine, sequences in zip((a, b), batches, strict=True):
            engine.decode([s for s in sequences if not s.is_finished])
    return tuple([s.output for s in sequences] for sequences in batches)


PAIRS = [
    ("dense", BEST_RUNG),
    ("paged", "cuda_graph"),
    (BEST_RUNG, BEST_RUNG),
    ("identity_pos", "full_batch"),
    ("resident_tables", "one_table"),
    ("autotune", BEST_RUNG),  # the last, on a GPU only
]


@pytest.mark.parametrize(
    ("rungs", "device"),
    [pytest.param(rungs, "cpu", id=f"{rungs}-cpu") for rungs in PAIRS[:-1]]
    + [pytest.param(rungs, "cuda", id=f"{rungs}-gpu", marks=pytest.mark.gpu) for rungs in PAIRS],
)
@pytest.mark.parametrize("model", MODELS)
def test_two_engines_run_side_by_side(model, rungs, device):
    gpt = random_model(*MODELS[model]).to(device)
    a, b = (small_engine(gpt, recipe=rung) for rung in rungs)
    assert interleaved(a, b) == (truncated(expected(model)),) * 2


def test_rows_past_the_batch_have_no_context_in_a_captured_run():
    engine = small_engine(random_model(3), recipe="cuda_graph")
    sequences = greedy_sequences(engine, PROMPTS, [8, 8, 8, 8, 8, 2, 2])
    engine.prefill(sequences)
    decode_all(engine, sequences)
    ((bucket, (static, _)),) = engine.step.captured.items()
    assert bucket == 8
    assert static.context_lens.tolist() == [s.n_cached - 1 for s in sequences[:5]] + [0, 0, 0]


@pytest.mark.gpu
def test_the_graph_runner_captures_once_a_bucket_and_replays_for_smaller_batches():
    engine = small_engine(random_model(3).to("cuda"), recipe="cuda_graph", warm_up=False)
    expected = {n: generate(engine, PROMPTS[:n], 4) for n in (3, 5, 7, 4, 1, 6, 2)}
    captured = dict(engine.step.captured)
    assert set(captured) == {1, 2, 4, 8}
    for n in (7, 1, 5, 2, 6, 3):
        assert generate(engine, PROMPTS[:n], 4) == expected[n] == expected[7][:n]
    assert engine.step.captured == captured
