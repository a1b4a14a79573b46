"""Execute notebooks on the machines of a Ray cluster, and publish each result here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import rosellm
from rosellm.atomic import replacing
from rosellm.lab.running.gallery import Outcome, outcomes_in, publish_gallery
from rosellm.lab.running.interruption import Interruption
from rosellm.lab.running.notebook_workers import Job, supervise
from rosellm.lab.running.sweep import NOTEBOOKS, Finished, Sweep

SUFFIXES = (".ipynb", ".html")


class Executed(NamedTuple):
    """A notebook's outcome, and its files by name: the executed notebook and its page."""

    outcome: Outcome
    files: dict[str, bytes]


def sweep_notebooks(
    notebooks: Sequence[Path],
    output: Path,
    parameters: dict[str, Any],
    cluster: str,
    timeout: float,
    interruption: Interruption,
) -> list[Outcome]:
    """Execute notebooks on the ``cluster``, a GPU each if it has any and ``device`` is not "cpu".

    Each is published in ``output`` when it has finished. Results that an earlier run published with the same
    parameters are kept, unless the notebook, the package or the records are newer. timeout: seconds per
    notebook. Returns the outcomes of the notebooks present after the sweep or the ``interruption``.
    """
    there = {path.stem: path for path in notebooks}
    outcomes = _published(notebooks, output, parameters)
    tasks = {name: partial(execute, name, parameters, timeout) for name in there if name not in outcomes}
    if outcomes:
        print(f"already in {output}, and current: {', '.join(outcomes)}")
    if tasks:
        with Sweep(cluster, interruption, notebooks[0].parent) as machines:
            on_gpu = machines.takes_gpu(parameters.get("device", "auto"))
            for name, finished in machines.run(tasks, on_gpu, "notebook"):
                outcomes[name] = _publish(there[name], finished, parameters, output)
    return sorted(outcomes.values(), key=lambda outcome: outcome.name)


def execute(name: str, parameters: dict[str, Any], timeout: float) -> Executed:
    """Execute a notebook on this machine of the cluster."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        job = Job(Path(NOTEBOOKS, f"{name}.ipynb").resolve(), parameters, folder)
        (outcome,) = supervise([job], 1, timeout, Interruption())
        made = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
        return Executed(outcome, {path.name: path.read_bytes() for path in made if path.exists()})


def _publish(notebook: Path, finished: Finished, parameters: dict[str, Any], output: Path) -> Outcome:
    """Write a notebook's files and replace its card; remove files that only an earlier run produced."""
    name = notebook.stem
    lost = Executed(Outcome(name, finished.seconds, "failed", finished.error, parameters), {})
    outcome, files = finished.value or lost
    outcome = replace(outcome, machine=finished.machine)
    for made in (f"{name}{suffix}" for suffix in SUFFIXES):
        if made in files:
            with replacing(output / made) as unfinished:
                unfinished.write_bytes(files[made])
        else:
            (output / made).unlink(missing_ok=True)
    publish_gallery({name: notebook}, [outcome], output)
    return outcome


def _published(notebooks: Sequence[Path], output: Path, parameters: dict[str, Any]) -> dict[str, Outcome]:
    """Return the outcomes of notebooks whose results in ``output`` are still current."""
    known, newest = outcomes_in(output), max(map(_changed, _sources(notebooks[0].parent)))
    return {
        path.stem: known[path.stem]
        for path in notebooks
        if path.stem in known
        and (known[path.stem].status, known[path.stem].parameters) == ("ok", parameters)
        and _changed(output / path.name) > max(newest, _changed(path))
    }


def _sources(folder: Path) -> Iterator[Path]:
    """Yield the files that notebooks depend on: the package, records and exhibits."""
    yield from Path(rosellm.__file__).parent.rglob("*.py")
    for pattern in ("*/**/*.json", "*/**/*.py"):
        yield from folder.glob(pattern)


def _changed(path: Path) -> float:
    """Return when the file was last written, 0 if it is missing."""
    return path.stat().st_mtime if path.exists() else 0.0
