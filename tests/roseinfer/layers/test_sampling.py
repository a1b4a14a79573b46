"""Sampling parameters, the tokens they allow, and when a sequence stops."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from rosellm.errors import SamplingError
from rosellm.roseinfer.kernels.draw import allowed_log_probs, penalised_ref
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import MOST_COMPLETIONS, SamplingParams
from tests.sampler import Sampler, counts_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BAD_ROWS = [[0.0, math.nan, 1.0], [0.0, 1.0, math.inf], [math.nan] * 3, [-math.inf] * 3]


def sequence(prompt: tuple[int, ...] = (0,), **params) -> Sequence:
    return Sequence(1, list(prompt), SamplingParams(**params))


def random_logits(rows: int, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_allowed_tokens_are_those_of_the_definitions(seed, device):
    rules = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (1.0, 10, 0.5), (2.0, 1, 0.9), (1.0, 99, 1e-9)]
    rules = [(*rule, min_p) for rule in rules for min_p in (0.0, 0.05, 0.4, 1.0)]
    logits = random_logits(len(rules), seed=seed)
    columns = [torch.tensor(column, device=device) for column in zip(*rules, strict=True)]
    found = allowed_log_probs(logits.to(device), *columns).cpu()
    for row, rule in enumerate(rules):
        expected = allowed_by_hand(logits[row].tolist(), *rule)
        kept = {i: p for i, p in enumerate(found[row].exp().tolist()) if p > 0}
        assert kept == pytest.approx(expected, rel=1e-4)


def test_greedy_takes_the_likeliest_token_of_every_row():
    logits = random_logits(6)
    greedy = [sequence(temperature=0.0, top_k=3, top_p=0.5) for _ in range(6)]
    assert Sampler()(logits, greedy) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("change", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}], ids=str)
def test_rules_that_leave_one_token_are_greedy(change):
    logits = random_logits(5)
    assert Sampler()(logits, [sequence(**change) for _ in range(5)]) == logits.argmax(dim=-1).tolist()


def draws(n: int, logits: torch.Tensor, **params) -> list[int]:
    one = sequence(**params)
    for _ in range(n):
        one.commit(*Sampler()(logits[None], [one]), num_newly_cached=1)
    return one.output


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others():
    logits = random_logits(1)[0] / 3
    assert draws(20, logits, seed=1) == draws(20, logits, seed=1)
    assert draws(20, logits, seed=1) != draws(20, logits, seed=2)


@pytest.mark.parametrize("device", DEVICES)
def test_a_seeded_row_does_not_depend_on_the_rest_of_its_batch(device):
    logits = random_logits(3).to(device) / 3
    alone = Sampler()(logits[1:2], [sequence(seed=7)])
    crowded = Sampler()(logits, [sequence(seed=3), sequence(seed=7), sequence(temperature=0.0)])
    assert crowded[1] == alone[0]


BAD = {
    "temperature": (-0.1, math.nan, math.inf, "1", True, 10**400),
    "top_k": (-2, 1.5, 2**63, None),
    "top_p": (0.0, 1.1, False, math.nan),
    "min_p": (-0.1, 1.5),
    "repetition_penalty": (0.0, -1, math.inf),
    "presence_penalty": (2.1, "0"),
    "frequency_penalty": (-2.1, math.nan),
    "max_tokens": (0, True, None),
    "seed": (-1, 2**63, 1.0),
    "logprobs": (-1, 21, True),
    "ignore_eos": (1,),
    "n": (0, 10**8, True, 10**5000),
    "stop": ("", ["a", ""], 5, [1]),
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-8])
def test_however_small_the_temperature_the_likeliest_token_is_drawn(temperature, dtype, device):
    logits = 20 * random_logits(5).to(device, dtype)
    rows = [sequence(temperature=temperature, top_k=k, top_p=p) for k, p in ((0, 1.0), (3, 0.5)) * 2] + [
        sequence(temperature=temperature, top_p=5e-324)
    ]
    assert Sampler()(logits, rows) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [1e39, sys.float_info.max, 10**300], ids=float)
def test_however_large_the_temperature_all_tokens_become_equally_likely(temperature):
    logits, params = random_logits(1, vocab=4), sequence(temperature=temperature).params
    rule = [torch.tensor([float(x)]) for x in (params.temperature, params.top_k, params.top_p, params.min_p)]
    assert allowed_log_probs(logits, *rule).exp().tolist() == [[0.25] * 4]
    assert set(
        Sampler()(logits.expand(100, -1), [sequence(temperature=temperature) for _ in range(100)])
    ) == set(range(4))


def test_the_largest_values_allowed_are_drawn_with():
    logits, most = random_logits(1), 2**63 - 1
    assert (
        Sampler()(logits, [sequence(top_k=most, seed=most, temperature=1e-3)])
        == logits.argmax(dim=-1).tolist()
    )


@pytest.mark.parametrize("temperature", [1.0, 1e39], ids=str)
def test_a_token_that_logits_rule_out_is_never_drawn(temperature):
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0]]).expand(50, -1)
    rows = [sequence(seed=i, temperature=temperature) for i in range(50)]
    assert set(Sampler()(logits, rows)) == {1, 3}


# Penalties


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


PENALTIES = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6},
    {"repetition_penalty": 1e-25},
    {"repetition_penalty": 1e25},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 2.0, "presence_penalty": -2.0, "frequency_penalty": 0.9},
]


@pytest.mark.parametrize("params", PENALTIES, ids=str)
@pytest.mark.parametrize("output", [[], [4], [9, 4, 9, 30, 9]], ids=str)
def test_penalties_are_those_of_the_definitions(params, output):
    one, logits = sequence(prompt=(3, 4, 3), **params), random_logits(1)
    one.tokens += output
    seen = counts_of([one], 50, torch.device("cpu"))
    by = [
        torch.tensor([getattr(one.params, f"{name}_penalty")])
        for name in ("repetition", "presence", "frequency")
    ]
    expected = penalised_by_hand(logits[0].tolist(), one.prompt, output, one.params)
    assert penalised_ref(logits, seen, *by)[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_penalties_change_greedy_and_drawn_tokens_of_their_own_row_only():
    logits = torch.zeros(4, 20)
    logits[:, 5], logits[:, 6] = 4.0, 3.0
    prompt = (5,)
    rows = [
        sequence(prompt, temperature=0.0),
        sequence(prompt, temperature=0.0, repetition_penalty=2.0),
        sequence(prompt, top_k=1, repetition_penalty=2.0),
        sequence(prompt, temperature=0.0, presence_penalty=2.0),
    ]
    assert Sampler()(logits, rows) == [5, 6, 6, 5]
    for row in rows:
        row.tokens.append(5)
    assert Sampler()(logits, rows) == [5, 6, 6, 6]


EXTREMES = [5e-324, 1e-40, 1e-38, 1e39, sys.float_info.max, 10**300]


# Exactness: draws against the distribution


@pytest.mark.parametrize("size", [1.0, 1e4, 1e8])
@pytest.mark.parametrize("extreme", EXTREMES, ids=float)
def test_the_most_extreme_repetition_penalties_leave_a_token_to_choose(extreme, size):
    logits = size * torch.tensor([[0.5, -1.0, 0.25], [-1.0, -0.5, -0.75]])
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "top_k": 1, "repetition_penalty": extreme}
        rows = [sequence((0, 1), **options), sequence((0, 1, 2), **options)]
        assert Sampler()(logits, rows) == [0 if extreme < 1 else 2, 1]
