"""All records of one GPU at one commit: ``python -m rosellm.bench campaign --minutes 10``.

Each block holds what is compared, and is measured in one lease of one machine. A call makes records that are
still missing, in the plan's order, until the next one would take too long; the next call goes on there. The
exit status is 0 if none is missing, 1 if some are, and 2 if records of another commit, GPU, host or lease
are in the way, or if the checkout has changes that are not committed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from rosellm.bench.plan import PLAN, Block, Run
from rosellm.command_line import whole_number
from rosellm.environment import COMMIT_VARIABLE, environment
from rosellm.errors import RoseError
from rosellm.models.loading import resolve_device

CAMPAIGN = {"git_commit": "commit", "git_dirty": "commit", "device_name": "GPU"}  # equal in all records
LEASE = CAMPAIGN | {"host": "host", "lease": "lease"}  # equal in all records of a block
LEAVING_S = 15.0  # from the last record to the end of the process
BEGUN = ".begun"  # folder of the records of the command that runs
SHOWN = 3  # names of a line
COMPLETE = re.compile(r"\[ *[\d.]+ s\] (\S+)\n")  # how a command tells that a record is complete


def add_to(parser: ArgumentParser) -> None:
    """Add this command's options, and :func:`run` as the parser's default ``run``."""
    parser.description = (__doc__ or "").strip().partition("\n\n")[2]
    parser.set_defaults(run=run)
    add = parser.add_argument
    names = [block.name for block in PLAN]
    add("--block", choices=names, metavar="NAME", help=f"one block: {', '.join(names)}; default: all")
    add("--minutes", type=whole_number(1), default=10, metavar="N", help="time limit in minutes")
    add("--out", type=Path, default=Path("build/campaign"), metavar="DIR", help="folder of the records")
    add("--list", action="store_true", help="show blocks and estimates, and measure nothing")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda if available")


def run(given: Namespace) -> None:
    """Make missing records until the time is up; leave with status 1 if some are still missing."""
    start = time.monotonic()
    blocks = [block for block in PLAN if given.block in (None, block.name)]
    if not given.list:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the command that runs, too
        campaign = Campaign(given.out, resolve_device(given.device).type)
        campaign.check(blocks)
        campaign.work_off(blocks, start + 60 * given.minutes - LEAVING_S)
    for block in blocks:
        print(told(block, given.out))
    if given.list:
        print(f"{'together':12} {sum(block.seconds for block in blocks) / 60:4.1f} minutes")
    elif any(missing(one, given.out) for block in blocks for one in block.runs):
        raise SystemExit(1)


def missing(one: Run, folder: Path) -> list[str]:
    """Return the records of a run that are not in the folder, in the order in which they are measured."""
    return [record for record in one.records if not _path(folder, record).is_file()]


def told(block: Block, folder: Path) -> str:
    """Describe in one line how long a block takes, and what is missing of it."""
    left = [record for one in block.runs for record in missing(one, folder)]
    total = sum(len(one.records) for one in block.runs)
    seconds = sum(one.expected_s(missing(one, folder)) for one in block.runs)
    line = f"{block.name:12} {block.seconds / 60:4.1f} minutes, {total - len(left)} of {total} records"
    more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
    return f"{line}; missing, {seconds / 60:.1f} minutes: {', '.join(left[:SHOWN])}{more}" if left else line


class Campaign:
    """The records in ``folder``, and those that are still to be measured on a device, "cuda" or "cpu".

    Raises ``RoseError`` unless the package is a clean commit.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.here = environment(resolve_device(device))
        if self.here["git_commit"] is None:
            raise RoseError(f"a campaign is of one commit: name it in {COMMIT_VARIABLE} where git has none")
        if self.here["git_dirty"]:
            raise RoseError("a campaign is of one commit: commit your changes first")
        folder.mkdir(parents=True, exist_ok=True)

    def check(self, asked: list[Block]) -> None:
        """Raise ``RoseError`` if the folder's records are not comparable with those to be measured here.

        All must be of this commit and GPU. Those of a block must be of one host and lease, and of this one
        if others of the block are missing and asked for.
        """
        for block in PLAN:
            paths = [_path(self.folder, record) for one in block.runs for record in one.records]
            known = {path: _environment_of(path) for path in paths if path.is_file()}
            goes_on = block in asked and len(known) < len(paths)
            first = self.here if goes_on else next(iter(known.values()), self.here)
            for path, own in known.items():
                _refuse_others(path, own, first | {name: self.here[name] for name in CAMPAIGN}, block)

    def work_off(self, blocks: list[Block], end: float) -> None:
        """Make missing records in order; stop where the next would be late. end: a monotonic time."""
        for block, one in ((its, one) for its in blocks for one in its.runs):
            left = missing(one, self.folder)
            while left:
                wanted = one.within(end - time.monotonic(), left)
                if not wanted:
                    return
                print(block.name, end=": ", flush=True)
                failed = self._measure(one, wanted, end, block)
                left = [record for record in missing(one, self.folder) if record in left][failed:]

    def _measure(self, one: Run, wanted: list[str], end: float, block: Block) -> bool:
        """Run a command that makes records, print one line, and return whether records are missing.

        Only records that the command tells to be complete are kept.
        """
        begun = self.folder / BEGUN
        shutil.rmtree(begun, ignore_errors=True)
        for record in wanted:
            _path(begun, record).parent.mkdir(parents=True, exist_ok=True)
        start, log = time.monotonic(), self.folder / "campaign.log"
        command = [sys.executable, "-m", *one.arguments(self.folder, begun, wanted), "--device", self.device]
        with log.open("a+b") as output:
            written = output.tell()
            status = _run(command, output, end + LEAVING_S / 2 - start)
            output.seek(written)
            complete = COMPLETE.findall(output.read().decode(errors="replace"))
        for record in wanted:
            path = _path(begun, record)
            if path.is_file() and (status == 0 or Path(record).name in complete):
                _refuse_others(path, _environment_of(path), self.here, block)
                _path(self.folder, record).parent.mkdir(parents=True, exist_ok=True)
                path.replace(_path(self.folder, record))
        is_short = any(record in wanted for record in missing(one, self.folder))
        names = wanted[0] + f" to {wanted[-1]}" * (len(wanted) > 1)
        why = "; ended, the time was up" if status is None else f"; FAILED, see {log}" * is_short
        print(f"{names}, {time.monotonic() - start:.0f} s of {one.expected_s(wanted):.0f}{why}", flush=True)
        return is_short


def _run(command: list[str], output: BinaryIO, limit_s: float) -> int | None:
    """Run a command, and return its exit status; None if it took too long. Its processes end with it."""
    process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment_of(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["environment"])
    except (ValueError, LookupError, TypeError) as error:
        raise RoseError(f"{path} is not a record: remove it") from error


def _refuse_others(path: Path, own: dict[str, Any], expected: dict[str, Any], block: Block) -> None:
    """Raise ``RoseError`` unless a record's environment is the expected one."""
    others = dict.fromkeys(name for key, name in LEASE.items() if own.get(key) != expected[key])
    if others:
        raise RoseError(
            f"{path} is of another {' and '.join(others)}; one lease makes all of block {block.name}: "
            "remove its records, or choose another --out"
        )


def _path(folder: Path, record: str) -> Path:
    return folder / f"{record}.json"
