"""Inter-token latency of running requests while a long prompt arrives."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from rosellm.bench.record import distribution
from rosellm.errors import RoseError
from rosellm.roseinfer.outputs import RequestOutput

PERCENTS = (50, 99)


def gap_figures(outputs: list[RequestOutput]) -> dict[str, Any]:
    """Return inter-token latencies in seconds during the last request's prefill, and outside it.

    A gap is "beside" the prefill if it overlaps the time from that request's arrival to its token, else
    "apart". Raises ``RoseError`` if no gap is beside it; if none is apart, those figures are None.
    """
    *running, long = outputs
    begin, end = long.metrics.arrival, long.metrics.token_times[0]
    beside: list[float] = []
    apart: list[float] = []
    for output in running:
        for before, after in pairwise(output.metrics.token_times):
            (beside if after > begin and before < end else apart).append(after - before)
    if not beside:
        raise RoseError(
            "no request was running when the long prompt came: give more --max-new-tokens, or a smaller "
            "--long-prompt-after-ms"
        )
    return {
        **distribution("itl_beside", beside, PERCENTS),
        **distribution("itl_apart", apart, PERCENTS),
        "itl_beside_max_s": max(beside),
        "long_prompt_ttft_s": end - begin,
    }
