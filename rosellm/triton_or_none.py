"""Triton and its language or, without Triton, stand-ins that raise an error when a kernel is launched.

Triton is available on Linux only. Elsewhere kernels can be defined, but their torch versions run instead.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NoReturn

from rosellm.errors import RecipeError

NO_TRITON = "Triton (Linux only) is not installed; use device='cpu' with the torch kernels"


class _Absent:
    """A stand-in for Triton: attributes and decorators work; launching a kernel raises ``RecipeError``."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *decorated: object, **_options: object) -> _Absent:
        if not all(map(callable, decorated)):
            raise RecipeError(NO_TRITON)
        return self

    def __getitem__(self, _grid: object) -> NoReturn:
        raise RecipeError(NO_TRITON)


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return _Absent()


triton, tl = _module("triton"), _module("triton.language")
TensorDescriptor = _module("triton.tools.tensor_descriptor").TensorDescriptor
gluon, gl = _module("triton.experimental.gluon"), _module("triton.experimental.gluon.language")
hopper = _module("triton.experimental.gluon.language.nvidia.hopper")
GluonDescriptor = _module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor
GluonASTSource = _module("triton.experimental.gluon._runtime").GluonASTSource
has_triton = not isinstance(triton, _Absent)


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up; ``triton.cdiv`` is many times slower on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n >= 1``."""
    return 1 << (n - 1).bit_length()
