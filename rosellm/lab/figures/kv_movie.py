"""The KV pool as a film: who takes, shares, copies and gives back which block, step by step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import ipywidgets
import traitlets
from IPython.display import display

from rosellm.errors import RoseError
from rosellm.lab.figures.blocks import BLOCK, block_pool
from rosellm.lab.figures.palette import TEXT
from rosellm.lab.figures.svg import FONT, Picture, wrap
from rosellm.lab.figures.widgets import Control, explore
from rosellm.lab.records.pool_log import PoolLog
from rosellm.roseinfer.serving.scheduler import OnlineScheduler

KINDS = ("allocation", "caching", "sharing", "copy on write", "rollover", "free", "eviction", "preemption")
LEAVINGS = {
    "finished": ("free", "has finished"),
    "cancelled": ("free", "is cancelled"),
    "failed": ("free", "has failed"),
    "preempted": ("preemption", "is preempted"),
}
PITCH, EDGE, LINE, MILLISECONDS = (62, 52), 10, 18, 800
SHEET, COLUMNS, GAP = 860, 2, 24


class MovieError(RoseError):
    """A film without the step that is asked for."""


@dataclass(frozen=True)
class Change:
    """Something of ``KINDS`` that happened to these blocks, in a sentence."""

    kind: str
    said: str
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """The first layer's pool between two steps, and what changed since the frame before.

    tables, lengths: blocks and tokens of each request and each cached prefix. refs: holders of each block.
    """

    tables: dict[str, tuple[int, ...]]
    lengths: dict[str, int]
    refs: dict[int, int]
    changes: tuple[Change, ...] = ()


class KVMovie:
    """Films a scheduler's pool: ``frames[0]`` is the beginning, then one follows each step of :meth:`run`."""

    def __init__(self, scheduler: OnlineScheduler) -> None:
        self.scheduler, self.engine = scheduler, scheduler.engine
        self.log = PoolLog(scheduler)
        self._prefixes: dict[tuple[int, ...], str] = {}
        self.frames = [self._frame()]

    def run(self, steps: int | None = None) -> KVMovie:
        """So many steps, or as many as there are; fewer if no request is left."""
        end = None if steps is None else len(self.frames) + steps
        while self.scheduler.has_unfinished and len(self.frames) != end:
            self.scheduler.step()
            self.log.note()
            frame = self._frame()
            changes = _changes(self.frames[-1], frame, self._leavings())
            self.frames.append(Frame(frame.tables, frame.lengths, frame.refs, tuple(changes)))
        return self

    def steps_of(self, kind: str) -> list[int]:
        """The steps in which something of ``KINDS`` happened."""
        if kind not in KINDS:
            raise MovieError(f"{kind!r} never happens to a block; these do: {', '.join(KINDS)}")
        return [step for step, frame in enumerate(self.frames) if any(c.kind == kind for c in frame.changes)]

    def picture(self, step: int) -> Picture:
        """One frame: what happened, the pool with the blocks concerned outlined, all block tables."""
        if not 0 <= step < len(self.frames):
            raise MovieError(f"there is no step {step}; the film has steps 0 to {len(self.frames) - 1}")
        return self._pictures([step])[0]

    def play(self, first: int = 0) -> None:
        """Displays a frame below a play button and a slider; the arrow keys go step by step."""
        pictures = self._pictures(range(len(self.frames)))
        steps = Film("step, one token each", range(len(self.frames)), first=first)
        explore(lambda step: display(pictures[step]), step=steps)

    def sheet(self) -> Picture:
        """A contact sheet: of each kind of change the first frame that has it."""
        firsts = sorted({found[0] for kind in KINDS if (found := self.steps_of(kind))})
        return _sheet(self._pictures(firsts or [0]))

    def _frame(self) -> Frame:
        blocks, cache = self.engine.blocks, self.engine.prefix_cache
        tables, lengths = {}, {}
        for request_id, request in sorted(self.scheduler.requests.items()):
            if held := request.block_ids[0]:
                name = f"request {request_id}"
                tables[name], lengths[name] = tuple(held), blocks.tokens_reserved(held)
        for tokens, pools in ({} if cache is None else cache.entries).items():
            name = self._prefixes.setdefault(tokens, f"prefix {len(self._prefixes) + 1}")
            tables[name], lengths[name] = tuple(pools[0]), len(tokens)
        in_use = range(self.engine.num_kv_blocks)
        return Frame(tables, lengths, {b: n for b in in_use if (n := blocks.ref_count(b))})

    def _leavings(self) -> dict[str, str]:
        """Who left at the latest moment, and how."""
        now = len(self.log.moments) - 1
        return {one.who: one.kind for one in self.log.happenings if one.moment == now}

    def _pictures(self, steps: Sequence[int]) -> list[Picture]:
        """Frames of one size, in which everybody keeps place and colour."""
        names = sorted({name for frame in self.frames for name in frame.tables}, key=_order)
        pools = [self._pool(self.frames[step], names) for step in steps]
        sizes = [_size(pool) for pool in pools]
        width = max(width for width, _ in sizes)
        captions = [_caption(self.frames[step], step, len(self.frames), width) for step in steps]
        top = LINE * max(len(lines) for lines in captions) + 8
        height = top + max(height for _, height in sizes)
        return [
            self._drawn(self.frames[step], lines, pool, (width, height, top))
            for step, lines, pool in zip(steps, captions, pools, strict=True)
        ]

    def _pool(self, frame: Frame, names: Sequence[str]) -> Picture:
        return block_pool(
            {name: frame.tables.get(name, ()) for name in names},
            self.engine.num_kv_blocks,
            {name: frame.lengths.get(name, 0) for name in names},
            self.engine.block_size,
            frame.refs,
        )

    def _drawn(
        self, frame: Frame, lines: list[str], pool: Picture, size: tuple[float, float, float]
    ) -> Picture:
        width, height, top = size
        columns = min(self.engine.num_kv_blocks, 12)
        outlines = "".join(
            f'<rect x="{EDGE + block % columns * PITCH[0] - 3}" y="{EDGE + block // columns * PITCH[1] - 3}" '
            f'width="{BLOCK[0] + 6}" height="{BLOCK[1] + 6}" rx="6" fill="none" stroke="{TEXT}" '
            'stroke-width="3"/>'
            for block in sorted({block for change in frame.changes for block in change.blocks})
        )
        texts = "".join(
            f'<text x="4" y="{14 + LINE * i}" font-size="13" fill="{TEXT}">{escape(line)}</text>'
            for i, line in enumerate(lines)
        )
        inside = f'{texts}<g transform="translate(0 {top})">{pool.svg}{outlines}</g>'
        return Picture(_svg(width, height, inside), "\n".join([*lines, pool.description]))


