"""Write files atomically."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces the file at ``path`` when the context ends.

    The replacement is atomic: readers see the old file or the complete new one, even if the process is killed
    meanwhile. If the context raises an error, the old file stays and the temporary file is removed. Raises
    ``OSError`` if the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        unfinished = Path(folder) / target.name
        yield unfinished
        unfinished.replace(target)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to the file at ``path`` as UTF-8, atomically."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
