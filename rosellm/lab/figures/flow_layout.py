"""The layout of a data flow: boxes in lanes on a grid of columns, and the arrows between them.

Arrows are horizontal in a lane or turn in the channel below it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from rosellm.lab.figures.svg import LINE, text_width

BOX_TEXT, NOTE_TEXT, PILL_SIZE, NOTE_LINE = 13, 11, 11, 14
PAD, GUTTER, NAME_WIDTH = 11, 36, 92


@dataclass(eq=False)
class Box:
    lane: int
    colour: str
    mark: str
    lines: list[str]
    notes: list[str]
    column: int = 0
    x: float = 0
    y: float = 0
    width: float = 0

    @property
    def name(self) -> str:
        return " ".join(self.lines)

    @property
    def text_width(self) -> float:
        sizes = [(line, BOX_TEXT) for line in self.lines] + [(note, NOTE_TEXT) for note in self.notes]
        return max(text_width(text, size) for text, size in sizes)

    @property
    def height(self) -> float:
        return LINE * len(self.lines) + NOTE_LINE * len(self.notes) + 2 * PAD - 4

    @property
    def centre(self) -> float:
        return self.x + self.width / 2


@dataclass(eq=False)
class Run:
    """The horizontal part of an arrow in a channel, from x to x, with its label's half width and height."""

    start: float
    end: float
    half: float = 0
    height: float = 8
    y: float = 0
    share: float = 0.5

    @property
    def middle(self) -> float:
        """Where the label is centred."""
        return self.start + (self.end - self.start) * self.share

    @property
    def left(self) -> float:
        return min(self.start, self.end, self.middle - self.half)

    @property
    def right(self) -> float:
        return max(self.start, self.end, self.middle + self.half)


@dataclass(eq=False)
class Arrow:
    source: Box
    target: Box
    label: list[str]
    leaves: float = 0
    enters: float = 0
    runs: list[Run] = field(default_factory=list)

    @property
    def is_level(self) -> bool:
        return self.source.lane == self.target.lane and self.target.column == self.source.column + 1

    @property
    def rises(self) -> bool:
        return self.target.lane < self.source.lane

    @property
    def pill(self) -> tuple[float, float]:
        """Width and height of the label, 0 without one."""
        if not self.label:
            return 0, 0
        return max(text_width(line, PILL_SIZE) for line in self.label) + 14, 14 * len(self.label) + 5

    @property
    def sides(self) -> tuple[str, str]:
        """Where it leaves its source and enters its target."""
        down = self.target.lane > self.source.lane
        return "top" if self.rises else "bottom", "top" if down else "bottom"

    @property
    def channels(self) -> tuple[int, int]:
        """The lanes below which it leaves and arrives; the same one unless it passes a lane."""
        if self.rises:
            return self.source.lane - 1, self.target.lane
        return self.source.lane, max(self.source.lane, self.target.lane - 1)


def place_columns(boxes: list[Box], arrows: list[Arrow]) -> None:
    """Each box right of its neighbour and not left of its inputs; arrows against that order are returns."""
    edges = [(a, b, 1) for a, b in pairwise(boxes) if a.lane == b.lane]
    for arrow in arrows:
        edge = (arrow.source, arrow.target, int(arrow.source.lane == arrow.target.lane))
        if _settle(boxes, [*edges, edge]):
            edges.append(edge)
    _settle(boxes, edges)


def _settle(boxes: list[Box], edges: list[tuple[Box, Box, int]]) -> bool:
    """Gives the leftmost columns that satisfy the edges; False if no columns do."""
    for box in boxes:
        box.column = 0
    for _ in range(len(boxes) + 1):
        late = [(a, b, gap) for a, b, gap in edges if b.column < a.column + gap]
        if not late:
            return True
        for a, b, gap in late:
            b.column = max(b.column, a.column + gap)
    return False


def place_x(boxes: list[Box], arrows: list[Arrow]) -> float:
    """Gives the columns their places and widths; returns the width of the picture."""
    x = NAME_WIDTH + 34.0
    for column in range(max(box.column for box in boxes) + 1):
        mine = [box for box in boxes if box.column == column]
        width = max([88.0, *(box.text_width + 2 * PAD for box in mine)])
        for box in mine:
            box.x, box.width = x, width
        labels = [a.pill[0] + 30 for a in arrows if a.is_level and a.source.column == column and a.label]
        x += width + max([GUTTER, *labels])
    return max(box.x + box.width for box in boxes) + 24


