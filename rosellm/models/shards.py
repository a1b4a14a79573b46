"""The safetensors files of a checkpoint."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rosellm.errors import CheckpointError

WHOLE = "model.safetensors"
LONGEST_NAME = 255  # bytes
MOST_NAMED = 3  # files that an error lists


@contextmanager
def opened(shard: Path) -> Iterator[safe_open]:
    try:
        with safe_open(shard, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{shard} cannot be read as safetensors: {error}") from error


def shards_of(folder: Path) -> list[Path]:
    """The checkpoint's files, all there: one, or those of its index. Raises ``CheckpointError``.

    As in transformers, a single file counts before an index, which an earlier checkpoint may have left.
    """
    index, names = folder / "model.safetensors.index.json", [WHOLE]
    if index.is_file() and not (folder / WHOLE).is_file():
        names = _indexed(index)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        others = len(missing) - MOST_NAMED
        listed = ", ".join(missing[:MOST_NAMED]) + (f" and {others} more" if others > 0 else "")
        raise CheckpointError(f"{folder} lacks {listed} (checkpoints are read from safetensors only)")
    return [folder / name for name in names]


def _indexed(index: Path) -> list[str]:
    """The files named by a safetensors index; all must be in its folder."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a valid safetensors index") from error
    if impossible := [name for name in names if not _can_exist(name)]:
        raise CheckpointError(f"{index} names a file that cannot exist, {reprlib.repr(impossible[0])}")
    if outside:
        raise CheckpointError(f"{index} names files outside its folder")
    return names


def _can_exist(name: str) -> bool:
    return name.isprintable() and 0 < len(name.encode()) <= LONGEST_NAME
