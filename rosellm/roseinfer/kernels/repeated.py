"""A device function that repeats the rows of a tile."""

from __future__ import annotations

from rosellm.triton_or_none import tl, triton


@triton.jit
def repeated(x, ROWS: tl.constexpr):
    """Stack ROWS / A copies of x: ``[A, B]`` → ``[ROWS, B]``."""
    TIMES: tl.constexpr = ROWS // x.shape[0]
    times = tl.broadcast_to(tl.reshape(x, (1, x.shape[0], x.shape[1])), (TIMES, x.shape[0], x.shape[1]))
    return tl.reshape(times, (ROWS, x.shape[1]))
