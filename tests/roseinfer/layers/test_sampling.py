"""Sampling parameters, the tokens they allow, and draws from these."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor

from rosellm.errors import SamplingError
from rosellm.roseinfer.kernels.draw import allowed_log_probs, draw, penalised_ref
from rosellm.roseinfer.kernels.noise import gumbel_noise, gumbel_noise_triton
from rosellm.roseinfer.sampling import MOST_COMPLETIONS, NOT_FINITE, SamplingParams
from tests.helpers import DTYPES

MOST = 2**63 - 1
BAD_ROWS = [[0.0, math.nan, 1.0], [0.0, 1.0, math.inf], [math.nan] * 3, [-math.inf] * 3]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def random_logits(rows: int, vocab: int = 50, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def columns(
    n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[Tensor]:
    return [torch.tensor([setting] * n) for setting in (float(temperature), top_k, top_p, min_p)]


def drawn(logits: Tensor, device: str = "cpu", noise=gumbel_noise, **rule) -> Tensor:
    """A token of each row, of seeds and positions 0, 1, …"""
    n = len(logits)
    inputs = logits, *columns(n, **rule), torch.arange(n), torch.arange(n)
    return draw(*(x.to(device) for x in inputs), noise).cpu()


# Which tokens are allowed.


def allowed_by_hand(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> dict[int, float]:
    """Token → probability, by the definitions, one token at a time."""
    exponentials = [math.exp(x / temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])
    ranked = [i for i in ranked if exponentials[i] >= min_p * max(exponentials)][: top_k or None]
    total, kept, mass = sum(exponentials[i] for i in ranked), [], 0.0
    for token in ranked:
        kept.append(token)
        mass += exponentials[token] / total
        if mass >= top_p:
            break
    total = sum(exponentials[i] for i in kept)
    return {token: exponentials[token] / total for token in kept}


@devices
@pytest.mark.parametrize("seed", range(4))
def test_allowed_tokens_are_those_of_the_definitions(seed, device):
    rules = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (1.0, 10, 0.5), (2.0, 1, 0.9), (1.0, 99, 1e-9)]
    rules = [(*rule, min_p) for rule in rules for min_p in (0.0, 0.05, 0.4, 1.0)]
    logits = random_logits(len(rules), seed=seed)
    settings = [torch.tensor(column, device=device) for column in zip(*rules, strict=True)]
    found = allowed_log_probs(logits.to(device), *settings).cpu()
    for row, rule in enumerate(rules):
        expected = allowed_by_hand(logits[row].tolist(), *rule)
        kept = {i: p for i, p in enumerate(found[row].exp().tolist()) if p > 0}
        assert kept == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("temperature", [1e39, sys.float_info.max, 10**300], ids=float)
def test_however_large_the_temperature_all_tokens_become_equally_likely(temperature):
    logits = random_logits(1, vocab=4)
    assert allowed_log_probs(logits, *columns(1, temperature)).exp().tolist() == [[0.25] * 4]
    assert set(drawn(logits.expand(100, -1), temperature=temperature).tolist()) == set(range(4))


# Draws.


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rule",
    [
        *(
            {"temperature": t, "top_k": k, "top_p": p}
            for t in (0.0, 1e-45, 1e-8)
            for k, p in ((0, 1), (3, 0.5))
        ),
        *(
            {"temperature": 5e-324},
            {"temperature": 1e-38, "top_p": 5e-324},
            {"temperature": 0.0, "min_p": 0.2},
        ),
        *({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-3, "top_k": MOST}),
    ],
    ids=str,
)
def test_rules_that_leave_one_token_take_the_likeliest_the_first_of_equals(rule, dtype, device):
    logits = 20 * random_logits(5).to(device, dtype)
    if rule.get("temperature") == 0:
        logits[0, [40, 17, 9]] = 500.0
    tokens = drawn(logits, device, **rule)
    assert tokens.dtype == torch.int32 and tokens.tolist() == logits.argmax(dim=-1).tolist()


@devices
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_marked_and_leave_the_others_alone(temperature, device):
    good, logits = random_logits(6, vocab=3), random_logits(6, vocab=3)
    logits[1:5] = torch.tensor(BAD_ROWS)
    expected = drawn(good, device, temperature=temperature)
    expected[1:5] = NOT_FINITE
    assert torch.equal(drawn(logits, device, temperature=temperature), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("noise", [gumbel_noise, gumbel_noise_triton])
@pytest.mark.parametrize("batch", [1, 7, 300])
def test_a_draw_captured_in_a_cuda_graph_goes_on_with_new_inputs(noise, batch):
    mixed = torch.arange(batch) % 3
    filters = mixed / 2, 5 * mixed, 1 - mixed / 8, mixed / 50
    inputs = [x.cuda() for x in (random_logits(batch, vocab=50257), *filters, mixed, mixed)]
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


# Exactness: draws against the distribution.

N_DRAWS = 6000
# Of chi-squared at a level of 0.1%, by degrees of freedom from 1.
CRITICAL = [10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1, 27.9, 29.6, 31.3, 32.9, 34.5, 36.1, 37.7]


def chi_squared_excess(tokens: Tensor, probs: Tensor) -> float:
    """Pearson's statistic of ``tokens [n]`` for ``probs [V]``, over its critical value: a misfit above 1."""
    counts, expected = torch.bincount(tokens, minlength=len(probs)), probs * len(tokens)
    possible = expected > 0
    if counts[~possible].any():
        return math.inf
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    return statistic / CRITICAL[int(possible.sum()) - 2]


