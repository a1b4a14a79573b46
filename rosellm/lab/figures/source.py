"""Show the source of objects of the package in a notebook, or the difference between two of them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from difflib import SequenceMatcher, ndiff
from pathlib import Path
from typing import Any

from IPython.display import Markdown, display

import rosellm
from rosellm.errors import RoseError

CHECKOUT = Path(rosellm.__file__).resolve().parent.parent


class SourceError(RoseError):
    """An object without Python source, or a class without the requested member."""


def show_source(*objects: Any, only: Sequence[str] = ()) -> None:
    """Display the source of functions, classes and Triton kernels, each under its name and file.

    only: names of the class members to show; all if empty.

    Line numbers are omitted because nbval compares the output, which must not change with edits further up in
    the file.
    """
    sources = [source_of(one, only) for one in objects]
    blocks = (f"{_heading(one)}\n```python\n{own}\n```" for one, own in zip(objects, sources, strict=True))
    display(Markdown("\n\n".join(blocks)))


def show_pair(before: object, after: object) -> None:
    """Display a diff of the sources of two objects.

    If the sources have less than a third of their lines in common, they are shown one below the other.
    """
    old, new = (source_of(one).splitlines() for one in (before, after))
    if SequenceMatcher(None, old, new).ratio() < 1 / 3:
        show_source(before, after)
        return
    lines = [line.rstrip() for line in ndiff(old, new) if not line.startswith("?")]
    heading = f"{_heading(before)} → {_heading(after)}"
    display(Markdown(f"{heading}\n```diff\n" + "\n".join(lines) + "\n```"))


def source_of(one: Any, only: Sequence[str] = ()) -> str:
    """Return the dedented source of an object.

    only: for a class, the names of the members to return below the class's head; all if empty.

    Raises SourceError for an object without source, or a member that the class itself does not define.
    """
    if only and inspect.isclass(one):
        return _members(one, only)
    try:
        return textwrap.dedent(inspect.getsource(_unwrapped(one))).rstrip()
    except (OSError, TypeError):
        raise SourceError(f"{_name(one)} has no Python source to show") from None


def _members(cls: type, only: Sequence[str]) -> str:
    """Return a class's decorators, its ``class`` line, dots for omitted members, and the members ``only``."""
    if missing := [name for name in only if name not in vars(cls)]:
        there = ", ".join(name for name in vars(cls) if not name.startswith("__"))
        raise SourceError(f"{cls.__name__} does not define {missing[0]}: there are {there}")
    head = source_of(cls).partition(":\n")[0] + ":\n    ..."
    return "\n\n".join([head, *(textwrap.indent(source_of(vars(cls)[name]), "    ") for name in only)])


def _unwrapped(one: Any) -> Any:
    """Return the Python function in a Triton kernel, autotuner, property, class method or static method."""
    for name in ("fn", "fget", "func", "__func__"):
        inner = getattr(one, name, None)
        if inner is not None and not inspect.isclass(one):
            return _unwrapped(inner)
    return inspect.unwrap(one) if callable(one) else one


def _name(one: Any) -> str:
    inner = _unwrapped(one)
    return getattr(inner, "__qualname__", None) or type(inner).__name__


def _heading(one: Any) -> str:
    return f"`{_name(one)}` · `{_file(one)}`"


def _file(one: Any) -> str:
    """Return the file of an object: relative to the checkout, or its name and folder, or "this notebook"."""
    path = Path(inspect.getsourcefile(_unwrapped(one)) or "").resolve()
    if path.is_relative_to(CHECKOUT / "rosellm"):
        return path.relative_to(CHECKOUT).as_posix()
    return "/".join(path.parts[-2:]) if path.is_file() else "this notebook"
