"""Token counts for penalties: torch reference and kernel."""

from __future__ import annotations

from torch import Tensor

from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.triton_or_none import tl, triton

ROLES = {"_count_tokens_kernel": "sampling"}


def count_tokens_ref(*, state: DeviceState, table: Tensor) -> None:
    """Add each state row's last token to the row's token counts (torch reference).

    table: ``[S, V]`` int32, the counts, as in ``TokenCounts``. Rows without counts, rows whose last token
    belongs to the prompt, and inert rows are skipped.
    """
    rows = (state.counts > 0) & (state.positions >= state.prompts)
    table[(state.counts[rows] - 1).long(), state.tokens[rows].long()] += 2


@triton.jit
def _count_tokens_kernel(
    tokens_ptr, positions_ptr, prompts_ptr, counts_ptr, table_ptr, state_stride, table_stride,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Count one state row's last token per program; no two rows share counts."""
    row = tl.program_id(0) * state_stride
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    token, position = tl.load(tokens_ptr + row), tl.load(positions_ptr + row)
    prompt, own = tl.load(prompts_ptr + row), tl.load(counts_ptr + row)
    if (own > 0) & (position >= prompt):
        place = table_ptr + (own - 1).to(tl.int64) * table_stride + token
        tl.store(place, tl.load(place) + 2)


def count_tokens(*, state: DeviceState, table: Tensor, dependent: int = False) -> None:
    """Count each state row's last token as :func:`count_tokens_ref` does, in Triton."""
    columns = state.tokens, state.positions, state.prompts, state.counts
    _count_tokens_kernel[(len(state.rows),)](
        *columns, table, state.tokens.stride(0), table.stride(0), num_warps=1, **launch_options(dependent)
    )
