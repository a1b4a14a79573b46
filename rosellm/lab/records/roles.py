"""Determine the role of each kernel or operator in a decode step: what it is for.

Kernels and operators are identified by name. If a name is ambiguous, the profiler range in which the engine
launched it decides, or its neighbours in the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rosellm.lab.records.trace import Event, Trace
from rosellm.roseinfer.kernels import table

OTHER = "other"

# The role of everything launched inside a profiler range of the engine, whatever its own name.
RANGE_ROLES = {
    "kv_append": "append",
    "sample": "sampling",
    "build_mask": "mask",
    "build_block_tables": "inputs",
    "h2d_block_tables": "inputs",
    "stage_tokens": "inputs",
}
# Our own kernels declare their roles.
OWN_ROLES = table.ROLES | {"_persistent_layers_kernel": "layers"}
# The role of a library kernel is the first with a substring of the kernel's name.
LIBRARY_ROLES = {
    "put": ("index_put",),
    "attention": ("attention", "attend", "flash", "fmha", "sdpa"),
    "softmax": ("softmax",),
    "sampling": ("argmax", "sort", "topk", "scan", "multinomial"),
    "norm": ("layer_norm", "layernorm", "rmsnorm"),
    "embedding": ("embed", "indexselect", "index_select", "vectorized_gather"),
    "GEMM": ("gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk", "cublas", "dot_kernel"),
    "elementwise": ("elementwise", "gelu", "copy", "cat", "fill", "reduce", "index", "scatter", "gather"),
}
# The role of an operator, by its name without namespace and in-place underscore.
OPERATOR_ROLES = {
    name: role
    for role, names in {
        "GEMM": "addmm mm linear _addmm_activation _linear_pointwise",
        "product": "matmul bmm baddbmm einsum",
        "softmax": "softmax _softmax",
        "attention": "scaled_dot_product_attention",
        "put": "index_put",
        "norm": "layer_norm native_layer_norm rms_norm _fused_rms_norm",
        "embedding": "embedding",
        "sampling": "argmax sort topk cumsum multinomial log_softmax",
        "elementwise": """
            __and__ __or__ abs add amax arange bitwise_and bitwise_not bitwise_or cat clamp clamp_max
            clamp_min clone contiguous copy div eq exp fill floor_divide full gather ge gelu gt index
            index_copy index_select isin isinf isnan item le log logical_and logical_not logical_or lt
            masked_fill max maximum mean min mul ne neg new_full new_ones new_zeros nonzero ones pad
            pow remainder repeat rsqrt rsub scatter silu square stack sub sum tanh to where zero zeros""",
        "views": """
            alias chunk detach empty empty_like empty_strided expand flatten lift_fresh narrow new_empty
            permute reshape resolve_conj resolve_neg select slice split split_with_sizes squeeze t
            tensor_split transpose unbind unsqueeze view view_as""",
    }.items()
    for name in names.split()
}
# Roles that name an operation rather than its purpose.
GENERIC = {"elementwise", "views"}
# Roles that name an operation with one usual purpose: that purpose, used if no neighbour decides otherwise.
USUAL = {"product": "GEMM", "softmax": "attention", "put": "append"}


class Marked(NamedTuple):
    """Work that is listed with a role of its own.

    name: the name of this role; also of a profiler range, and all work launched inside it is included.
    role: the role that the work has when its neighbours are classified.
    kernels: names of further kernels that are included.
    """

    name: str
    role: str
    kernels: frozenset[str]

    def has(self, event: Event, part: str) -> bool:
        return part == self.name or event.name in self.kernels


def roles_of(trace: Trace, work: list[Event], steps: list[Event], marked: Sequence[Marked] = ()) -> list[str]:
    """Return the role of every event of ``work``.

    work: events of ``trace`` in order of start.
    steps: the ranges of the single steps, within which neighbours decide.
    marked: work with roles of its own.
    """
    operators = trace.of("op")
    parts = trace.host_at(event.started for event in work)
    marks = [next((m for m in marked if m.has(*one)), None) for one in zip(work, parts, strict=True)]
    roles = [
        mark.role if mark else _role(event, _launcher(operators, event), part)
        for event, part, mark in zip(work, parts, marks, strict=True)
    ]
    members: dict[int, list[int]] = {}
    for i, event in enumerate(work):
        step = bisect_right(steps, event.started, key=lambda one: one.start)
        members.setdefault(step, []).append(i)
    for indices in members.values():
        for i, role in zip(indices, by_place([roles[i] for i in indices]), strict=True):
            roles[i] = role
    return [mark.name if mark else role for role, mark in zip(roles, marks, strict=True)]


def _launcher(operators: list[Event], event: Event) -> str:
    """Return the name of the operator that was running when ``event`` was issued; "" if none was."""
    i = bisect_right(operators, event.started, key=lambda op: op.start) - 1
    return operators[i].name if i >= 0 and event.started <= operators[i].end else ""


def _role(event: Event, launcher: str, part: str) -> str:
    if event.kind == "copy":
        return next((f"copy {way}" for way in ("HtoD", "DtoH", "DtoD") if way in event.name), "copy")
    if event.kind == "memset":
        return "memset"
    by_launcher = operator_role(launcher)
    return RANGE_ROLES.get(part, kernel_role(event.name) if by_launcher == OTHER else by_launcher)


def operator_role(name: str) -> str:
    """Return e.g. ``GEMM`` for ``aten::addmm``; "other" if unknown."""
    short = name.rpartition("::")[2]
    return OPERATOR_ROLES.get(short, OPERATOR_ROLES.get(short.rstrip("_"), OTHER))


def kernel_role(name: str) -> str:
    """Return e.g. ``norm`` for ``_add_norm_kernel``; "other" if unknown."""
    lower = name.lower()
    found = (role for role, pieces in LIBRARY_ROLES.items() if any(piece in lower for piece in pieces))
    return OWN_ROLES.get(name) or next(found, OTHER)


def by_place(roles: list[str]) -> list[str]:
    """Resolve the ambiguous roles of one step from their neighbours.

    roles: the roles of the step's work, in order of start.

    - GEMMs after the last norm are the head.
    - Generic work, softmax and index_put after the head are sampling.
    - Generic work before the embedding, or else before the first norm, is inputs.
    - A softmax is attention, and so are the nearest matrix product on either side and the generic work around
      them, up to other work such as the layer's GEMMs.
    - Other generic work next to attention or an append takes its role.
    """
    roles = list(roles)
    if "head" not in roles and "norm" in roles:
        _rename(roles, range(_last(roles, "norm"), len(roles)), {"GEMM", "product"}, "head")
    if "head" in roles:
        _rename(roles, range(_last(roles, "head"), len(roles)), {*GENERIC, "softmax", "put"}, "sampling")
    first = next((roles.index(role) for role in ("embedding", "norm") if role in roles), 0)
    _rename(roles, range(first), GENERIC, "inputs")
    for role, products in (("attention", 0), ("softmax", 1), ("append", 0), ("put", 0)):
        for i in [i for i, one in enumerate(roles) if one == role]:
            roles[i] = USUAL.get(role, role)
            _absorb(roles, range(i - 1, -1, -1), roles[i], products)
            _absorb(roles, range(i + 1, len(roles)), roles[i], products)
    return [USUAL.get(role, role) for role in roles]


def _last(roles: list[str], role: str) -> int:
    return len(roles) - 1 - roles[::-1].index(role)


def _rename(roles: list[str], places: Iterable[int], old: set[str], new: str) -> None:
    for i in places:
        if roles[i] in old:
            roles[i] = new


def _absorb(roles: list[str], around: Iterable[int], role: str, products: int) -> None:
    """Overwrite generic roles with ``role``, in place, and stop at the first role that is not generic.

    around: indices in the order in which they are visited.
    products: number of matrix products that are overwritten too, before one stops the walk.
    """
    for i in around:
        if roles[i] == "product" and products:
            products -= 1
        elif roles[i] not in GENERIC:
            return
        roles[i] = role
