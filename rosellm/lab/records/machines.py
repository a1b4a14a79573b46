"""Machines side by side: the notebooks' reference, and others that a reader chooses.

A machine is a folder of records, named after its device. Adding the folder is all that is needed.
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
    """Return the reference's records, then those of each other folder in ``record``, once each.

    record: comma-separated names; ``here`` means this machine. Raises RecordError. The others refuse to load
    a record whose model or size differs from the reference's.
    """
    asked = [name.strip() for name in record.split(",")]
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = [this_machine(here) if name == HERE else name for name in asked]
    first, *others = (find(name, folder) for name in dict.fromkeys([REFERENCE, *asked]))
    return [first, *(replace(one, like=first) for one in others)]


def name_of(results: Results) -> str:
    """Return the device's name, with the dtype on a CPU; the folder's name if no record has one.

    A folder that is not named after its device is added.
    """
    try:
        device = results.device_name
    except RecordError:
        return results.folder.name
    name, folder = f"{device}{'' if results.is_gpu else ', fp32'}", results.folder.name
    return name if folder == folder_name(device) else f"{name} ({folder})"


def names_of(machines: Sequence[Results]) -> list[str]:
    """Return the label suffix of each machine; "" if there is only one."""
    return [f", {name_of(results)}" for results in machines] if len(machines) > 1 else [""]


def beside(
    machines: Sequence[Results], keys: Iterable[K], figures: Callable[[Results, K], list[Any]]
) -> tuple[list[list[Any]], list[str]]:
    """Return a table's rows, the machines of a key below one another, and lines for what machines lack.

    keys: a tuple's parts are joined for the row's label. figures: returns the cells after it. A RecordError
    is raised only if there is a single machine; other errors also if they come from the first machine.
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
    """Return, for readers, why the figure that raised ``error`` is missing."""
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
