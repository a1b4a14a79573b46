"""Execute notebooks in batch and make a gallery: ``python -m rosellm.lab.running.run_notebooks``.

Each notebook runs in its own worker process (papermill, in the notebooks' folder, with the interpreter that
runs this command). The output folder receives each executed notebook and its HTML page, and an index of all.
SIGINT (Ctrl-C) and SIGTERM end the run: finished notebooks are published, the others stay as before.
"""

import rosellm.lab.running.spared_imports  # noqa: F401, I001  (before any module that reads notebooks)
import argparse
import ast
import json
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
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
import yaml
from ipykernel.kernelspec import write_kernel_spec
from jupyter_client.manager import AsyncKernelManager
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from rosellm.atomic import write_text
from rosellm.command_line import OneLineParser
from rosellm.errors import RoseError
from rosellm.lab.running.forked_kernel import ONE_THREAD, fork_server, kernel_manager
from rosellm.lab.running.gallery import Outcome, page, publish_gallery
from rosellm.lab.running.interruption import (
    Interruption,
    is_running,
    kill_children,
    kill_family,
    signals_held_back,
)

SCRATCH = ".run-"


class NotebookError(RoseError):
    """A notebook or parameter that does not exist, or a notebook that cannot be executed as requested."""


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


def select(folder: Path, wanted: str = "") -> list[Path]:
    """The notebooks of ``folder`` that ``wanted`` lists by path, name, prefix or else substring of a name.

    ``wanted`` is comma or space separated; "" means all. Raises NotebookError for a name without a notebook.
    """
    found = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
    if not found:
        raise NotebookError(f"there is no notebook in {folder}")
    chosen = set() if wanted.strip() else set(found)
    for word in wanted.replace(",", " ").split():
        word = Path(word).name.removesuffix(".ipynb")
        named = [name for name in found if word and word in name]
        matches = {word} & set(found) or {name for name in named if name.startswith(word)} or set(named)
        if not matches:
            raise NotebookError(f"no notebook is called {word!r}: there are {', '.join(found)}")
        chosen |= matches
    return [path for name, path in found.items() if name in chosen]


def parse_parameters(text: str) -> dict[str, Any]:
    """``name=value`` pairs, space separated; a value is JSON, else YAML (``quick=false``, ``batch=[1,2]``).

    Raises NotebookError for a pair that cannot be read.
    """
    try:
        pairs = [word.partition("=") for word in shlex.split(_keep_lists(text))]
    except ValueError as error:
        raise NotebookError(f"the parameters {text!r} cannot be read: {error}") from None
    for name, equals, _ in pairs:
        if not equals or not name.isidentifier():
            raise NotebookError(f"a parameter is given as name=value, not as {name + equals!r}")
    return {name: _value(name, value) for name, _, value in pairs}


def check_parameters(notebooks: Sequence[Path], parameters: dict[str, Any]) -> None:
    """Raises NotebookError unless every notebook has every parameter, of a matching type."""
    for notebook in notebooks if parameters else ():
        known = _known_parameters(notebook)
        for name in parameters.keys() - known.keys():
            raise NotebookError(
                f"{notebook.stem} has no parameter {name!r}: it has {', '.join(sorted(known)) or 'none'}"
            )
        for name, value in parameters.items():
            if not _is_like(value, known[name]):
                raise NotebookError(
                    f"{notebook.stem} cannot take {name}={value!r}: it takes a value like {known[name]!r}"
                )


def kernel_environment(folder: Path) -> dict[str, str]:
    """An environment in which the kernel "python3" is this interpreter, whatever kernels are installed.

    The kernel's description is written to ``folder``, which must exist while kernels run.
    """
    write_kernel_spec(folder / "kernels" / "python3", extra_arguments=["--log-level=ERROR"])
    return {"JUPYTER_PATH": str(folder), "JUPYTER_RUNTIME_DIR": str(folder), **ONE_THREAD}


def run(
    notebooks: Sequence[Path],
    output: Path,
    parameters: dict[str, Any] | None = None,
    workers: int = 2,
    timeout: float = 300.0,
    interruption: Interruption | None = None,
) -> list[Outcome]:
    """Executes the notebooks, ``workers`` at a time, and publishes the results in ``output``.

    A notebook that takes more than ``timeout`` seconds is killed. The notebooks themselves are only read.
    After an ``interruption`` the outcomes are those of the notebooks finished by then. Raises NotebookError
    for an unknown parameter, before anything runs.
    """
    parameters = parameters or {}
    check_parameters(notebooks, parameters)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotebookError(f"output {str(output)!r} cannot be a folder: {error.strerror}") from error
    _remove_leftovers(output)
    with tempfile.TemporaryDirectory(
        dir=output, prefix=f"{SCRATCH}{os.getpid()}-", ignore_cleanup_errors=True
    ) as scratch:
        jobs = [Job(path.resolve(), parameters, Path(scratch).resolve()) for path in notebooks]
        outcomes = _supervise(jobs, workers, timeout, interruption or Interruption())
        names = {outcome.name for outcome in outcomes}
        finished = {job.notebook.stem: job for job in jobs if job.notebook.stem in names}
        for job in finished.values():
            _publish(job, output)
        if finished:
            publish_gallery({name: job.notebook for name, job in finished.items()}, outcomes, output)
    return outcomes


