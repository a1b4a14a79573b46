"""Draw attention programs on a GPU over time: which processor runs which, and who waits for the longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import NamedTuple

import numpy as np

from rosellm.lab.figures.charts import Chart, ChartError, finish, text_table
from rosellm.lab.figures.palette import BLUE, ORANGE, PEACH, SKY, TEXT
from rosellm.lab.records.records import number
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.kernels.attention_plan import Variant

pieces_of = load_exhibit("pieces").pieces_of

LANE_PIXELS, MOST_PIXELS, GAP = 12, 264, 28  # height of a lane, of a panel, between panels
LONGEST, OTHERS = "reads the longest row", "reads other rows only"
COLOURS = (BLUE, SKY, ORANGE, PEACH)  # others, alternating; the longest, alternating
SCALE = [[i / 3, colour] for i, colour in enumerate(COLOURS)]

Parts = Sequence[tuple[int, int]]  # (row, cached tokens read from it)


class Program(NamedTuple):
    """One program: its processor, its start time there, and the tokens that it reads of each row."""

    processor: int
    start: int
    parts: Parts

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.parts)

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True)
class Dealt:
    """A launch's programs, assigned to processors. The unit of time is one token read by a processor."""

    variant: Variant
    lengths: Sequence[int]
    programs: Sequence[Program]
    processors: int

    @property
    def end(self) -> int:
        """When the last processor finishes."""
        return max(one.end for one in self.programs)

    @property
    def fair(self) -> float:
        """When all processors would finish under perfect balance."""
        return sum(one.tokens for one in self.programs) / self.processors

    @property
    def longest(self) -> int:
        """Tokens that the longest program reads."""
        return max(one.tokens for one in self.programs)


def programs_of(lengths: Sequence[int], variant: Variant, kv_heads: int) -> list[list[tuple[int, int]]]:
    """Return what each program of a launch reads, as (row, tokens), in launch order: head by head.

    lengths: cached tokens of each row, at least one.
    """
    if not variant.combine:
        return [[(row, n)] for row, n in enumerate(lengths)] * kv_heads
    cut, _ = pieces_of(lengths, variant.tile, variant.pieces, variant.lead)
    return [[_tokens(lengths, variant.tile, *span) for span in spans] for spans in cut] * kv_heads


def _tokens(lengths: Sequence[int], tile: int, row: int, first: int, tiles: int) -> tuple[int, int]:
    """Convert tiles to (row, tokens); a row's last tile may be partial."""
    return row, min(lengths[row], (first + tiles) * tile) - first * tile


def deal(lengths: Sequence[int], variant: Variant, kv_heads: int, processors: int) -> Dealt:
    """Assign each program of a launch to the first free processor, one at a time, all equally fast.

    This is a model: a GPU's processor runs several programs at once, and all share its memory. Raises
    ``ChartError`` for rows without tokens, or without processors.
    """
    if min(lengths, default=0) < 1 or processors < 1:
        raise ChartError(f"give rows of at least one token, and processors: {list(lengths)}, {processors}")
    free = [(0, processor) for processor in range(processors)]
    programs = []
    for parts in programs_of(lengths, variant, kv_heads):
        start, processor = free[0]
        programs.append(Program(processor, start, parts))
        heapreplace(free, (programs[-1].end, processor))
    return Dealt(variant, lengths, programs, processors)


def timeline(ways: Mapping[str, Dealt], title: str) -> Chart:
    """Draw a panel for each way, a lane for each processor, a bar for each program; gaps are waiting.

    Programs that read from the longest row, if there is one, have their own colour. The dashed line is where
    all would end under perfect balance. Raises ``ChartError`` if ``ways`` is empty.
    """
    if not ways:
        raise ChartError("there is no launch to draw")
    processors = max(one.processors for one in ways.values())
    pixels = min(LANE_PIXELS * processors, MOST_PIXELS)
    gap = round(GAP * processors / pixels)  # in lanes, like all below
    pitch, chart = processors + gap, Chart()
    for i, (name, dealt) in enumerate(ways.items()):
        _add_programs(chart, dealt, i * pitch)
        _mark_fair(chart, dealt, i * pitch - 0.5)
        chart.add_annotation(x=0, y=i * pitch - 0.6 - gap / 8, text=_told(name, dealt))
    chart.update_annotations(showarrow=False, xanchor="left", yanchor="bottom", font={"size": 12})
    for name, colour in ((LONGEST, ORANGE), (OTHERS, BLUE)):
        chart.add_bar(x=[None], y=[None], orientation="h", name=name, marker_color=colour)  # for the legend
    latest = max(one.end for one in ways.values())
    chart.update_xaxes(range=[0, latest * 1.01], title_text="cached tokens that a processor has read")
    lanes = pitch * len(ways)
    chart.update_yaxes(range=[lanes - gap - 0.5, -gap - 0.5], visible=False)
    chart.update_layout(barmode="stack", barcornerradius=0)
    chart.table = _table(ways)
    return finish(chart, title, round(pixels * lanes / processors), (LONGEST, OTHERS))


def _mark_fair(chart: Chart, dealt: Dealt, top: float) -> None:
    line = {"color": TEXT, "dash": "dash", "width": 1.5}
    ends = {"x0": dealt.fair, "x1": dealt.fair, "y0": top, "y1": top + dealt.processors}
    chart.add_shape(type="line", line=line, **ends)


def _told(name: str, dealt: Dealt) -> str:
    times, programs = number(dealt.end / dealt.fair), f"{len(dealt.programs):,} programs"
    return f"<b>{name}</b>: {programs}, all done at {dealt.end:,}, {times} × the mean of {number(dealt.fair)}"


def _add_programs(chart: Chart, dealt: Dealt, top: int) -> None:
    """Stack the bars of a lane in order, alternately dark and light."""
    most, least = max(dealt.lengths), min(dealt.lengths)
    turns, kinds = [0] * dealt.processors, []
    for one in dealt.programs:
        is_long = most > least and any(dealt.lengths[row] == most for row, _ in one.parts)
        kinds.append(2 * is_long + turns[one.processor] % 2)
        turns[one.processor] += 1
    chart.add_bar(
        x=_packed([one.tokens for one in dealt.programs]),
        y=_packed([top + one.processor for one in dealt.programs]),
        width=1,
        orientation="h",
        marker={"color": _packed(kinds), "colorscale": SCALE, "cmin": 0, "cmax": 3, "line": {"width": 0}},
        showlegend=False,
        hovertemplate="%{value} tokens<extra></extra>",
    )


def _packed(values: Sequence[int]) -> np.ndarray:
    """Return the narrowest typed array, which plotly stores packed."""
    return np.array(values, np.min_scalar_type(max(values)))


def _table(ways: Mapping[str, Dealt]) -> str:
    rows = [
        [
            name,
            one.variant.tile,
            one.variant.pieces or "each row",
            len(one.programs),
            one.longest,
            one.end,
            one.fair,
        ]
        for name, one in ways.items()
    ]
    rows = [[*row, one.end / one.fair] for row, one in zip(rows, ways.values(), strict=True)]
    headers = [
        "",
        "tile, tokens",
        "pieces of a head",
        "programs",
        "longest, tokens",
        "last ends at",
        "mean",
        "over the mean",
    ]
    return text_table(headers, rows)
