"""Execute notebooks in batch and make a gallery: ``python -m rosellm.lab.running.run_notebooks``.

Each notebook runs by papermill in its own folder, with the interpreter that runs this command, or with
``--cluster`` on a machine of a Ray cluster. The output folder receives each executed notebook and its HTML
page as it finishes, and an index of all.

SIGINT (Ctrl-C) and SIGTERM end the run: finished notebooks are published, the others stay as before.
"""

import rosellm.lab.running.spared_imports  # noqa: F401, I001  (before any module that reads notebooks)
import argparse
import ast
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import papermill
import yaml

import rosellm
from rosellm.atomic import replacing
from rosellm.command_line import OneLineParser, command, whole_number
from rosellm.lab.running.execution import Executed, NotebookError, Outcome, execute, run_here
from rosellm.lab.running.gallery import outcomes_in, publish_gallery
from rosellm.lab.running.interruption import Interruption
from rosellm.lab.running.sweep import NOTEBOOKS, Finished, Sweep, add_cluster_option, in_one_line


def select(folder: Path, wanted: str = "") -> list[Path]:
    """Return the notebooks of ``folder`` that ``wanted`` selects.

    wanted: paths, names, prefixes or substrings of names, separated by commas or spaces; "" means all.

    Raises NotebookError if the folder has no notebook, if a name matches no notebook, or if ``wanted`` has
    separators but no name.
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
    """Parse ``name=value`` pairs, separated by spaces; the values are YAML, as after papermill's ``-y``.

    Examples: ``quick=false``, ``batch=[1, 2]``. Raises NotebookError for a pair that cannot be parsed.
    """
    parameters = {}
    try:
        for word in shlex.split(re.sub(r"(?<==)\[[^\]]*\]", lambda found: shlex.quote(found[0]), text)):
            name, equals, value = word.partition("=")
            if not equals or not name.isidentifier():
                raise NotebookError(f"a parameter is given as name=value, not as {name + equals!r}")
            parameters[name] = yaml.safe_load(value)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise NotebookError(f"the parameters {text!r} cannot be read: {in_one_line(error)}") from None
    return parameters


def parameters_of(notebooks: Sequence[Path], parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return name of notebook → those of the parameters that it has.

    Raises NotebookError if no notebook has a parameter, or if one has a default of another type.
    """
    if not parameters:
        return {notebook.stem: {} for notebook in notebooks}
    known = {notebook.stem: _inspected(notebook) for notebook in notebooks}
    for name in parameters:
        if not any(name in there for there in known.values()):
            first, there = next(iter(known.items()))
            others = f", and {len(known) - 1} others lack it, too" if len(known) > 1 else ""
            told = ", ".join(sorted(there)) or "none"
            raise NotebookError(f"{first} has no parameter {name!r}: it has {told}{others}")
    return {
        notebook: {name: value for name, value in parameters.items() if _takes(notebook, name, value, there)}
        for notebook, there in known.items()
    }


def _inspected(notebook: Path) -> dict[str, Any]:
    try:
        return papermill.inspect_notebook(notebook)
    except Exception as error:  # nbformat and papermill may raise anything
        raise NotebookError(f"{notebook} cannot be read as a notebook: {in_one_line(error)}") from error


def _takes(notebook: str, name: str, value: Any, known: dict[str, Any]) -> bool:
    """Return whether a notebook has a parameter; raise NotebookError if its default is of another type."""
    if name not in known:
        return False
    default = None  # a default that is not a literal: the parameter takes any value
    with suppress(ValueError, SyntaxError):
        default = ast.literal_eval(known[name]["default"])
    if not _is_like(value, default):
        raise NotebookError(f"{notebook} cannot take {name}={value!r}: it takes a value like {default!r}")
    return True


def _is_like(value: Any, default: Any) -> bool:
    """Return whether ``value`` may replace ``default``: same type, or an integer in place of a float."""
    if isinstance(default, list):
        return isinstance(value, list) and all(_is_like(item, one) for one in default[:1] for item in value)
    return default is None or type(value) in ({float: (float, int)}.get(type(default)) or (type(default),))


