"""Measurements that notebooks run at small sizes, and that ``measure`` records on a GPU at full size.

Each returns a plain dict that a record stores unchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rosellm.lab.records.bench import decode_tokens, first_difference, forced_logits, make_prompts
from rosellm.lab.records.trace import Trace
from rosellm.ladder.dense import H2D_RANGE
from rosellm.ladder.pools import SlotPool, TuplePool
from rosellm.models.model import Transformer
from rosellm.roseinfer.steps.step import STEP_RANGE

POOLS = {"tuple": TuplePool, "slots": SlotPool}
APPEND_RANGE = f"{STEP_RANGE}.kv_append"


def count_step(trace: Trace, n_layers: int) -> dict[str, Any]:
    """Count what one profiled decode step launched, copied and allocated.

    On a CPU, "kernels" are operators called from Python, and nothing is copied. ``range_us`` maps each part
    of the step to the host's µs in it, which the profiler inflates.
    """
    tables, append = trace.within(H2D_RANGE), trace.within(APPEND_RANGE)
    return {
        "kernels": trace.kernels,
        "gpu_time_us": trace.gpu_time(),
        "host_to_device_copies": len(trace.host_to_device),
        "host_to_device_bytes": sum(e.n_bytes for e in trace.host_to_device),
        "table_copies": len(tables.host_to_device),
        "table_bytes": sum(e.n_bytes for e in tables.host_to_device),
        "append_kernels_a_layer": append.kernels / n_layers,
        "append_copies_a_layer": len(append.host_to_device) / n_layers,
        "allocations": trace.allocations,
        "allocated_bytes": trace.allocated_bytes,
        "range_us": {e.name.rpartition(".")[2]: e.duration for e in trace.ranges() if e.name != STEP_RANGE},
    }


def equality(
    model: Transformer, rungs: list[str], lengths: list[int], batch: int, new_tokens: int
) -> dict[str, dict]:
    """Compare every rung with the first of ``rungs``, the reference.

    lengths: prompt lengths, through which the prompts cycle.
    batch: number of prompts.
    new_tokens: tokens generated per prompt.

    Returns rung → figures. Tokens are those that the rung generates by itself; logits are compared while it
    is fed the reference's tokens. ``max_logit_difference`` is to be judged against ``logit_deviation``, the
    standard deviation of the reference's logits. ``smallest_gap_of_reference`` is the smallest difference
    between the two best logits of any of the reference's choices.
    """
    prompts = make_prompts(batch, lengths, model.config.vocab_size, seed=1)
    options = {"gate_from": 1}
    reference = decode_tokens(model, rungs[0], prompts, new_tokens, **options)
    expected = forced_logits(model, rungs[0], prompts, reference, **options)
    best = expected.topk(2, dim=-1).values
    figures = {}
    for rung in rungs:
        tokens = decode_tokens(model, rung, prompts, new_tokens, **options)
        logits = forced_logits(model, rung, prompts, reference, **options)
        same = np.equal(tokens, reference)
        figures[rung] = {
            "max_logit_difference": (expected - logits).abs().max().item(),
            "logit_deviation": expected.std().item(),
            "share_of_argmax_equal": (expected.argmax(-1) == logits.argmax(-1)).float().mean().item(),
            "tokens_equal": bool(same.all()),
            "share_of_tokens_equal": float(same.mean()),
            "first_difference": (parted := first_difference(expected, reference, tokens)),
            "gap_at_first_difference": parted and parted["logit_gap"],
            "smallest_gap_of_reference": (best[..., 0] - best[..., 1]).min().item(),
            "distinct_tokens_of_reference": len({t for row in reference for t in row}),
        }
    return figures
