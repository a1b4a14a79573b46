"""Draw a layer's matrices as sharded over ranks, and a step of one rank with its all-reduces."""

from __future__ import annotations

from collections.abc import Sequence

from rosellm.lab.figures.charts import Chart, finish, text_table
from rosellm.lab.figures.palette import BLUE, ORANGE, PALETTE, TEXT, fill
from rosellm.lab.records.records import number
from rosellm.roseinfer.exhibits import load_exhibit

cuts, svg = load_exhibit("cuts"), load_exhibit("svg")

MOST_PIXELS, LEAST_PIXELS, GAP, LABELS = 150.0, 14.0, 34.0, 58.0


def shards(matrices: Sequence[cuts.CutMatrix], n_ranks: int, title: str) -> svg.Picture:
    """Draw all matrices to one scale, each rank's shard in its colour; a far taller one is shortened."""
    widest = max(one.columns for one in matrices)
    tallest = sorted(one.rows for one in matrices)[-2]  # the head's vocabulary would dwarf the others
    scale = MOST_PIXELS / max(widest, tallest)
    top, x, parts = svg.BELOW_TITLE + 4, 12.0, []
    for one in matrices:
        width, height = max(LEAST_PIXELS, one.columns * scale), min(MOST_PIXELS, one.rows * scale)
        parts += _matrix(one, (x, top), (width, height), one.rows * scale > MOST_PIXELS)
        x += max(width, LABELS) + GAP
    bottom = top + MOST_PIXELS + 44
    for rank in range(n_ranks):
        parts.append(svg.rect(12 + 84 * rank, bottom - 10, 12, 12, 2, _colour(rank)))
        parts.append(svg.texts([f"rank {rank}"], 30 + 84 * rank, bottom, 12, TEXT, anchor="start"))
    return svg.picture(x, bottom + 12, title, parts, _in_words(matrices))


def _matrix(
    one: cuts.CutMatrix, at: tuple[float, float], size: tuple[float, float], is_cut_off: bool
) -> list[str]:
    (x, y), (width, height) = at, size
    parts = []
    for region in one.regions:
        left, right = (edge / one.columns * width for edge in (region.columns.start, region.columns.stop))
        above, below = (edge / one.rows * height for edge in (region.rows.start, region.rows.stop))
        box = x + left, y + above, right - left, below - above
        parts.append(svg.rect(*box, 0, _colour(region.rank)))
    told = [f"{one.rows:,} rows × {one.columns:,}", *["(drawn shorter)"] * is_cut_off]
    parts.append(svg.rect(x, y, width, height, 0, "none", svg.DASHED))
    parts.append(
        svg.texts([one.name], x, y + height + 14, 12, TEXT, extra=' font-weight="bold"', anchor="start")
    )
    parts.append(svg.texts(told, x, y + height + 29, 10, TEXT, anchor="start"))
    return parts


def _colour(rank: int) -> str:
    return PALETTE[rank % len(PALETTE)]


def _in_words(matrices: Sequence[cuts.CutMatrix]) -> str:
    rows = [
        [one.name, one.rows, one.columns, "columns" if one.is_cut_by_columns else "rows", one.elements(0)]
        for one in matrices
    ]
    return text_table(["", "rows", "columns", "cut by", "elements of rank 0"], rows)


def sums_over_time(step: cuts.SummedStep, title: str) -> Chart:
    """Draw one decode step of rank 0 on an axis in µs: computing, and summing or waiting for a sum."""
    chart = Chart()
    lanes = {"computes": (step.computing, BLUE, ""), "sums": (step.sums, ORANGE, "/")}
    for name, (stretches, colour, hatch) in lanes.items():
        chart.add_bar(
            base=[(start - step.start) * 1e6 for start, _ in stretches],
            x=[(end - start) * 1e6 for start, end in stretches],
            y=[name] * len(stretches),
            orientation="h",
            name=name,
            marker=fill(colour, hatch),
            hovertemplate=f"{name}: %{{x:.3g}} µs<extra></extra>",
        )
    chart.update_layout(barmode="overlay", bargap=0.25)
    chart.update_xaxes(title_text="µs from the start of the step")
    chart.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    us = {name: sum(end - start for start, end in stretches) * 1e6 for name, (stretches, *_) in lanes.items()}
    rows = [[name, len(stretches), us[name]] for name, (stretches, *_) in lanes.items()]
    chart.table = (
        text_table(["", "stretches", "µs"], rows) + f"\nsums: {number(step.share * 100)} % of the step"
    )
    return finish(chart, title, 92)
