"""Time decode steps of few sequences at several contexts, on ``split_kv`` and on the rung before."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.experiment import Asked, table
from rosellm.lab.records.turns import each
from rosellm.models.model import Transformer
from rosellm.roseinfer.recipe import BEFORE

RUNG = "split_kv"
STEPS, CLOCKS_S = 12, 1.0  # of a measurement; seconds before it, so that an idle GPU reaches full speed


def grid(asked: Asked) -> dict:
    """Return rung → step times of 1 to 8 sequences at several contexts, as ``few``."""
    batches, contexts = asked.size.batches(1, 2, 4, 8), asked.size.contexts(256, 512, 768, 1000)
    return {
        "few": {
            rung: [
                step_at(asked.gpt, rung, batch, context)
                for batch in each(f"grid, {rung}, batch", batches)
                for context in contexts
            ]
            for rung in (BEFORE[RUNG], RUNG)
        }
    }


def step_at(model: Transformer, rung: str, batch: int, context: int) -> dict[str, Any]:
    """Return the device µs of decode steps and their median.

    Steps are launched as far ahead of their results as the rung allows.
    """
    bench = Bench(model, rung, make_prompts(batch, context, model.config.vocab_size), STEPS + 2)
    end = perf_counter() + CLOCKS_S * (model.device.type == "cuda")
    while perf_counter() < end:
        bench.run_ahead(STEPS)
        bench.restart()
    steps_us = [seconds * 1e6 for seconds in bench.run_ahead(STEPS)]
    return {"batch": batch, "context": context, "step_us": median(steps_us[2:]), "steps_us": steps_us}


EXPERIMENTS = [table("grid", grid)]
