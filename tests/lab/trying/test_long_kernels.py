"""Kernels that are right on small sizes and wrong on long ones: every one is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rosellm.lab.trying.check_kernel import check_kernel
from rosellm.lab.trying.same_tokens import LONG
from rosellm.lab.trying.try_rung import KernelError, try_rung
from rosellm.roseinfer.kernels.table import TORCH
from tests.helpers import ON_GPU

Kernel = Callable[..., Any]
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="gpu", marks=ON_GPU.marks)]


def last_tokens(name: str, most: int) -> Kernel:
    """One tile of keys, without the loop over the others."""

    def attend(*, window: int | None, **operands: Any) -> Any:
        return getattr(TORCH, name)(window=min(window or most, most), **operands)

    return attend


def first_tokens(most: int) -> Kernel:
    def attend(*, context_lens: torch.Tensor, **operands: Any) -> Any:
        return TORCH.paged_attention_decode(context_lens=context_lens.clamp(max=most), **operands)

    return attend


def norm_of(most: int) -> Kernel:
    """Moments of the first columns only, as with one block of registers."""

    def norm(*, x: Any, scale: Any, shift: Any, eps: float, **more: Any) -> Any:
        whole = TORCH.add_norm(x=x, scale=scale, shift=shift, eps=eps, **more)
        some = x[:, :most].float()
        centred = x.float() - (some.mean(1, keepdim=True) if shift is not None else 0)
        variance = centred[:, :most].square().mean(1, keepdim=True)
        normed = centred * torch.rsqrt(variance + eps) * scale.float()
        return whole.copy_(normed + (0 if shift is None else shift.float()))

    return norm


def norm_zero_beyond(most: int) -> Kernel:
    def norm(**operands: Any) -> Any:
        out = TORCH.add_norm(**operands)
        out[:, most:] = 0
        return out

    return norm


def product_of(name: str, most: int) -> Kernel:
    """The first columns of K only."""

    def product(*, x: torch.Tensor, weight: torch.Tensor, **operands: Any) -> Any:
        if x.shape[1] > most:
            x = torch.cat((x[:, :most], torch.zeros_like(x[:, most:])), dim=1)
            weight = torch.cat((weight[:, :most], torch.zeros_like(weight[:, most:])), dim=1)
        return getattr(TORCH, name)(x=x, weight=weight, **operands)

    return product


def head_of(most: int) -> Kernel:
    """Only the first words of the vocabulary."""

    def best(*, weight: torch.Tensor, **operands: Any) -> Any:
        return TORCH.best_tokens(weight=weight[:most], **operands)

    return best


def zero_beyond(name: str, most: int) -> Kernel:
    def columns(**operands: Any) -> Any:
        out = getattr(TORCH, name)(**operands)
        out[..., most:] = 0
        return out

    return columns


def first_rows(most: int) -> Kernel:
    def norm(**operands: Any) -> Any:
        out = TORCH.add_norm(**operands)
        out[most:] = 0
        return out

    return norm


def early_positions(most: int) -> Kernel:
    def rotated(*, positions: torch.Tensor, **operands: Any) -> Any:
        return TORCH.position_heads(positions=positions.clamp(max=most), **operands)

    return rotated


WRONG: dict[str, tuple[str, Kernel]] = {
    "the last 128 tokens": ("paged_attention_decode", last_tokens("paged_attention_decode", 128)),
    "the last 512 tokens": ("paged_attention_decode", last_tokens("paged_attention_decode", 512)),
    "the first 128 tokens": ("paged_attention_decode", first_tokens(128)),
    "the first 1,024 tokens": ("paged_attention_decode", first_tokens(1024)),
    "append, the last 128": ("append_and_attend", last_tokens("append_and_attend", 128)),
    "append, the last 1,024": ("append_and_attend", last_tokens("append_and_attend", 1024)),
    "prompts, the last 128": ("prefill_attention", last_tokens("prefill_attention", 128)),
    "norms of 256 rows": ("add_norm", first_rows(256)),
    "norms zero beyond 2,048": ("add_norm", norm_zero_beyond(2048)),
    "moments of 2,048 columns": ("add_norm", norm_of(2048)),
    "moments of 4,096 columns": ("add_norm", norm_of(4096)),
    "few rows, K of 2,048": ("few_rows_linear", product_of("few_rows_linear", 2048)),
    "few rows, K of 4,096": ("few_rows_linear", product_of("few_rows_linear", 4096)),
    "some rows, K of 4,096": ("some_rows_linear", product_of("some_rows_linear", 4096)),
    "1,024 words": ("best_tokens", head_of(1024)),
    "embeddings zero beyond 4,096": ("embed", zero_beyond("embed", 4096)),
    "silu zero beyond 4,096": ("silu_mul", zero_beyond("silu_mul", 4096)),
    "positions up to 511": ("position_heads", early_positions(511)),
}


def delta_of(most: int) -> Kernel:
    """Adds the first columns only."""

    def norm(*, delta: Any, **operands: Any) -> Any:
        if delta is not None:
            delta = delta.clone()
            delta[..., most:] = 0
        return TORCH.add_norm(delta=delta, **operands)

    return norm


def first_words(most: int) -> Kernel:
    def embed(*, ids: torch.Tensor, **operands: Any) -> Any:
        return TORCH.embed(ids=ids.clamp(max=most - 1), **operands)

    return embed


def first_tiles(most: int) -> Kernel:
    def advance(*, values: Any, indices: torch.Tensor, **operands: Any) -> Any:
        if values is not None:
            values, indices = values[:, :most], indices[:, :most]
        return TORCH.advance(values=values, indices=indices, **operands)

    return advance


def by_the_first_head(**operands: Any) -> Any:
    """Keys and values of the first head for the others."""
    for name in ("k_cache_layer", "v_cache_layer"):
        operands[name] = operands[name][:, :1].expand_as(operands[name])
    return TORCH.paged_attention_decode(**operands)


def only_if(name: str, operand: str, is_so: Callable[[Any], bool], wrong: Kernel) -> tuple[str, Kernel]:
    """A kernel that is wrong where an operand is so."""

    def kernel(**operands: Any) -> Any:
        return (wrong if is_so(operands[operand]) else getattr(TORCH, name))(**operands)

    return name, kernel


def given(operand: Any) -> bool:
    return operand is not None


def missing(operand: Any) -> bool:
    return operand is None


PAGED, APPEND, PROMPTS = "paged_attention_decode", "append_and_attend", "prefill_attention"
NORM, FEW, SOME, HEAD = "add_norm", "few_rows_linear", "some_rows_linear", "best_tokens"
FEW_K, SOME_K = product_of(FEW, 4096), product_of(SOME, 4096)
# Wrong with one value of an option, and there on long inputs only.
WRONG |= {
    "2,048 words, greedy": only_if(HEAD, "sampled", lambda sampled: not sampled, head_of(2048)),
    "2,048 words, sampled": only_if(HEAD, "sampled", lambda sampled: sampled, head_of(2048)),
    "embeddings of 2,048 words": ("embed", first_words(2048)),
    "embeddings with places, 4,096": only_if("embed", "places", given, zero_beyond("embed", 4096)),
    "512 tiles of words": ("advance", first_tiles(512)),
    "few rows, 2,048 outputs": (FEW, zero_beyond(FEW, 2048)),
    "some rows, 2,048 outputs": (SOME, zero_beyond(SOME, 2048)),
    "few rows, K of 4,096, no norm": only_if(FEW, "norm", missing, FEW_K),
    "few rows, K of 4,096, a norm": only_if(FEW, "norm", given, FEW_K),
    "few rows, K of 4,096, one": only_if(FEW, "x", lambda x: len(x) == 1, FEW_K),
    "few rows, K of 4,096, two": only_if(FEW, "x", lambda x: len(x) == 2, FEW_K),
    "few rows, K of 4,096, no gate": only_if(FEW, "activation", lambda f: f != "swiglu", FEW_K),
    "some rows, K of 4,096, no gate": only_if(SOME, "activation", lambda f: f != "swiglu", SOME_K),
    "some rows, K of 4,096, in parts": only_if(SOME, "parts", lambda n: n == 4, SOME_K),
    "moments of 4,096, LayerNorm": only_if(NORM, "shift", given, norm_of(4096)),
    "moments of 4,096, RMSNorm": only_if(NORM, "shift", missing, norm_of(4096)),
    "delta of 4,096": (NORM, delta_of(4096)),
    "delta of 4,096, no bias": only_if(NORM, "bias", missing, delta_of(4096)),
    "the first 64 blocks": (PAGED, first_tokens(1024)),
    "one head of long groups": only_if(PAGED, "block_table", lambda t: t.shape[1] > 16, by_the_first_head),
    "the last 100 of a window": only_if(PAGED, "window", given, last_tokens(PAGED, 100)),
    "append in pieces, 1,000": only_if(
        APPEND, "plan", lambda p: p.variant.combine, last_tokens(APPEND, 1000)
    ),
    "append, rows whole, 1,000": only_if(
        APPEND, "plan", lambda p: not p.variant.combine, last_tokens(APPEND, 1000)
    ),
    "prompts in pieces, 1,000": only_if(PROMPTS, "tiles", lambda t: t.in_pieces, last_tokens(PROMPTS, 1000)),
    "prompts, tiles whole, 1,000": only_if(
        PROMPTS, "tiles", lambda t: not t.in_pieces, last_tokens(PROMPTS, 1000)
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_kernel_that_is_right_on_short_inputs_only_is_refused(wrong, device):
    name, kernel = WRONG[wrong]
    verdict = check_kernel(name, kernel, seed=3, device=device)
    assert not verdict.passed
    assert "wrong value" in str(verdict), verdict


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("paged_attention_decode", first_tokens(1099)),
        ("append_and_attend", last_tokens("append_and_attend", 2000)),
        ("position_heads", early_positions(1099)),
        ("prefill_attention", last_tokens("prefill_attention", 2000)),
    ],
)
def test_a_context_of_the_readers_own_is_tried_as_long_as_it_is(name, kernel):
    verdict = check_kernel(name, kernel, seed=3, device="cpu", context=2500)
    assert "wrong value" in str(verdict), verdict


def test_what_only_a_long_prompt_shows_is_refused_by_the_tokens(monkeypatch):
    """As if no case were long: the engine's own run of a long prompt is left."""
    monkeypatch.setattr("rosellm.lab.trying.try_rung.check_kernel", lambda name, *_, **__: passed(name))
    with pytest.raises(KernelError, match="new token .*fused_append's is"):
        try_rung("mine", base="fused_append", append_and_attend=last_tokens("append_and_attend", LONG // 3))


def passed(name: str) -> Any:
    return check_kernel("silu_mul", TORCH.silu_mul, n_random=0)
