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
    are skipped; errors number lines from the first that is not blank.
    """
    try:
        content = Path(text).read_text(encoding="utf-8-sig").lstrip()  # spreadsheets write a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        told = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ArgumentTypeError(f"cannot read {text}: {told}") from None
    rows_of = _json_rows if content.startswith("{") else _csv_rows
    try:
        arrivals = [_arrival(*row) for row in rows_of(content.split("\n"))]
    except ValueError as error:
        raise ArgumentTypeError(f"{text}{error}") from None
    if not arrivals:
        raise ArgumentTypeError(f"{text} has no arrivals")
    return sorted(arrivals, key=lambda arrival: arrival.seconds)


def _json_rows(lines: list[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line, object_pairs_hook=_once_each)
            except (ValueError, RecursionError):
                yield number, None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """Build a JSON object; return None if it repeats a name."""
    row = dict(pairs)
    return row if len(row) == len(pairs) else None


def _csv_rows(lines: list[str]) -> Iterator[tuple[int, Any]]:
    """Yield each row and the number of its last line; a quoted cell may span several."""
    reader = csv.DictReader(map(str.strip, lines))
    try:
        names = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        if names and sorted(name for name in names if name in FIELDS) != sorted(FIELDS):
            raise ValueError(f": the header is {','.join(names)}; it must name {', '.join(FIELDS)} once each")
        for row in reader:
            yield reader.line_num, None if None in row else row  # None: the key of what exceeds the header
    except csv.Error as error:
        raise ValueError(f", after line {reader.line_num}: {error}") from None


def _arrival(number: int, row: object) -> Arrival:
    here = f", line {number}"
    if not isinstance(row, dict) or any(row.get(name) is None for name in FIELDS):
        raise ValueError(f"{here}: it must give {', '.join(FIELDS)} once each")
    seconds, *counts = (_number(row[name]) for name in FIELDS)
    if not 0 <= seconds <= DAY_S:
        given = reprlib.repr(row["seconds"])
        raise ValueError(f"{here}: seconds is {given}; it must be a number from 0 to {DAY_S}, a day")
    for value, (name, most) in zip(counts, MOST.items(), strict=True):
        if not (value.is_integer() and 1 <= value <= most):
            given = reprlib.repr(row[name])
            raise ValueError(f"{here}: {name} is {given}; it must be a whole number from 1 to {most}")
    return Arrival(seconds, *map(int, counts))


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
