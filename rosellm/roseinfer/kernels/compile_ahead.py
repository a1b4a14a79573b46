"""Compile kernels on all cores before any of them is launched.

Triton compiles a kernel at its first launch, and a step launches its kernels one after another. Most of a
compilation runs outside Python, so threads can compile concurrently. Triton 3.6 also builds a C launcher at
the first launch with each combination of argument types; the threads build that, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any

from torch import Tensor
from tqdm import tqdm

from rosellm.triton_or_none import TensorDescriptor, has_triton, triton

_ONE_AT_A_TIME = Lock()


def compile_ahead(runs: Iterable[Callable[[], object]]) -> None:
    """Compile all Triton kernels that the functions ``runs`` launch, without launching them.

    Each function is called once with launches disabled, so that outputs stay uninitialised; launches from
    other threads are unaffected. A kernel that does not compile raises when it is launched, not here. After
    one second a progress bar appears on stderr. Without Triton, the functions are not called.
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
    """A thread pool that compiles kernels, builds their launchers, and counts the kernels on ``bar``."""

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


def _compile_once(met: set[Any], kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
    """Compile a kernel unless it has met arguments of the same kinds: a model has many equal layers."""
    kinds = kernel, _kind(arguments), _kind(tuple(options.items()))
    if kinds not in met:
        met.add(kinds)
        kernel.run(*arguments, grid=grid, warmup=True, **options)


def _kind(value: Any) -> Any:
    """Return what a kernel is compiled for: of tensors dtype, alignment and block shape; other values."""
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    return value


def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Make this thread's launches compile their kernels without running them.

    A kernel's arguments are known only where it is launched, so ``kernel[grid]`` itself is replaced.
    """
    kernel_type = triton.runtime.KernelInterface
    with _ONE_AT_A_TIME:
        launch_on, owner = kernel_type.__getitem__, get_ident()
        met: set[Any] = set()

        def name_only(kernel: Any, grid: Any) -> Any:
            mine = get_ident() == owner
            return partial(_compile_once, met, kernel, grid) if mine else launch_on(kernel, grid)

        kernel_type.__getitem__ = name_only
        try:
            yield
        finally:
            kernel_type.__getitem__ = launch_on
