"""Executes notebooks in batch and makes a gallery of the results: ``python -m rosellm.lab.run_notebooks``.

Each notebook runs in a worker process of its own (papermill, in the notebooks' folder, with the interpreter
that runs this command). The output folder receives the executed notebook and an HTML page of each, and an
index of all.
"""

import argparse
import json
import logging
import multiprocessing
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import nbformat
import papermill
import psutil
import yaml
from ipykernel.kernelspec import write_kernel_spec
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from rosellm.errors import RoseError
from rosellm.lab.gallery import Outcome, page, publish_gallery

GRACE_SECONDS = 5.0


class NotebookError(RoseError):
    """A notebook or a parameter that does not exist, or a notebook that cannot be executed as asked."""


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
    """The notebooks of ``folder`` whose name, or its beginning, is in ``wanted``.

    ``wanted`` is comma or space separated; "" means all. Raises NotebookError for a name without a notebook.
    """
    found = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
    if not found:
        raise NotebookError(f"there is no notebook in {folder}")
    chosen = set() if wanted.strip() else set(found)
    for word in wanted.replace(",", " ").split():
        word = word.removesuffix(".ipynb")
        matches = {word} & set(found) or {name for name in found if name.startswith(word)}
        if not matches:
            raise NotebookError(f"no notebook is called {word!r}: there are {', '.join(found)}")
        chosen |= matches
    return [path for name, path in found.items() if name in chosen]


