"""Execute notebooks in parallel, each in its own worker process with its own kernel."""

import rosellm.lab.running.spared_imports  # noqa: F401, I001  (before any module that reads notebooks)
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import nbformat
import papermill
import psutil
from ipykernel.kernelspec import write_kernel_spec
from jupyter_client.manager import AsyncKernelManager
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from rosellm.atomic import write_text
from rosellm.errors import RoseError
from rosellm.lab.running.forked_kernel import ONE_THREAD, fork_server, kernel_manager
from rosellm.lab.running.gallery import Outcome, page
from rosellm.lab.running.interruption import Interruption, kill_children, kill_family, signals_held_back


class NotebookError(RoseError):
    """A notebook or parameter does not exist, or a notebook cannot be executed as requested."""


@dataclass(frozen=True)
class Job:
    """One notebook to execute; its results go to ``scratch`` under the notebook's own name."""

    notebook: Path
    parameters: dict[str, Any]
    scratch: Path


@dataclass
class Running:
    job: Job
    process: BaseProcess
    channel: Connection
    started: float


def kernel_environment(folder: Path) -> dict[str, str]:
    """Return an environment in which the kernel "python3" is this interpreter.

    The kernel's description is written to ``folder``, which must exist while kernels run. Other entries of
    the caller's JUPYTER_PATH, such as page templates, are still found.
    """
    write_kernel_spec(folder / "kernels" / "python3", extra_arguments=["--log-level=ERROR"])
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("JUPYTER_PATH"))))
    return {"JUPYTER_PATH": path, "JUPYTER_RUNTIME_DIR": str(folder), **ONE_THREAD}


def supervise(jobs: Sequence[Job], workers: int, timeout: float, interruption: Interruption) -> list[Outcome]:
    """Execute the notebooks, ``workers`` at a time; return the outcomes of the finished ones, by name.

    A notebook that takes more than ``timeout`` seconds is killed.
    """
    context = fork_server()
    waiting, outcomes = deque(jobs), []
    running: list[Running] = []
    try:
        tqdm.set_lock(threading.RLock())  # the default is a semaphore, which forked processes would leak
        with tqdm(total=len(jobs), unit="notebook") as bar:
            while (waiting or running) and interruption.number is None:
                while waiting and len(running) < workers:
                    running.append(_start(context, waiting.popleft()))
                bar.set_postfix_str(", ".join(one.job.notebook.stem for one in running))
                oldest = min(one.started for one in running)
                sentinels = [one.process.sentinel for one in running]
                wait([interruption.reader, *sentinels], max(0.0, oldest + timeout - time.monotonic()))
                for one in [one for one in running if _is_over(one, timeout)]:
                    outcomes.append(_finish(one, timeout))
                    running.remove(one)
                    bar.update()
    finally:
        for one in running:
            _end(one.process)
    return sorted(outcomes, key=lambda outcome: outcome.name)


def _start(context: ForkServerContext, job: Job) -> Running:
    channel, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, theirs))
    resource_tracker.ensure_running()  # started later, it would unblock the signals
    with signals_held_back():
        process.start()
    theirs.close()
    return Running(job, process, channel, time.monotonic())


def _is_over(running: Running, timeout: float) -> bool:
    return running.process.exitcode is not None or time.monotonic() - running.started >= timeout


def _finish(running: Running, timeout: float) -> Outcome:
    job, code = running.job, running.process.exitcode
    if code is None:
        _end(running.process)
        return Outcome(job.notebook.stem, timeout, "timeout", f"not done after {timeout:g} s", job.parameters)
    try:
        seconds, error = running.channel.recv()
    except EOFError:
        seconds, error = time.monotonic() - running.started, f"its worker process ended with exit code {code}"
    return Outcome(job.notebook.stem, seconds, "failed" if error else "ok", error, job.parameters)


def _end(process: BaseProcess) -> None:
    """Kill a worker and its kernel; all their files are in the scratch folder."""
    with suppress(psutil.NoSuchProcess):
        kill_family(psutil.Process(process.pid))
    process.join()


def _work(job: Job, channel: Connection) -> None:
    os.setsid()  # Ctrl-C goes to the supervisor, which ends the workers
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.update(kernel_environment(job.scratch / "kernels" / job.notebook.stem))
    manager = kernel_manager(in_child=channel.close)
    threading.Thread(target=_follow_parent, daemon=True).start()
    logging.getLogger("papermill").setLevel(logging.ERROR)
    channel.send(_execute(job, manager))


def _follow_parent() -> None:
    """Exit when the supervisor is killed: nothing waits for this worker any more."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    kill_children(psutil.Process())
    os._exit(1)


def _execute(job: Job, manager: type[AsyncKernelManager]) -> tuple[float, str]:
    executed, started, error = job.scratch / job.notebook.name, time.monotonic(), ""
    try:
        papermill.execute_notebook(
            job.notebook,
            executed,
            job.parameters,
            kernel_name="python3",
            cwd=job.notebook.parent,
            progress_bar=False,
            shutdown_kernel="immediate",
            kernel_manager_class=manager,
        )
    except PapermillExecutionError as failure:
        error = f"cell {failure.exec_count}: {failure.ename}: {first_line(failure.evalue)}"
    except Exception as failure:
        error = f"{type(failure).__name__}: {first_line(str(failure))}"
    seconds = time.monotonic() - started
    if executed.exists():
        page_error = _write_page(executed, job.notebook.parent)
        error = error or page_error
    return seconds, error


def _write_page(executed: Path, folder: Path) -> str:
    """Write the executed notebook as HTML next to it; return an error message, or ""."""
    try:
        text = page(nbformat.read(executed, as_version=4), folder)
    except Exception as failure:
        return f"executed, but its page was not made: {type(failure).__name__}: {first_line(str(failure))}"
    write_text(executed.with_suffix(".html"), text)
    return ""


def first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")
