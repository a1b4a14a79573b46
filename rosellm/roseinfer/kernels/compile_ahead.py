"""Compile kernels on all cores before any of them is launched.

Triton compiles a kernel at its first launch, and a step launches its kernels one after another. Triton 3.6
also builds a C launcher at the first launch with each combination of argument types.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import cache, partial
from threading import Lock, Thread, get_ident
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from rosellm.triton_or_none import GluonASTSource, GluonDescriptor, TensorDescriptor, has_triton, triton

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
    """An executor whose jobs each compile a kernel and build its launcher, and wait for :meth:`start`."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Future, Callable[[], Any]]] = []

    def submit(self, compile_kernel: Callable[[], Any]) -> Future:  # type: ignore[override]
        self._jobs.append((Future(), compile_kernel))
        return self._jobs[-1][0]

    def start(self, bar: tqdm) -> None:
        """Run all jobs, the first submitted first, and count them on ``bar``.

        Kernels in Triton's cache are loaded. From the first one on that is not there, child processes compile
        the kernels, and this process loads each when it is in the cache.
        """
        bar.reset(len(self._jobs))
        with _no_front_end():
            n_cached = next((i for i, job in enumerate(self._jobs) if not _settle(*job)), len(self._jobs))
            bar.update(n_cached)
        remaining = self._jobs[n_cached:]
        for i in _done_by_children([job for _, job in remaining]):
            _settle(*remaining[i])
            bar.update()
        for future, job in remaining:
            if not future.done():  # its child was killed
                _settle(future, job)


def _settle(future: Future, compile_kernel: Callable[[], Any]) -> bool:
    """Set the result, or the error, of ``future``; return False if the kernel is not in Triton's cache."""
    try:
        future.set_result(_with_launcher(compile_kernel))
    except _NotCached:
        return False
    except Exception as error:  # noqa: BLE001
        future.set_exception(error)
    return True


def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    """Compile a kernel and build its launcher, or load both from Triton's cache; return the kernel."""
    kernel = compile_kernel()
    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def _done_by_children(jobs: list[Callable[[], Any]]) -> Iterator[int]:
    """Compile kernels into Triton's cache on all cores; yield each job's index when it is done.

    Parts of a compilation hold the interpreter lock, such as Triton's front end, so that threads would wait
    for each other. Forked children need neither imports nor copies of the jobs, and never touch the GPU. They
    take indices from one pipe and write them to another.
    """
    (take, put), (collect, report) = os.pipe(), os.pipe()
    os.write(put, b"".join(i.to_bytes(2, "big") for i in range(len(jobs))))
    os.close(put)
    children: list[int] = []
    with suppress(OSError):  # no memory or process is left: there are fewer children, or none
        while len(children) < min(len(jobs), len(os.sched_getaffinity(0))):
            children.append(_fork(jobs, take, report))
    os.close(report)
    try:
        while index := os.read(collect, 2):
            yield int.from_bytes(index, "big")
    finally:
        while os.read(take, 4096):  # an interrupt: leave the children nothing to take
            pass
        for child in children:
            with suppress(ChildProcessError):  # the program ignores SIGCHLD or waits for all children
                os.waitpid(child, 0)
        os.close(take)
        os.close(collect)


def _fork(jobs: list[Callable[[], Any]], take: int, report: int) -> int:
    """Start a child that compiles until no index is left; return its process ID."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside other threads
        if child := os.fork():
            return child
    try:
        while index := os.read(take, 2):
            with suppress(Exception):  # the parent meets it again
                _with_launcher(jobs[int.from_bytes(index, "big")])
            os.write(report, index)
    finally:
        os._exit(0)  # noqa: SLF001


class _NotCached(Exception):
    """A kernel that is not in Triton's cache was to be loaded from it."""


@contextmanager
def _no_front_end() -> Iterator[None]:
    """Make this thread's compilations of kernels that are not in Triton's cache raise ``_NotCached``."""
    owner = get_ident()
    originals = {source: source.make_ir for source in (triton.compiler.ASTSource, GluonASTSource)}

    def make_ir(source: Any, *arguments: Any, **options: Any) -> Any:
        if get_ident() == owner:
            raise _NotCached
        return originals[type(source)](source, *arguments, **options)

    for kind in originals:
        kind.make_ir = make_ir
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.make_ir = original


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
