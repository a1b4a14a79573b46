"""Kernels compiled on all cores, before any of them is launched.

Triton compiles a kernel at its first launch, and the launches of a step come one after the other. Most of a
compilation is outside Python, so threads compile at the same time. Triton 3.6 also builds, at the first
launch with these types of arguments, an extension in C that launches it: the threads do that, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any

from tqdm import tqdm

from rosellm.triton_or_none import has_triton, triton

_ONE_AT_A_TIME = Lock()


def compile_ahead(runs: Iterable[Callable[[], object]]) -> None:
    """Compile the kernels that ``runs`` launch; they are called, but no kernel of Triton's runs.

    What follows a launch finds its outputs as they were allocated. Other threads launch as ever. A kernel
    that does not compile raises when it is launched, not here. If it takes longer than a second, a progress
    bar on stderr tells how long. Without Triton nothing is called.
    """
    if not has_triton:
        return
    with (
        tqdm(desc="compile", total=0, unit=" kernels", delay=1) as bar,
        _Compilers(bar) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
        _launching_nothing(),
    ):
        for run in runs:
            run()


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels, and build what launches them; ``bar`` counts the kernels."""

    def __init__(self, bar: tqdm) -> None:
        super().__init__()
        self._bar, self._n_kernels = bar, 0

    def submit(self, compile_kernel: Callable[[], Any]) -> Future:  # type: ignore[override]
        self._n_kernels += 1
        self._bar.total = self._n_kernels
        future = super().submit(_with_launcher, compile_kernel)
        future.add_done_callback(self._count)
        return future

    def _count(self, _future: Future) -> None:
        with self._bar.get_lock():
            self._bar.update()


def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """This thread's launches only name what is to be compiled."""
    kernel_type = triton.runtime.KernelInterface
    with _ONE_AT_A_TIME:
        launch_on, owner = kernel_type.__getitem__, get_ident()

        def name_only(kernel: Any, grid: Any) -> Any:
            mine = get_ident() == owner
            return partial(kernel.run, grid=grid, warmup=True) if mine else launch_on(kernel, grid)

        kernel_type.__getitem__ = name_only
        try:
            yield
        finally:
            kernel_type.__getitem__ = launch_on
