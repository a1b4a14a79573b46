"""The notebooks' still pictures: SVG without scripts, made for light pages and dark ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from math import log2, prod

from rosellm.errors import RoseError
from rosellm.lab.figures.palette import PALETTE, TEXT

FONT = "Helvetica Neue, Arial, Liberation Sans, DejaVu Sans, sans-serif"
LANE_COLOURS = {"cpu": "#4a5d73", "pci": "#65548a", "gpu": "#2c6d57", "host": "#4a5d73"}
OTHER_LANES = ("#7d4f2f", "#2f6484", "#5f6b2d", "#8a4a63")
NEW, NEW_TEXT, PILL, PILL_TEXT = "#f6a04a", "#2b1a05", "#e9edf2", "#2a3038"
FREE, HELD = "rgba(127,127,127,0.12)", "#39424e"
DASHED = f' stroke="{TEXT}" stroke-width="1.3" stroke-dasharray="5 4"'

# Advance widths of DejaVu Sans, the widest of the fonts that a page may take, in hundredths of the font size.
WIDTHS = {
    30: "'ijlIJ",
    37: " ,.-/:;\\|f·",
    42: "()[]!tr",
    54: '"*_`sz?c–',
    64: "LFkvxyPTYaeoESbdghnpqu$0123456789{}µ",
    70: "KAVBRXZC",
    79: "UHNDG&OQ",
    86: "w#+<=>^~M×→−≤≥÷",
    101: "%mW@…",
}
WIDTH_OF = {character: width / 100 for width, characters in WIDTHS.items() for character in characters}
BOLD = 1.13


class DiagramError(RoseError):
    """A picture of something that does not exist, or that contradicts itself."""


@dataclass(frozen=True)
class Picture:
    """An SVG picture and what it shows in words; the last line of a cell, or ``display``, shows it."""

    svg: str
    description: str

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/plain": self.description}


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Pixels that ``text`` takes at most in the fonts named by ``FONT``."""
    return sum(WIDTH_OF.get(character, 1.01) for character in text) * size * (BOLD if bold else 1)


def wrap(text: str, width: float, size: float, bold: bool = False) -> list[str]:
    """Lines of ``text`` no wider than ``width`` pixels; a word that is wider alone is broken."""
    lines: list[str] = []
    for word in (piece for whole in text.split() for piece in _pieces(whole, width, size, bold)):
        if lines and text_width(f"{lines[-1]} {word}", size, bold) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _pieces(word: str, width: float, size: float, bold: bool) -> list[str]:
    """A word cut where it must be, after an underscore or dot if it has one."""
    if text_width(word, size, bold) <= width or len(word) < 2:
        return [word]
    fits = max(n for n in range(1, len(word)) if n == 1 or text_width(word[:n], size, bold) <= width)
    seam = max(word.rfind(mark, 0, fits) for mark in "_./")
    cut = seam + 1 if seam > 0 else fits
    return [word[:cut], *_pieces(word[cut:], width, size, bold)]


# Data flow: boxes in lanes on a grid of columns; arrows are level in a lane or turn in the channel below it.

BOX_TEXT, NOTE_TEXT, PILL_SIZE, LINE, NOTE_LINE = 13, 11, 11, 16, 14
MAX_TEXT, MAX_PILL, PAD, GUTTER, LANE_PAD, NAME_WIDTH = 128, 118, 11, 36, 12, 92


@dataclass(eq=False)
class _Box:
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
class _Run:
    """The level part of an arrow in a channel, from x to x, with the half width and height of its label."""

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
class _Arrow:
    source: _Box
    target: _Box
    label: list[str]
    leaves: float = 0
    enters: float = 0
    runs: list[_Run] = field(default_factory=list)

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
        """The lanes below which it leaves and arrives; one and the same unless it passes a lane."""
        if self.rises:
            return self.source.lane - 1, self.target.lane
        return self.source.lane, max(self.source.lane, self.target.lane - 1)


