"""Token counts for penalties, and bad words: torch reference and kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.cache.token_counts import BARRED, MOST_BEGINNINGS, MOST_COUNTED, WORD_COLUMNS
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.triton_or_none import tl, triton

ROLES = {"_count_tokens_kernel": "sampling"}


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
        words_ptr = entries_ptr + table_stride - 3 * MOST_BEGINNINGS
        entry, has_words = tl.load(entries_ptr + token), tl.load(words_ptr) > 0
        tl.store(entries_ptr + token, tl.where(((entry & 0x7FFF) >> 1) < MOST_COUNTED, entry + 2, entry))
        if has_words:
            _bar_ends(token, entries_ptr, words_ptr, MOST_BEGINNINGS, BARRED)


def count_tokens(*, state: DeviceState, table: Tensor, dependent: int = False) -> None:
    """Count each state row's last token as :func:`count_tokens_ref` does, in Triton."""
    columns = state.tokens, state.positions, state.prompts, state.counts
    _count_tokens_kernel[(len(state.rows),)](
        *columns, table, state.tokens.stride(0), table.stride(0), MOST_COUNTED=MOST_COUNTED,
        MOST_BEGINNINGS=MOST_BEGINNINGS, BARRED=BARRED, num_warps=4, **launch_options(dependent),
    )  # fmt: skip
