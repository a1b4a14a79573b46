"""Keep the other parts of an existing record when a run measures only some parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rosellm.lab.records.bench import free_memory
from rosellm.lab.records.records import RecordError, Results
from rosellm.lab.records.turns import each

# Environment entries that all parts of a record share; a copy without git has only a version.
OF_MACHINE = ("device_name", "git_commit", "rosellm")


def in_parts(
    path: Path,
    begun: dict[str, Any],
    parts: Mapping[str, Callable[[], Any]],
    key: str | None = None,
    order: Callable[[str], Any] | None = None,
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Measure part after part; yield the record so far, and the part's name and figures.

    begun: the record without parts; its ``figures`` get them, under ``key`` if given, sorted by ``order`` of
    their names. Parts that the record at ``path`` has of the same conditions are kept; a part whose figures
    are None is left out. Raises ``RecordError`` if others would be lost.
    """
    found = kept_parts(path, begun, list(parts), key)
    for name in each(path.stem, parts):
        if (figures := parts[name]()) is not None:
            found[name] = figures
        ordered = dict(sorted(found.items(), key=lambda part: order(part[0]))) if order else dict(found)
        yield (
            begun | {"figures": ordered if key is None else begun["figures"] | {key: ordered}},
            name,
            figures,
        )
        free_memory()


def kept_parts(
    path: Path, today: dict[str, Any], asked: Sequence[str], key: str | None = None
) -> dict[str, Any]:
    """Return part → figures of the record at ``path``; {} unless measured under the same conditions.

    Device name, commit, and all facts of the two besides their parts must agree. today: the new record, still
    without parts. asked: the parts to be measured; raises ``RecordError`` if others would be lost; none: any
    may be. key: where figures hold the parts; None if figures hold nothing else.
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
    """Return what a record states of all its parts."""
    environment, figures = record.get("environment", {}), record.get("figures", {})
    told = {**record, **({} if key is None else figures)}
    told |= {name: environment.get(name) for name in OF_MACHINE}
    return {name: value for name, value in told.items() if name not in ("environment", "figures", key)}
