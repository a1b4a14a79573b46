"""Follow a scheduler step by step: who holds the KV blocks, and what happens to each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.serving.scheduler import OnlineScheduler

KINDS = ("preempted", "evicted", "cancelled", "failed", "finished")
ENDS = {"length": "finished", "stop": "finished", "cancelled": "cancelled", "failed": "failed"}


@dataclass(frozen=True, slots=True)
class Moment:
    """The first layer's pool between two steps, in blocks; with ``free`` they add up to the pool.

    requests: blocks of each active request, oldest first; a shared block counts for its oldest holder.
    cached: held by the prefix cache alone. lost: neither free nor held.
    """

    requests: dict[int, int]
    cached: int
    lost: int
    free: int


@dataclass(frozen=True, slots=True)
class Happening:
    """An event of ``KINDS`` that was detected at a moment; ``who`` is a request or an evicted prefix."""

    moment: int
    kind: str
    who: str


class PoolLog:
    """A scheduler's pool at each moment, and the events up to it.

    Compares the block tables with their previous state, so the scheduler needs no hook: missing requests have
    ended, preemptions are counted in their metrics, and missing cache entries were evicted. ``moments[0]`` is
    the initial state.
    """

    def __init__(self, scheduler: OnlineScheduler) -> None:
        self.scheduler, self.engine = scheduler, scheduler.engine
        self.moments: list[Moment] = []
        self.happenings: list[Happening] = []
        self._known: dict[int, Sequence] = {}
        self._ended: set[int] = set(scheduler.finished)
        self._preemptions: Counter[int] = Counter()
        self._entries: list[tuple[int, ...]] = []
        self.note()

    def note(self) -> None:
        """Record a moment; call it after each step, or after anything else worth recording."""
        at = len(self.moments)
        self.happenings += [Happening(at, kind, who) for kind, who in self._changes()]
        self.moments.append(self._moment())

    def run(self) -> PoolLog:
        """Step until no request is left, recording each step."""
        while self.scheduler.has_unfinished:
            self.scheduler.step()
            self.note()
        return self

    def count(self, kind: str) -> int:
        """Count the events of a kind."""
        return sum(one.kind == kind for one in self.happenings)

    def _changes(self) -> Iterator[tuple[str, str]]:
        present = self.scheduler.requests
        self._known |= present
        for request_id, request in self._known.items():
            times = request.metrics.preemptions
            yield from [("preempted", f"request {request_id}")] * (times - self._preemptions[request_id])
            self._preemptions[request_id] = times
        for request_id in sorted(self._known.keys() - present.keys()):
            yield self._end(request_id, self._known.pop(request_id).finish_reason)
        for request_id in sorted(
            self.scheduler.finished.keys() - self._ended
        ):  # began and ended between two notes
            yield self._end(request_id, self.scheduler.finished[request_id].finish_reason)
        cache = self.engine.prefix_cache
        entries = {} if cache is None else cache.entries
        gone = [entry for entry in self._entries if entry not in entries]
        yield from (("evicted", f"a prefix of {len(entry)} tokens") for entry in gone)
        self._entries = list(entries)

    def _end(self, request_id: int, finish_reason: str | None) -> tuple[str, str]:
        self._ended.add(request_id)
        return ENDS[str(finish_reason)], f"request {request_id}"

    def _moment(self) -> Moment:
        counted: set[int] = set()
        held: dict[int, int] = {}
        for request_id, request in sorted(self.scheduler.requests.items()):
            own = set(request.block_ids) - counted
            counted |= own
            if own:
                held[request_id] = len(own)
        cache = self.engine.prefix_cache
        in_first_pool = range(self.engine.num_kv_blocks)
        cached = set() if cache is None else set(cache.holdings()) & set(in_first_pool) - counted
        free = self.engine.blocks.num_free_blocks()
        lost = len(in_first_pool) - free - len(counted) - len(cached)
        return Moment(held, len(cached), lost, free)