def flow(lanes: Mapping[str, Sequence[str]], arrows: Sequence[tuple[str, str, str]], title: str) -> Picture:
    """Data flow: one lane a place (``"GPU"``), its boxes from left to right, labelled arrows between boxes.

    A box is named by the first line of its text; further lines are notes in small print. ``*`` before the
    text marks what is new, ``-`` what is removed. Names must differ. An arrow is (from, to, label).
    """
    boxes = _boxes(lanes)
    drawn = [
        _Arrow(_named(boxes, a), _named(boxes, b), wrap(text, MAX_PILL, PILL_SIZE)) for a, b, text in arrows
    ]
    if repeated := [
        ends for ends, n in Counter((a.source.name, a.target.name) for a in drawn).items() if n > 1
    ]:
        raise DiagramError(f"two arrows go from {' to '.join(repeated[0])}: join their labels")
    _place_columns(boxes, drawn)
    width = max(_place_x(boxes, drawn), 420)
    _place_ports(drawn)
    channels = _channels(drawn, len(lanes))
    width = max([width, *(run.right + 10 for arrow in drawn for run in arrow.runs)])
    y, bands = _title_height(title), []
    for i, name in enumerate(lanes):
        mine = [box for box in boxes if box.lane == i]
        height = max(44.0, *(box.height for box in mine)) + 2 * LANE_PAD
        for box in mine:
            box.y = y + (height - box.height) / 2
        bands.append(_band(name, i, y, height, width))
        y += height + _place_runs(channels[i], y + height)
    parts = [*bands, *map(_line, drawn), *map(_box, boxes), *map(_pill, drawn), _legend(boxes, width, y)]
    return _picture(width, y + 14, title, parts, _in_words(lanes, arrows))


def _boxes(lanes: Mapping[str, Sequence[str]]) -> list[_Box]:
    boxes = [
        _parse(text, i, _lane_colour(name, i))
        for i, (name, texts) in enumerate(lanes.items())
        for text in texts
    ]
    if not boxes:
        raise DiagramError("a data flow needs at least one box")
    repeated = [name for name, n in Counter(_key(box.name) for box in boxes).items() if n > 1]
    if repeated:
        raise DiagramError(f"two boxes have the same name: {', '.join(repeated)}")
    return boxes


def _lane_colour(name: str, i: int) -> str:
    known = (colour for word, colour in LANE_COLOURS.items() if word in name.lower())
    return next(known, OTHER_LANES[i % len(OTHER_LANES)])


def _parse(text: str, lane: int, colour: str) -> _Box:
    mark = text[0] if text[:1] in ("*", "-") else ""
    first, *notes = text.removeprefix(mark).strip().split("\n")
    if not first:
        raise DiagramError(f"a box needs a text, not {text!r}")
    small = [line for note in notes for line in wrap(note, MAX_TEXT, NOTE_TEXT)]
    return _Box(lane, colour, mark, wrap(first, MAX_TEXT, BOX_TEXT), small)


def _key(text: str) -> str:
    """A box's name without its mark, notes and spaces."""
    return "".join(text.split("\n")[0].split()).lstrip("*-")


def _named(boxes: list[_Box], name: str) -> _Box:
    for box in boxes:
        if _key(box.name) == _key(name):
            return box
    raise DiagramError(f"no box is called {name!r}: there are {', '.join(box.name for box in boxes)}")


def _place_columns(boxes: list[_Box], arrows: list[_Arrow]) -> None:
    """Each box right of its neighbour and not left of what flows into it; arrows against that are returns."""
    edges = [(a, b, 1) for a, b in pairwise(boxes) if a.lane == b.lane]
    for arrow in arrows:
        edge = (arrow.source, arrow.target, int(arrow.source.lane == arrow.target.lane))
        if _settle(boxes, [*edges, edge]):
            edges.append(edge)
    _settle(boxes, edges)