def parse_parameters(text: str) -> dict[str, Any]:
    """``name=value`` pairs, space separated; a value is JSON or else YAML (``quick=false``, ``batch=[1,2]``).

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
    """Raises NotebookError unless every one of the notebooks has every one of the parameters."""
    for notebook in notebooks if parameters else ():
        known = papermill.inspect_notebook(notebook)
        for name in parameters.keys() - known.keys():
            raise NotebookError(
                f"{notebook.stem} has no parameter {name!r}: it has {', '.join(sorted(known)) or 'none'}"
            )


def kernel_environment(folder: Path) -> dict[str, str]:
    """Environment in which the kernel "python3" is this interpreter, whatever kernels the machine has.

    The kernel's description is written to ``folder``, which must stay while kernels are started.
    """
    write_kernel_spec(folder / "kernels" / "python3", extra_arguments=["--log-level=ERROR"])
    return {"JUPYTER_PATH": str(folder), "OMP_NUM_THREADS": "1"}


def run(
    notebooks: Sequence[Path],
    output: Path,
    parameters: dict[str, Any] | None = None,
    workers: int = 2,
    timeout: float = 300.0,
) -> list[Outcome]:
    """Executes the notebooks, ``workers`` at a time, and publishes what they leave in ``output``.

    A notebook that takes more than ``timeout`` seconds is ended. The notebooks themselves are only read.
    Raises NotebookError for an unknown parameter, before anything runs.
    """
    parameters = parameters or {}
    check_parameters(notebooks, parameters)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output, prefix=".run-", ignore_cleanup_errors=True) as scratch:
        jobs = [Job(path.resolve(), parameters, Path(scratch).resolve()) for path in notebooks]
        outcomes = _supervise(jobs, workers, timeout)
        for job in jobs:
            _publish(job, output)
        publish_gallery({job.notebook.stem: job.notebook for job in jobs}, outcomes, output)
    return outcomes


def _keep_lists(text: str) -> str:
    return re.sub(r"(?<==)\[[^\]]*\]", lambda match: shlex.quote(match[0]), text)


def _value(name: str, text: str) -> Any:
    with suppress(json.JSONDecodeError):
        return json.loads(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise NotebookError(f"the value of parameter {name!r} cannot be read as YAML: {text!r}") from None


def _supervise(jobs: Sequence[Job], workers: int, timeout: float) -> list[Outcome]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rosellm", "papermill", "nbconvert"])
    waiting, running, outcomes = deque(jobs), [], []
    try:
        with tqdm(total=len(jobs), unit="notebook") as bar:
            while waiting or running:
                while waiting and len(running) < workers:
                    running.append(_start(context, waiting.popleft()))
                bar.set_postfix_str(", ".join(one.job.notebook.stem for one in running))
                oldest = min(one.started for one in running)
                wait([one.process.sentinel for one in running], max(0.0, oldest + timeout - time.monotonic()))
                for one in [one for one in running if _is_over(one, timeout)]:
                    outcomes.append(_finish(one, timeout))
                    running.remove(one)
                    bar.update()
    finally:
        _end([one.process for one in running])
    return sorted(outcomes, key=lambda outcome: outcome.name)


def _start(context: multiprocessing.context.BaseContext, job: Job) -> Running:
    channel, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, theirs))
    process.start()
    theirs.close()
    return Running(job, process, channel, time.monotonic())


def _is_over(running: Running, timeout: float) -> bool:
    return running.process.exitcode is not None or time.monotonic() - running.started >= timeout


def _finish(running: Running, timeout: float) -> Outcome:
    job, code = running.job, running.process.exitcode
    if code is None:
        _end([running.process])
        return Outcome(job.notebook.stem, timeout, "timeout", f"not done after {timeout:g} s", job.parameters)
    try:
        seconds, error = running.channel.recv()
    except EOFError:
        seconds, error = time.monotonic() - running.started, f"its worker process ended with exit code {code}"
    return Outcome(job.notebook.stem, seconds, "failed" if error else "ok", error, job.parameters)


def _end(processes: Sequence[BaseProcess]) -> None:
    """Ends the workers with their kernels: politely first, so that kernels leave no files, then surely."""
    family = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            family += psutil.Process(process.pid).children(recursive=True)
        process.terminate()
    for process in processes:
        process.join(GRACE_SECONDS)
        process.kill()
        process.join()
    for relative in family:
        with suppress(psutil.NoSuchProcess):
            relative.kill()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _work(job: Job, channel: Connection) -> None:
    signal.signal(
        signal.SIGINT, lambda *_: None
    )  # Ctrl-C reaches the whole group; the supervisor ends the workers
    signal.signal(signal.SIGTERM, _interrupt)
    logging.getLogger("papermill").setLevel(logging.ERROR)
    os.environ.update(kernel_environment(job.scratch / "kernels" / job.notebook.stem))
    with suppress(KeyboardInterrupt):
        channel.send(_execute(job))


def _execute(job: Job) -> tuple[float, str]:
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
    """The executed notebook as HTML beside it; what went wrong, or nothing."""
    try:
        text = page(nbformat.read(executed, as_version=4), folder)
    except Exception as failure:
        return f"executed, but its page was not made: {type(failure).__name__}: {_first_line(str(failure))}"
    executed.with_suffix(".html").write_text(text, encoding="utf-8")
    return ""


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def _publish(job: Job, output: Path) -> None:
    """Moves what the job left to the output folder; what only an earlier run left there goes."""
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--notebooks", type=Path, default=Path("notebooks"), help="their folder")
    parser.add_argument("--output", type=Path, default=Path("build"), help="folder of the results")
    parser.add_argument("--select", default="", help="names or their beginnings, comma or space separated")
    parser.add_argument("--parameters", default="", help="name=value pairs, space separated")
    parser.add_argument("--workers", type=int, default=2, help="notebooks at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a notebook may take")
    arguments = parser.parse_args(argv)
    if arguments.workers < 1 or arguments.timeout <= 0:
        given = f"{arguments.workers} and {arguments.timeout:g}"
        raise NotebookError(f"workers must be 1 or more and timeout above 0, not {given}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if a notebook failed, 2 for a wrong request, 130 if interrupted."""
    try:
        arguments = _arguments(argv)
        notebooks = select(arguments.notebooks, arguments.select)
        parameters = parse_parameters(arguments.parameters)
        outcomes = run(notebooks, arguments.output, parameters, arguments.workers, arguments.timeout)
    except RoseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(_table(outcomes))
    print(f"gallery: {arguments.output / 'index.html'}")
    failures = [outcome for outcome in outcomes if outcome.status != "ok"]
    for outcome in failures:
        print(f"FAILED {outcome.name}: {outcome.error}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
