"""Profile the host's own time in decode steps, by Python function (cProfile)."""

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
    """One function's own µs per step, including C but not Python callees, and its calls per step."""

    name: str
    us: float
    calls: float

    @property
    def is_one(self) -> bool:
        """Whether this is a single function; the last entry may sum up the rest."""
        return self.name.startswith("`")


def host_functions(run: Callable[[], object], steps: int, most: int = MOST) -> tuple[HostFunction, ...]:
    """Profile ``run``, which performs ``steps`` steps: the ``most`` costly functions, then the rest.

    The profiler adds overhead to every call, so shares are more reliable than µs. The sum is the host's time,
    whether or not a GPU works meanwhile. Waiting for a GPU counts towards the function that waits.
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
