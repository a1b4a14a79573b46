"""Every planted fault is found and described, also those that are right on small sizes or short inputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rosellm.lab.trying.check_kernel import check_kernel
from rosellm.lab.trying.same_tokens import LONG
from rosellm.lab.trying.try_rung import KernelError, try_rung
from rosellm.roseinfer.cache.device_state import POSITION
from rosellm.roseinfer.kernels.table import TORCH
from tests.helpers import ON_GPU

Kernel = Callable[..., Any]
Planted = tuple[str, Kernel, str]
IDENTITY, NORM, PAGED = "kv_append_identity_pos", "add_norm", "paged_attention_decode"
FUSED, PROMPTS, HEADS = "append_and_attend", "prefill_attention", "position_heads"
FEW, SOME = "few_rows_linear", "some_rows_linear"
HEAD, NEVER, VALUE = "best_tokens", r"cache_layer\[\d+, .*found poison.*never written", "wrong value"
append, add_norm = TORCH.kv_append_identity_pos, TORCH.add_norm


def given(name: str, change: Callable[[dict], dict], message: str = VALUE) -> Planted:
    """The specification of ``name``, called with some operands changed."""
    return name, lambda **o: getattr(TORCH, name)(**o | change(o)), message


def after(name: str, spoil: Callable[[Any, dict], Any], message: str = VALUE) -> Planted:
    """The specification of ``name``; then ``spoil(result, operands)``, whose result, if any, is returned."""

    def kernel(**operands):
        result = getattr(TORCH, name)(**operands)
        spoilt = spoil(result, operands)
        return result if spoilt is None else spoilt

    return name, kernel, message


def then(name: str, touch: Callable[[dict], Any], message: str) -> Planted:
    """The specification of ``name``, followed by ``touch(operands)``."""

    return after(name, lambda result, o: (touch(o), result)[1], message)


def only_if(operand: str, is_so: Callable[[Any], bool], planted: Planted) -> Planted:
    """Right unless the operand is so."""
    name, wrong, message = planted
    return name, lambda **o: (wrong if is_so(o[operand]) else getattr(TORCH, name))(**o), message


def unless(operand: str, is_so: Callable[[Any], bool], planted: Planted) -> Planted:
    return only_if(operand, lambda value: not is_so(value), planted)


def element(x: torch.Tensor, offset: int) -> torch.Tensor:
    """The element of x's memory at ``offset`` from its first one."""
    return x.as_strided((1,), (1,), x.storage_offset() + offset)