def _remove_leftovers(output: Path) -> None:
    """Scratch folders of runs that were killed."""
    for folder in output.glob(f"{SCRATCH}*-*"):
        owner = folder.name.removeprefix(SCRATCH).partition("-")[0]
        if not is_running(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _known_parameters(notebook: Path) -> dict[str, Any]:
    """Name → default; None for a default that is not a literal."""
    try:
        found = papermill.inspect_notebook(notebook)
    except Exception as error:  # nbformat and papermill may raise anything
        raise NotebookError(f"{notebook} cannot be read as a notebook: {_first_line(str(error))}") from error
    return {name: _literal(parameter["default"]) for name, parameter in found.items()}


def _literal(text: str) -> Any:
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return None


def _is_like(value: Any, default: Any) -> bool:
    """Whether ``value`` may replace ``default``: of its type, or an integer for a float."""
    if isinstance(default, list):
        return isinstance(value, list) and all(_is_like(item, one) for one in default[:1] for item in value)
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return default is None or type(value) is type(default)


def _keep_lists(text: str) -> str:
    return re.sub(r"(?<==)\[[^\]]*\]", lambda match: shlex.quote(match[0]), text)


def _value(name: str, text: str) -> Any:
    with suppress(json.JSONDecodeError, RecursionError):
        return json.loads(text)
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        raise NotebookError(f"the value of parameter {name!r} cannot be read as YAML: {text!r}") from None


def _supervise(
    jobs: Sequence[Job], workers: int, timeout: float, interruption: Interruption
) -> list[Outcome]:
    context = fork_server()
    waiting, outcomes = deque(jobs), []
    running: list[Running] = []
    try:
        tqdm.set_lock(threading.RLock())  # its default is a semaphore, which forked processes would leak
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
    """Kills a worker and its kernel; all their files are in the scratch folder."""
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
    """Exit when the supervisor has been killed, since nobody waits for this worker then."""
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
        error = f"cell {failure.exec_count}: {failure.ename}: {_first_line(failure.evalue)}"
    except Exception as failure:
        error = f"{type(failure).__name__}: {_first_line(str(failure))}"
    seconds = time.monotonic() - started
    if executed.exists():
        page_error = _write_page(executed, job.notebook.parent)
        error = error or page_error
    return seconds, error


def _write_page(executed: Path, folder: Path) -> str:
    """Writes the executed notebook as HTML beside it; returns an error message, or nothing."""
    try:
        text = page(nbformat.read(executed, as_version=4), folder)
    except Exception as failure:
        return f"executed, but its page was not made: {type(failure).__name__}: {_first_line(str(failure))}"
    write_text(executed.with_suffix(".html"), text)
    return ""


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def _publish(job: Job, output: Path) -> None:
    """Moves the job's results to the output folder; removes results that only an earlier run left there."""
    for suffix in (".ipynb", ".html"):
        made, published = (folder / (job.notebook.stem + suffix) for folder in (job.scratch, output))
        if made.exists():
            os.replace(made, published)
        else:
            published.unlink(missing_ok=True)


def _table(outcomes: Sequence[Outcome]) -> str:
    width = max(len("notebook"), *(len(outcome.name) for outcome in outcomes))
    rows = [f"{outcome.name:<{width}}  {outcome.seconds:7.1f}  {outcome.status}" for outcome in outcomes]
    return "\n".join([f"{'notebook':<{width}}  seconds  status", *rows])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--notebooks", type=Path, default=Path("notebooks"), help="their folder")
    parser.add_argument("--output", type=Path, default=Path("build"), help="folder of the results")
    parser.add_argument("--select", default="", help="names or their beginnings, comma or space separated")
    parser.add_argument("--parameters", default="", help="name=value pairs, space separated")
    parser.add_argument("--workers", type=int, default=2, help="notebooks at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds allowed per notebook")
    arguments = parser.parse_args(argv)
    if arguments.workers < 1 or not 0 < arguments.timeout <= threading.TIMEOUT_MAX:
        given = f"{arguments.workers} and {arguments.timeout:g}"
        raise NotebookError(f"workers must be 1 or more and timeout above 0 and finite, not {given}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if a notebook failed, 2 for a usage error, 130 or 143 if interrupted."""
    try:
        with Interruption() as interruption:
            arguments = _arguments(argv)
            notebooks = select(arguments.notebooks, arguments.select)
            parameters = parse_parameters(arguments.parameters)
            outcomes = run(
                notebooks, arguments.output, parameters, arguments.workers, arguments.timeout, interruption
            )
    except RoseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if len(outcomes) < len(notebooks):
        done = (outcome.name for outcome in outcomes)
        print(interruption.told(done, (path.stem for path in notebooks)), file=sys.stderr)
        return interruption.exit_code
    print(_table(outcomes))
    print(f"gallery: {arguments.output / 'index.html'}")
    failures = [outcome for outcome in outcomes if outcome.status != "ok"]
    for outcome in failures:
        print(f"FAILED {outcome.name}: {outcome.error}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
