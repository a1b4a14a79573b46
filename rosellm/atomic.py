"""Atomic file writes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to ``path``, which it atomically replaces on success.

    Readers see either the old file or the complete new one, whenever the writer is stopped. Raises
    ``OSError`` as writing does; the old file then stays, and nothing else is left behind.
    """
    target = Path(os.path.realpath(path))
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        unfinished = Path(folder) / target.name
        yield unfinished
        unfinished.replace(target)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, atomically."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
