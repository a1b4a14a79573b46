"""Which rungs call which kernel (see ``assembly``), and what the other rungs do instead."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

from rosellm.roseinfer.recipe import BEFORE, LADDER

Axes = SimpleNamespace  # of a rung, with its variants


class Caller(NamedTuple):
    """Whether a recipe's step calls a kernel, and what the others do instead."""

    calls: Callable[[Axes], bool]
    instead: Callable[[Axes], str]


def _append(*names: str) -> Callable[[Axes], bool]:
    """Return a predicate: does the host-driven step append in one of these ways?"""
    return lambda recipe: recipe.step == "host" and recipe.append in names


def _stored_by(recipe: Axes) -> str:
    if recipe.append == "fused":
        return "append_and_attend stores the new token itself (append='fused')"
    if recipe.append == "index_put":
        return "torch's index_put stores it (append='index_put')"
    if recipe.step == "resident":
        return "the resident step's rows stand at positions of their own: it calls kv_append_identity_pos"
    return f"append={recipe.append!r} has another kernel"


def _attended_by(recipe: Axes) -> str:
    return (
        "append_and_attend attends"
        if recipe.append == "fused"
        else f"attention={recipe.attention!r} is torch's own"
    )


def _padded(recipe: Axes) -> str:
    return "prompts run through the model's own attention (prefill='padded')"


def _by_model(recipe: Axes) -> str:
    return "the model's own operators run between the products (norm='separate')"


def _product(recipe: Axes) -> str:
    return f"gemm={recipe.gemm!r} has products of its own"


def _silu(recipe: Axes) -> str:
    if recipe.activation == "separate":
        return "the model's own operators activate (activation='separate')"
    return f"{_product(recipe)}, which activate in their epilogue"


def _host(recipe: Axes) -> str:
    return "the host does this (step='host')"


CALLERS = {
    "paged_attention_decode": Caller(lambda r: r.attention == "paged" and r.append != "fused", _attended_by),
    "kv_append": Caller(_append("generic", "full_batch"), _stored_by),
    "kv_append_full_batch": Caller(_append("full_batch", "identity_pos"), _stored_by),
    "kv_append_identity_pos": Caller(lambda r: r.append == "identity_pos", _stored_by),
    "prefill_attention": Caller(lambda r: r.prefill != "padded", _padded),
    "position_heads": Caller(lambda r: r.prefill != "padded", _padded),
    "gumbel_noise": Caller(lambda r: r.head != "fused", lambda r: "the fused head makes its own"),
    "append_and_attend": Caller(lambda r: r.append == "fused", _stored_by),
    "plan_attention": Caller(lambda r: r.append == "fused", lambda r: "only a fused append has a plan"),
    "embed": Caller(lambda r: r.norm == "fused", _by_model),
    "add_norm": Caller(lambda r: r.norm == "fused", _by_model),
    "silu_mul": Caller(lambda r: r.activation == "epilogue" and r.gemm == "library", _silu),
    "few_rows_linear": Caller(lambda r: r.gemm == "small_m", _product),
    "some_rows_linear": Caller(lambda r: r.gemm == "small_m", _product),
    "best_tokens": Caller(lambda r: r.head == "fused", lambda r: "the sampler takes logits (head='logits')"),
    "advance": Caller(lambda r: r.step == "resident", _host),
}  # fmt: skip


def refusal(kernel: str, rung: str) -> str:
    """Return why ``rung`` never calls ``kernel``, and the last earlier rung that does; "" if it does."""
    caller = CALLERS[kernel]
    if caller.calls(_axes(rung)):
        return ""
    below: str | None = BEFORE.get(rung)
    while below is not None and not caller.calls(_axes(below)):
        below = BEFORE.get(below)
    above = next(name for name in LADDER if caller.calls(_axes(name)))
    nearest = f"{below} still does" if below else f"the first that does is {above}"
    return f"{rung} never calls {kernel}: {caller.instead(_axes(rung))}; {nearest}"


def _axes(rung: str) -> Axes:
    return Axes(**LADDER[rung].as_dict())
