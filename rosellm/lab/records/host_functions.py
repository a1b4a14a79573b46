"""Measure the host's time in decode steps by Python function, with cProfile."""

from __future__ import annotations

import cProfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

MOST = 10


@dataclass(frozen=True)
class HostFunction:
    """The host's time in one Python function.

    name: file and qualified name, in backquotes.
    us: µs per step, including C functions that it calls, but not Python functions.
    calls: calls per step.
    """

    name: str
    us: float
    calls: float

    @property
    def is_one(self) -> bool:
        """Whether this is a single function, rather than the entry that sums up all remaining functions."""
        return self.name.startswith("`")


def host_functions(run: Callable[[], object], steps: int, most: int = MOST) -> tuple[HostFunction, ...]:
    """Profile ``run``, and return the functions in which the host spends most time, costliest first.

    run: performs ``steps`` steps.
    most: number of functions to list; one further entry sums up all remaining functions.

    The entries add up to the host's time, whether or not a GPU works meanwhile; waiting for a GPU counts
    towards the function that waits. The profiler slows down every call, so that shares are more reliable
    than µs.
    """
    profiler = cProfile.Profile(builtins=False)
    profiler.runcall(run)
    us: dict[str, float] = defaultdict(float)
    calls: dict[str, float] = defaultdict(float)
    for entry in profiler.getstats():
        if isinstance(entry.code, CodeType):
            us[_name(entry.code)] += entry.inlinetime / steps * 1e6
            calls[_name(entry.code)] += entry.callcount / steps
    every = [
        HostFunction(name, us[name], calls[name]) for name in sorted(us, key=us.__getitem__, reverse=True)
    ]
    if rest := every[most:]:
        others = sum(f.us for f in rest), sum(f.calls for f in rest)
        every[most:] = [HostFunction(f"{len(rest)} other functions", *others)]
    return tuple(every)


def _name(code: CodeType) -> str:
    """Return e.g. ``kv_blocks.KVBlocks.reserve``: the module's file, then the qualified name."""
    path = Path(code.co_filename)
    file = "notebook" if "ipykernel" in str(path.parent) else path.stem
    return f"`{'generated' if file == '<string>' else file}.{code.co_qualname}`"
