"""Arrival times of requests, random or from a trace, and goodput: requests served within latency limits."""

from __future__ import annotations

import csv
import json
import math
import reprlib
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np

from rosellm.bench.options import MOST_TOKENS
from rosellm.command_line import INT32_MAX
from rosellm.roseinfer.request import RequestMetrics

DAY_S = 86_400  # no request arrives later
N_SAMPLES = 200  # samples of the queue's length per run
FIELDS = ("seconds", "prompt_tokens", "new_tokens")
MOST = {"prompt_tokens": MOST_TOKENS, "new_tokens": INT32_MAX}  # as for the options of these names

Lines = list[tuple[int, str]]  # with line numbers, from 1


class Arrival(NamedTuple):
    """A request of a trace: its arrival in seconds from the start, and its token counts."""

    seconds: float
    prompt_tokens: int
    new_tokens: int


def poisson_times(rate: float, n_requests: int, seed: int) -> list[float]:
    """Draw a Poisson process of ``rate`` requests per second; times in seconds, the first at 0."""
    gaps = np.random.default_rng([seed, n_requests]).exponential(1 / rate, size=n_requests)
    return (np.cumsum(gaps) - gaps[0]).tolist()


def read_trace(text: str) -> list[Arrival]:
    """An argparse type: read a file's arrivals, sorted by time.

    Each line is a JSON object with the FIELDS, or the file is CSV with a header that names them. Blank lines
    are skipped.
    """
    try:
        lines = _numbered(Path(text).read_text(encoding="utf-8-sig"))  # spreadsheets write a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        told = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ArgumentTypeError(f"cannot read {text}: {told}") from None
    if not lines:
        raise ArgumentTypeError(f"{text} has no arrivals")
    rows = _json_rows(lines) if lines[0][1].lstrip().startswith("{") else _csv_rows(lines)
    arrivals: list[Arrival] = []
    try:
        arrivals.extend(_arrival(number, row) for number, row in rows)
    except ValueError as error:
        raise ArgumentTypeError(f"{text}{error}") from None
    if not arrivals:
        raise ArgumentTypeError(f"{text} has no arrivals")
    return sorted(arrivals, key=lambda arrival: arrival.seconds)


def _numbered(text: str) -> Lines:
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _json_rows(lines: Lines) -> Iterator[tuple[int, Any]]:
    for number, line in lines:
        try:
            row = json.loads(line, object_pairs_hook=_once_each)
        except KeyError as twice:
            raise ValueError(f", line {number}: it names {twice.args[0]} twice") from None
        except (ValueError, RecursionError):
            row = None
        yield number, row


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raise ``KeyError`` with the name of a repeated field."""
    if name := _twice([name for name, _ in pairs]):
        raise KeyError(name)
    return dict(pairs)


def _csv_rows(lines: Lines) -> Iterator[tuple[int, Any]]:
    (_, header), *rows = _csv_cells(lines)
    names = [name.strip() for name in header]
    if not set(names) >= set(FIELDS):
        raise ValueError(f": the header is {','.join(names)}; it must name {', '.join(FIELDS)}")
    if name := _twice(names):
        raise ValueError(f": the header names {name} twice")
    for number, row in rows:
        if len(row) > len(names):
            raise ValueError(f", line {number}: it has {len(row)} cells, the header {len(names)}")
        yield number, dict(zip(names, row, strict=False))


def _twice(names: list[str]) -> str | None:
    """Return the first repeated name among the FIELDS, or None; other columns may repeat."""
    return next((name for name in FIELDS if names.count(name) > 1), None)


def _csv_cells(lines: Lines) -> Iterator[tuple[int, list[str]]]:
    """Yield each row's cells and its first line number; a quoted cell may span several lines."""
    reader, begin = csv.reader(line for _, line in lines), 0
    try:
        for row in reader:
            yield lines[begin][0], row
            begin = reader.line_num
    except csv.Error as error:
        raise ValueError(f", line {lines[begin][0]}: {error}") from None


def _arrival(number: int, row: object) -> Arrival:
    here = f", line {number}"
    if not isinstance(row, dict) or any(row.get(name) is None for name in FIELDS):
        raise ValueError(f"{here}: it must give {', '.join(FIELDS)}")
    values = {name: _number(row[name]) for name in FIELDS}
    if not 0 <= values["seconds"] <= DAY_S:
        told = reprlib.repr(row["seconds"])
        raise ValueError(f"{here}: seconds is {told}; it must be a number from 0 to {DAY_S}, a day")
    for name, most in MOST.items():
        if not (values[name].is_integer() and 1 <= values[name] <= most):
            told = reprlib.repr(row[name])
            raise ValueError(f"{here}: {name} is {told}; it must be a whole number from 1 to {most}")
    return Arrival(values["seconds"], int(values["prompt_tokens"]), int(values["new_tokens"]))


def _number(value: object) -> float:
    """Parse a number; NaN if the value is not numeric."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def submit_by_deadline(
    times: Iterable[float],
    submit: Callable[[int], None],
    clock: Callable[[], float] = perf_counter,
    pause: Callable[[float], object] = sleep,
) -> list[float]:
    """Call ``submit(i)`` at ``times[i]`` seconds from now; return how late each call was, in seconds.

    A late call is made at once, and does not delay later ones.
    """
    start, lags = clock(), []
    for i, due in enumerate(times):
        while (left := start + due - clock()) > 0:
            pause(left)
        lags.append(clock() - start - due)
        submit(i)
    return lags


def queue_over_time(requests: list[RequestMetrics], start: float, end: float) -> dict[str, list[float]]:
    """Sample how many requests wait for their first token and how many are in flight, N_SAMPLES times.

    start, end: of the run, in ``perf_counter`` seconds; ``queue_times_s`` are relative to the start.
    """
    samples = np.linspace(start, end, N_SAMPLES)
    columns = zip(*((one.arrival, one.token_times[0], one.token_times[-1]) for one in requests), strict=True)
    arrived, begun, ended = (np.searchsorted(np.sort(times), samples, side="right") for times in columns)
    return {
        "queue_times_s": (samples - start).tolist(),
        "queue_waiting": (arrived - begun).tolist(),
        "queue_in_flight": (arrived - ended).tolist(),
    }


def goodput(
    requests: list[RequestMetrics],
    lags: list[float],
    seconds: float,
    ttft_limit: float = math.inf,
    itl_limit: float = math.inf,
) -> dict[str, float]:
    """Return the requests per second that meet both limits (in seconds), and their share.

    TTFT is measured from when the request was due, ``lags`` before its submission; every gap between two
    tokens must be within ``itl_limit``.
    """
    good = 0
    for one, lag in zip(requests, lags, strict=True):
        slow = max(one.itl, default=0.0) > itl_limit
        good += not slow and one.token_times[0] - one.arrival + lag <= ttft_limit
    return {"goodput_req_s": good / seconds, "within_limits_share": good / len(requests)}