def _settle(boxes: list[_Box], edges: list[tuple[_Box, _Box, int]]) -> bool:
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


def _place_x(boxes: list[_Box], arrows: list[_Arrow]) -> float:
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


def _place_ports(arrows: list[_Arrow]) -> None:
    """Spreads the arrows' ends along the tops and bottoms of boxes, in the order of their far ends."""
    sides: dict[tuple[_Box, str], list[tuple[float, int, str]]] = {}
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


def _straighten(arrow: _Arrow, n_out: int, n_in: int) -> None:
    """Of two boxes above each other, the one with a single arrow follows the other's port."""
    if n_in == 1:
        arrow.enters = min(max(arrow.leaves, arrow.target.x + 12), arrow.target.x + arrow.target.width - 12)
    elif n_out == 1:
        arrow.leaves = arrow.enters


def _channels(arrows: list[_Arrow], n_lanes: int) -> list[list[list[_Run]]]:
    """For the channel below each lane its tracks; runs that do not overlap share a track."""
    channels: list[list[_Run]] = [[] for _ in range(n_lanes)]
    for arrow in arrows:
        if arrow.is_level:
            continue
        first, last = arrow.channels
        half, height = arrow.pill[0] / 2, max(8.0, arrow.pill[1])
        if first == last:
            arrow.runs = [_Run(arrow.leaves, arrow.enters, half, height)]
            channels[first].append(arrow.runs[0])
        else:
            gutter = _gutter(arrow)
            arrow.runs = [_Run(arrow.leaves, gutter, half, height), _Run(gutter, arrow.enters)]
            for channel, run in zip((first, last), arrow.runs, strict=True):
                channels[channel].append(run)
    for runs in channels:
        _clear_labels(runs)
    return [_share(runs) for runs in channels]


def _clear_labels(runs: list[_Run]) -> None:
    """Moves labels along their runs, off the upright lines of other arrows where there is room."""
    for run in runs:
        others = [x for other in runs if other is not run for x in (other.start, other.end)]
        shares = (s for s in (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8) if _is_clear(run, s, others))
        run.share = next(shares, 0.5)


def _is_clear(run: _Run, share: float, uprights: list[float]) -> bool:
    at = run.start + (run.end - run.start) * share
    fits = abs(run.end - run.start) * min(share, 1 - share) >= run.half
    return fits and all(abs(at - x) > run.half + 6 for x in uprights)


def _gutter(arrow: _Arrow) -> float:
    """Where an arrow passes a lane: beside the target's column, on the source's side."""
    box = arrow.target
    return box.x - GUTTER / 2 if arrow.leaves < box.centre else box.x + box.width + GUTTER / 2


def _share(runs: list[_Run]) -> list[list[_Run]]:
    tracks: list[list[_Run]] = []
    for run in sorted(runs, key=lambda r: r.right - r.left):
        free = (t for t in tracks if all(run.left > o.right + 8 or run.right < o.left - 8 for o in t))
        track = next(free, None)
        if track is None:
            tracks.append([run])
        else:
            track.append(run)
    return tracks


def _place_runs(tracks: list[list[_Run]], top: float) -> float:
    """Heights of a channel's runs, track under track; returns the height of the channel."""
    y = top + 12
    for track in tracks:
        height = max(run.height for run in track)
        for run in track:
            run.y = y + height / 2
        y += height + 8
    return y + 6 - top if tracks else 10


def _points(arrow: _Arrow) -> list[tuple[float, float]]:
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


def _line(arrow: _Arrow) -> str:
    marks = {arrow.source.mark, arrow.target.mark}
    colour = NEW if "*" in marks and "-" not in marks else TEXT
    dashes = ' stroke-dasharray="5 4"' if "-" in marks else ""
    points = _points(arrow)
    (x0, y0), (x, y) = points[-2:] if points[-2] != points[-1] else (points[-3], points[-1])
    back = (0, 9 if y > y0 else -9) if abs(y - y0) > abs(x - x0) else (9 if x > x0 else -9, 0)
    bx, by = x - back[0], y - back[1]
    dx, dy = back[1] * 0.5, back[0] * 0.5
    line = _rounded([*points[:-1], (bx, by)])
    head = f"M{_n(x)} {_n(y)}L{_n(bx + dx)} {_n(by + dy)}L{_n(bx - dx)} {_n(by - dy)}Z"
    return (
        f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>'
        f'<path d="{head}" fill="{colour}"/>'
    )


