"""Sampling as requests ask for it."""

from __future__ import annotations

import math

import pytest
import torch

from rosellm.errors import PromptError
from rosellm.roseinfer.kernels.draw import allowed_log_probs, draw
from rosellm.roseinfer.kernels.noise import gumbel_noise, gumbel_noise_triton
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import NOT_FINITE, SamplingParams
from tests.helpers import (
    TRITON_DEVICES,
    decode_all,
    generate,
    random_model,
    random_prompts,
    small_config,
    small_engine,
)
from tests.roseinfer.layers.test_sampling import BAD_ROWS, DEVICES, random_logits, sequence
from tests.sampler import Sampler

N_DRAWS = 6000
# Of chi-squared at a level of 0.1%, by degrees of freedom from 1.
CRITICAL = [
    float(x)
    for x in [
        "10.8",
        "13.8",
        "16.3",
        "18.5",
        "20.5",
        "22.5",
        "24.3",
        "26.1",
        "27.9",
        "29.6",
        "31.3",
        "32.9",
        "34.5",
        "36.1",
        "37.7",
    ]
]


def chi_squared_excess(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's statistic of ``tokens [n]`` for ``probs [V]``, over its critical value: a misfit above 1."""
    counts, expected = torch.bincount(tokens, minlength=len(probs)), probs * len(tokens)
    possible = expected > 0
    if counts[~possible].any():
        return math.inf
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    return statistic / float(CRITICAL[int(possible.sum()) - 2])


def columns(
    n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[torch.Tensor]:
    return [torch.full((n,), setting) for setting in (temperature, top_k, top_p, min_p)]


def draw_many(
    logits: torch.Tensor, params: dict, varied: str, device: str, noise=gumbel_noise
) -> torch.Tensor:
    """``N_DRAWS`` tokens from ``logits [V]``: of many seeds at one position, or of one seed at many."""
    steps, fixed = torch.arange(N_DRAWS), torch.full((N_DRAWS,), 3)
    seeds, positions = (steps, fixed) if varied == "seeds" else (fixed, steps)
    inputs = [logits.expand(N_DRAWS, -1), *columns(N_DRAWS, **params), seeds, positions]
    return draw(*(x.to(device) for x in inputs), noise).cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("varied", ["seeds", "positions"])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 4},
        {"top_p": 0.7},
        {"temperature": 2.0, "top_k": 7, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 2.0, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
def test_drawn_tokens_follow_the_allowed_probabilities(params, varied, device):
    logits = random_logits(1, vocab=10, seed=5)[0] / 2
    probs = allowed_log_probs(logits[None], *columns(1, **params))[0].exp()
    assert (probs > 0).sum() > 1
    assert chi_squared_excess(draw_many(logits, params, varied, device), probs) < 1


def pairs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return 4 * first + second


@pytest.mark.parametrize("varied", ["seeds", "positions"])
def test_draws_of_neighbouring_seeds_or_positions_are_independent(varied):
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5])
    probs = logits.softmax(dim=-1)
    tokens = draw_many(logits, {}, varied, "cpu")
    joint = torch.outer(probs, probs).flatten()
    assert chi_squared_excess(pairs(tokens[::2], tokens[1::2]), joint) < 1
    assert chi_squared_excess(pairs(tokens[::2], tokens[::2]), joint) > 1


# What a draw depends on


def test_the_sampler_draws_with_the_seed_and_the_position_of_the_new_token():
    logits = random_logits(3) / 3
    rules = [(0.7, 9, 0.9, 0.1), (1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0)]
    rows = [
        sequence(prompt=(0,) * n, seed=40 + n, temperature=t, top_k=k, top_p=p, min_p=m)
        for n, (t, k, p, m) in enumerate(rules, start=5)
    ]
    settings = [torch.tensor(column) for column in zip(*rules, strict=True)]
    expected = draw(logits, *settings, torch.tensor([45, 46, 47]), torch.tensor([5, 6, 7]))
    assert Sampler()(logits, rows) == expected.tolist()


def test_a_sequence_keeps_its_seed_and_gets_a_fresh_one_if_none_is_given():
    assert sequence(seed=8).seed == 8
    fresh = {sequence().seed for _ in range(20)}
    assert len(fresh) == 20 and all(0 <= seed < 2**63 for seed in fresh)


