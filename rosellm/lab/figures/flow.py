"""Data flow as a picture: one lane per place, its boxes from left to right, labelled arrows between boxes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rosellm.lab.figures.flow_layout import (
    BOX_TEXT,
    NAME_WIDTH,
    NOTE_LINE,
    NOTE_TEXT,
    PAD,
    PILL_SIZE,
    Arrow,
    Box,
    channels_of,
    place_columns,
    place_ports,
    place_runs,
    place_x,
    points_of,
)
from rosellm.lab.figures.palette import TEXT
from rosellm.lab.figures.svg import (
    DASHED,
    FREE,
    LINE,
    DiagramError,
    Picture,
    picture,
    px,
    rect,
    text_width,
    texts,
    title_height,
    wrap,
)

LANE_COLOURS = {"cpu": "#4a5d73", "pci": "#65548a", "gpu": "#2c6d57", "host": "#4a5d73"}
OTHER_LANES = ("#7d4f2f", "#2f6484", "#5f6b2d", "#8a4a63")
NEW, NEW_TEXT, PILL, PILL_TEXT = "#f6a04a", "#2b1a05", "#e9edf2", "#2a3038"
MAX_TEXT, MAX_PILL, LANE_PAD = 128, 118, 12


def flow(lanes: Mapping[str, Sequence[str]], arrows: Sequence[tuple[str, str, str]], title: str) -> Picture:
    """Data flow: one lane per place (``"GPU"``), its boxes from left to right, labelled arrows between boxes.

    A box is named by the first line of its text; further lines are notes in small print. ``*`` before the
    text marks what is new, ``-`` what is removed. Names must differ. An arrow is (from, to, label).
    """
    boxes = _boxes(lanes)
    drawn = [
        Arrow(_named(boxes, a), _named(boxes, b), wrap(text, MAX_PILL, PILL_SIZE)) for a, b, text in arrows
    ]
    if repeated := [
        ends for ends, n in Counter((a.source.name, a.target.name) for a in drawn).items() if n > 1
    ]:
        raise DiagramError(f"two arrows go from {' to '.join(repeated[0])}: join their labels")
    place_columns(boxes, drawn)
    width = max(place_x(boxes, drawn), 420)
    place_ports(drawn)
    channels = channels_of(drawn, len(lanes))
    width = max([width, *(run.right + 10 for arrow in drawn for run in arrow.runs)])
    y, bands = title_height(title), []
    for i, name in enumerate(lanes):
        mine = [box for box in boxes if box.lane == i]
        height = max(44.0, *(box.height for box in mine)) + 2 * LANE_PAD
        for box in mine:
            box.y = y + (height - box.height) / 2
        bands.append(_band(name, i, y, height, width))
        y += height + place_runs(channels[i], y + height)
    parts = [*bands, *map(_line, drawn), *map(_box, boxes), *map(_pill, drawn), _legend(boxes, width, y)]
    return picture(width, y + 14, title, parts, _in_words(lanes, arrows))


def _boxes(lanes: Mapping[str, Sequence[str]]) -> list[Box]:
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


def _parse(text: str, lane: int, colour: str) -> Box:
    mark = text[0] if text[:1] in ("*", "-") else ""
    first, *notes = text.removeprefix(mark).strip().split("\n")
    if not first:
        raise DiagramError(f"a box needs a text, not {text!r}")
    small = [line for note in notes for line in wrap(note, MAX_TEXT, NOTE_TEXT)]
    return Box(lane, colour, mark, wrap(first, MAX_TEXT, BOX_TEXT), small)


def _key(text: str) -> str:
    """A box's name without its mark, notes and spaces."""
    return "".join(text.split("\n")[0].split()).lstrip("*-")


def _named(boxes: list[Box], name: str) -> Box:
    for box in boxes:
        if _key(box.name) == _key(name):
            return box
    raise DiagramError(f"no box is called {name!r}: there are {', '.join(box.name for box in boxes)}")


