"""Launch variants of decode attention, and the plan that splits a step into pieces, one per program.

A row is one sequence; its keys are split into tiles. The tiles of all rows, one row after another, are cut
into pieces of equal length (Stream-K, Osama et al. 2023, arXiv:2301.03598): a piece may end one row, contain
several, and start another. Starting a row has a fixed cost, modelled as ``lead`` extra tiles. Context lengths
are read on the device, so one captured launch serves any lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.tile_tables import best
from rosellm.triton_or_none import next_power_of_2, tl, triton

ROLES = {"_plan_kernel": "attention", "_order_kernel": "attention"}
PLANNED_ELEMENTS = 2048  # pieces x rows, or pairs of rows, that one planning program compares
PLANNED_ROWS = 32  # the fewest; smaller batches share a kernel
SHORT, MIDDLE, LONG, LONGEST = 128, 512, 1024, 8192  # cached tokens
UNEVEN, UNEVEN_FROM = 1.5, 4  # ratio of longest to mean context; programs per SM


class Variant(NamedTuple):
    """A launch configuration of decode attention.

    tile: tokens per tile.
    pieces: number of pieces in a step; 0 if each row is one piece.
    warps: warps per program.
    stages: pipeline stages. With 1, the next tile is loaded into registers; with more, ``stages - 1`` tiles
        are in flight to shared memory.
    lanes: 1 keeps a separate softmax for each token of a tile, combined at the end, so that threads work
        independently; this takes ``tile * D / warps / 32`` more registers per thread. Only for KV heads with
        a single query head.
    dot: 1 runs GEMMs on tensor cores, as for several query heads per KV head, with the query repeated to
        ``SMALLEST_DOT`` rows. Only for KV heads with a single query head.
    lead: number of tiles that starting a row counts as, when rows are cut into pieces.
    ring: 1 takes the kernel of :mod:`ring_attention`, which copies ``stages`` tiles of keys and values to
        shared memory before the queries are ready. Rows must be whole; warps, lanes, dot, lead and sort have
        no effect.
    sort: 1 starts the longest rows first, so that no long row is left alone at the end. Rows must be whole.
    """

    tile: int
    pieces: int = 0
    warps: int = 4
    stages: int = 1
    lanes: int = 0
    dot: int = 0
    lead: int = 0
    ring: int = 0
    sort: int = 0

    @property
    def combine(self) -> bool:
        """Return whether rows may be split, so that partial results must be combined."""
        return self.pieces > 0

    def __str__(self) -> str:
        return "/".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parse the string that ``str(variant)`` returns."""
        return cls(*map(int, text.split("/")))


class Plan(NamedTuple):
    """The boundaries of a step's pieces, shared by all layers with the same window.

    variant: the launch configuration.
    window: number of tokens that each query attends to; None for all.
    starts: ``[PIECES + 1, 2]`` int32, the row and tile at which each piece starts, then the end of the last
        piece. A row's tiles are counted from the first that its window touches.
    covers: ``[B, 2]`` int32, the first and last piece of each row.
    order: ``[B]`` int32, the rows from the longest to the shortest; None unless the variant sorts them.

    starts and covers are None if each row is one piece. If there are more pieces than tiles, the last pieces
    are empty; a piece that lies within a row's lead is empty, too.
    """

    variant: Variant
    window: int | None = None
    starts: Tensor | None = None
    covers: Tensor | None = None
    order: Tensor | None = None


def variant_for(
    rows: int,
    kv_heads: int,
    longest: int,
    num_sms: int,
    group: int = 1,
    head_dim: int = 64,
    mean: float | None = None,
) -> Variant:
    """Return the variant of decode attention that is fastest on an H200.

    rows: number of rows in the step.
    kv_heads: number of KV heads.
    longest: maximum number of cached tokens of a row.
    num_sms: number of the GPU's streaming multiprocessors (SMs).
    group: query heads per KV head.
    head_dim: head size.
    mean: average number of cached tokens per row; None if all rows are equally long.

    Rows that fill the GPU stay whole, unless one row could outlast the rest: with several query heads per KV
    head, if ``longest``, rounded up to a power of two, exceeds ``LONG`` times the programs per SM; with one
    query head per KV head, if it is more than 1.5 times the mean. Lengths between two powers of two share one
    or two variants, because each variant is captured in its own graph.
    """
    reach, share = next_power_of_2(max(longest, 1)), rows * kv_heads / num_sms
    if reach <= SHORT:
        stay_whole = True
    elif group == 1:
        uneven = share >= UNEVEN_FROM and mean is not None and longest > UNEVEN * mean
        stay_whole = not uneven and (share >= 2 or (rows > 2 and reach <= MIDDLE))
    else:
        stay_whole = (share >= 1.25 and reach <= LONG * share) or (rows > 2 and reach <= MIDDLE)
    choose = whole_rows if stay_whole else cut_rows
    return choose(rows, kv_heads, longest, num_sms, group, head_dim)


