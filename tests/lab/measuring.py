"""Run ``measure`` on a CPU: the record that it writes, or the line with which it refuses."""

from __future__ import annotations

import json
from pathlib import Path

from rosellm.lab import measure


def measured(folder: Path, name: str, *options: str) -> dict:
    """Return the record ``name`` that the command writes below ``folder``."""
    assert measure.main([name, *options, "--device=cpu", f"--output={folder}"]) == 0
    (path,) = folder.rglob(f"{name}.json")
    return json.loads(path.read_text())


def refusal(capsys, folder: Path, *asked: str) -> str:
    """Return the one line with which the command refuses, before it writes anything."""
    before = sorted(folder.rglob("*"))
    try:
        status: object = measure.main([*asked, "--device=cpu", f"--output={folder}"])
    except SystemExit as left:  # the parser's
        status = left.code
    said = capsys.readouterr().err
    assert status == 2 and said.count("\n") == 1 and sorted(folder.rglob("*")) == before
    return said
