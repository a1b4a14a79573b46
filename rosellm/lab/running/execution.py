"""Execute notebooks by papermill, several at a time."""

import rosellm.lab.running.spared_imports  # noqa: F401, I001  (before any module that reads notebooks)
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread, get_ident
from typing import Any, NamedTuple
from uuid import uuid4

import nbformat
import psutil
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from papermill.engines import papermill_engines
from papermill.exceptions import PapermillExecutionError
from papermill.execute import raise_for_execution_errors
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from tqdm import tqdm

from rosellm.errors import RoseError
from rosellm.lab.running.interruption import Interruption
from rosellm.lab.running.page import page
from rosellm.lab.running.sweep import INTERRUPTED_WITHIN_S, Finished, in_one_line

# One thread, since several notebooks run at once; no warning that ipywidgets is not installed.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}


class NotebookError(RoseError):
    """A notebook or parameter that does not exist, or a notebook that cannot be executed as requested."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of executing a notebook.

    name: the notebook's file name without suffix.
    seconds: run time.
    status: "ok", "failed" or "timeout".
    error: why the notebook failed, in one line; "" if it did not.
    parameters: the values given for the notebook's parameters, by name.
    machine: name of the host that ran the notebook; "" for this host.
    """

    name: str
    seconds: float
    status: str
    error: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    machine: str = ""


class Executed(NamedTuple):
    """The outcome of a notebook, and the resulting files by name: the executed notebook and its page."""

    outcome: Outcome
    files: dict[str, bytes]


class Kernel(AsyncKernelManager):
    """A kernel of this interpreter, whatever kernels are installed, for the notebook of this thread.

    On Linux, its sockets are in the abstract namespace (unix(7)), under a random name, since a TCP port is
    chosen before the kernel binds it, and another process might take it meanwhile.
    """

    def __init__(self, **options: Any) -> None:
        abstract = {"transport": "ipc", "ip": f"@rosellm-{uuid4().hex}"} if sys.platform == "linux" else {}
        super().__init__(**abstract, kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), **options)
        RUNNING[get_ident()] = self

    def start_kernel(self, **options: Any) -> Any:
        """Start the kernel with the variables of ``ENVIRONMENT``."""
        return super().start_kernel(env=os.environ | ENVIRONMENT, **options)


RUNNING: dict[int, Kernel] = {}  # by the thread that executes a notebook


def execute(
    notebook: Path, parameters: dict[str, Any], timeout: float, folder: Path | None = None
) -> Executed:
    """Execute a notebook; return its outcome and the resulting files. The notebook's file is only read.

    parameters: values of the notebook's parameters, by name.
    timeout: seconds after which the kernel is killed.
    folder: working folder of the kernel; None means the notebook's folder.

    ``papermill.execute_notebook`` is not used since it changes the working directory, which threads share.
    """
    notebook, started, error = notebook.resolve(), time.monotonic(), ""
    folder = folder or notebook.parent
    content = load_notebook_node(str(notebook))
    if parameters:
        content = parameterize_notebook(content, parameters)
    done, thread = Event(), get_ident()
    Thread(target=_kill_after, args=(timeout, thread, done), daemon=True).start()
    try:
        papermill_engines.execute_notebook_with_engine(
            None,
            content,
            "python3",
            progress_bar=False,
            kernel_manager_class=Kernel,
            shutdown_kernel="immediate",
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        )
        raise_for_execution_errors(content, None)
    except PapermillExecutionError as failure:
        told = failure.evalue.strip().partition("\n")[0]
        error = f"cell {failure.exec_count}: {failure.ename}: {told}"
    except Exception as failure:  # papermill may raise anything
        error = in_one_line(failure)
    finally:
        done.set()
        RUNNING.pop(thread, None)
    seconds, status = time.monotonic() - started, "failed" if error else "ok"
    if error and seconds >= timeout:
        seconds, status, error = timeout, "timeout", f"not done after {timeout:g} s"
    files = {notebook.name: nbformat.writes(content).encode()}
    try:
        files[f"{notebook.stem}.html"] = page(content, folder).encode()
    except Exception as failure:  # nbconvert may raise anything
        status, error = "failed", error or f"its page was not made: {in_one_line(failure)}"
    return Executed(Outcome(notebook.stem, seconds, status, error, parameters), files)


def run_here(
    tasks: Mapping[str, Callable[[], Any]], workers: int, interruption: Interruption
) -> Iterator[tuple[str, Finished]]:
    """Run tasks that execute notebooks; yield the name and result of each task when it finishes.

    workers: number of tasks that run at a time.
    interruption: ends the run early and kills the kernels of unfinished tasks.

    If this process is killed, its kernels end by themselves.
    """
    with ThreadPoolExecutor(workers) as pool, tqdm(total=len(tasks), unit="notebook") as bar:
        names = {pool.submit(task): name for name, task in tasks.items()}
        pending = set(names)
        try:
            while pending and interruption.number is None:
                done, pending = wait(pending, INTERRUPTED_WITHIN_S, FIRST_COMPLETED)
                for future in done:
                    bar.update()
                    yield names[future], _finished(future)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in pending):
                for thread in list(RUNNING):
                    _kill(thread)
                time.sleep(0.1)


def _finished(future: Future) -> Finished:
    error = future.exception()
    return Finished(error=in_one_line(error)) if error else Finished(value=future.result())


def _kill_after(seconds: float, thread: int, done: Event) -> None:
    while not done.wait(seconds):
        seconds = 0.1
        _kill(thread)


def _kill(thread: int) -> None:
    """Kill the kernel of a thread's notebook, if it has started, and all child processes of the kernel."""
    process = getattr(getattr(RUNNING.get(thread), "provisioner", None), "process", None)
    if process is not None and process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            kernel = psutil.Process(process.pid)
            for one in (*kernel.children(recursive=True), kernel):
                one.kill()