def _line(arrow: Arrow) -> str:
    marks = {arrow.source.mark, arrow.target.mark}
    colour = NEW if "*" in marks and "-" not in marks else TEXT
    dashes = ' stroke-dasharray="5 4"' if "-" in marks else ""
    points = points_of(arrow)
    (x0, y0), (x, y) = points[-2:] if points[-2] != points[-1] else (points[-3], points[-1])
    back = (0, 9 if y > y0 else -9) if abs(y - y0) > abs(x - x0) else (9 if x > x0 else -9, 0)
    bx, by = x - back[0], y - back[1]
    dx, dy = back[1] * 0.5, back[0] * 0.5
    line = _rounded([*points[:-1], (bx, by)])
    head = f"M{px(x)} {px(y)}L{px(bx + dx)} {px(by + dy)}L{px(bx - dx)} {px(by - dy)}Z"
    return (
        f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>'
        f'<path d="{head}" fill="{colour}"/>'
    )


def _rounded(points: list[tuple[float, float]], radius: float = 7) -> str:
    """A path along level and upright lines with round corners."""
    path = [f"M{px(points[0][0])} {px(points[0][1])}"]
    for (ax, ay), (x, y), (bx, by) in zip(points, points[1:], points[2:], strict=False):
        r = min(radius, (abs(x - ax) + abs(y - ay)) / 2, (abs(bx - x) + abs(by - y)) / 2)
        into, out = _step(x - ax, y - ay, r), _step(bx - x, by - y, r)
        path.append(f"L{px(x - into[0])} {px(y - into[1])}Q{px(x)} {px(y)} {px(x + out[0])} {px(y + out[1])}")
    return "".join([*path, f"L{px(points[-1][0])} {px(points[-1][1])}"])


def _step(dx: float, dy: float, length: float) -> tuple[float, float]:
    distance = abs(dx) + abs(dy)
    return (dx / distance * length, dy / distance * length) if distance else (0, 0)


def _band(name: str, lane: int, y: float, height: float, width: float) -> str:
    colour = _lane_colour(name, lane)
    lines = wrap(name, NAME_WIDTH, 12, bold=True)
    top = y + height / 2 - LINE * len(lines) / 2 + 12
    return (
        rect(2, y, width - 4, height, 10, TEXT, ' opacity="0.13"')
        + rect(2, y, 5, height, 2.5, colour)
        + texts(lines, 16, top, 12, TEXT, anchor="start", extra=' font-weight="bold"')
    )


def _box(box: Box) -> str:
    fill, ink, extra, struck = box.colour, "#ffffff", "", ""
    if box.mark == "*":
        fill, ink = NEW, NEW_TEXT
    if box.mark == "-":
        fill, ink, extra, struck = FREE, TEXT, DASHED, ' text-decoration="line-through"'
    top = box.y + PAD + 10
    return (
        rect(box.x, box.y, box.width, box.height, 7, fill, extra)
        + texts(box.lines, box.centre, top, BOX_TEXT, ink, extra=struck)
        + texts(box.notes, box.centre, top + LINE * len(box.lines) - 1, NOTE_TEXT, ink, NOTE_LINE, struck)
    )


def _pill(arrow: Arrow) -> str:
    if not arrow.label:
        return ""
    width, height = arrow.pill
    if arrow.is_level:
        (x0, y), (x1, _) = points_of(arrow)
        x = (x0 + x1) / 2 - 3
    else:
        x, y = arrow.runs[0].middle, arrow.runs[0].y
    return rect(
        x - width / 2, y - height / 2, width, height, 8, PILL, f' stroke="{TEXT}" stroke-width="0.8"'
    ) + texts(arrow.label, x, y - height / 2 + 13, PILL_SIZE, PILL_TEXT, 14)


def _legend(boxes: list[Box], width: float, y: float) -> str:
    marks = [name for mark, name in (("*", "new"), ("-", "removed")) if any(b.mark == mark for b in boxes)]
    parts, x = [], width - 8.0
    for name in reversed(marks):
        x -= text_width(name, 11)
        parts.append(texts([name], x, y + 7, 11, TEXT, anchor="start"))
        x -= 22
        style = (NEW, "") if name == "new" else (FREE, DASHED)
        parts.append(rect(x, y - 3, 16, 11, 3, *style))
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
