"""Step times of the ladder, of variants between its rungs, and of the best rung less one field."""

from __future__ import annotations

from functools import partial
from typing import Any

from rosellm.bench.benchmark_scheduler import run_scheduler
from rosellm.bench.job import Job
from rosellm.bench.workloads import Workload
from rosellm.lab.records.ablations import BETWEEN, one_step_back, variants
from rosellm.lab.records.bench import Bench, free_memory, make_prompts
from rosellm.lab.records.step_time import StepTimes, measure_steps, prompt_length, room
from rosellm.lab.records.turns import in_turns
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.sampling import SamplingParams

STEP_WORKLOADS = ("W0", "W1", "W2", "W3")
WHOLE_RUNS = ("W1", "W2", "W3")


def step_shape(workload: Workload) -> tuple[int, int]:
    """Return a workload's batch size, and its cached tokens per sequence at mid-run.

    A text prompt counts as one token.
    """
    return workload.max_batch_size, (workload.prompt_tokens or 1) - 1 + workload.max_new_tokens // 2


def ladder_steps(model: Transformer, rungs: list[str], workload: Workload, **effort: Any) -> dict[str, Any]:
    """Time every rung's step at a workload's batch size and mid-run context, in alternation."""
    batch, context = step_shape(workload)
    prompts = make_prompts(batch, prompt_length(context), model.config.vocab_size)
    makers = {rung: partial(Bench, model, rung, prompts, room()) for rung in rungs}
    return figures_of(batch, context, measure_steps(makers, **effort))


def ablation_steps(model: Transformer, rung: str, workload: Workload, **effort: Any) -> dict[str, Any]:
    """Time a rung's step, that of the previous rung, and the variants between."""
    batch, context = step_shape(workload)
    return figures_of(batch, context, measure_steps(variants(rung, model, batch, context), **effort))


ABLATED = tuple(BETWEEN)


def leave_one_out(
    model: Transformer, workload: Workload, repeats: int = 5, best: str = BEST_RUNG
) -> dict[str, Any]:
    """Measure, alternating, whole runs of the best recipe and of it with one field reverted.

    A recipe that is not possible maps to its reason. A repeat is the tokens per second of a whole run.
    """
    blocks = workload.max_batch_size * blocks_for(workload.max_new_tokens, 64)
    sizes: dict[str, Any] = {"max_batch_size": workload.max_batch_size, "num_kv_blocks": blocks}
    engines, refused = {"none": Engine(model, recipe=best, **sizes)}, dict[str, str]()
    for field, recipe in one_step_back(best).items():
        if isinstance(recipe, str):
            refused[field] = recipe
        else:
            engines[field] = Engine(model, recipe=recipe, **sizes)
    prompts = make_prompts(workload.num_requests, 1, model.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=workload.max_new_tokens, ignore_eos=True)
    jobs = {field: Job(engine, prompts, params) for field, engine in engines.items()}

    def tok_s(job: Job) -> float:
        return run_scheduler(job)["total_throughput_tok_s"]

    found = in_turns({field: partial(tok_s, job) for field, job in jobs.items()}, repeats)
    return {"best": best, "tok_s": found, "refused": refused}


def figures_of(batch: int, context: int, steps: dict[str, StepTimes]) -> dict[str, Any]:
    """Return step times for a record, and free the GPU's memory; context: mean cached tokens per row."""
    turns = {name: [[round(us, 3) for us in own] for own in one.turns_us] for name, one in steps.items()}
    free_memory()
    return {"batch": batch, "context": context, "turns_us": turns}
