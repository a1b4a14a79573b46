"""Execute notebooks by papermill, in a pool of processes or on the machines of a Ray cluster."""

import rosellm.lab.running.spared_imports  # noqa: F401, I001  (before any module that reads notebooks)
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any, NamedTuple

import nbformat
import papermill
import psutil
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from rosellm.errors import RoseError
from rosellm.lab.running.interruption import Interruption
from rosellm.lab.running.kernels import KernelManager, begin, fork_server, kill_children
from rosellm.lab.running.page import page
from rosellm.lab.running.sweep import INTERRUPTED_WITHIN_S, Finished, in_one_line


class NotebookError(RoseError):
    """A notebook or parameter does not exist, or a notebook cannot be executed as requested."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a notebook: ``status`` is "ok", "failed" or "timeout"; ``seconds`` is its run time.

    machine: the host that ran it, "" for this one.
    """

    name: str
    seconds: float
    status: str
    error: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    machine: str = ""


class Executed(NamedTuple):
    """A notebook's outcome, and its files by name: the executed notebook and its page."""

    outcome: Outcome
    files: dict[str, bytes]


def execute(
    notebook: Path, parameters: dict[str, Any], timeout: float, folder: Path | None = None
) -> Executed:
    """Execute a notebook in ``folder`` (default: its own), with this interpreter; the file is only read.

    After ``timeout`` seconds its kernel is killed.
    """
    notebook, started, error = notebook.resolve(), time.monotonic(), ""
    folder = folder or notebook.parent
    done = Event()
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch, notebook.name)
        Thread(target=_kill_kernels, args=(timeout, done), daemon=True).start()
        try:
            papermill.execute_notebook(
                notebook,
                made,
                parameters,
                kernel_name="python3",
                cwd=folder,
                progress_bar=False,
                coalesce_streams=True,
                shutdown_kernel="immediate",
                kernel_manager_class=KernelManager,
            )
        except PapermillExecutionError as failure:
            told = failure.evalue.strip().partition("\n")[0]
            error = f"cell {failure.exec_count}: {failure.ename}: {told}"
        except Exception as failure:
            error = in_one_line(failure)
        finally:
            done.set()
        seconds, files = time.monotonic() - started, {}
        status = "failed" if error else "ok"
        if error and seconds >= timeout:
            seconds, status, error = timeout, "timeout", f"not done after {timeout:g} s"
        if made.exists():
            files[made.name] = made.read_bytes()
            try:
                files[f"{made.stem}.html"] = page(nbformat.read(made, as_version=4), folder).encode()
            except Exception as failure:  # nbconvert may raise anything
                status, error = "failed", error or f"its page was not made: {in_one_line(failure)}"
    return Executed(Outcome(notebook.stem, seconds, status, error, parameters), files)


def run_here(
    tasks: Mapping[str, Callable[[], Any]], workers: int, interruption: Interruption
) -> Iterator[tuple[str, Finished]]:
    """Yield the tasks' names and results as they finish, ``workers`` at a time, until the interruption.

    A task is a function of this package, or a ``partial`` of one. When this process ends, however it does, so
    do the workers and their kernels.
    """
    tqdm.set_lock(RLock())  # the default is a semaphore, which processes would leak
    before = set(multiprocessing.active_children())
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
        ProcessPoolExecutor(workers, fork_server(), _begin, (scratch,)) as pool,
        tqdm(total=len(tasks), unit="notebook") as bar,
    ):
        names = {pool.submit(task): name for name, task in tasks.items()}
        pending = set(names)
        try:
            while pending and interruption.number is None:
                done, pending = wait(pending, INTERRUPTED_WITHIN_S, FIRST_COMPLETED)
                for future in done:
                    bar.update()
                    yield names[future], _finished(future)
        finally:
            if pending:
                for worker in set(multiprocessing.active_children()) - before:
                    worker.kill()
                pool.shutdown(cancel_futures=True)


def _begin(scratch: str) -> None:
    """Begin a worker; its temporary files are in ``scratch``."""
    begin()
    tempfile.tempdir = os.environ["JUPYTER_RUNTIME_DIR"] = scratch
    logging.getLogger("papermill").setLevel(logging.ERROR)


def _finished(future: Future) -> Finished:
    error = future.exception()
    return Finished(error=in_one_line(error)) if error else Finished(value=future.result())


def _kill_kernels(after: float, done: Event) -> None:
    """Kill the kernels of this process and all that they have started, from then on until ``done``."""
    while not done.wait(after):
        after = 0.1
        for kernel in multiprocessing.active_children():
            with suppress(psutil.NoSuchProcess):
                kill_children(psutil.Process(kernel.pid))
            kernel.kill()