def draw_many(logits: Tensor, rule: dict, varied: str, device: str) -> Tensor:
    """``N_DRAWS`` tokens from ``logits [V]``: of many seeds at one position, or of one seed at many."""
    steps, fixed = torch.arange(N_DRAWS), torch.full((N_DRAWS,), 3)
    seeds, positions = (steps, fixed) if varied == "seeds" else (fixed, steps)
    inputs = logits.expand(N_DRAWS, -1), *columns(N_DRAWS, **rule), seeds, positions
    return draw(*(x.to(device) for x in inputs)).cpu()


@devices
@pytest.mark.parametrize("varied", ["seeds", "positions"])
@pytest.mark.parametrize(
    "rule",
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
def test_drawn_tokens_follow_the_allowed_probabilities(rule, varied, device):
    logits = random_logits(1, vocab=10, seed=5)[0] / 2
    probs = allowed_log_probs(logits[None], *columns(1, **rule))[0].exp()
    assert (probs > 0).sum() > 1
    assert chi_squared_excess(draw_many(logits, rule, varied, device), probs) < 1


# Penalties.


def penalised_by_hand(logits: list[float], prompt: list[int], output: list[int], params) -> list[float]:
    """By the definitions, one token at a time."""
    found = list(logits)
    for token in range(len(logits)):
        if token in prompt or token in output:
            by = params.repetition_penalty
            found[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
        if token in output:
            found[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return found


def penalised(logits: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    seen = torch.zeros(logits.shape, dtype=torch.int32)
    seen[:, prompt] = 1
    for token in output:
        seen[:, token] += 2
    by = params.repetition, params.presence_penalty, params.frequency_penalty
    return penalised_ref(logits, seen, *(torch.full((len(logits),), x) for x in by))


@pytest.mark.parametrize(
    "penalties",
    [
        *({"repetition_penalty": by} for by in (1.4, 0.6, 1e-25, 1e25)),
        *({"presence_penalty": 1.5}, {"frequency_penalty": -0.7}),
        {"repetition_penalty": 2.0, "presence_penalty": -2.0, "frequency_penalty": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("output", [[], [4], [9, 4, 9, 30, 9]], ids=str)
def test_penalties_are_those_of_the_definitions(penalties, output):
    params, logits = SamplingParams(**penalties), random_logits(1)
    expected = penalised_by_hand(logits[0].tolist(), [3, 4, 3], output, params)
    assert penalised(logits, [3, 4, 3], output, params)[0].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e4, 1e8])
@pytest.mark.parametrize("extreme", [5e-324, 1e-40, 1e-38, 1e39, sys.float_info.max, 10**300], ids=float)
def test_the_most_extreme_repetition_penalties_leave_a_token_to_choose(extreme, size):
    params = SamplingParams(repetition_penalty=extreme)
    some = penalised(size * torch.tensor([[0.5, -1.0, 0.25]]), [0, 1], [], params)
    every = penalised(size * torch.tensor([[-1.0, -0.5, -0.75]]), [0, 1, 2], [], params)
    for temperature in (0.0, 1.0):
        found = drawn(torch.cat((some, every)), temperature=temperature, top_k=1)
        assert found.tolist() == [0 if extreme < 1 else 2, 1]


# Parameters.

BAD = {
    "temperature": (-0.1, math.nan, math.inf, "1", True, 10**400),
    "top_k": (-2, 1.5, 2**63, None),
    "top_p": (0.0, 1.1, False, math.nan),
    "min_p": (-0.1, 1.5),
    "repetition_penalty": (0.0, -1, math.inf),
    "presence_penalty": (2.1, "0"),
    "frequency_penalty": (-2.1, math.nan),
    "max_tokens": (0, True),
    "seed": (-2, 2**63, 1.0),
    "logprobs": (-1, 21, True),
    "ignore_eos": (1,),
    "n": (0, 10**8, True, 10**5000),
    "stop": ("", ["a", ""], 5, [1]),
    "stop_token_ids": (5, [-1], ["a"], [True]),
    "logit_bias": ([1], {"a": 1}, {-1: 1.0}, {1: math.nan}),
    "min_tokens": (-1, 1.5, None),
    "prompt_logprobs": (-1, 21),
}


@pytest.mark.parametrize("name", BAD)
def test_parameters_outside_their_range_are_refused_by_name_and_value(name):
    for value in BAD[name]:
        with pytest.raises(SamplingError, match=f"^{name} is .*; ") as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 130


def test_several_completions_of_a_greedy_request_are_refused():
    with pytest.raises(SamplingError, match="n is 3; .* temperature 0"):
        SamplingParams(n=3, temperature=0)


def test_a_top_k_of_minus_one_is_zero_as_in_vllm():
    params = SamplingParams(top_k=-1)
    assert params == SamplingParams(top_k=0) and repr(params) == repr(SamplingParams())
    assert not params.is_filtered


def test_as_many_completions_as_allowed_are_made_each_with_its_own_seed():
    each = SamplingParams(n=MOST_COMPLETIONS, seed=5).each()
    assert [one.seed for one in each] == list(range(5, 5 + MOST_COMPLETIONS))
    assert {one.n for one in each} == {1}
