"""Record decode steps of a rung and of the previous one, event by event, to be drawn later."""

from __future__ import annotations

from functools import partial
from typing import Any

from rosellm.bench.workloads import Workload
from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.ledger import WARM_UP_STEPS, drive
from rosellm.lab.records.step_records import step_shape
from rosellm.lab.records.trace import record_trace
from rosellm.models.model import Transformer
from rosellm.roseinfer.recipe import BEFORE

TIMELINES = ("cuda_graph", "reused_index_buffers", "resident_step", "dependent_launch")
STEPS = 2


def timeline(model: Transformer, rung: str, workload: Workload) -> dict[str, Any]:
    """Trace ``STEPS`` steps of both rungs, run as in a scheduler, at a workload's mid-run context."""
    batch, context = step_shape(workload)
    room = WARM_UP_STEPS + 2 * STEPS
    prompts = make_prompts(batch, max(1, context - room), model.config.vocab_size)
    figures: dict[str, Any] = {"batch": batch, "context": context}
    for name in (BEFORE[rung], rung):
        bench = Bench(model, name, prompts, room + 1)
        drive(bench, WARM_UP_STEPS)
        figures[name] = record_trace(partial(drive, bench, STEPS)).as_dict()
    return figures
