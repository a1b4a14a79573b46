"""The safetensors files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rosellm.errors import CheckpointError, describe

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_NAMED = 3  # files that an error lists


def opened(shard: Path) -> safe_open:
    """Open a safetensors file; raise ``CheckpointError`` if it cannot be read."""
    try:
        return safe_open(shard, framework="pt")
    except (SafetensorError, OSError) as error:
        if _is_lfs_pointer(shard):
            raise CheckpointError(f"{shard} is a git-lfs pointer; run `git lfs pull` in its folder") from None
        raise CheckpointError(f"{shard} cannot be read as safetensors: {error}") from error


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(40).startswith(b"version https://git-lfs")
    except OSError:
        return False


def shards_of(folder: Path) -> list[Path]:
    """Return the weight files in ``folder``: a single file, or the files that an index lists.

    As in transformers, a single file takes precedence over an index, which an earlier checkpoint may have
    left behind. Raises ``CheckpointError`` if a file is missing.
    """
    is_indexed = (folder / INDEX).is_file() and not (folder / WHOLE).is_file()
    names = _indexed(folder / INDEX) if is_indexed else [WHOLE]
    present = {path.name for path in folder.iterdir() if path.is_file()}
    if missing := [describe(name) for name in names if name not in present]:
        listed = ", ".join(missing[:MOST_NAMED]) + (" and others" if len(missing) > MOST_NAMED else "")
        others = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        convert = "; transformers' save_pretrained converts others" if others else ""
        raise CheckpointError(
            f"{folder} lacks {listed} (only safetensors files in the folder are read{convert})"
        )
    return [folder / name for name in names]


def _indexed(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a valid safetensors index") from error