def _rounded(points: list[tuple[float, float]], radius: float = 7) -> str:
    """A path along level and upright lines with round corners."""
    path = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for (ax, ay), (x, y), (bx, by) in zip(points, points[1:], points[2:], strict=False):
        r = min(radius, (abs(x - ax) + abs(y - ay)) / 2, (abs(bx - x) + abs(by - y)) / 2)
        into, out = _step(x - ax, y - ay, r), _step(bx - x, by - y, r)
        path.append(f"L{_n(x - into[0])} {_n(y - into[1])}Q{_n(x)} {_n(y)} {_n(x + out[0])} {_n(y + out[1])}")
    return "".join([*path, f"L{_n(points[-1][0])} {_n(points[-1][1])}"])


def _step(dx: float, dy: float, length: float) -> tuple[float, float]:
    distance = abs(dx) + abs(dy)
    return (dx / distance * length, dy / distance * length) if distance else (0, 0)


def _band(name: str, lane: int, y: float, height: float, width: float) -> str:
    colour = _lane_colour(name, lane)
    lines = wrap(name, NAME_WIDTH, 12, bold=True)
    top = y + height / 2 - LINE * len(lines) / 2 + 12
    return (
        _rect(2, y, width - 4, height, 10, TEXT, ' opacity="0.13"')
        + _rect(2, y, 5, height, 2.5, colour)
        + _texts(lines, 16, top, 12, TEXT, anchor="start", extra=' font-weight="bold"')
    )


def _box(box: _Box) -> str:
    fill, ink, extra, struck = box.colour, "#ffffff", "", ""
    if box.mark == "*":
        fill, ink = NEW, NEW_TEXT
    if box.mark == "-":
        fill, ink, extra, struck = FREE, TEXT, DASHED, ' text-decoration="line-through"'
    top = box.y + PAD + 10
    return (
        _rect(box.x, box.y, box.width, box.height, 7, fill, extra)
        + _texts(box.lines, box.centre, top, BOX_TEXT, ink, extra=struck)
        + _texts(box.notes, box.centre, top + LINE * len(box.lines) - 1, NOTE_TEXT, ink, NOTE_LINE, struck)
    )


def _pill(arrow: _Arrow) -> str:
    if not arrow.label:
        return ""
    width, height = arrow.pill
    if arrow.is_level:
        (x0, y), (x1, _) = _points(arrow)
        x = (x0 + x1) / 2 - 3
    else:
        x, y = arrow.runs[0].middle, arrow.runs[0].y
    return _rect(
        x - width / 2, y - height / 2, width, height, 8, PILL, f' stroke="{TEXT}" stroke-width="0.8"'
    ) + _texts(arrow.label, x, y - height / 2 + 13, PILL_SIZE, PILL_TEXT, 14)


def _legend(boxes: list[_Box], width: float, y: float) -> str:
    marks = [name for mark, name in (("*", "new"), ("-", "removed")) if any(b.mark == mark for b in boxes)]
    parts, x = [], width - 8.0
    for name in reversed(marks):
        x -= text_width(name, 11)
        parts.append(_texts([name], x, y + 7, 11, TEXT, anchor="start"))
        x -= 22
        style = (NEW, "") if name == "new" else (FREE, DASHED)
        parts.append(_rect(x, y - 3, 16, 11, 3, *style))
        x -= 14
    return "".join(parts)


