"""All records of one GPU at one commit: ``python -m rosellm.bench campaign --minutes 10``.

Each block holds what is compared, and is measured in one lease of one machine. A call makes records that are
still missing, in the plan's order, until the next one would take too long; the next call goes on there. The
exit status is 0 if none is missing, 1 if some are, and 2 if records of another commit, GPU, host or lease
are in the way, or if the checkout has changes that are not committed.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rosellm.bench.plan import PLAN, Block, Run
from rosellm.command_line import whole_number
from rosellm.environment import COMMIT_VARIABLE, environment
from rosellm.errors import RoseError
from rosellm.models.loading import resolve_device

CAMPAIGN = {"git_commit": "commit", "device_name": "GPU"}  # equal in all records
LEASE = CAMPAIGN | {"host": "host", "lease": "lease"}  # equal in all records of a block
LEAVING_S = 15.0  # from the last record to the end of the process
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
        campaign.check()
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

    def check(self) -> None:
        """Raise ``RoseError`` if the folder's records are not comparable with those to be measured here.

        All must be of this commit and GPU. Those of a block must be of one host and lease, and of this one
        if others of the block are missing.
        """
        for block in PLAN:
            known = dict(self._environments(block))
            is_done = not any(missing(one, self.folder) for one in block.runs)
            first = next(iter(known.values()), self.here) if is_done else self.here
            expected = first | {name: self.here[name] for name in CAMPAIGN}
            for record, own in known.items():
                if others := [name for key, name in LEASE.items() if own.get(key) != expected[key]]:
                    raise RoseError(
                        f"{_path(self.folder, record)} is of another {' and '.join(others)}; one lease makes "
                        f"all of block {block.name}: remove its records, or choose another --out"
                    )

    def _environments(self, block: Block) -> Iterator[tuple[str, dict[str, Any]]]:
        for record in [record for one in block.runs for record in one.records]:
            if (path := _path(self.folder, record)).is_file():
                yield record, json.loads(path.read_text(encoding="utf-8"))["environment"]

    def work_off(self, blocks: list[Block], end: float) -> None:
        """Make missing records in order; stop where the next would be late. end: a monotonic time."""
        for name, one in ((block.name, one) for block in blocks for one in block.runs):
            left = missing(one, self.folder)
            while left:
                wanted = one.within(end - time.monotonic(), left)
                if not wanted:
                    return
                print(name, end=": ", flush=True)
                failed = self._measure(one, wanted, end)
                left = [record for record in missing(one, self.folder) if record in left][failed:]

    def _measure(self, one: Run, wanted: list[str], end: float) -> bool:
        """Run a command that makes records, print one line, and return whether it failed or took too long.

        If so, only records that the command tells to be complete are kept.
        """
        for record in wanted:
            _path(self.folder, record).parent.mkdir(parents=True, exist_ok=True)
        begun, log = time.monotonic(), self.folder / "campaign.log"
        command = [sys.executable, "-m", *one.arguments(self.folder, wanted), "--device", self.device]
        status: int | None = None
        with log.open("a+b") as output:
            written = output.tell()
            try:
                limit = end + LEAVING_S / 2 - begun
                status = subprocess.run(command, stdout=output, stderr=output, timeout=limit).returncode
            except subprocess.TimeoutExpired:
                pass
            finally:
                output.seek(written)
                complete = COMPLETE.findall(output.read().decode(errors="replace"))
                for record in wanted if status != 0 else ():
                    if Path(record).name not in complete:
                        _path(self.folder, record).unlink(missing_ok=True)
        names = wanted[0] + f" to {wanted[-1]}" * (len(wanted) > 1)
        why = "" if status == 0 else f"; FAILED, see {log}" if status else "; ended, the time was up"
        print(f"{names}, {time.monotonic() - begun:.0f} s of {one.expected_s(wanted):.0f}{why}", flush=True)
        return status != 0


def _path(folder: Path, record: str) -> Path:
    return folder / f"{record}.json"
