"""Record decode steps of a rung and of the previous one, event by event, to be drawn later."""

from __future__ import annotations

from typing import Any

from rosellm.bench.workloads import Workload
from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.ledger import WARM_UP_STEPS, drive
from rosellm.lab.records.step_records import step_shape
from rosellm.lab.records.trace import Trace, record_trace
from rosellm.models.model import Transformer
from rosellm.roseinfer.recipe import BEFORE

TIMELINES = ("cuda_graph", "reused_index_buffers", "resident_step", "dependent_launch")
STEPS = 2


def timeline(model: Transformer, rung: str, workload: Workload) -> dict[str, Any]:
    """Trace ``STEPS`` steps of both rungs, run as in a scheduler, at a workload's mid-run context."""
    batch, context = step_shape(workload)
    return {
        "batch": batch,
        "context": context,
        **{name: trace_steps(model, name, batch, context).as_dict() for name in (BEFORE[rung], rung)},
    }


def trace_steps(model: Transformer, rung: str, batch: int, context: int) -> Trace:
    """Profile the last ``STEPS`` of a few decode steps."""
    room = WARM_UP_STEPS + 2 * STEPS
    prompts = make_prompts(batch, max(1, context - room), model.config.vocab_size)
    bench = Bench(model, rung, prompts, room + 1)
    drive(bench, WARM_UP_STEPS)
    return record_trace(lambda: drive(bench, STEPS))