def _in_words(lanes: Mapping[str, Sequence[str]], arrows: Sequence[tuple[str, str, str]]) -> str:
    words = {"*": " (new)", "-": " (removed)"}

    def said(text: str) -> str:
        mark = text[0] if text[:1] in words else ""
        return ", ".join(text.removeprefix(mark).strip().split("\n")) + words.get(mark, "")

    rows = [f"{name}: {' | '.join(map(said, texts))}" for name, texts in lanes.items()]
    return "\n".join(
        rows + [f"  {a.lstrip('*-')} → {b.lstrip('*-')}" + (f": {t}" if t else "") for a, b, t in arrows]
    )


# What tensors and the KV pool look like.

MAX_WIDTH = 820.0


def tensor_shapes(tensors: Sequence[tuple[str, str, tuple[int, ...]]], title: str = "") -> Picture:
    """Boxes for tensors given as (name, dimensions ``"[B, H, D]"``, shape), edges growing with the logarithm.

    The last three dimensions are depth, height and width; those before them are written.
    """
    cells = [_tensor(*tensor) for tensor in tensors]
    if not cells:
        raise DiagramError("there is no tensor to draw")
    parts, x, y, row, widest = [], 8.0, _title_height(title), 0.0, 0.0
    for svg, width, height in cells:
        if x > 8 and x + width > MAX_WIDTH:
            x, y, row = 8.0, y + row + 14, 0.0
        parts.append(f'<g transform="translate({_n(x)} {_n(y)})">{svg}</g>')
        x, row = x + width + 26, max(row, height)
        widest = max(widest, x - 18)
    rows = [
        f"{name} {dims} = {' × '.join(map(str, shape))}, {prod(shape):,} elements"
        for name, dims, shape in tensors
    ]
    return _picture(widest, y + row + 6, title, parts, "\n".join(rows))


def _tensor(name: str, dims: str, shape: tuple[int, ...]) -> tuple[str, float, float]:
    """One tensor's drawing with its width and height."""
    letters = [part.strip() for part in dims.strip("[]").split(",")]
    if len(letters) != len(shape) or not shape or min(shape) < 1:
        raise DiagramError(f"{name}: the dimensions {dims} do not fit the shape {tuple(shape)}")
    sides = [12 + 11 * log2(n) for n in shape[::-1][:3]] + [0.0, 0.0, 0.0]
    w, h, d = sides[0], max(sides[1], 12.0), sides[2] * 0.45 if len(shape) > 2 else 0.0
    named = [f"{letter} = {n:,}" for letter, n in zip(letters[::-1], shape[::-1], strict=True)]
    left = text_width(named[1], 11) + 8 if len(shape) > 1 else 0.0
    head = [
        (name, 13, True),
        (dims, 11, False),
        *([(", ".join(named[:2:-1]), 11, False)] if len(shape) > 3 else []),
    ]
    top = 18.0 + 15 * (len(head) - 1)
    front = top + d + 4
    right = d / 2 + text_width(named[2], 11) + 4 if len(shape) > 2 else 0.0
    parts = [
        _texts(
            [text], 0, 13 + 15 * i, size, TEXT, anchor="start", extra=' font-weight="bold"' if bold else ""
        )
        for i, (text, size, bold) in enumerate(head)
    ]
    colour, dark, light = PALETTE[0], "#2a5688", "#5b8dc4"
    if d:
        parts.append(
            _polygon(
                [(left, front), (left + d, front - d), (left + w + d, front - d), (left + w, front)], light
            )
        )
        corner = [
            (left + w, front),
            (left + w + d, front - d),
            (left + w + d, front - d + h),
            (left + w, front + h),
        ]
        parts.append(_polygon(corner, dark))
        parts.append(
            _texts([named[2]], left + w + d / 2 + 6, front + h - d / 2 + 9, 11, TEXT, anchor="start")
        )
    parts.append(_rect(left, front, w, h, 0, colour))
    parts.append(_texts([named[0]], left + w / 2, front + h + 15, 11, TEXT))
    if len(shape) > 1:
        parts.append(_texts([named[1]], left - 6, front + h / 2 + 4, 11, TEXT, anchor="end"))
    widths = [left + w + max(right, d), left + w / 2 + text_width(named[0], 11) / 2]
    widths += [text_width(text, size, bold) for text, size, bold in head]
    return "".join(parts), max(widths), front + h + 20


