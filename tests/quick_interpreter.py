"""Triton's interpreter without its repetition: half the time of most kernels.

To interpret a kernel, Triton exchanges what ``triton.language`` holds, and puts it back at the end. It does
so again for each function that the kernel calls, when all is exchanged already: nothing is left to do then.
And each value's shape and type are worked out and named anew, of which a kernel has a handful.
"""

import math
from collections.abc import Callable
from functools import cache
from types import FunctionType

import numpy as np
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

_exchange = interpreter._patch_lang
_make_block_type = tl.block_type.__init__
_numpy_type_of_scalar = cache(interpreter._get_np_dtype)
_block_types: dict[tuple, dict] = {}


def _exchange_once(fn: FunctionType) -> interpreter._LangPatchScope:
    seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    if seen and not any(tl.core.is_builtin(language.load) for language in seen):
        return interpreter._LangPatchScope()
    return _exchange(fn)


def _exchange_builtin(
    obj: object, name: str, member: Callable, _builder: object, scope: interpreter._LangPatchScope
) -> None:
    def interpreted(*args: object, _semantic: object = None, **options: object) -> object:
        return member(*args, **options, _semantic=interpreter.interpreter_semantic)

    scope.set_attr(obj, name, interpreted)


@cache
def _shape_of_tensor(shape: tuple[int, ...]) -> tuple[tl.constexpr, tl.tuple]:
    sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
    return tl.constexpr(math.prod(sizes)), tl.tuple(map(tl.constexpr, sizes))


def _init_tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape_of_tensor(type.shape if type.is_block() else ())


def _init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: list) -> None:
    key = element_ty.name, *[size.value if isinstance(size, tl.constexpr) else size for size in shape]
    made = _block_types.get(key)
    if made is None:
        _make_block_type(self, element_ty, shape)
        _block_types[key] = {name: getattr(self, name) for name in ("shape", "numel", "name")}
    else:
        self.__dict__.update(made, element_ty=element_ty)


def _numpy_type(kind: tl.dtype) -> np.dtype:
    scalar = kind.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _numpy_type_of_scalar(scalar)


def install() -> None:
    """Unless Triton compiles, whose types must stay its own."""
    if not knobs.runtime.interpret:
        return
    interpreter._patch_lang = _exchange_once
    interpreter._patch_attr = _exchange_builtin
    interpreter._get_np_dtype = _numpy_type
    tl.tensor.__init__ = _init_tensor
    tl.block_type.__init__ = _init_block_type
