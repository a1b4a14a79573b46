"""Check a reader's kernel against its specification, the torch version of that name in ``kernels.table``."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from textwrap import wrap
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from tqdm.auto import tqdm

from rosellm.errors import RoseError, describe
from rosellm.lab.trying import makers
from rosellm.lab.trying.case import ODD, USES, Case, cases
from rosellm.lab.trying.guarded_memory import Allocations, Draw, fault, faulty
from rosellm.models.arch import Arch
from rosellm.roseinfer.kernels.table import TORCH, Kernels
from rosellm.triton_or_none import has_triton, triton

# Trials use no filters, penalties or log-probabilities.
UNTRIED = ("filtered_tiles", "choose_filtered", "count_tokens", "store_likely", "quantize", "dequantize")
NAMES = tuple(one.name for one in fields(Kernels) if one.name not in ("name", *UNTRIED))
EXACT = {"kv_append", "kv_append_full_batch", "kv_append_identity_pos", "plan_attention", "advance"}
BY_POSITION = {"gumbel_noise", "plan_attention"}  # the engine passes the operands by position
COPIED = torch.float32, torch.float16, torch.bfloat16  # dtypes of appends, which only copy
N_RANDOM = 4
MOST_TOLD = 4  # number of faults to print


class KernelError(RoseError):
    """A kernel that is wrong, that the rung does not call, or that cannot be timed or charted."""

    def _render_traceback_(self) -> list[str]:  # called by IPython
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Verdict:
    """The result of :func:`check_kernel`.

    kernel: the name of the kernel.
    n_cases: number of cases that were tried.
    seed: seed of the inputs.
    case: description of the operands of the call that failed; "" if no call failed.
    faults: a line for each fault of that call.
    launched: names of the Triton kernels that the kernel launched; empty if it failed.
    interpreted: whether Triton's interpreter ran them on a CPU.
    """

    kernel: str
    n_cases: int
    seed: int
    case: str = ""
    faults: tuple[str, ...] = ()
    launched: frozenset[str] = frozenset()
    interpreted: bool = False

    @property
    def passed(self) -> bool:
        return not self.case

    def __str__(self) -> str:
        if self.passed:
            exactly = ", bit for bit" if self.kernel in EXACT else ""
            return f"{self.kernel} PASSED {self.n_cases} cases{exactly}; nothing else was touched"
        more = [f"and {len(self.faults) - MOST_TOLD} faults more"] if len(self.faults) > MOST_TOLD else []
        head = f"{self.kernel} FAILED in case {self.n_cases} (seed {self.seed}):"
        called = wrap(self.case, 96, initial_indent="  with ", subsequent_indent="    ")
        return "\n".join([head, *(f"  {one}" for one in (*self.faults[:MOST_TOLD], *more)), *called])


def check_kernel(
    name: str,
    kernel: Callable[..., Any],
    *,
    seed: int | None = None,
    model: Arch | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    n_random: int = N_RANDOM,
    context: int = 0,
) -> Verdict:
    """Compare ``kernel`` with the specification ``name`` in many cases, up to the first case that fails.

    kernel: called like the kernel in the engine, with operands by name, or by position for ``BY_POSITION``.
    seed: seed of the inputs; None draws a seed, which the verdict states.
    model: architecture whose sizes are tried, too; None for none.
    dtype: checked besides fp32; appends are checked in fp32, fp16 and bfloat16 instead.
    device: None means a GPU if available, else the CPU.
    n_random: number of cases with random sizes.
    context: number of cached tokens of two additional cases; 0 for none.

    The fixed sizes range from one row and one column over odd sizes to those of GPT-2 (33 rows, 12 heads of
    64, blocks of 64) and Llama (heads of 128, 2,048 columns), and to long ones: contexts of 300 and 1,025
    cached tokens, a vocabulary of 5,000 and 8,448 columns, each with every option of the kernel. Raises
    KernelError for an unknown name.
    """
    check_name(name, kernel)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    seed = secrets.randbits(31) if seed is None else seed
    dtypes = COPIED if name.startswith("kv_append") else tuple(dict.fromkeys((torch.float32, dtype)))
    drawn = list(cases(model, dtypes, seed, n_random, context))
    is_read = sys.stderr.isatty() or "JPY_SESSION_NAME" in os.environ  # a terminal or JupyterLab
    told = tqdm(drawn, desc=name, unit="case", leave=False, delay=1, disable=not is_read)
    with launches() as launched:
        for n, case in enumerate(told, 1):
            if found := faults_of(name, kernel, case, seed + n, where):
                failed = described(getattr(makers, name)(case, Draw(seed + n, where)))
                return Verdict(name, n, seed, failed, tuple(found))
    is_interpreted = bool(launched) and where.type == "cpu"
    return Verdict(name, len(drawn), seed, launched=frozenset(launched), interpreted=is_interpreted)


def check_name(name: str, kernel: object) -> None:
    """Raise KernelError unless a kernel ``name`` exists that can be tried, and ``kernel`` is callable."""
    if name in UNTRIED:
        raise KernelError(f"{name} serves filters, penalties or quantised weights; trials have none")
    if name not in NAMES:
        raise KernelError(f"there is no kernel {name!r} to replace: there are {', '.join(NAMES)}")
    if not callable(kernel):
        raise KernelError(
            f"{name}={describe(kernel)} cannot be called; give a function like the specification"
        )


@torch.inference_mode()
def faults_of(
    name: str, kernel: Callable[..., Any], case: Case, seed: int, device: torch.device
) -> list[str]:
    """Return a line for each fault of ``kernel`` in one case; [] if it matches the specification."""
    wanted, drawn, exact = Draw(seed, device), Draw(seed, device), name in EXACT
    make = getattr(makers, name)
    expected = _results(name, _called(name, getattr(TORCH, name), make(case, wanted)))
    given = make(case, drawn)
    before = [buffer.memory.clone() for buffer in drawn.buffers]
    try:
        with Allocations() as made:
            returned = _called(name, kernel, given)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        return [f"raised {_first_line(error)}"]
    faults = _compared(_results(name, returned), expected, exact)
    for buffer, then, right in zip(drawn.buffers, before, wanted.buffers, strict=True):
        faults += buffer.faults(then, right, exact)
    return [*faults, *made.faults()]


def _called(name: str, kernel: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    return kernel(*given.values()) if name in BY_POSITION else kernel(**given)


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's root cause, which Triton's interpreter wraps in other errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return describe(error).splitlines()[0]


def _results(name: str, returned: Any) -> list[Any] | None:
    """Return the results to compare as a list; None if the kernel returned nothing.

    The LM head's results per tile are reduced to one per row; ties go to the lowest index.
    """
    if not isinstance(returned, tuple):
        return None if returned is None else [returned]
    results = list(returned[2:] if name == "plan_attention" else returned)
    if name == "best_tokens" and all(isinstance(one, Tensor) and one.dim() == 2 for one in results):
        values, indices = results
        best = values.max(dim=1, keepdim=True).values
        results = [best, torch.where(values == best, indices, 2**31 - 1).min(dim=1, keepdim=True).values]
    return results


def _compared(found: list[Any] | None, expected: list[Any] | None, exact: bool) -> list[str]:
    if found is None or expected is None or len(found) != len(expected):
        return [] if found is expected else [f"returned {_form(found)}, expected {_form(expected)}"]
    faults: list[str] = []
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        name = "the result" if len(found) == 1 else f"result {i}"
        if _form([one]) != _form([other]):
            faults.append(f"{name} is {_form([one])}, expected {_form([other])}")
        elif isinstance(one, Tensor) and (wrong := faulty(one, other, exact)).any():
            faults.append(fault(name, wrong, one, other, "a wrong value"))
    return faults


def _form(results: list[Any] | None) -> str:
    if results is None:
        return "nothing"
    return ", ".join(
        f"{list(one.shape)} {_short(one.dtype)} on {one.device.type}"
        if isinstance(one, Tensor)
        else describe(one)
        for one in results
    )


def described(given: Mapping[str, Any]) -> str:
    """Describe operands in one line: tensors by shape, dtype and row stride, and other values by ``str``."""
    return ", ".join(f"{name} {_described(value)}" for name, value in given.items())


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        strided = "" if value.is_contiguous() else f", rows {value.stride(0)} apart"
        return f"{list(value.shape)} {_short(value.dtype)}{strided}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        inner = [f"{name} {_described(one)}" for name, one in zip(value._fields, value, strict=True)]
        return f"({', '.join(inner)})"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"of {len(value.rows)} rows" if hasattr(value, "rows") else str(value)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def triton_kernels(name: str, kernel: Callable[..., Any], device: torch.device) -> frozenset[str]:
    """Return the names of the Triton kernels that ``kernel`` launches, over all its options."""
    with launches() as launched:
        for option in range(USES):
            faults_of(name, kernel, replace(ODD, option=option), 0, device)
    return frozenset(launched)


@contextmanager
def launches() -> Iterator[set[str]]:
    """Yield a set that collects the names of the Triton kernels launched within the context."""
    seen: set[str] = set()
    if not has_triton:
        yield seen
        return
    interface = triton.runtime.jit.KernelInterface
    launch = interface.__getitem__

    def noted(kernel: Any, grid: Any) -> Callable[..., Any]:
        seen.add(_name(kernel))
        return launch(kernel, grid)

    with patch.object(interface, "__getitem__", noted):
        yield seen


def _name(kernel: Any) -> str:
    """Return the name of a Triton kernel's function, even if the kernel is autotuned."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return getattr(kernel, "__name__", "a Triton kernel")