# The part of sampling that a CUDA graph can hold


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_of_temperature_zero_get_the_first_of_their_largest_logits(dtype, device):
    logits = random_logits(4, vocab=5000).to(device, dtype)
    logits[0, [4000, 17, 900]] = 50.0
    logits[2] = 0.0
    inputs = [*columns(4, 0.0, 3, 0.5, 0.2), torch.arange(4), torch.arange(4)]
    tokens = draw(logits, *(x.to(device) for x in inputs))
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == logits.argmax(dim=-1).tolist()
    assert tokens[[0, 2]].tolist() == [17, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_marked_and_leave_the_others_alone(temperature, device):
    good = random_logits(2, vocab=3)
    logits = torch.cat((good[:1], torch.tensor(BAD_ROWS), good[1:])).to(device)
    inputs = [*columns(6, temperature), torch.arange(6), torch.arange(6)]
    tokens = draw(logits, *(x.to(device) for x in inputs)).tolist()
    ends = [0, 5]
    alone = draw(logits[ends], *(x[ends].to(device) for x in inputs)).tolist()
    assert tokens == [alone[0], *[NOT_FINITE] * 4, alone[1]]


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_logits_top_k_keeps_the_first(device):
    inputs = [torch.zeros(50, 900), *columns(50, top_k=2), torch.arange(50), torch.arange(50)]
    assert set(draw(*(x.to(device) for x in inputs)).tolist()) == {0, 1}


def test_a_draw_asks_nothing_of_its_inputs_values():
    """Tensors on ``meta`` have no values to branch on, and no shape that depends on them."""
    inputs = (torch.zeros(3, 11), *columns(3), torch.arange(3), torch.arange(3))
    tokens = draw(*(x.to("meta") for x in inputs))
    assert (tokens.device.type, tokens.shape, tokens.dtype) == ("meta", (3,), torch.int32)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_the_kernels_noise_draws_the_same_tokens(device):
    inputs = [random_logits(6, vocab=1500), *columns(6), torch.arange(6), torch.arange(6)]
    inputs = [x.to(device) for x in inputs]
    assert draw(*inputs, gumbel_noise_triton).tolist() == draw(*inputs).tolist()
    rows = [sequence(seed=i) for i in range(6)]
    assert Sampler(gumbel_noise_triton)(inputs[0], rows) == Sampler()(inputs[0], rows)


@pytest.mark.gpu
@pytest.mark.parametrize("noise", [gumbel_noise, gumbel_noise_triton])
@pytest.mark.parametrize("batch", [1, 7, 300])
def test_a_draw_captured_in_a_cuda_graph_goes_on_with_new_inputs(noise, batch):
    mixed = torch.arange(batch) % 3
    filters = mixed / 2, 5 * mixed, 1 - mixed / 8, mixed / 50
    parts = (random_logits(batch, vocab=50257), *filters, mixed, mixed)
    inputs = [x.cuda() for x in parts]
    draw(*inputs, noise)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = draw(*inputs, noise)
    for step in range(3):
        inputs[0].copy_(random_logits(batch, vocab=50257, seed=step))
        inputs[5].add_(2**40)
        inputs[6].add_(1)
        graph.replay()
        assert torch.equal(tokens, draw(*inputs, noise))


@pytest.mark.parametrize(
    ("stop", "strings"),
    [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ())],
    ids=str,
)
def test_stop_strings_become_a_tuple(stop, strings):
    params = SamplingParams(stop=stop)
    assert params.stop == params.stops == strings


def test_temperature_zero_is_greedy():
    assert SamplingParams(temperature=0.0).is_greedy and not SamplingParams(temperature=0.01).is_greedy


# When a sequence ends


def test_a_sequence_stops_at_its_length():
    one = Sequence(1, [5, 6], SamplingParams(max_tokens=2), eos_token_ids=(9,))
    one.commit(7, num_newly_cached=2)
    assert (one.is_finished, one.num_cached_tokens, one.last_token) == (False, 2, 7)
    one.commit(8, num_newly_cached=1)
    assert (one.finish_reason, one.output, one.prompt, one.n_output) == ("length", [7, 8], [5, 6], 2)


@pytest.mark.parametrize(("ignore_eos", "reason"), [(False, "stop"), (True, None)])
def test_a_sequence_stops_at_the_end_token_unless_it_is_ignored(ignore_eos, reason):
    one = Sequence(1, [5], SamplingParams(ignore_eos=ignore_eos), eos_token_ids=(9,))
    one.commit(9, num_newly_cached=1)
    assert (one.finish_reason, one.output) == (reason, [9])


def test_the_end_token_as_the_last_one_allowed_counts_as_a_stop():
    one = Sequence(1, [5], SamplingParams(max_tokens=1), eos_token_ids=(9,))
    one.commit(9, num_newly_cached=1)
    assert one.finish_reason == "stop"


def test_a_callers_prompt_list_is_not_changed():
    prompt = [5, 6]
    Sequence(1, prompt, SamplingParams(temperature=0.0), eos_token_ids=()).commit(7, num_newly_cached=2)
    assert prompt == [5, 6]


def test_an_engine_ends_a_sequence_at_the_models_end_token():
    prompt = random_prompts([5])
    ((*_, last),) = outputs = generate(small_engine(random_model(2)), prompt, 12)
    n = outputs[0].index(last) + 1
    engine = small_engine(random_model(2, small_config(eos_token_ids=(last,))))
    stopping = [engine.make_sequence(p, SamplingParams(temperature=0.0, max_tokens=12)) for p in prompt]
    engine.prefill(stopping)
    assert decode_all(engine, stopping) == [outputs[0][:n]]
    assert stopping[0].finish_reason == "stop"


def test_seeded_sampling_gives_the_same_tokens_on_every_rung_and_in_any_batch():
    gpt, prompts = random_model(2), random_prompts([5, 9, 2])
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=10) for i in range(3)]

    def sample(rung: str, rows: list[int]) -> list[list[int]]:
        engine = small_engine(gpt, recipe=rung)
        sequences = [engine.make_sequence(prompts[row], params[row]) for row in rows]
        engine.prefill(sequences)
        return decode_all(engine, sequences)

    together = sample("resident_step", [0, 1, 2])
    assert sample("fused_head", [2, 1, 0]) == together[::-1]
    assert [sample(BEST_RUNG, [row])[0] for row in range(3)] == together


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        ([], 1, "empty"),
        ("text", 1, "str"),
        ([101], 1, "101"),
        ([-1], 1, "-1"),
        ([1.0], 1, "1.0"),
        ([True], 1, "True"),
        ([1] * 60, 5, "64 positions"),
        ([1] * 20, 20, "KV blocks"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused(prompt, max_tokens, words):
    engine = small_engine(random_model(0), num_kv_blocks=4)
    with pytest.raises(PromptError, match=words):
        engine.make_sequence(prompt, SamplingParams(max_tokens=max_tokens))


def test_a_prompt_that_just_fits_runs_to_its_end():
    engine = small_engine(random_model(0), num_kv_blocks=8)
    ((*_, last),) = generate(engine, [[1] * 60], 4)
    assert last in range(101)
