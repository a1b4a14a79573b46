"""When a batch drafts: decided on the host, from the times and the accepted drafts of earlier steps."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from functools import partial
from statistics import median_low

from rosellm.roseinfer.steps.planner import NO_ROWS, Batch

FIRST_REST, LONGEST_REST = 16, 128  # plain steps between two probes; more if drafting is slow or hopeless
SHORT_REST, PROVEN = 4, 6  # the first rest, once that many steps in a row have paid
# Probes are rare if new rows are expected to accept fewer drafts than this share of those that pay. They then
# take about this share of the time, if each costs the host this many seconds.
HOPELESS, PROBING, PROBE_S = 0.25, 0.01, 300e-6
AVERAGED = 4  # steps per mean time; more than are left in flight
MOST_TRIED, LASTING = 32, 4096  # steps until the times are known, or measured again
MARGIN, UNKNOWN = 1.1, 1.5  # of the gain that pays; how much longer a step takes if it drafts
Kind = tuple[int, bool]  # the captured batch size of a step, and whether it drafts


class Pace:
    """Decides from measurements whether the next step of a batch drafts.

    A step that drafts takes longer, and gives a row one token more for each accepted draft. While drafts do
    not pay, a single step, a probe, drafts now and then, ever more rarely, to count accepted drafts.
    """

    def __init__(self) -> None:
        self._seconds: dict[Kind, deque[float]] = defaultdict(partial(deque, maxlen=2))  # not yet compared
        self._ratios: dict[int, deque[float]] = defaultdict(partial(deque, maxlen=5))  # by batch size
        self._longer: dict[int, float] = {}  # their medians
        self._plain_s: dict[int, float] = {}  # the latest mean time of plain steps, by batch size
        self._is_old: set[int] = set()  # batch sizes whose ratio is to be measured again
        self._begun: Counter[Kind] = Counter()  # since the times of this kind were last forgotten
        self._kind: Kind | None = None  # of the steps that ended last
        self._n_alike = 0  # how many in a row, counted from ``AVERAGED`` again after each mean
        self._started = self._ended = 0.0  # when the steps now being averaged began; when the last one ended
        self._is_paused = False  # whether other work came after it
        self._resting = NO_ROWS  # the batch that takes plain steps by the latest decision
        self._since, self._until = 0, 0.0  # plain steps since one drafted; the number at which the rest ends
        self._rest = float(FIRST_REST)
        self._counted = 0, 0  # the batch size of the latest rest, and the plain steps before it
        self._n_paid = 0  # steps that drafted because it pays, in a row
        self.is_probing = False  # whether the latest decision was to draft although it does not pay
        self.is_timed = True  # whether ``note`` and ``pause`` are to be called

    def rests(self, batch: Batch) -> bool:
        """Return whether an earlier decision makes the next step of a batch plain."""
        rests = batch is self._resting and self._since < self._until
        self._since += rests
        return rests

    def rest(self, batch: Batch, n_steps: float = math.inf, is_timed: bool = False) -> None:
        """Let a batch take ``n_steps`` plain steps after the last one that drafted.

        is_timed: whether these steps are timed.
        """
        self._resting, self._until, self.is_timed = batch, n_steps, is_timed

    def reconsider(self) -> None:
        """Let the next step be decided by itself: more is known about accepted drafts."""
        self._resting = NO_ROWS

    def begin(self, rows: int, accepted: float) -> None:
        """Start a batch with new rows.

        accepted: how many accepted drafts per step are expected of a new row.
        """
        self.reconsider()
        is_hopeless = accepted < HOPELESS * self.needed(rows)
        rare = PROBE_S / PROBING / self._plain_s.get(rows, PROBE_S)
        self._rest, self._n_paid = max(FIRST_REST, rare if is_hopeless else 0.0), 0

    def drafts(self, rows: int, accepted: float, batch: Batch) -> bool:
        """Return whether the next step of a batch drafts.

        rows: the captured batch size.
        accepted: the result of ``Planner.accepted_by``.
        """
        self.is_probing = False
        if not self.is_timed:
            self._kind, self.is_timed = None, True
        rested, before = self._counted
        self._begun[rested, False] += self._since - before
        chosen = self._chosen(rows, accepted, batch)
        self._begun[rows, chosen] += 1
        self._since = 0 if chosen else self._since + 1
        self._counted = rows, self._since
        return chosen

    def _chosen(self, rows: int, accepted: float, batch: Batch) -> bool:
        if rows not in self._longer or rows in self._is_old:
            for kind in (True, False):
                if len(self._seconds[rows, kind]) < 2 and self._begun[rows, kind] < MOST_TRIED:
                    return kind
        longer, pays = self.longer(rows), accepted > self.needed(rows)
        if self._begun[rows, pays] > LASTING * longer:
            self._is_old.add(rows)
            for kind in (True, False):
                self._seconds.pop((rows, kind), None)
                self._begun[rows, kind] = 0
        rest = self._rest * max(1.0, 1.5 * (longer - 1))
        self.is_probing = not pays and self._since >= rest
        if pays or self.is_probing:
            self._n_paid = self._n_paid + 1 if pays else 0
            first = FIRST_REST if self._n_paid < PROVEN else SHORT_REST
            self._rest = first if pays else min(2 * self._rest, max(self._rest, LONGEST_REST))
            return True
        self.rest(batch, rest, is_timed=len(self._seconds[rows, False]) < 2)
        return False

    def note(self, rows: int, drafted: bool, now: float) -> None:
        """Note that a step has ended, and been committed, at time ``now`` in seconds; only if ``is_timed``.

        The host's work for a step delays later ones, several steps may be committed at once, and the host's
        speed changes. So the mean time of ``AVERAGED`` steps counts, after as many of the same kind, and two
        such means are compared with the latest two of the other kind.
        """
        if (rows, drafted) != self._kind:
            self._kind, self._n_alike = (rows, drafted), 0
        elif self._is_paused:
            self._started += now - self._ended
            self._n_alike -= 1
        self._n_alike += 1
        self._ended, self._is_paused = now, False
        if self._n_alike % AVERAGED == 0:
            self._note_mean(rows, drafted)

    def _note_mean(self, rows: int, drafted: bool) -> None:
        started, self._started = self._started, self._ended
        if self._n_alike == AVERAGED:
            return
        self._n_alike = AVERAGED
        seconds = (self._ended - started) / AVERAGED
        self._seconds[rows, drafted].append(seconds)
        if not drafted:
            self._plain_s[rows] = seconds
        drafting, plain = self._seconds[rows, True], self._seconds[rows, False]
        if len(drafting) == len(plain) == 2:
            self._ratios[rows].append(min(drafting) / min(plain))
            self._longer[rows] = max(1.0, median_low(self._ratios[rows]))
            self._is_old.discard(rows)
            self._seconds[rows, not drafted].clear()

    def pause(self) -> None:
        """Note that there is other work before the next step ends."""
        self._is_paused = True

    def longer(self, rows: int) -> float:
        """Return the time of a step that drafts as a multiple of that of a plain one, at least 1."""
        return self._longer.get(rows, UNKNOWN)

    def needed(self, rows: int) -> float:
        """Return how many accepted drafts per row and step pay."""
        return MARGIN * self.longer(rows) - 1


class Always(Pace):
    """A pace at which every step drafts, or none."""

    def __init__(self, drafts: bool = True) -> None:
        super().__init__()
        self._drafts = drafts

    def rests(self, batch: Batch) -> bool:
        return False

    def drafts(self, rows: int, accepted: float, batch: Batch) -> bool:
        return self._drafts