def ring_rows(
    rows: int,
    kv_heads: int,
    longest: int,
    num_sms: int,
    group: int = 1,
    head_dim: int = 64,
    mean: float | None = None,
) -> Variant | None:
    """Return the variant that copies keys and values ahead of the queries, or None if others are faster.

    Arguments as in :func:`variant_for`. It is faster if the shared memory holds two tiles of 128 tokens of
    every program, or else if the rows are not short. Long rows are split, unless they fill the GPU evenly.
    """
    reach, share = next_power_of_2(max(longest, 1)), rows * kv_heads / num_sms
    is_even = mean is None or longest <= UNEVEN * mean
    if share * next_power_of_2(head_dim) <= 128:
        most = LONGEST if share >= 0.9 and is_even else LONG if share >= 0.2 else MIDDLE
        return Variant(128, stages=2, ring=1) if reach <= most else None
    not_short = SHORT < reach <= LONG and (share <= 2 or (group == 1 and is_even))
    return Variant(64, stages=2, ring=1) if not_short else None


def cut_rows(
    rows: int,
    kv_heads: int,
    longest: int,
    num_sms: int,
    group: int = 1,
    head_dim: int = 64,
    mean: float | None = None,
) -> Variant:
    """Return the fastest measured variant that splits rows into pieces; arguments as in :func:`variant_for`.

    In the table, pieces are counted in units of ``2 * num_sms / kv_heads``, which is two programs per SM.
    mean is ignored.
    """
    pieces = max(1, 2 * num_sms // kv_heads)
    tiles = rows * -(-next_power_of_2(max(longest, 1)) // 16)
    sizes = {"rows": rows, "tiles_each": tiles / pieces, "rows_each": rows / pieces}
    chosen = Variant(*best("cut_rows", **sizes, group=group, head_dim=head_dim))
    most = min(pieces, tiles) if tiles <= 8 * pieces else pieces * chosen.pieces
    return chosen._replace(pieces=most)


def whole_rows(
    rows: int,
    kv_heads: int,
    longest: int,
    num_sms: int,
    group: int = 1,
    head_dim: int = 64,
    mean: float | None = None,
) -> Variant:
    """Return the fastest measured variant with one piece per row; arguments as in :func:`variant_for`.

    mean is ignored.
    """
    share, reach = rows * kv_heads / num_sms, next_power_of_2(max(longest, 1))
    return Variant(*best("whole_rows", share=share, reach=reach, group=group, head_dim=head_dim))


def make_plan_ref(positions: Tensor, variant: Variant, window: int | None = None) -> Plan:
    """Return the plan of a step (torch reference).

    positions: ``[B]``, the number of cached tokens per row; a negative one, of an inert row, counts as 0.
    """
    if not variant.combine:
        order = positions.sort(descending=True, stable=True).indices.int() if variant.sort else None
        return Plan(variant, window, order=order)
    tiles = _tiles_of(positions.long().clamp_min(0), variant.tile, window)  # [B]
    ends = (tiles + variant.lead).cumsum(0)
    filled = ends[-1].clamp_max(variant.pieces)
    start = (torch.arange(variant.pieces + 1, device=ends.device) * ends[-1] // filled).minimum(ends[-1])
    row = torch.searchsorted(ends, start, right=True)
    tile = (start - torch.cat((ends.new_zeros(1), ends))[row] - variant.lead).clamp_min(0)
    touched = torch.stack((ends - tiles, ends - 1), dim=1)  # [B, 2]: the first and the last tile of each row
    covers = torch.searchsorted(start, touched, right=True) - 1
    return Plan(variant, window, torch.stack((row, tile), dim=1).int(), covers.int())


def _tiles_of(positions: Tensor, tile: int, window: int | None) -> Tensor:
    """Return how many tiles, at least 1, hold cached keys in the window of each row's new token."""
    first = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp_min(0)
    return ((positions + tile - 1) // tile - first // tile).clamp_min(1)


@triton.jit
def span_of(position, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first key that a new token attends to, its tile, and the number of tiles to read.

    position: number of cached tokens; a negative one, of an inert row, counts as 0.

    Tiles are read from the first key's to the last cached key's; there is always at least one.
    """
    position = tl.maximum(position, 0)
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW else position * 0
    first_tile = first // TILE
    return first, first_tile, tl.maximum(tl.cdiv(position, TILE) - first_tile, 1)


@triton.jit(do_not_specialize=["n_rows", "n_pieces"])
def _plan_kernel(
    starts_ptr, covers_ptr, positions_ptr, position_stride, n_rows, n_pieces, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, LEAD: tl.constexpr, WINDOW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Plan CHUNK pieces per program.

    Every program sums the tiles of all rows; the first program also writes ``covers``.
    """
    row = tl.arange(0, ROWS)
    piece = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    exists = row < n_rows
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    position = tl.load(positions_ptr + row * position_stride, mask=exists, other=0)
    _, _, tiles = span_of(position, TILE, WINDOW)
    length = tl.where(exists, tiles + LEAD, 0)
    ends = tl.cumsum(length, axis=0)
    total = tl.sum(length, axis=0)
    filled = tl.minimum(total, n_pieces).to(tl.int64)
    start = tl.minimum(piece * total.to(tl.int64) // filled, total).to(tl.int32)
    before = exists[None, :] & (ends[None, :] <= start[:, None])
    passed = tl.max(tl.where(before, ends[None, :], 0), axis=1)
    planned = piece <= n_pieces
    tl.store(starts_ptr + 2 * piece, tl.sum(before.to(tl.int32), axis=1), mask=planned)
    tl.store(starts_ptr + 2 * piece + 1, tl.maximum(start - passed - LEAD, 0), mask=planned)
    if tl.program_id(0) == 0:
        first = tl.cdiv((ends - tiles + 1) * filled, total) - 1
        last = tl.cdiv(ends * filled, total) - 1
        tl.store(covers_ptr + 2 * row, first.to(tl.int32), mask=exists)
        tl.store(covers_ptr + 2 * row + 1, last.to(tl.int32), mask=exists)


@triton.jit(do_not_specialize=["n_rows"])
def _order_kernel(
    order_ptr, positions_ptr, position_stride, n_rows, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Find the places of CHUNK rows per program: longer rows come first, and equal ones in their order."""
    other = tl.arange(0, ROWS)[None, :]
    row = (tl.program_id(0) * CHUNK + tl.arange(0, CHUNK))[:, None]
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    exists = other < n_rows
    theirs = tl.load(positions_ptr + other * position_stride, mask=exists, other=0)
    own = tl.load(positions_ptr + row * position_stride, mask=row < n_rows, other=0)
    before = exists & ((theirs > own) | ((theirs == own) & (other < row)))
    place = tl.sum(before.to(tl.int32), axis=1)[:, None]
    tl.store(order_ptr + place, row, mask=row < n_rows)


def make_plan(
    positions: Tensor, variant: Variant, window: int | None = None, *, dependent: int = False
) -> Plan:
    """Return the plan of a step as :func:`make_plan_ref` does, in Triton.

    positions may be strided. dependent: the launch mode, as in ``launch_options``.
    """
    n_rows, pieces = len(positions), variant.pieces
    rows = max(PLANNED_ROWS, next_power_of_2(n_rows))
    chunk = min(128, max(1, PLANNED_ELEMENTS // rows))
    if variant.sort and not variant.combine:
        order = positions.new_empty(n_rows, dtype=torch.int32)
        numbers = positions.stride(0), n_rows, rows, chunk
        _order_kernel[(-(-n_rows // chunk),)](order, positions, *numbers, **launch_options(dependent))
        return Plan(variant, window, order=order)
    if not variant.combine:
        return Plan(variant, window)
    starts = positions.new_empty((pieces + 1, 2), dtype=torch.int32)
    covers = positions.new_empty((n_rows, 2), dtype=torch.int32)
    arguments = starts, covers, positions, positions.stride(0), n_rows, pieces
    sizes = {"ROWS": rows, "CHUNK": chunk, "TILE": variant.tile, "LEAD": variant.lead, "WINDOW": window or 0}
    _plan_kernel[(-(-(pieces + 1) // chunk),)](*arguments, **sizes, **launch_options(dependent))
    return Plan(variant, window, starts, covers)
