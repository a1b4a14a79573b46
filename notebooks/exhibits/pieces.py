"""Cut the rows of a batch into equal pieces for attention programs, and draw what each program walks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from rosellm.lab.figures.charts import Chart, finish, text_table
from rosellm.lab.figures.palette import PALETTE
from rosellm.roseinfer.kernels.attention_plan import Variant, make_plan_ref


def pieces_of(
    lengths: Sequence[int], tile: int, pieces: int, lead: int = 0
) -> tuple[list[list[tuple[int, int, int]]], list[int]]:
    """Return what each piece of an attention plan processes, and the number of tiles of each row.

    A piece is a list of (row, first tile, tiles). lengths: cached tokens per row, at least one. lead: see
    ``Variant``.
    """
    starts = make_plan_ref(torch.tensor(lengths), Variant(tile, pieces, lead=lead)).starts
    assert starts is not None  # pieces > 0, so rows are split
    at: list[list[int]] = starts.tolist()
    tiles, cut = [-(-n // tile) for n in lengths], []
    for (row, first), (last, end) in pairwise(at):
        firsts, stops = [first] + [0] * (last - row), [*tiles[row:last], end]
        spans = enumerate(zip(firsts, stops, strict=True), row)
        cut.append([(r, begin, stop - begin) for r, (begin, stop) in spans if stop > begin])
    return cut, tiles


def programs(lanes: Mapping[str, Sequence[tuple[str, int]]], unit: str, *, title: str) -> Chart:
    """Draw a bar for each program, made of consecutive (owner, amount) segments."""
    owners = list(dict.fromkeys(owner for parts in lanes.values() for owner, _ in parts))
    styles = {owner: PALETTE[i % len(PALETTE)] for i, owner in enumerate(owners)}
    chart, names = Chart(), list(lanes)
    for owner in owners:
        lengths = [sum(n for mine, n in parts if mine == owner) for parts in lanes.values()]
        chart.add_bar(x=lengths, y=names, orientation="h", name=owner, marker_color=styles[owner])
    chart.update_layout(barmode="stack", bargap=0.25)
    chart.update_xaxes(title_text=unit)
    chart.update_yaxes(type="category", autorange="reversed", showgrid=False, ticks="", ticksuffix="  ")
    told = [", ".join(f"{n} of {owner}" for owner, n in parts) for parts in lanes.values()]
    totals = [sum(n for _, n in parts) for parts in lanes.values()]
    chart.table = text_table(["program", unit, "which"], zip(names, totals, told, strict=True))
    return finish(chart, title, 20 * len(lanes), legend=owners)
