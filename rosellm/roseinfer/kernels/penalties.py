"""Token counts for penalties, and bad words: torch references and kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rosellm.roseinfer.cache.device_state import COUNTS, POSITION, PROMPT, TOKEN, DeviceState
from rosellm.roseinfer.cache.token_counts import BARRED, MOST_BEGINNINGS, MOST_COUNTED, WORD_COLUMNS
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.triton_or_none import cdiv, tl, triton

ROLES = dict.fromkeys(("_count_tokens_kernel", "_copy_counts_kernel", "_count_drafts_kernel"), "sampling")
CHUNK = 4096  # entries that a program copies


def count_tokens_ref(*, state: DeviceState, table: Tensor) -> None:
    """Count each state row's last token, and bar the tokens that would end bad words (torch reference).

    table: ``[S, V + WORD_COLUMNS]`` int32, as in ``TokenCounts``. Rows without counts, rows whose last token
    belongs to the prompt, and inert rows are skipped. A count stops at ``MOST_COUNTED``.
    """
    rows = (state.counts > 0) & (state.positions >= state.prompts)
    own, token = (state.counts[rows] - 1).long(), state.tokens[rows].long()
    table[own, token] += torch.where((table[own, token] & 0x7FFF) >> 1 < MOST_COUNTED, 2, 0).int()
    words = table[:, -WORD_COLUMNS:].unflatten(1, (3, MOST_BEGINNINGS))
    last, barred, matched = words[own].unbind(1)
    extends = (pad(barred, (1, -1), value=1) > 0) | (pad(matched, (1, -1)) > 0)
    matches = (last == 1 + token[:, None]) & extends
    words[own, 2] = matches.int()
    for row, beginning in ((barred > 0) & (matched > 0)).nonzero():
        table[own[row], barred[row, beginning] - 1] &= ~BARRED
    for row, beginning in ((barred > 0) & matches).nonzero():
        table[own[row], barred[row, beginning] - 1] |= BARRED


def fork_counts_ref(*, state: DeviceState, wide: DeviceState, table: Tensor) -> None:
    """Fill the table row of each draft, except that the draft itself is not yet counted (torch reference).

    state: R rows, whose last tokens are not yet counted.
    wide: R * (k + 1) verify rows of ``speculation.Verified``; ``counts`` of a draft is 1 + a table row of its
        own, or 0.
    table: as in :func:`count_tokens_ref`.
    """
    places, source = len(wide.rows) // len(state.rows), state.counts
    for i in range(1, places):
        before, own = wide.of(wide.rows[i - 1 :: places].clone()), wide.counts[i::places]
        table[own[own > 0] - 1] = table[source[own > 0] - 1]
        before.counts.copy_(own)
        count_tokens_ref(state=before, table=table)
        source = own


def count_accepted_ref(*, state: DeviceState, wide: DeviceState, table: Tensor) -> None:
    """Count the accepted drafts of each state row that has advanced (torch reference).

    state, wide, table: as in :func:`fork_counts_ref`. The token at a state row's old position was counted
    before, and its new last token is not counted. A row that has ended keeps its counts.
    """
    places = len(wide.rows) // len(state.rows)
    advanced = state.positions - wide.positions[::places]
    for i in range(1, places):
        drafts = wide.of(wide.rows[i::places].clone())
        drafts.counts.copy_(torch.where((state.positions >= 0) & (i < advanced), state.counts, 0))
        count_tokens_ref(state=drafts, table=table)


@triton.jit
def _bar_ends(token, entries_ptr, words_ptr, MOST_BEGINNINGS: tl.constexpr, BARRED: tl.constexpr):
    """Update which beginnings of bad words one row's output ends with, and the tokens that are barred.

    A beginning extends the one before it, unless it is the first of its word. Several words may end in the
    same token: all tokens are freed before any is barred.
    """
    at = tl.arange(0, MOST_BEGINNINGS)
    barred_ptr, matched_ptr = words_ptr + MOST_BEGINNINGS + at, words_ptr + 2 * MOST_BEGINNINGS + at
    is_first = tl.load(barred_ptr - 1, mask=at > 0, other=1) > 0
    extends = tl.load(matched_ptr - 1, mask=at > 0, other=0) > 0
    matches = (tl.load(words_ptr + at) == token + 1) & (is_first | extends)
    barred, matched = tl.load(barred_ptr), tl.load(matched_ptr) > 0
    tl.debug_barrier()
    tl.store(matched_ptr, matches.to(tl.int32))
    places, freed, newly = entries_ptr + barred - 1, (barred > 0) & matched, (barred > 0) & matches
    tl.store(places, tl.load(places, mask=freed) & ~BARRED, mask=freed)
    tl.debug_barrier()
    tl.store(places, tl.load(places, mask=newly) | BARRED, mask=newly)


@triton.jit
def _count(
    token, entries_ptr, table_stride, MOST_COUNTED: tl.constexpr, MOST_BEGINNINGS: tl.constexpr,
    BARRED: tl.constexpr,
):  # fmt: skip
    """Count a token in one table row, and bar the tokens that would end bad words."""
    words_ptr = entries_ptr + table_stride - 3 * MOST_BEGINNINGS
    entry, has_words = tl.load(entries_ptr + token), tl.load(words_ptr) > 0
    tl.store(entries_ptr + token, tl.where(((entry & 0x7FFF) >> 1) < MOST_COUNTED, entry + 2, entry))
    if has_words:
        _bar_ends(token, entries_ptr, words_ptr, MOST_BEGINNINGS, BARRED)


@triton.jit
def _count_tokens_kernel(
    tokens_ptr, positions_ptr, prompts_ptr, counts_ptr, table_ptr, state_stride, table_stride,
    MOST_COUNTED: tl.constexpr, MOST_BEGINNINGS: tl.constexpr, BARRED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Count one state row's last token per program; no two rows share counts."""
    row = tl.program_id(0) * state_stride
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    token, position = tl.load(tokens_ptr + row), tl.load(positions_ptr + row)
    prompt, own = tl.load(prompts_ptr + row), tl.load(counts_ptr + row)
    if (own > 0) & (position >= prompt):
        entries_ptr = table_ptr + (own - 1).to(tl.int64) * table_stride
        _count(token, entries_ptr, table_stride, MOST_COUNTED, MOST_BEGINNINGS, BARRED)