def one_more(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((len(x) + 1, *x.shape[1:]), x.stride(), x.storage_offset())


def each(names: tuple[str, ...], change: Callable[[torch.Tensor], Any]) -> Callable[[dict], dict]:
    return lambda o: {name: change(o[name]) for name in names}


CACHES, NEWS = ("k_cache_layer", "v_cache_layer"), ("key_new", "value_new")
ROWS = *NEWS, "block_idx", "pos"


def writes_inert_rows(**o):
    o["k_cache_layer"][o["block_idx"], :, o["pos"]] = o["key_new"]
    append(**o)


def raises(**operands):
    raise RuntimeError("no such kernel\nand more")


KNOWN: dict[tuple[int, ...], torch.Tensor] = {}


def remembers_its_first_call(*, x, **operands):
    return KNOWN.setdefault(tuple(x.shape), add_norm(x=x, **operands))


def writes_past(right, o):
    out = torch.empty_like(right)
    out.as_strided((out.numel() + 2,), (1,), out.storage_offset()).fill_(1.0)
    return out.copy_(right)


def leaves_its_last_column(right, o):
    out = right.new_empty(right.shape)
    out[:, :-1] = right[:, :-1]
    return out


def by_the_wrong_group(*, k_new, v_new, q, **operands):
    h, kv = q.shape[1], k_new.shape[1]
    order = torch.arange(h).view(kv, h // kv).T.flatten()  # right where every head has its own keys
    q = q[:, order.argsort()]
    return TORCH.paged_attention_decode(q=q, k_new=k_new, v_new=v_new, **operands)[:, order]


def never_stops(*, state, **operands):
    stops = state.stops.clone()
    state.stops.fill_(-1)
    TORCH.advance(state=state, **operands)
    state.stops.copy_(stops)


def to_whole_chunks(x):
    return x[:, : max(1, x.shape[1] // 16 * 16)]


PLANTED: dict[str, Planted] = {
    "64 elements of the heads laid end to end": given(
        IDENTITY,
        lambda o: each((*CACHES, *NEWS), lambda x: x[:, : max(1, 64 // o["key_new"].shape[2])])(o),
        NEVER,
    ),
    "64 elements of each head": given(IDENTITY, each((*CACHES, *NEWS), lambda x: x[..., :64]), NEVER),
    "nine rows": given(IDENTITY, each(ROWS, lambda x: x[:9]), NEVER),
    "no value": given(IDENTITY, each(CACHES[1:], torch.empty_like), r"v_cache_layer\[.*never written, 4 of"),
    "keys as values": given(IDENTITY, lambda o: {"value_new": o["key_new"]}, r"v_cache_layer\[.*a wrong"),
    "rows taken for contiguous": given(
        IDENTITY,
        each(NEWS[:1], lambda x: x.as_strided(x.shape, (x[0].numel(), *x.stride()[1:]))),
        r"(?s)k_cache_layer\[.*a wrong value.*k_cache_layer \[71, 3, 4, 6\] float32.*rows 54 apart",
    ),
    "a row too many": given(IDENTITY, each(ROWS, one_more), r"k_cache_layer\[.*expected poison \(written"),
    "inert rows": (IDENTITY, writes_inert_rows, r"k_cache_layer\[.*written by mistake"),
    "its input": then(IDENTITY, lambda o: o["pos"].zero_(), r"pos\[\d+\]: found 0, .*by mistake"),
    "before the cache": then(
        IDENTITY,
        lambda o: element(o["k_cache_layer"], -3).zero_(),
        "memory 3 before the beginning of k_cache",
    ),
    "raises": (IDENTITY, raises, r"raised RuntimeError: no such kernel$"),
    "remembers its first call": (NORM, remembers_its_first_call, r"the result\[0, 0\]: .* \(a wrong value"),
    "leaves x": given(NORM, lambda o: {"x": o["x"].clone()}, r"x\[0, 0\]: found .*never written"),
    "no eps": given(NORM, lambda o: {"eps": 0.0}, r"the result\[0, \d+\]"),
    "past its result": after(NORM, writes_past, r"memory 1 past the end of a tensor that it made: found 1, "),
    "leaves its last column": after(NORM, leaves_its_last_column, r"the result\[0, 0\]: found poison"),
    "between rows": then(  # the next row's query
        IDENTITY,
        lambda o: len(o["key_new"]) > 1 and element(o["key_new"], o["key_new"].stride(0) - 1).zero_(),
        r"memory between the rows of key_new: found 0, .*outside, 1 e",
    ),
    "values of a projection": then(
        HEADS,
        lambda o: element(o["q"], o["q"][0].numel() + o["k"][0].numel() + 1).zero_(),
        r"v\[0, 0, 1\]: found 0, expected .* \(written by mistake, 1 of 4",
    ),
    "past the context": given(
        PAGED, lambda o: {"context_lens": (o["context_lens"] + 1).clamp_max(5)}, "the result|raised "
    ),
    "the whole table": given(  # entries past a context may be anything
        PAGED,
        lambda o: o["k_cache_layer"][o["block_table"].long()] is None or {},
        r"raised IndexError: index \d+ ",
    ),
    "the wrong group": (PAGED, by_the_wrong_group, r"the result\[0, 1, 0\].*a wrong value"),
    "the wrong type": after(
        "silu_mul",
        lambda out, o: out.double(),
        r"result is \[1, 1\] float64 on cpu, expected \[1, 1\] float32",
    ),
    "nothing": ("silu_mul", lambda **o: None, r"returned nothing, expected \[1, 1\] float32 on cpu"),
    "whole chunks of K": given(SOME, each(("x", "weight"), to_whole_chunks), r"the result\[0, 0\]: "),
    "the worst token": given(HEAD, lambda o: {"hidden": -o["hidden"]}, r"result 1\[0, 0\]: found \d+, "),
    "never stops": ("advance", never_stops, rf"state.rows\[\d+, {POSITION}\]: found \d+, expected -1 "),
}


@pytest.mark.parametrize("wrong", PLANTED)
def test_a_planted_fault_is_found_and_described(wrong):
    name, kernel, message = PLANTED[wrong]
    KNOWN.clear()
    verdict = check_kernel(name, kernel, device="cpu", seed=5)
    assert not verdict.passed
    assert str(verdict).startswith(f"{name} FAILED in case {verdict.n_cases} (seed 5):\n  ")
    assert re.search(message, str(verdict), re.MULTILINE), str(verdict)


# Right on short inputs.


def last(name: str, most: int) -> Planted:
    """One tile of keys, without the loop over the others."""
    return given(name, lambda o: {"window": min(o["window"] or most, most)})


def first(most: int) -> Planted:
    return given(PAGED, lambda o: {"context_lens": o["context_lens"].clamp(max=most)})


def first_columns(x: torch.Tensor, most: int) -> torch.Tensor:
    """The others are zero."""
    return x * (torch.arange(x.shape[-1], device=x.device) < most)


def product_of(name: str, most: int) -> Planted:
    """The first columns of K only."""
    return given(name, each(("x", "weight"), lambda x: first_columns(x, most)))


def moments_of(most: int) -> Planted:
    """Of the first columns only, as with one block of registers."""

    def spoil(whole, o):
        x = o["x"].float()  # as the specification left it, with the sums
        if o["shift"] is not None:
            x = x - x[:, :most].mean(1, keepdim=True)
        normed = x * torch.rsqrt(x[:, :most].square().mean(1, keepdim=True) + o["eps"]) * o["scale"].float()
        return whole.copy_(normed + (0 if o["shift"] is None else o["shift"].float()))

    return after(NORM, spoil)


def delta_of(most: int) -> Planted:
    """Adds the first columns only."""
    return given(NORM, each(("delta",), lambda x: None if x is None else first_columns(x, most)))


def zero_beyond(name: str, most: int) -> Planted:
    return after(name, lambda out, o: out[..., most:].zero_() is None or out)


def head_of(most: int) -> Planted:
    return given(HEAD, lambda o: {"weight": o["weight"][:most]})


def early(most: int) -> Planted:
    return given(HEADS, lambda o: {"positions": o["positions"].clamp(max=most)})


def is_given(operand: Any) -> bool:
    return operand is not None


def in_parts(plan: Any) -> bool:
    return plan.variant.combine


WRONG = {
    "the last 512 tokens": last(PAGED, 512),
    "the first 128 tokens": first(128),
    "the first 1,024 tokens": first(1024),
    "the last 100 of a window": only_if("window", is_given, last(PAGED, 100)),
    "one head of long groups": only_if(
        "block_table",
        lambda table: table.shape[1] > 16,
        given(PAGED, each(CACHES, lambda cache: cache[:, :1].expand_as(cache))),
    ),
    "append in pieces, 1,000": only_if("plan", in_parts, last(FUSED, 1000)),
    "append, rows whole, 1,000": unless("plan", in_parts, last(FUSED, 1000)),
    "append, the last 1,024": last(FUSED, 1024),
    "prompts in pieces, 1,000": only_if("tiles", lambda tiles: tiles.in_pieces, last(PROMPTS, 1000)),
    "prompts, tiles whole, 1,000": unless("tiles", lambda tiles: tiles.in_pieces, last(PROMPTS, 1000)),
    "norms of 256 rows": after(NORM, lambda out, o: out[256:].zero_() is None or out),
    "norms zero beyond 4,096": zero_beyond(NORM, 4096),
    "moments of 4,096, LayerNorm": only_if("shift", is_given, moments_of(4096)),
    "moments of 4,096, RMSNorm": unless("shift", is_given, moments_of(4096)),
    "delta of 4,096": delta_of(4096),
    "delta of 4,096, no bias": unless("bias", is_given, delta_of(4096)),
    "few rows, 2,048 outputs": zero_beyond(FEW, 2048),
    "few rows, K of 4,096, no norm": unless("norm", is_given, product_of(FEW, 4096)),
    "few rows, K of 4,096, a norm": only_if("norm", is_given, product_of(FEW, 4096)),
    "few rows, K of 4,096, one": only_if("x", lambda x: len(x) == 1, product_of(FEW, 4096)),
    "few rows, K of 4,096, two": only_if("x", lambda x: len(x) == 2, product_of(FEW, 4096)),
    "few rows, K of 4,096, no gate": unless("activation", lambda f: f == "swiglu", product_of(FEW, 4096)),
    "some rows, 2,048 outputs": zero_beyond(SOME, 2048),
    "some rows, K of 4,096, no gate": unless("activation", lambda f: f == "swiglu", product_of(SOME, 4096)),
    "some rows, K of 4,096, in parts": only_if("parts", lambda n: n == 4, product_of(SOME, 4096)),
    "2,048 words, greedy": unless("sampled", bool, head_of(2048)),
    "2,048 words, sampled": only_if("sampled", bool, head_of(2048)),
    "512 tiles of words": given(
        "advance",
        lambda o: each(("values", "indices") if is_given(o["values"]) else (), lambda x: x[:, :512])(o),
    ),
    "embeddings of 2,048 words": given("embed", lambda o: {"ids": o["ids"].clamp(max=2047)}),
    "embeddings with places, 4,096": only_if("places", is_given, zero_beyond("embed", 4096)),
    "silu zero beyond 4,096": zero_beyond("silu_mul", 4096),
    "positions up to 511": early(511),
}


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="gpu", marks=ON_GPU.marks)]
)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_kernel_that_is_right_on_short_inputs_only_is_refused(wrong, device):
    name, kernel, message = WRONG[wrong]
    verdict = check_kernel(name, kernel, seed=3, device=device)
    assert not verdict.passed and message in str(verdict), verdict


@pytest.mark.parametrize("wrong", [first(1099), early(1099), last(PROMPTS, 2000)])
def test_a_context_of_the_readers_own_is_tried_as_long_as_it_is(wrong):
    verdict = check_kernel(*wrong[:2], seed=3, device="cpu", context=2500)
    assert VALUE in str(verdict), verdict


def test_what_only_a_long_prompt_shows_is_refused_by_the_tokens(monkeypatch):
    """As if no case were long: the engine's own run of a long prompt is left."""
    passed = check_kernel("silu_mul", TORCH.silu_mul, n_random=0)
    monkeypatch.setattr("rosellm.lab.trying.try_rung.check_kernel", lambda *_, **__: passed)
    with pytest.raises(KernelError, match="new token .*fused_append's is"):
        try_rung("mine", base="fused_append", **{FUSED: last(FUSED, LONG // 3)[1]})
