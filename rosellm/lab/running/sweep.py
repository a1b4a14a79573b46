"""Run tasks, which are functions of this package, on the machines of a Ray cluster."""

from __future__ import annotations

import platform
import shutil
import signal
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from tqdm import tqdm

import rosellm
from rosellm.cluster.runtime import Runtime
from rosellm.environment import CHECKOUT, COMMIT_VARIABLE, environment
from rosellm.errors import ClusterError, DeviceError, RoseError, describe
from rosellm.lab.running.interruption import Interruption

RETRIES = 3
ABSENT_S = 60.0
INTERRUPTED_WITHIN_S = 0.25
NOTEBOOKS = "notebooks"  # the notebooks' folder, below the working folder of every task
UNWANTED = shutil.ignore_patterns("__pycache__", ".*")


@dataclass(frozen=True)
class Finished:
    """The result of a task.

    machine: name of the host that ran the task; "" for this host, or if unknown.
    seconds: run time.
    value: what the task returned.
    error: why the task failed, in one line; "" if it did not.
    """

    machine: str = ""
    seconds: float = 0.0
    value: Any = None
    error: str = ""


class Sweep:
    """A connection to a Ray cluster, as a context; tasks that still run when it ends are killed.

    address: address of the cluster (see ``Runtime``).
    interruption: a context that has been entered; ends a run early.
    notebooks: folder that is sent to the machines; None for none.

    The machines need RoseLLM's dependencies, but no shared file system: this copy of RoseLLM is sent to them.
    Raises ``ClusterError`` if the cluster cannot be joined.
    """

    def __init__(self, address: str, interruption: Interruption, notebooks: Path | None = None) -> None:
        self._interruption = interruption
        with tempfile.TemporaryDirectory() as folder:
            _stage(Path(folder), notebooks)
            self._runtime = Runtime(address, environment=_environment(folder))
        self._ray = self._runtime.ray
        interruption.take_over()  # Ray installs its own SIGTERM handler

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._runtime.leave()

    def takes_gpu(self, device: str) -> bool:
        """Return whether each task for ``device`` is given a GPU; for "auto", if the cluster has any.

        Raises ``DeviceError`` for "cuda" if the cluster has no GPU.
        """
        there = self._runtime.device() == "cuda"
        if device == "cuda" and not there:
            raise DeviceError("device 'cuda' is not available: the Ray cluster has no GPU")
        return there and device != "cpu"

    def run(
        self, tasks: Mapping[str, Callable[[], Any]], on_gpu: bool, unit: str
    ) -> Iterator[tuple[str, Finished]]:
        """Run tasks on the cluster; yield the name and result of each task when it finishes.

        tasks: functions of this package, or their ``partial`` objects, by name.
        on_gpu: whether each task has a GPU of its own; it always has a CPU core of its own.
        unit: what a task is, for the progress bar.

        A task whose machine or process is lost is retried up to ``RETRIES`` times. Unfinished tasks are
        dropped on interruption. Raises ``ClusterError`` if the cluster has no machine that could run the
        remaining tasks for ``ABSENT_S``.
        """
        with tqdm(total=len(tasks), unit=unit, disable=not tasks) as bar:
            for name, finished in self._run(tasks, on_gpu):
                bar.update()
                where = f" on {finished.machine}" if finished.machine else ""
                told = f": {finished.error}" if finished.error else ""
                tqdm.write(f"[{finished.seconds:6.1f} s] {name}{where}{told}")
                yield name, finished

    def call(self, task: Callable[[], Any], on_gpu: bool) -> Any:
        """Run a single task, and return what it returns.

        Raises ``RoseError`` with the task's error, or ``KeyboardInterrupt`` on interruption.
        """
        for _name, finished in self._run({"": task}, on_gpu):
            if finished.error:
                raise RoseError(finished.error)
            return finished.value
        raise KeyboardInterrupt

    def _run(self, tasks: Mapping[str, Callable[[], Any]], on_gpu: bool) -> Iterator[tuple[str, Finished]]:
        options = {"num_cpus": 1, "num_gpus": int(on_gpu), "max_retries": RETRIES}
        remote = self._ray.remote(scheduling_strategy="SPREAD", **options)(_execute)
        calls = {remote.remote(task): name for name, task in tasks.items()}
        for call in self._finishing(list(calls), "GPU" if on_gpu else "CPU"):
            try:
                yield calls[call], self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                yield calls[call], Finished(error=in_one_line(getattr(error, "cause", None) or error))

    def _finishing(self, calls: list[Any], resource: str) -> Iterator[Any]:
        """Yield each call when it finishes, until the interruption.

        resource: "GPU" or "CPU", which the cluster needs for the remaining calls.
        """
        seen = monotonic()
        while calls and self._interruption.number is None:
            done, calls = self._ray.wait(calls, timeout=INTERRUPTED_WITHIN_S)
            yield from done
            if self._ray.cluster_resources().get(resource, 0) >= 1:
                seen = monotonic()
            elif monotonic() - seen > ABSENT_S:
                raise ClusterError(
                    f"{len(calls)} tasks are left, and the Ray cluster has had no {resource} for "
                    f"{ABSENT_S:g} s; the same command continues there"
                )


def add_cluster_option(parser: ArgumentParser) -> None:
    """Add the option ``--cluster``, the address for a :class:`Sweep`; its default is None."""
    text = "run on a Ray cluster: auto, or the host:port of its head; existing results are kept"
    parser.add_argument("--cluster", metavar="ADDRESS", help=text)


def in_one_line(error: BaseException) -> str:
    """Return an error's type and message, or only the message of a ``RoseError``, cut to the first line."""
    return (str(error) if isinstance(error, RoseError) else describe(error)).partition("\n")[0]


def _execute(task: Callable[[], Any]) -> Finished:
    """Run a task on a machine of the cluster, in a process that SIGTERM from Ray ends at once.

    Ray sends SIGKILL soon after SIGTERM. If it ended the process in the middle of a cleanup, child processes
    could remain that do not notice its end.
    """
    machine, started = platform.node(), monotonic()
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        value = task()
    except Exception as error:  # a task may raise anything, and must not end the others
        return Finished(machine, monotonic() - started, error=in_one_line(error))
    finally:
        signal.signal(signal.SIGTERM, before)
    return Finished(machine, monotonic() - started, value)


def _stage(folder: Path, notebooks: Path | None) -> None:
    """Copy the package and the exhibits to ``folder`` and, unless None, ``notebooks`` with the results."""
    shutil.copytree(Path(rosellm.__file__).parent, folder / "rosellm", ignore=UNWANTED)
    for name in ("exhibits",) if notebooks is None else ("exhibits", "results"):
        if (CHECKOUT / NOTEBOOKS / name).is_dir():
            shutil.copytree(CHECKOUT / NOTEBOOKS / name, folder / NOTEBOOKS / name, ignore=UNWANTED)
    if notebooks is not None:
        shutil.copytree(
            notebooks, folder / NOTEBOOKS, ignore=UNWANTED, ignore_dangling_symlinks=True, dirs_exist_ok=True
        )


def _environment(folder: str) -> dict[str, Any]:
    """Return Ray's runtime environment for the tasks: the files in ``folder``, and their commit."""
    commit = environment(torch.device("cpu"))["git_commit"]
    return {"working_dir": folder, "env_vars": {COMMIT_VARIABLE: commit} if commit else {}}
