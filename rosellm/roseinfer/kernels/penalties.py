"""Token counts for penalties: torch reference and kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.cache.token_counts import MOST_COUNTED
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.triton_or_none import tl, triton

ROLES = {"_count_tokens_kernel": "sampling"}


def count_tokens_ref(*, state: DeviceState, table: Tensor) -> None:
    """Add each state row's last token to the row's token counts (torch reference).

    table: ``[S, V]`` int32, the counts, as in ``TokenCounts``. Rows without counts, rows whose last token
    belongs to the prompt, and inert rows are skipped. A count stops at ``MOST_COUNTED``.
    """
    rows = (state.counts > 0) & (state.positions >= state.prompts)
    place = (state.counts[rows] - 1).long(), state.tokens[rows].long()
    table[place] += torch.where((table[place] & 0xFFFF) >> 1 < MOST_COUNTED, 2, 0).int()


@triton.jit
def _count_tokens_kernel(
    tokens_ptr, positions_ptr, prompts_ptr, counts_ptr, table_ptr, state_stride, table_stride,
    MOST_COUNTED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Count one state row's last token per program; no two rows share counts."""
    row = tl.program_id(0) * state_stride
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    token, position = tl.load(tokens_ptr + row), tl.load(positions_ptr + row)
    prompt, own = tl.load(prompts_ptr + row), tl.load(counts_ptr + row)
    if (own > 0) & (position >= prompt):
        place = table_ptr + (own - 1).to(tl.int64) * table_stride + token
        entry = tl.load(place)
        tl.store(place, tl.where(((entry & 0xFFFF) >> 1) < MOST_COUNTED, entry + 2, entry))


def count_tokens(*, state: DeviceState, table: Tensor, dependent: int = False) -> None:
    """Count each state row's last token as :func:`count_tokens_ref` does, in Triton."""
    columns = state.tokens, state.positions, state.prompts, state.counts
    _count_tokens_kernel[(len(state.rows),)](
        *columns, table, state.tokens.stride(0), table.stride(0),
        MOST_COUNTED=MOST_COUNTED, num_warps=1, **launch_options(dependent),
    )  # fmt: skip
