"""A folder of records of a device that does not exist: the H200's, at half the speed or as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rosellm.lab.recorded import MIXED_LEDGERS
from rosellm.lab.records.records import REFERENCE

NAME, FOLDER = "Made-up GPU 9", "made-up-gpu-9"
LACKING = "W3"  # the workload that was not measured


def add_made_up_machine(results: Path) -> Path:
    """Write it beside the others in ``results``: whole runs and steps, without those of ``LACKING``."""
    folder = results / FOLDER
    folder.mkdir()
    for path in [*(results / REFERENCE).glob("W*-*.json"), *(results / REFERENCE).glob("steps-W*.json")]:
        if LACKING not in path.stem:
            record = json.loads(path.read_text(encoding="utf-8"))
            record["environment"]["device_name"] = NAME
            (folder / path.name).write_text(json.dumps(_halved(record)), encoding="utf-8")
    return folder


def add_complete_machine(results: Path) -> None:
    """Write one beside the others that has every record of the reference, of one GPU and of two.

    And those ledgers that the reference lacks.
    """
    for pair in ("", "-x2"):
        shutil.copytree(results / f"{REFERENCE}{pair}", results / f"{FOLDER}{pair}")
    shutil.copy(results / MIXED_LEDGERS / "ledger_w8.json", results / FOLDER)
    newest = {"device_name": NAME, "device_memory_bytes": 1, "time_utc": "9999"}  # tells the device's name
    (results / FOLDER / "newest.json").write_text(json.dumps({"environment": newest}), encoding="utf-8")


def _halved(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _halved(one, "turns_us" if key == "turns_us" else name) for name, one in value.items()}
    if isinstance(value, list):
        return [_halved(one, key) for one in value]
    if key == "turns_us":
        return value * 2
    return value / 2 if key.endswith("throughput_tok_s") else value
