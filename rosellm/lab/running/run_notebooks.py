"""Execute notebooks in batch and make a gallery: ``python -m rosellm.lab.running.run_notebooks``.

Each notebook runs in its own worker process (papermill, in the notebooks' folder, with the interpreter that
runs this command), or with ``--cluster`` on a machine of a Ray cluster. The output folder receives each
executed notebook and its HTML page, and an index of all.

SIGINT (Ctrl-C) and SIGTERM end the run: finished notebooks are published, the others stay as before.
"""

import rosellm.lab.running.spared_imports  # noqa: F401, I001  (before any module that reads notebooks)
import argparse
import ast
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import papermill
import yaml

from rosellm.command_line import OneLineParser
from rosellm.errors import RoseError
from rosellm.lab.running.gallery import Outcome, place, publish_gallery
from rosellm.lab.running.interruption import Interruption, is_running
from rosellm.lab.running.notebook_sweep import sweep_notebooks
from rosellm.lab.running.notebook_workers import Job, NotebookError, first_line, supervise
from rosellm.lab.running.sweep import add_cluster_option

SCRATCH = ".run-"


def select(folder: Path, wanted: str = "") -> list[Path]:
    """Return the notebooks of ``folder`` that ``wanted`` selects by path, name, prefix or substring.

    ``wanted`` is comma or space separated; "" means all. Raises NotebookError for a name without a notebook,
    or if it contains no name.
    """
    found = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
    if not found:
        raise NotebookError(f"there is no notebook in {folder}")
    words = wanted.replace(",", " ").split()
    if wanted.strip() and not words:
        raise NotebookError(f"{wanted!r} names no notebook: there are {', '.join(found)}")
    chosen = set() if words else set(found)
    for word in words:
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
    """Raise NotebookError unless every notebook has every parameter, of a matching type."""
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


def run(
    notebooks: Sequence[Path],
    output: Path,
    parameters: dict[str, Any] | None = None,
    workers: int = 2,
    timeout: float = 300.0,
    interruption: Interruption | None = None,
) -> list[Outcome]:
    """Execute the notebooks, ``workers`` at a time, and publish the results in ``output``.

    A notebook that takes more than ``timeout`` seconds is killed. The notebooks themselves are only read.
    After an ``interruption``, returns only the outcomes of the notebooks finished by then. Raises
    NotebookError for an unknown parameter, before anything runs.
    """
    parameters = parameters or {}
    check_parameters(notebooks, parameters)
    _make(output)
    _remove_leftovers(output)
    with tempfile.TemporaryDirectory(
        dir=output, prefix=f"{SCRATCH}{os.getpid()}-", ignore_cleanup_errors=True
    ) as scratch:
        jobs = [Job(path.resolve(), parameters, Path(scratch).resolve()) for path in notebooks]
        outcomes = supervise(jobs, workers, timeout, interruption or Interruption())
        names = {outcome.name for outcome in outcomes}
        finished = {job.notebook.stem: job for job in jobs if job.notebook.stem in names}
        for job in finished.values():
            _publish(job, output)
        if finished:
            publish_gallery({name: job.notebook for name, job in finished.items()}, outcomes, output)
    return outcomes


def _make(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotebookError(f"output {str(output)!r} cannot be a folder: {error.strerror}") from error


def _remove_leftovers(output: Path) -> None:
    """Remove the scratch folders of killed runs."""
    for folder in output.glob(f"{SCRATCH}*-*"):
        owner = folder.name.removeprefix(SCRATCH).partition("-")[0]
        if not is_running(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _known_parameters(notebook: Path) -> dict[str, Any]:
    """Return name → default; None for a default that is not a literal."""
    try:
        found = papermill.inspect_notebook(notebook)
    except Exception as error:  # nbformat and papermill may raise anything
        raise NotebookError(f"{notebook} cannot be read as a notebook: {first_line(str(error))}") from error
    return {name: _literal(parameter["default"]) for name, parameter in found.items()}


def _literal(text: str) -> Any:
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return None


def _is_like(value: Any, default: Any) -> bool:
    """Return whether ``value`` may replace ``default``: the same type, or an integer for a float."""
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


def _publish(job: Job, output: Path) -> None:
    """Move the job's results to the output folder; remove results that only an earlier run produced."""
    for suffix in (".ipynb", ".html"):
        made, published = (folder / (job.notebook.stem + suffix) for folder in (job.scratch, output))
        if made.exists():
            os.replace(made, published)
        else:
            published.unlink(missing_ok=True)


def _table(outcomes: Sequence[Outcome]) -> str:
    width = max(len("notebook"), *(len(outcome.name) for outcome in outcomes))
    rows = [
        f"{outcome.name:<{width}}  {outcome.seconds:7.1f}  {outcome.status}{place(outcome)}"
        for outcome in outcomes
    ]
    return "\n".join([f"{'notebook':<{width}}  seconds  status", *rows])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--notebooks", type=Path, default=Path("notebooks"), help="folder of the notebooks")
    parser.add_argument("--output", type=Path, default=Path("build"), help="folder of the results")
    parser.add_argument("--select", default="", help="names or prefixes, comma or space separated")
    parser.add_argument("--parameters", default="", help="name=value pairs, space separated")
    parser.add_argument("--workers", type=int, default=2, help="notebooks at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds allowed per notebook")
    add_cluster_option(parser)
    arguments = parser.parse_args(argv)
    if arguments.workers < 1 or not 0 < arguments.timeout <= threading.TIMEOUT_MAX:
        given = f"{arguments.workers} and {arguments.timeout:g}"
        raise NotebookError(f"workers must be 1 or more and timeout above 0 and finite, not {given}")
    return arguments


def _execute(
    arguments: argparse.Namespace,
    notebooks: Sequence[Path],
    parameters: dict[str, Any],
    interruption: Interruption,
) -> list[Outcome]:
    output, timeout = arguments.output, arguments.timeout
    if arguments.cluster is None:
        return run(notebooks, output, parameters, arguments.workers, timeout, interruption)
    check_parameters(notebooks, parameters)
    _make(output)
    return sweep_notebooks(notebooks, output, parameters, arguments.cluster, timeout, interruption)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 if a notebook failed, 2 for a usage error, 130 or 143 if interrupted."""
    try:
        with Interruption() as interruption:
            arguments = _arguments(argv)
            notebooks = select(arguments.notebooks, arguments.select)
            parameters = parse_parameters(arguments.parameters)
            outcomes = _execute(arguments, notebooks, parameters, interruption)
    except (RoseError, OSError) as error:
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
