"""Compile kernels on all cores before any of them is launched.

Triton compiles a kernel at its first launch, and a step launches its kernels one after another. Of a
compilation, only the front end runs in Python: threads take turns at it, and run all else concurrently.
Triton 3.6 also builds a C launcher at the first launch with each combination of argument types; the threads
build that, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock, Thread, get_ident
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from rosellm.triton_or_none import GluonDescriptor, TensorDescriptor, has_triton, triton

SWITCH_SECONDS = 0.05
_ONE_AT_A_TIME = Lock()


def begin_hashing() -> None:
    """Hash Triton's files in another thread: the first compilation, or look-up, takes 0.4 s for it."""
    if has_triton and torch.cuda.is_available():
        _hashing()


@cache
def _hashing() -> Thread:
    thread = Thread(target=triton.runtime.cache.triton_key, daemon=True)
    thread.start()
    return thread


def compile_ahead(runs: Iterable[Callable[[], object]]) -> None:
    """Compile all Triton kernels that the functions ``runs`` launch, without launching them.

    Each function is called once with launches disabled, so that outputs stay uninitialised; launches from
    other threads are unaffected. A kernel that does not compile raises when it is launched, not here. After
    one second a progress bar appears on stderr. Without Triton, the functions are not called.
    """
    if not has_triton:
        return
    _hashing().join()
    jobs, bar = _Jobs(), tqdm(desc="compile", total=0, unit=" kernels", delay=1)
    with _ONE_AT_A_TIME, bar, triton.AsyncCompileMode(jobs, ignore_errors=True):
        try:
            with _launching_nothing():
                for run in runs:
                    run()
        finally:
            jobs.start(bar)


class _Jobs(Executor):
    """An executor whose jobs each compile a kernel and build its launcher, and wait for :meth:`start`.

    Until then, no compilation slows down the caller's Python.
    """

    def __init__(self) -> None:
        self._jobs: list[tuple[Future, Callable[[], Any]]] = []

    def submit(self, compile_kernel: Callable[[], Any]) -> Future:  # type: ignore[override]
        self._jobs.append((Future(), compile_kernel))
        return self._jobs[-1][0]

    def start(self, bar: tqdm) -> None:
        """Run all jobs, the first submitted first, and count them on ``bar``."""
        bar.reset(len(self._jobs))
        with _front_ends_in_turn(), ThreadPoolExecutor() as pool:
            running = [pool.submit(_settle, *job) for job in self._jobs]
            for _ in as_completed(running):
                bar.update()


def _settle(future: Future, compile_kernel: Callable[[], Any]) -> None:
    """Compile a kernel, build its launcher, and set the result, or the error, of ``future``."""
    try:
        kernel = compile_kernel()
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        future.set_result(kernel)
    except Exception as error:  # noqa: BLE001
        future.set_exception(error)


@contextmanager
def _front_ends_in_turn() -> Iterator[None]:
    """Let one thread at a time run Triton's front end, which is Python from its start to its end.

    In turn, the first job is through after its own time; together, each would take as long as all of them.
    Threads also interrupt each other's Python less often.
    """
    source, turn, interval = triton.compiler.ASTSource, Lock(), sys.getswitchinterval()
    make_ir = source.make_ir

    def make_ir_in_turn(*arguments: Any, **options: Any) -> Any:
        with turn:
            return make_ir(*arguments, **options)

    source.make_ir = make_ir_in_turn
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        source.make_ir = make_ir
        sys.setswitchinterval(interval)


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
    if isinstance(value, (TensorDescriptor, GluonDescriptor)):
        return value.base.dtype, *value.block_shape
    return value


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Make this thread's launches compile their kernels without running them.

    A kernel's arguments are known only where it is launched, so ``kernel[grid]`` itself is replaced.
    """
    kernel_type = triton.runtime.KernelInterface
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
