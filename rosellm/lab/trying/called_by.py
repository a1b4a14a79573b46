"""Find out which rungs call which kernel, according to how ``assembly`` builds a rung's step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rosellm.roseinfer.recipe import BEFORE, LADDER

Fields = Mapping[str, tuple[str, ...]]
APART: Fields = {"append": ("index_put", "generic", "full_batch", "identity_pos")}
FUSED: Fields = {"append": ("fused",)}


class Role(NamedTuple):
    """A kernel's role.

    name: the cause of the kernel's time in a ledger.
    fields: the values of recipe fields with which a step calls the kernel; all fields must match.
    """

    name: str
    fields: Fields


ROLES = {
    "paged_attention_decode": Role("attention", {**APART, "attention": ("paged",)}),
    "kv_append": Role("append", {"append": ("generic", "full_batch"), "step": ("host",)}),
    "kv_append_full_batch": Role("append", {"append": ("full_batch", "identity_pos"), "step": ("host",)}),
    "kv_append_identity_pos": Role("append", {"append": ("identity_pos",)}),
    "prefill_attention": Role("attention", {"prefill": ("packed",)}),
    "position_heads": Role("elementwise", {"prefill": ("packed",)}),
    "gumbel_noise": Role("sampling", {"head": ("logits",)}),
    "append_and_attend": Role("attention", FUSED),
    "plan_attention": Role("attention", FUSED),
    "embed": Role("embedding", {"norm": ("fused",)}),
    "add_norm": Role("norm", {"norm": ("fused",)}),
    "silu_mul": Role("elementwise", {"activation": ("epilogue",), "gemm": ("library",)}),
    "few_rows_linear": Role("GEMM", {"gemm": ("small_m",)}),
    "some_rows_linear": Role("GEMM", {"gemm": ("small_m",)}),
    "best_tokens": Role("head", {"head": ("fused",)}),
    "advance": Role("sampling", {"step": ("resident",)}),
}


def refusal(kernel: str, rung: str) -> str:
    """Return why ``rung`` never calls ``kernel``, and the nearest rung that does; "" if ``rung`` does."""
    if not (reason := _mismatch(kernel, rung)):
        return ""
    below: str | None = BEFORE.get(rung)
    while below is not None and _mismatch(kernel, below):
        below = BEFORE.get(below)
    above = next(name for name in LADDER if not _mismatch(kernel, name))
    nearest = f"{below} still does" if below else f"the first that does is {above}"
    return f"{rung} never calls {kernel}: {reason}; {nearest}"


def _mismatch(kernel: str, rung: str) -> str:
    """Describe the recipe field that keeps a rung from calling the kernel; "" if the rung calls it."""
    recipe = LADDER[rung].as_dict()
    for field, values in ROLES[kernel].fields.items():
        if (found := recipe[field]) not in values:
            return f"its {field} is {found!r}, not {' or '.join(map(repr, values))}"
    return ""
