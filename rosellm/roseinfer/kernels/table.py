"""The device functions that an engine calls, in one bundle: Triton kernels, or their torch references.

Triton runs on a GPU, and in its interpreter on a CPU (for tests: about a millisecond per program). The torch
references run anywhere; an engine on a CPU uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rosellm.errors import RecipeError, describe
from rosellm.roseinfer import kv_append_triton as kv
from rosellm.roseinfer.kernels import (
    advance,
    attention,
    attention_plan,
    few_rows,
    filtered,
    filtered_head,
    grouped_ring,
    head,
    likely,
    linear,
    noise,
    norm,
    online_softmax,
    peer_sums,
    penalties,
    prefill,
    prefill_pieces,
    prefill_ring,
    quantize,
    ring,
    ring_attention,
    rotary,
    speculation,
    verify_attention,
    wide_prefixes,
)
from rosellm.rosetrainer import paged_attention as paged
from rosellm.triton_or_none import NO_TRITON, has_triton

# The role of each Triton kernel, by its name in a profile.
LAYERS = (
    paged,
    kv,
    attention,
    attention_plan,
    few_rows,
    linear,
    norm,
    online_softmax,
    peer_sums,
    quantize,
    rotary,
)
RINGS = ring, grouped_ring, ring_attention
DRAFTS = speculation, verify_attention
PREFILLS = prefill, prefill_pieces, prefill_ring, wide_prefixes
OTHERS = advance, filtered, filtered_head, head, likely, noise, penalties
GROUPS = LAYERS, RINGS, DRAFTS, PREFILLS, OTHERS
ROLES = {name: role for sources in GROUPS for source in sources for name, role in source.ROLES.items()}


@dataclass(frozen=True)
class Kernels:
    """One implementation, in Triton or torch, of every device function that an engine calls."""

    name: str
    paged_attention_decode: Callable[..., torch.Tensor]
    kv_append: Callable[..., None]
    kv_append_full_batch: Callable[..., None]
    kv_append_identity_pos: Callable[..., None]
    prefill_attention: Callable[..., torch.Tensor]
    position_heads: Callable[..., None]
    gumbel_noise: Callable[..., torch.Tensor]
    append_and_attend: Callable[..., torch.Tensor]
    plan_attention: Callable[..., Any]
    embed: Callable[..., torch.Tensor]
    add_norm: Callable[..., Any]
    silu_mul: Callable[..., torch.Tensor]
    few_rows_linear: Callable[..., torch.Tensor]
    some_rows_linear: Callable[..., torch.Tensor]
    quantize: Callable[..., Any]
    dequantize: Callable[..., torch.Tensor]
    best_tokens: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    filtered_tiles: Callable[..., filtered_head.Tiles]
    choose_filtered: Callable[..., None]
    count_tokens: Callable[..., None]
    store_likely: Callable[..., None]
    advance: Callable[..., None]


def triton_kernels(dependent: int) -> Kernels:
    """Return the Triton kernels.

    dependent: the launch mode, as in ``launch_options``, of the kernels of a GPU-resident step.
    """
    step: dict[str, Callable[..., Any]] = {
        "prefill_attention": prefill.prefill_attention,
        "position_heads": rotary.position_heads,
        "append_and_attend": attention.append_and_attend,
        "plan_attention": attention_plan.make_plan,
        "embed": norm.embed,
        "add_norm": norm.add_norm,
        "silu_mul": norm.silu_mul,
        "few_rows_linear": few_rows.few_rows_linear,
        "some_rows_linear": linear.some_rows_linear,
        "quantize": quantize.quantize,
        "best_tokens": head.best_tokens,
        "filtered_tiles": filtered_head.filtered_tiles,
        "choose_filtered": filtered.choose_filtered,
        "count_tokens": penalties.count_tokens,
        "advance": advance.advance,
    }
    return Kernels(
        name="triton",
        paged_attention_decode=paged.paged_attention_decode,
        kv_append=kv.kv_append_triton,
        kv_append_full_batch=kv.kv_append_triton_full_batch,
        kv_append_identity_pos=kv.kv_append_triton_identity_pos,
        gumbel_noise=noise.gumbel_noise_triton,
        store_likely=likely.store_likely,
        dequantize=quantize.dequantize,
        **{name: partial(kernel, dependent=dependent) for name, kernel in step.items()},
    )


TRITON, TRITON_DEPENDENT = triton_kernels(dependent=False), triton_kernels(dependent=True)
TORCH = Kernels(
    "torch",
    paged.paged_attention_decode_ref,
    kv.kv_append_ref,
    kv.kv_append_rows_ref,
    kv.kv_append_live_rows_ref,
    prefill.prefill_attention_ref,
    rotary.position_heads_ref,
    noise.gumbel_noise,
    attention.append_and_attend_ref,
    attention_plan.make_plan_ref,
    norm.embed_ref,
    norm.add_norm_ref,
    norm.silu_mul_ref,
    few_rows.few_rows_linear_ref,
    linear.some_rows_linear_ref,
    quantize.quantize_ref,
    quantize.dequantize_ref,
    head.best_tokens_ref,
    filtered_head.filtered_tiles_ref,
    filtered.choose_filtered_ref,
    penalties.count_tokens_ref,
    likely.store_likely_ref,
    advance.advance_ref,
)


def is_stock(kernels: Kernels, name: str) -> bool:
    """Return whether the kernel ``name`` is the package's own in Triton, not a replacement."""
    return getattr(kernels, name) in (getattr(TRITON, name), getattr(TRITON_DEPENDENT, name))


def choose_kernels(name: str | Kernels, launch: str, device: torch.device) -> Kernels:
    """Return the kernels called ``triton``, ``torch`` or ``auto`` (Triton on a GPU or if autotuned).

    name: one of these names, or ``Kernels``, which are returned unchanged.
    launch: "fixed", "dependent" (programmatic dependent launch, on a GPU) or "autotuned".

    Raises ``RecipeError`` for an unknown name, or if the kernels cannot run on the device.
    """
    if isinstance(name, Kernels):
        return name
    if name == "auto":
        name = "triton" if device.type == "cuda" or launch == "autotuned" else "torch"
    if name == "torch":
        if launch == "autotuned":
            raise RecipeError("launch='autotuned' requires Triton kernels; kernels='torch' cannot be tuned")
        return TORCH
    if name != "triton":
        raise RecipeError(f"kernels={describe(name)} is unknown; use 'auto', 'triton' or 'torch'")
    if not has_triton:
        raise RecipeError(NO_TRITON)
    if device.type == "cpu" and torch.cuda.is_available():
        raise RecipeError(
            "kernels='triton' on device 'cpu' needs TRITON_INTERPRET=1 and no visible GPU; "
            "use kernels='torch'"
        )
    if launch == "dependent" and device.type == "cuda":
        return TRITON_DEPENDENT
    if launch in ("fixed", "dependent"):
        return TRITON
    do_bench = None if device.type == "cuda" else _first_configuration
    return replace(TRITON, paged_attention_decode=paged.make_autotuned_paged_attention_decode(do_bench))


def _first_configuration(run: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
    """Stand in for Triton's ``do_bench`` in the interpreter, where timing is meaningless.

    Calls ``run`` once, and returns the same time for every configuration.
    """
    run()
    return [1.0] * len(quantiles)
