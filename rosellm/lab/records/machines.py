"""Show the records of several machines side by side: the notebooks' reference, and others the reader chooses.

A machine is a folder of records, named after its device. A new folder is found without further configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from rosellm.environment import environment
from rosellm.lab.records.records import REFERENCE, RecordError, Results, UnlikeError, find

HERE = "here"
LACKING = (RecordError, LookupError)  # a record is missing, or a figure in it

K = TypeVar("K")  # row key of a table


def folder_name(device_name: str) -> str:
    """Convert e.g. ``NVIDIA H200`` to ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def this_machine(device: torch.device) -> str:
    """Return the folder name of this machine's records: its GPU's name, or its CPU's for a CPU device."""
    return folder_name(environment(device)["device_name"])


def find_machines(record: str = REFERENCE, folder: Path | None = None) -> list[Results]:
    """Return the records of the reference machine, then those of each other machine in ``record``.

    record: comma-separated folder names; ``here`` means this machine.
    folder: contains the machines' folders; None for :func:`results_folder`.

    Raises RecordError if there is no such folder. The other machines refuse to load a record whose model or
    size differs from the reference's.
    """
    asked = [name.strip() for name in record.split(",")]
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = [this_machine(here) if name == HERE else name for name in asked]
    first, *others = (find(name, folder) for name in dict.fromkeys([REFERENCE, *asked]))
    return [first, *(replace(one, like=first) for one in others)]


def name_of(results: Results) -> str:
    """Return the name of a machine for readers.

    That is the device's name, followed by the dtype on a CPU, and by the folder's name if the folder is not
    named after the device. Without a record that contains the device's name, it is the folder's name.
    """
    try:
        device = results.device_name
    except RecordError:
        return results.folder.name
    name, folder = f"{device}{'' if results.is_gpu else ', fp32'}", results.folder.name
    return name if folder == folder_name(device) else f"{name} ({folder})"


def names_of(machines: Sequence[Results]) -> list[str]:
    """Return what labels append for each machine: ", NAME", or "" if there is only one machine."""
    return [f", {name_of(results)}" for results in machines] if len(machines) > 1 else [""]


def beside(
    machines: Sequence[Results], keys: Iterable[K], figures: Callable[[Results, K], list[Any]]
) -> tuple[list[list[Any]], list[str]]:
    """Build a table with a row for each key and machine; the rows of a key are consecutive.

    keys: the row's label is the key, or its parts joined if it is a tuple.
    figures: returns the cells after the label.

    Returns the rows, and lines that name what machines lack. ``figures`` may raise RecordError or LookupError
    for a missing figure: the row is then omitted. With a single machine, the error is raised instead; so is a
    LookupError from the first machine, since it indicates a typing error.
    """
    rows: list[list[Any]] = []
    lacking: dict[str, list[str]] = {}
    labels = {key: ", ".join(map(str, key)) if isinstance(key, tuple) else str(key) for key in keys}
    for key, label in labels.items():
        for results, name in zip(machines, names_of(machines), strict=True):
            try:
                rows.append([f"{label}{name}", *figures(results, key)])
            except LACKING as error:
                is_typo = results is machines[0] and not isinstance(error, RecordError)
                if len(machines) == 1 or is_typo:
                    raise
                lacking.setdefault(f"{why_lacking(error)}{name}", []).append(label)
    return rows, [why if len(of) == len(labels) else f"{why}: {'; '.join(of)}" for why, of in lacking.items()]


def why_lacking(error: Exception) -> str:
    """Return a text for readers that says why a figure is missing; ``error`` was raised when it was read."""
    return getattr(error, "why", RecordError.why)


def check_same_size(results: Results, reference: Results, record: str) -> None:
    """Raise UnlikeError unless both measured ``record`` at the same batch and context."""
    one, other = (two.figures(record) for two in (results, reference))
    differences = [
        f"another {key} ({one.get(key)}, not {other.get(key)})"
        for key in ("batch", "context")
        if one.get(key) != other.get(key)
    ]
    if differences:
        raise UnlikeError(f"{record} of {results.folder.name}", differences)