def place_ports(arrows: list[Arrow]) -> None:
    """Spreads the arrows' ends along the tops and bottoms of boxes, in the order of their far ends."""
    sides: dict[tuple[Box, str], list[tuple[float, int, str]]] = {}
    for i, arrow in enumerate(arrows):
        if not arrow.is_level:
            out_side, in_side = arrow.sides
            sides.setdefault((arrow.source, out_side), []).append((arrow.target.centre, i, "leaves"))
            sides.setdefault((arrow.target, in_side), []).append((arrow.source.centre, i, "enters"))
    for (box, _), ends in sides.items():
        for k, (_, i, end) in enumerate(sorted(ends)):
            setattr(arrows[i], end, box.x + box.width * (k + 1) / (len(ends) + 1))
    for arrow in arrows:
        if not arrow.is_level and arrow.source.column == arrow.target.column:
            _straighten(
                arrow, len(sides[arrow.source, arrow.sides[0]]), len(sides[arrow.target, arrow.sides[1]])
            )


def _straighten(arrow: Arrow, n_out: int, n_in: int) -> None:
    """Of two boxes above each other, the one with a single arrow follows the other's port."""
    if n_in == 1:
        arrow.enters = min(max(arrow.leaves, arrow.target.x + 12), arrow.target.x + arrow.target.width - 12)
    elif n_out == 1:
        arrow.leaves = arrow.enters


def channels_of(arrows: list[Arrow], n_lanes: int) -> list[list[list[Run]]]:
    """For the channel below each lane its tracks; runs that do not overlap share a track."""
    channels: list[list[Run]] = [[] for _ in range(n_lanes)]
    for arrow in arrows:
        if arrow.is_level:
            continue
        first, last = arrow.channels
        half, height = arrow.pill[0] / 2, max(8.0, arrow.pill[1])
        if first == last:
            arrow.runs = [Run(arrow.leaves, arrow.enters, half, height)]
            channels[first].append(arrow.runs[0])
        else:
            gutter = _gutter(arrow)
            arrow.runs = [Run(arrow.leaves, gutter, half, height), Run(gutter, arrow.enters)]
            for channel, run in zip((first, last), arrow.runs, strict=True):
                channels[channel].append(run)
    for runs in channels:
        _clear_labels(runs)
    return [_share(runs) for runs in channels]


def _clear_labels(runs: list[Run]) -> None:
    """Moves labels along their runs, off the upright lines of other arrows where there is room."""
    for run in runs:
        others = [x for other in runs if other is not run for x in (other.start, other.end)]
        shares = (s for s in (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8) if _is_clear(run, s, others))
        run.share = next(shares, 0.5)


def _is_clear(run: Run, share: float, uprights: list[float]) -> bool:
    at = run.start + (run.end - run.start) * share
    fits = abs(run.end - run.start) * min(share, 1 - share) >= run.half
    return fits and all(abs(at - x) > run.half + 6 for x in uprights)


def _gutter(arrow: Arrow) -> float:
    """Where an arrow passes a lane: beside the target's column, on the source's side."""
    box = arrow.target
    return box.x - GUTTER / 2 if arrow.leaves < box.centre else box.x + box.width + GUTTER / 2


def _share(runs: list[Run]) -> list[list[Run]]:
    tracks: list[list[Run]] = []
    for run in sorted(runs, key=lambda r: r.right - r.left):
        free = (t for t in tracks if all(run.left > o.right + 8 or run.right < o.left - 8 for o in t))
        track = next(free, None)
        if track is None:
            tracks.append([run])
        else:
            track.append(run)
    return tracks


def place_runs(tracks: list[list[Run]], top: float) -> float:
    """Heights of a channel's runs, track under track; returns the height of the channel."""
    y = top + 12
    for track in tracks:
        height = max(run.height for run in track)
        for run in track:
            run.y = y + height / 2
        y += height + 8
    return y + 6 - top if tracks else 10


def points_of(arrow: Arrow) -> list[tuple[float, float]]:
    source, target = arrow.source, arrow.target
    if arrow.is_level:
        y = source.y + source.height / 2
        return [(source.x + source.width, y), (target.x, y)]
    start, end = (
        (box.y if side == "top" else box.y + box.height)
        for box, side in zip((source, target), arrow.sides, strict=True)
    )
    turns = [point for run in arrow.runs for point in ((run.start, run.y), (run.end, run.y))]
    return [(arrow.leaves, start), *turns, (arrow.enters, end)]