def run(
    notebooks: Sequence[Path],
    output: Path,
    parameters: dict[str, Any] | None = None,
    workers: int = 2,
    timeout: float = 300.0,
    interruption: Interruption | None = None,
    cluster: str | None = None,
) -> list[Outcome]:
    """Execute notebooks, publish each in ``output`` when it finishes, and return their outcomes.

    output: folder of the gallery; created if missing.
    parameters: values of the notebooks' parameters, by name, which those get that have them; None means the
        defaults.
    workers: number of notebooks that run at a time on this machine.
    timeout: seconds per notebook.
    interruption: ends the run early; only finished notebooks have an outcome.
    cluster: address of a Ray cluster that executes the notebooks, whatever ``workers`` is; None means this
        machine. On a cluster, each notebook is given a GPU if there is any and the parameter ``device`` is
        not "cpu"; notebooks whose results in ``output`` are still current are not executed again.

    The outcomes are sorted by name. Raises NotebookError before anything runs, as :func:`parameters_of` does,
    or if ``output`` cannot be a folder.
    """
    parameters, interruption = parameters or {}, interruption or Interruption()
    own = parameters_of(notebooks, parameters)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotebookError(f"output {str(output)!r} cannot be a folder: {error.strerror}") from error
    done = {} if cluster is None else _current(notebooks, output, own)
    left = {path.stem: path for path in notebooks if path.stem not in done}
    if done:
        print(f"already in {output}, and current: {', '.join(done)}")
    with (
        Sweep(cluster, interruption, notebooks[0].parent)
        if cluster is not None and left
        else nullcontext() as machines
    ):
        folder = Path(NOTEBOOKS) if machines else notebooks[0].parent
        tasks = {
            name: partial(execute, folder / path.name, own[name], timeout) for name, path in left.items()
        }
        if machines:
            results = machines.run(tasks, machines.takes_gpu(parameters.get("device", "auto")), "notebook")
        else:
            results = run_here(tasks, workers, interruption)
        for name, finished in results:
            done[name] = _publish(left[name], finished, own[name], output)
    return sorted(done.values(), key=lambda outcome: outcome.name)


def _publish(notebook: Path, finished: Finished, parameters: dict[str, Any], output: Path) -> Outcome:
    """Write a notebook's files, remove those that only an earlier run produced, and replace its card."""
    lost = Executed(Outcome(notebook.stem, finished.seconds, "failed", finished.error, parameters), {})
    outcome, files = finished.value or lost
    outcome = replace(outcome, machine=finished.machine)
    for made in (notebook.name, f"{notebook.stem}.html"):
        if made in files:
            with replacing(output / made) as unfinished:
                unfinished.write_bytes(files[made])
        else:
            (output / made).unlink(missing_ok=True)
    publish_gallery({notebook.stem: notebook}, [outcome], output)
    return outcome


def _current(
    notebooks: Sequence[Path], output: Path, parameters: dict[str, dict[str, Any]]
) -> dict[str, Outcome]:
    """Return, by name, the outcomes in ``output`` that are newer than everything they depend on.

    Only successful outcomes with equal parameters are returned; ``parameters`` are those of each notebook.
    """
    known, newest = outcomes_in(output), max(map(_changed, _sources(notebooks[0].parent)))
    return {
        path.stem: known[path.stem]
        for path in notebooks
        if path.stem in known
        and (known[path.stem].status, known[path.stem].parameters) == ("ok", parameters[path.stem])
        and _changed(output / path.name) > max(newest, _changed(path))
    }


def _sources(folder: Path) -> Iterator[Path]:
    """Yield the files that the notebooks of ``folder`` depend on: the package, records and exhibits."""
    yield from Path(rosellm.__file__).parent.rglob("*.py")
    for pattern in ("*/**/*.json", "*/**/*.py"):
        yield from folder.glob(pattern)


def _changed(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def parsed(parser: OneLineParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Path]]:
    """Add the options that select notebooks, parse ``argv``, and return the options and the notebooks."""
    parser.add_argument("--notebooks", type=Path, default=Path("notebooks"), help="folder of the notebooks")
    parser.add_argument("--select", default="", help="names or prefixes, comma or space separated")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds allowed per notebook")
    given = parser.parse_args(argv)
    if not 0 < given.timeout <= threading.TIMEOUT_MAX:
        raise NotebookError(f"timeout must be above 0 and finite, not {given.timeout:g}")
    return given, select(given.notebooks, given.select)


@command
def main(argv: list[str] | None = None) -> None:
    """Run the command; exit with 1 if a notebook failed, 2 for a usage error, 130 or 143 if interrupted."""
    parser = OneLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build"), help="folder of the results")
    parser.add_argument("--parameters", default="", help="name=value pairs, space separated")
    parser.add_argument("--workers", type=whole_number(1), default=2, help="notebooks at a time")
    add_cluster_option(parser)
    with Interruption() as interruption:
        given, notebooks = parsed(parser, argv)
        parameters, limits = parse_parameters(given.parameters), (given.workers, given.timeout)
        outcomes = run(notebooks, given.output, parameters, *limits, interruption, given.cluster)
    interruption.exit_unless_done((one.name for one in outcomes), [path.stem for path in notebooks])
    width = max(len(one.name) for one in outcomes)
    print(f"{'notebook':<{width}}  seconds  status")
    for one in outcomes:
        place = f" on {one.machine}" if one.machine else ""
        print(f"{one.name:<{width}}  {one.seconds:7.1f}  {one.status}{place}")
    print(f"gallery: {given.output / 'index.html'}")
    failures = [outcome for outcome in outcomes if outcome.status != "ok"]
    for outcome in failures:
        print(f"FAILED {outcome.name}: {outcome.error}", file=sys.stderr)
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
