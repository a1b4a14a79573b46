"""Triton and its language; where it is not installed, stand-ins that say so when a kernel is launched.

Triton comes for Linux. Kernels are defined all the same elsewhere, beside the torch functions that run there.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NoReturn

from rosellm.errors import RecipeError

NO_TRITON = "Triton, which comes for Linux, is not installed here; use device='cpu' with the torch kernels"


class _Absent:
    """Stands for all of Triton: may be named and used as a decorator; whatever a launch needs is refused."""

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
has_triton = not isinstance(triton, _Absent)
