"""Triton's interpreter without its repetition: a third less for a kernel that calls functions.

To interpret a kernel, Triton exchanges what ``triton.language`` holds, and puts it back at the end. It does
so again for each function that the kernel calls, when all is exchanged already: nothing is left to do then.
"""

from types import FunctionType

import triton.language as tl
from triton.runtime import interpreter

_exchange = interpreter._patch_lang


def _exchange_once(fn: FunctionType) -> interpreter._LangPatchScope:
    seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    if seen and not any(tl.core.is_builtin(language.load) for language in seen):
        return interpreter._LangPatchScope()
    return _exchange(fn)


def install() -> None:
    interpreter._patch_lang = _exchange_once