class Player(ipywidgets.HBox):
    """A play button and a slider that move together; ``value`` is where they are."""

    value = traitlets.Int()

    def __init__(self, slider: ipywidgets.IntSlider) -> None:
        ends = {"min": slider.min, "max": slider.max, "step": slider.step, "value": slider.value}
        play = ipywidgets.Play(**ends, interval=MILLISECONDS)
        super().__init__([play, slider])
        ipywidgets.link((play, "value"), (slider, "value"))
        ipywidgets.link((slider, "value"), (self, "value"))


class Film(Control):
    """A range to be stepped through or played."""

    def widget(self) -> Player:
        return Player(super().widget())


def _changes(old: Frame, new: Frame, leavings: Mapping[str, str]) -> Iterator[Change]:
    """What happened from one frame to the next, those that left first."""
    for name in old.tables.keys() - new.tables.keys():
        blocks = old.tables[name]
        kind, said = LEAVINGS[leavings[name]] if name in leavings else ("eviction", "is evicted")
        yield Change(kind, f"{name} {said} and lets go of {_blocks(blocks)}", blocks)
    for name, blocks in new.tables.items():
        stayed = old.tables.keys() & new.tables.keys()
        known = {block for one in stayed for block in {*old.tables[one]} & {*new.tables[one]}}
        yield from _taken(name, old.tables.get(name, ()), blocks, known, new.lengths[name])


def _taken(
    name: str, before: tuple[int, ...], blocks: tuple[int, ...], known: set[int], n_tokens: int
) -> Iterator[Change]:
    """What became of one table; ``known`` are the blocks that others had before and still have."""
    tokens = f"{n_tokens} token{'s' * (n_tokens > 1)}"
    if before:
        for source, copy in zip(before, blocks, strict=False):
            if source != copy:
                said = f"{name} copies shared block {source} to {copy} before it writes"
                yield Change("copy on write", said, (source, copy))
        if added := blocks[len(before) :]:
            said = f"{name} rolls over into {_blocks(added)}: block {blocks[len(before) - 1]} is full"
            yield Change("rollover", said, added)
    elif name.startswith("prefix"):
        yield Change("caching", f"the cache keeps {_blocks(blocks)} as {name}, {tokens}", blocks)
    else:
        if shared := tuple(block for block in blocks if block in known):
            yield Change("sharing", f"{name} shares {_blocks(shared)}, computed before", shared)
        if own := tuple(block for block in blocks if block not in shared):
            yield Change(
                "allocation",
                f"{name} takes {_blocks(own)} for {'the rest of ' if shared else ''}its {tokens}",
                own,
            )


def _order(name: str) -> tuple[bool, int]:
    """Requests, then prefixes, each by number."""
    kind, number = name.split()
    return kind == "prefix", int(number)


def _blocks(blocks: Sequence[int]) -> str:
    return f"block{'s' * (len(blocks) > 1)} {', '.join(map(str, blocks))}"


def _caption(frame: Frame, step: int, n_frames: int, width: float) -> list[str]:
    told = [f"{change.kind}: {change.said}" for change in frame.changes]
    quiet = "nothing is cached yet" if not frame.tables else "every request writes into its last block"
    lines = [line for one in told or [quiet] for line in wrap(one, width - 8, 13)]
    return [f"Step {step} of {n_frames - 1}", *lines]


def _size(picture: Picture) -> tuple[float, float]:
    found = re.search(r' width="([\d.]+)" height="([\d.]+)"', picture.svg)
    assert found, "every picture says its size"
    return float(found[1]), float(found[2])


def _svg(width: float, height: float, inside: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" font-family="{FONT}">{inside}</svg>'
    )


def _sheet(pictures: Sequence[Picture]) -> Picture:
    scale = min(1.0, (SHEET / COLUMNS - GAP) / _size(pictures[0])[0])
    width, height = (side * scale + GAP for side in _size(pictures[0]))
    placed = "".join(
        f'<g transform="translate({i % COLUMNS * width:g} {i // COLUMNS * height:g}) scale({scale:.3f})">'
        f"{picture.svg}</g>"
        for i, picture in enumerate(pictures)
    )
    rows = -(-len(pictures) // COLUMNS)
    svg = _svg(width * min(COLUMNS, len(pictures)), height * rows, placed)
    return Picture(svg, "\n\n".join(picture.description for picture in pictures))
