"""What a record's file has already: a run that measures other parts of the same record keeps it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rosellm.lab.records.records import RecordError, Results

# Of an environment, what parts of one record have in common; a copy without git has its version alone.
OF_MACHINE = ("device_name", "git_commit", "rosellm")


def earlier_parts(path: Path, today: dict[str, Any], key: str | None = None) -> dict[str, Any]:
    """Part → figures of the record at ``path``; none unless it was measured as ``today``'s is.

    That is, of the same device name and commit, and alike in whatever else the two say beside their parts.
    today: without parts as yet. key: where figures hold the parts; None: figures are nothing else.
    """
    found = _load(path)
    return {} if _differences(found, today, key) else _parts(found, key)


def kept_parts(
    path: Path, today: dict[str, Any], asked: Sequence[str], key: str | None = None
) -> dict[str, Any]:
    """:func:`earlier_parts`, for a run that measures those ``asked``, which may be none.

    Raises ``RecordError`` if it would lose any others.
    """
    found = _load(path)
    lost = [part for part in _parts(found, key) if part not in asked] if asked else []
    differences = _differences(found, today, key)
    if lost and differences:
        raise RecordError(
            f"{path} would lose {', '.join(lost)}, measured with another {' and '.join(differences)}: "
            "measure them too, or choose another --output"
        )
    return {} if differences else _parts(found, key)


def _load(path: Path) -> dict[str, Any]:
    return Results(path.parent).load(path.stem) if path.is_file() else {}


def _parts(record: dict[str, Any], key: str | None) -> dict[str, Any]:
    figures = record.get("figures", {})
    return dict(figures if key is None else figures.get(key, {}))


def _differences(found: dict[str, Any], today: dict[str, Any], key: str | None) -> list[str]:
    before, now = _facts(found, key), _facts(json.loads(json.dumps(today)), key)
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _facts(record: dict[str, Any], key: str | None) -> dict[str, Any]:
    """What is told of all parts alike."""
    environment, figures = record.get("environment", {}), record.get("figures", {})
    told = {**record, **({} if key is None else figures)}
    told |= {name: environment.get(name) for name in OF_MACHINE}
    return {name: value for name, value in told.items() if name not in ("environment", "figures", key)}
