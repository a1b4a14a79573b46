"""Tasks spread over the machines of a Ray cluster: functions go out, what they return comes back."""

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
NOTEBOOKS = "notebooks"  # their folder, below the working folder of every task
UNWANTED = shutil.ignore_patterns("__pycache__", ".*")


@dataclass(frozen=True)
class Finished:
    """What came of a task: its ``value``, or ``error`` in one line. machine: its host's name."""

    machine: str = ""
    seconds: float = 0.0
    value: Any = None
    error: str = ""


class Sweep:
    """A Ray cluster for as long as its ``with`` lasts; what still runs at its end is ended.

    The machines need the packages that RoseLLM depends on. RoseLLM itself, as it is here, is sent to them,
    and so is the folder ``notebooks``; no file system is shared. address: as for ``Runtime``.
    interruption: entered; it ends a run early. Raises ``ClusterError``.
    """

    def __init__(self, address: str, interruption: Interruption, notebooks: Path | None = None) -> None:
        self._interruption = interruption
        with tempfile.TemporaryDirectory() as folder:
            _stage(Path(folder), notebooks)
            self._runtime = Runtime(address, environment=_environment(folder))
        self._ray = self._runtime.ray
        interruption.take_over()  # Ray has a handler of SIGTERM

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._runtime.leave()

    def takes_gpu(self, device: str) -> bool:
        """Whether tasks for ``device`` get a GPU each: "auto" if the cluster has any.

        Raises ``DeviceError`` for "cuda" without one.
        """
        there = self._runtime.device() == "cuda"
        if device == "cuda" and not there:
            raise DeviceError("device 'cuda' is not available: the Ray cluster has no GPU")
        return there and device != "cpu"

    def run(
        self, tasks: Mapping[str, Callable[[], Any]], on_gpu: bool, unit: str
    ) -> Iterator[tuple[str, Finished]]:
        """The tasks by name as they finish, each on a CPU core of its own, and on a GPU of its own or none.

        A task is a function of this package, or a ``partial`` of one. If its machine or process is lost it
        runs again, up to ``RETRIES`` times. After the interruption what has not finished is left out. Raises
        ``ClusterError`` once no machine that could run the rest has been there for ``ABSENT_S``.
        """
        with tqdm(total=len(tasks), unit=unit, disable=not tasks) as bar:
            for name, finished in self._run(tasks, on_gpu):
                bar.update()
                tqdm.write(f"[{finished.seconds:6.1f} s] {name}{_place(finished)}")
                yield name, finished

    def call(self, task: Callable[[], Any], on_gpu: bool) -> Any:
        """What a single task returns. Raises ``RoseError`` with its error, ``KeyboardInterrupt``."""
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
            yield calls[call], self._taken(call)

    def _finishing(self, calls: list[Any], resource: str) -> Iterator[Any]:
        """The calls as they finish, until the interruption."""
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

    def _taken(self, call: Any) -> Finished:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            return Finished(error=in_one_line(error.cause or error))
        except self._ray.exceptions.RayError as error:
            return Finished(error=in_one_line(error))


def add_cluster_option(parser: ArgumentParser) -> None:
    """``--cluster``, the address of a :class:`Sweep`'s cluster; None without it."""
    text = "spread over a Ray cluster: auto, or the host:port of its head; what is there already is left out"
    parser.add_argument("--cluster", metavar="ADDRESS", help=text)


def in_one_line(error: BaseException) -> str:
    """The first line of an error's type and message; of an error that a user can cause the message alone."""
    return (str(error) if isinstance(error, RoseError) else describe(error)).partition("\n")[0]


def _execute(task: Callable[[], Any]) -> Finished:
    """Runs on a machine of the cluster, whose Ray sends SIGTERM and soon SIGKILL if this process is to end.

    It then ends at once: put in order by halves, its children would not notice that it has gone.
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


def _place(finished: Finished) -> str:
    where = f" on {finished.machine}" if finished.machine else ""
    return f"{where}: {finished.error}" if finished.error else where


def _stage(folder: Path, notebooks: Path | None) -> None:
    """A checkout's ``rosellm`` and ``notebooks``, as far as tasks need them."""
    shutil.copytree(Path(rosellm.__file__).parent, folder / "rosellm", ignore=UNWANTED)
    if notebooks is not None:
        for name in ("results", "exhibits"):
            if (CHECKOUT / NOTEBOOKS / name).is_dir():
                shutil.copytree(CHECKOUT / NOTEBOOKS / name, folder / NOTEBOOKS / name, ignore=UNWANTED)
        shutil.copytree(
            notebooks, folder / NOTEBOOKS, ignore=UNWANTED, ignore_dangling_symlinks=True, dirs_exist_ok=True
        )


def _environment(folder: str) -> dict[str, Any]:
    """Ray's runtime environment of the tasks: the files in ``folder``, and the commit they are from."""
    commit = environment(torch.device("cpu"))["git_commit"]
    return {"working_dir": folder, "env_vars": {COMMIT_VARIABLE: commit} if commit else {}}
