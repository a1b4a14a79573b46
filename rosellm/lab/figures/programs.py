"""Attention's programs on a GPU over time: which processor runs which, and who waits for the longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import NamedTuple

import numpy as np

from rosellm.lab.figures.charts import Chart, ChartError, finish, text_table
from rosellm.lab.figures.models import pieces_of
from rosellm.lab.figures.palette import BLUE, ORANGE, PEACH, SKY, TEXT
from rosellm.lab.records.records import number
from rosellm.roseinfer.kernels.attention_plan import Variant

LANE_PIXELS, MOST_PIXELS, GAP = 12, 264, 28  # of a lane, of a panel, between panels
LONGEST, OTHERS = "reads the longest row", "reads other rows only"
COLOURS = (BLUE, SKY, ORANGE, PEACH)  # of others, every second one, of the longest, every second one
SCALE = [[i / 3, colour] for i, colour in enumerate(COLOURS)]

Parts = Sequence[tuple[int, int]]  # (row, cached tokens read of it)


class Program(NamedTuple):
    """One program: its processor, when it starts there, and the tokens of each row that it reads."""

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
    """A launch's programs, dealt out to processors. Time is counted in tokens that a processor reads."""

    variant: Variant
    lengths: Sequence[int]
    programs: Sequence[Program]
    processors: int

    @property
    def end(self) -> int:
        """When the last processor is done."""
        return max(one.end for one in self.programs)

    @property
    def fair(self) -> float:
        """When all would be done, had each the same to read."""
        return sum(one.tokens for one in self.programs) / self.processors

    @property
    def longest(self) -> int:
        """Tokens that the longest program reads."""
        return max(one.tokens for one in self.programs)


def programs_of(lengths: Sequence[int], variant: Variant, kv_heads: int) -> list[list[tuple[int, int]]]:
    """What each program of a launch reads, as (row, tokens), in the order of the launch: head by head.

    lengths: cached tokens of each row, at least one.
    """
    if not variant.combine:
        return [[(row, n)] for row, n in enumerate(lengths)] * kv_heads
    cut, _ = pieces_of(lengths, variant.tile, variant.pieces, variant.lead)
    return [[_tokens(lengths, variant.tile, *span) for span in spans] for spans in cut] * kv_heads


def _tokens(lengths: Sequence[int], tile: int, row: int, first: int, tiles: int) -> tuple[int, int]:
    """A row's last tile may not be full."""
    return row, min(lengths[row], (first + tiles) * tile) - first * tile


def deal(lengths: Sequence[int], variant: Variant, kv_heads: int, processors: int) -> Dealt:
    """A launch's programs, each on the processor that is free first, one at a time, all equally fast.

    That is a model: a GPU's processor runs several programs at once, and all share its memory. Raises
    ``ChartError`` for rows without tokens, or no processor.
    """
    if min(lengths, default=0) < 1 or processors < 1:
        raise ChartError(f"give rows of one token or more, and processors: {list(lengths)}, {processors}")
    free = [(0, processor) for processor in range(processors)]
    programs = []
    for parts in programs_of(lengths, variant, kv_heads):
        start, processor = free[0]
        programs.append(Program(processor, start, parts))
        heapreplace(free, (programs[-1].end, processor))
    return Dealt(variant, lengths, programs, processors)


def timeline(ways: Mapping[str, Dealt], title: str) -> Chart:
    """A panel for each way, a lane for each processor, a bar for each program; empty space is waiting.

    Programs that read of the longest row, if there is one, have a colour of their own. The dashed line is
    where all would end, had each processor the same to read. Raises ``ChartError`` without any way.
    """
    if not ways:
        raise ChartError("there is no launch to draw")
    processors = max(one.processors for one in ways.values())
    pixels = min(LANE_PIXELS * processors, MOST_PIXELS)
    gap = round(GAP * processors / pixels)  # in lanes, as all that follows
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
    """Bars in one lane are stacked in their order; every second one is lighter, to be told apart."""
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
    """Typed arrays are stored packed, the narrower the shorter."""
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
