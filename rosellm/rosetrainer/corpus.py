"""The training text: the Python standard library's own sources."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import accumulate
from pathlib import Path, PurePosixPath

from rosellm.errors import RoseError

VALIDATION_SHARE = 0.02
LEFT_OUT_FOLDERS = ("site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "config-*")
"""Installed packages, caches, code-page tables, the manual as one string, build settings of this machine."""
LEFT_OUT_FILES = ("_sysconfigdata*.py", "sitecustomize.py", "usercustomize.py")
"""Files that describe one installation rather than the library."""


@dataclass(frozen=True)
class Source:
    """One file of the corpus.

    path: relative to the corpus folder, with forward slashes. text: its content.
    """

    path: str
    text: str

    @property
    def n_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """Training and validation files, ordered by path; no file is in both, nor are copies of one file."""

    train: tuple[Source, ...]
    validation: tuple[Source, ...]

    def digest(self) -> str:
        """Return a SHA-256 of paths and texts, which does not depend on where the corpus is installed."""
        whole = hashlib.sha256()
        for source in self.train + self.validation:
            whole.update(f"{source.path}\0{source.text}\0".encode())
        return whole.hexdigest()

    def subset(self, n_bytes: int) -> Corpus:
        """Return a corpus of the first files of each split.

        It has about ``n_bytes`` bytes for training, and a tenth of that for validation.
        """
        return Corpus(_first(self.train, n_bytes), _first(self.validation, n_bytes // 10))


def read_corpus(folder: Path | None = None) -> Corpus:
    """Read every Python source below ``folder`` (default: the running standard library), split by file.

    Tests are included if they are installed. LEFT_OUT_FOLDERS, LEFT_OUT_FILES, empty files, files that are
    not UTF-8, and all but the first of identical files are excluded. Raises ``RoseError`` if ``folder`` is
    not a folder or if either split is empty.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    if not folder.is_dir():
        raise RoseError(f"corpus {str(folder)!r} is not a folder")
    sources = _without_copies(_read(path, folder) for path in _python_files(folder))
    train = tuple(source for source in sources if not is_validation(source.path))
    validation = tuple(source for source in sources if is_validation(source.path))
    if not train or not validation:
        raise RoseError(
            f"corpus {str(folder)!r} gives {len(train)} training and {len(validation)} validation files; "
            "each split needs at least one"
        )
    return Corpus(train, validation)


def is_validation(path: str) -> bool:
    """Return whether the file at ``path`` is in the validation split, which depends on the path's SHA-256.

    path: relative to the corpus folder, with forward slashes.
    """
    draw = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big")
    return draw < VALIDATION_SHARE * 2**32


def _python_files(folder: Path) -> list[Path]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return [folder / path for path in sorted(found) if not _left_out(PurePosixPath(path))]


def _left_out(path: PurePosixPath) -> bool:
    folders = any(fnmatch(part, pattern) for part in path.parent.parts for pattern in LEFT_OUT_FOLDERS)
    return folders or any(fnmatch(path.name, pattern) for pattern in LEFT_OUT_FILES)


def _read(path: Path, folder: Path) -> Source | None:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return Source(path.relative_to(folder).as_posix(), text.replace("\r\n", "\n"))


def _without_copies(sources: Iterable[Source | None]) -> list[Source]:
    firsts: dict[str, Source] = {}
    for source in sources:
        if source is not None and source.text.strip():
            firsts.setdefault(source.text, source)
    return list(firsts.values())


def _first(sources: tuple[Source, ...], n_bytes: int) -> tuple[Source, ...]:
    before = accumulate((source.n_bytes for source in sources), initial=0)
    return tuple(source for source, start in zip(sources, before, strict=False) if start < n_bytes)