def count_tokens(*, state: DeviceState, table: Tensor, dependent: int = False) -> None:
    """Count each state row's last token as :func:`count_tokens_ref` does, in Triton."""
    columns = state.tokens, state.positions, state.prompts, state.counts
    _count_tokens_kernel[(len(state.rows),)](
        *columns, table, state.tokens.stride(0), table.stride(0), MOST_COUNTED=MOST_COUNTED,
        MOST_BEGINNINGS=MOST_BEGINNINGS, BARRED=BARRED, num_warps=4, **launch_options(dependent),
    )  # fmt: skip


@triton.jit
def _copy_counts_kernel(
    rows_ptr, wide_ptr, table_ptr, row_stride, wide_stride, table_stride, PLACES: tl.constexpr,
    COUNTS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Copy one chunk of a state row's table row to the table rows of its drafts per program."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    own = tl.load(rows_ptr + row * row_stride + COUNTS)
    if tl.load(wide_ptr + (row * PLACES + 1) * wide_stride + COUNTS) > 0:  # there is a draft
        column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = column < table_stride
        entries = tl.load(table_ptr + (own - 1).to(tl.int64) * table_stride + column, mask=inside)
        for i in range(1, PLACES):
            copy = tl.load(wide_ptr + (row * PLACES + i) * wide_stride + COUNTS)
            if copy > 0:
                target = table_ptr + (copy - 1).to(tl.int64) * table_stride + column
                tl.store(target, entries, mask=inside)


@triton.jit
def _count_drafts_kernel(
    rows_ptr, wide_ptr, table_ptr, row_stride, wide_stride, table_stride, PLACES: tl.constexpr,
    ACCEPTED: tl.constexpr, TOKEN: tl.constexpr, POSITION: tl.constexpr, PROMPT: tl.constexpr,
    COUNTS: tl.constexpr, MOST_COUNTED: tl.constexpr, MOST_BEGINNINGS: tl.constexpr, BARRED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Count several tokens in one table row per program.

    If ACCEPTED, the table row is that of a state row, and the tokens are its accepted drafts. Otherwise it is
    that of a verify row, and the tokens are those of the verify rows before it.
    """
    target = tl.program_id(0).to(tl.int64)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    if ACCEPTED:
        fields, first = rows_ptr + target * row_stride, target * PLACES
        end = first + tl.load(fields + POSITION) - tl.load(wide_ptr + first * wide_stride + POSITION)
        first += 1
    else:
        fields, first, end = wide_ptr + target * wide_stride, target // PLACES * PLACES, target
    own, prompt = tl.load(fields + COUNTS), tl.load(fields + PROMPT)
    if own > 0:
        entries_ptr = table_ptr + (own - 1).to(tl.int64) * table_stride
        for place in range(first, end):
            counted = wide_ptr + place * wide_stride
            if tl.load(counted + POSITION) >= prompt:
                token = tl.load(counted + TOKEN)
                _count(token, entries_ptr, table_stride, MOST_COUNTED, MOST_BEGINNINGS, BARRED)
                tl.debug_barrier()


def fork_counts(*, state: DeviceState, wide: DeviceState, table: Tensor, dependent: int = False) -> None:
    """Fill the table rows of drafts as :func:`fork_counts_ref` does, in two Triton kernels."""
    places = len(wide.rows) // len(state.rows)
    strides = state.rows.stride(0), wide.rows.stride(0), table.stride(0)
    _copy_counts_kernel[(len(state.rows), cdiv(table.shape[1], CHUNK))](
        state.rows, wide.rows, table, *strides, PLACES=places, COUNTS=COUNTS, CHUNK=CHUNK,
        **launch_options(dependent),
    )  # fmt: skip
    _count_drafts(state, wide, table, False, dependent)


def count_accepted(*, state: DeviceState, wide: DeviceState, table: Tensor, dependent: int = False) -> None:
    """Count accepted drafts as :func:`count_accepted_ref` does, in Triton."""
    _count_drafts(state, wide, table, True, dependent)


def _count_drafts(
    state: DeviceState, wide: DeviceState, table: Tensor, accepted: bool, dependent: int
) -> None:
    strides = state.rows.stride(0), wide.rows.stride(0), table.stride(0)
    fields = {"TOKEN": TOKEN, "POSITION": POSITION, "PROMPT": PROMPT, "COUNTS": COUNTS}
    _count_drafts_kernel[(len(state.rows if accepted else wide.rows),)](
        state.rows, wide.rows, table, *strides, PLACES=len(wide.rows) // len(state.rows), ACCEPTED=accepted,
        **fields, MOST_COUNTED=MOST_COUNTED, MOST_BEGINNINGS=MOST_BEGINNINGS, BARRED=BARRED, num_warps=4,
        **launch_options(dependent),
    )  # fmt: skip