def block_pool(
    tables: Mapping[str, Sequence[int]],
    n_blocks: int,
    lengths: Mapping[str, int],
    block_size: int,
    refs: Mapping[int, int] | None = None,
    title: str = "",
) -> Picture:
    """The KV pool of one layer: every block with its owner's colour, filled as far as it holds tokens.

    tables: sequence → block indices; lengths: sequence → cached tokens. A block in several tables is striped.
    ``refs`` (block → holders, by default counted from the tables) is written where it is above 1.
    """
    _check_pool(tables, n_blocks, lengths, block_size)
    owners = {b: [name for name, blocks in tables.items() if b in blocks] for b in range(n_blocks)}
    filled = {b: 0 for b in range(n_blocks)}
    for name, blocks in tables.items():
        for i, block in enumerate(blocks):
            filled[block] = max(filled[block], min(block_size, lengths[name] - i * block_size))
    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(tables)}
    held = {b: len(names) for b, names in owners.items()} | dict(refs or {})
    top = _title_height(title)
    columns = min(n_blocks, 12)
    parts = [
        _block(
            b,
            (10 + b % columns * 62, top + b // columns * 52),
            [colours[name] for name in owners[b]],
            filled[b] / block_size,
            held[b],
        )
        for b in range(n_blocks)
    ]
    y = top + -(-n_blocks // columns) * 52 + 12
    for name, blocks in tables.items():
        parts.append(_table_row(name, blocks, colours[name], y, f"{lengths[name]:,} tokens"))
        y += 26
    width = max(
        [columns * 62 + 12.0, *(_row_width(n, b, f"{lengths[n]:,} tokens") for n, b in tables.items())]
    )
    return _picture(
        width, y + 4, title, parts, _pool_in_words(owners, filled, block_size, tables, lengths, held)
    )


def _check_pool(
    tables: Mapping[str, Sequence[int]], n_blocks: int, lengths: Mapping[str, int], block_size: int
) -> None:
    if n_blocks < 1 or block_size < 1:
        raise DiagramError(f"a pool needs blocks with room, not {n_blocks} of {block_size} tokens")
    for name, blocks in tables.items():
        if name not in lengths:
            raise DiagramError(f"the length of {name} is missing: there are {', '.join(lengths) or 'none'}")
        if strange := [b for b in blocks if not 0 <= b < n_blocks]:
            raise DiagramError(f"{name} has block {strange[0]}, but the pool has blocks 0 to {n_blocks - 1}")
        if not (len(blocks) - 1) * block_size < lengths[name] <= len(blocks) * block_size and blocks:
            raise DiagramError(
                f"{name}: {lengths[name]} tokens do not fill {len(blocks)} blocks of {block_size}"
            )


BLOCK = (52, 42)


def _block(index: int, at: tuple[float, float], colours: list[str], share: float, held: int) -> str:
    (x, y), (w, h) = at, BLOCK
    if not colours:
        return _rect(x, y, w, h, 5, FREE, DASHED) + _texts([str(index)], x + w / 2, y + 26, 12, TEXT)
    stripes = _stripes(colours)
    band = h / len(stripes)
    bands = "".join(_rect(x, y + i * band, w * share, band, 0, colour) for i, colour in enumerate(stripes))
    plate = f"{index} ×{held}" if held > 1 else str(index)
    width = text_width(plate, 12, bold=True) + 8
    return (
        _rect(x, y, w, h, 3, HELD)
        + bands
        + _rect(x + w / 2 - width / 2, y + 12, width, 18, 5, HELD)
        + _texts([plate], x + w / 2, y + 26, 12, "#ffffff", extra=' font-weight="bold"')
    )


def _stripes(colours: list[str]) -> list[str]:
    """A block's horizontal stripes: one for one owner, four or more in turn for several."""
    return colours if len(colours) == 1 else colours * -(-4 // len(colours))


def _table_row(name: str, blocks: Sequence[int], colour: str, y: float, length: str) -> str:
    """A sequence's block table: name, length, its blocks in order."""
    parts = [
        _rect(10, y, 14, 14, 3, colour),
        _texts([name], 30, y + 12, 12, TEXT, anchor="start", extra=' font-weight="bold"'),
        _texts([length], 38 + text_width(name, 12, True), y + 12, 12, TEXT, anchor="start"),
    ]
    x = 52 + text_width(name, 12, True) + text_width(length, 12)
    for block in blocks:
        width = text_width(str(block), 11) + 12
        parts.append(
            _rect(x, y - 2, width, 18, 4, HELD) + _texts([str(block)], x + width / 2, y + 11, 11, "#ffffff")
        )
        x += width + 4
    return "".join(parts)


def _row_width(name: str, blocks: Sequence[int], length: str) -> float:
    chips = sum(text_width(str(block), 11) + 16 for block in blocks)
    return 60 + text_width(name, 12, True) + text_width(length, 12) + chips


def _pool_in_words(
    owners: dict[int, list[str]],
    filled: dict[int, int],
    block_size: int,
    tables: Mapping[str, Sequence[int]],
    lengths: Mapping[str, int],
    held: Mapping[int, int],
) -> str:
    rows = [f"{name}: {lengths[name]:,} tokens in blocks {list(blocks)}" for name, blocks in tables.items()]
    for block, names in owners.items():
        if names:
            more = f", {held[block]} holders" if held[block] > 1 else ""
            rows.append(f"  block {block}: {', '.join(names)}, {filled[block]}/{block_size}{more}")
    free = [str(block) for block, names in owners.items() if not names]
    return "\n".join([*rows, f"  free: {', '.join(free) or 'none'}"])


TITLE_WIDTH, TITLE_SIZE = 700, 15


def _picture(width: float, height: float, title: str, parts: Sequence[str], description: str) -> Picture:
    lines = wrap(title, TITLE_WIDTH, TITLE_SIZE, bold=True)
    width = max([width, *(text_width(line, TITLE_SIZE, bold=True) + 12 for line in lines)])
    heading = _texts(lines, 4, 20, TITLE_SIZE, TEXT, 20, ' font-weight="bold"', "start")
    words = f"{title}\n{description}" if title else description
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
        f'height="{_n(height)}" role="img" font-family="{FONT}"><title>{escape(title or description)}</title>'
        f"<desc>{escape(description)}</desc>{heading}{''.join(parts)}</svg>"
    )
    return Picture(svg, words)


def _title_height(title: str) -> float:
    return 20.0 * len(wrap(title, TITLE_WIDTH, TITLE_SIZE, bold=True)) + 10


def _texts(
    lines: Sequence[str],
    x: float,
    y: float,
    size: float,
    colour: str,
    leading: float = LINE,
    extra: str = "",
    anchor: str = "middle",
) -> str:
    style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}"{extra}'
    return "".join(
        f'<text x="{_n(x)}" y="{_n(y + i * leading)}" {style}>{escape(line)}</text>'
        for i, line in enumerate(lines)
    )


def _rect(x: float, y: float, width: float, height: float, radius: float, fill: str, extra: str = "") -> str:
    size = f'width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}"'
    return f'<rect x="{_n(x)}" y="{_n(y)}" {size} fill="{fill}"{extra}/>'


def _polygon(points: Sequence[tuple[float, float]], colour: str) -> str:
    return f'<polygon points="{" ".join(f"{_n(x)},{_n(y)}" for x, y in points)}" fill="{colour}"/>'


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
