"""Make the ledger of a workload: where the time of its decode steps, or of its prefills, goes."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import replace
from functools import partial

from torch.profiler import record_function

from rosellm.bench.benchmark_scheduler import BENCHMARK
from rosellm.bench.prompts import make_prompts as benchmark_prompts, request_params
from rosellm.bench.workloads import Workload
from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.floors import prefill_floors_us
from rosellm.lab.records.ledger import Ledger, step_ledger, take_ledger, tokens_before_profile, tokens_needed
from rosellm.lab.records.trace import PROFILED_STEP
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OnlineScheduler
from rosellm.roseinfer.steps.resident import RUN_AHEAD

STEPS, PREFILLS = 8, 4
ROOM = tokens_needed(STEPS) + 1


def workload_ledger(model: Transformer, rung: str, workload: Workload) -> Ledger:
    """Return the ledger of a workload's decode step, or of a prefill if each request generates one token.

    In the decode step each request has half of its output. Lengths and sampling parameters are those of the
    requests that ``benchmark_scheduler`` makes. Raises ``RoseError`` if the model has too few positions.
    """
    if workload.max_new_tokens == 1:
        return _prefill_ledger(model, rung, workload)
    options = Namespace(**vars(BENCHMARK.parse_options(["--workload", workload.id])) | workload.flags())
    vocab_size, params = model.config.vocab_size, request_params(options)[: workload.max_batch_size]
    prompts = benchmark_prompts(options, vocab_size)
    lengths = [_prompt_length(len(p), own.max_tokens or 0) for p, own in zip(prompts, params, strict=False)]
    bench = Bench(model, rung, make_prompts(len(lengths), lengths, vocab_size), ROOM)
    bench.params = [replace(own, max_tokens=ROOM) for own in params]
    bench.restart()
    return step_ledger(bench, STEPS)


def _prompt_length(prompt: int, new_tokens: int) -> int:
    """Return the prompt length for which a request is halfway through its output in the profiled steps.

    prompt, new_tokens: lengths of the prompt and output in the workload.
    """
    return max(1, prompt - 1 + new_tokens // 2 - tokens_before_profile(STEPS))


def _prefill_ledger(model: Transformer, rung: str, workload: Workload) -> Ledger:
    """Return the ledger of a prefill of as many prompts as the scheduler's token budget allows."""
    length = workload.prompt_tokens or 1
    prompts = min(workload.num_requests, max(1, SchedulerConfig().prefill_token_budget // length))
    prefills = Prefills(model, rung, prompts, length)
    floors = partial(prefill_floors_us, model.config, prompts, length, model.dtype.itemsize)
    return take_ledger(prefills.run, prefills.engine, PREFILLS, prompts, length, floors)


class Prefills:
    """An engine that prefills batches of equal prompts, each of which generates one token.

    prompts: number of prompts per prefill.
    length: tokens per prompt.
    """

    def __init__(self, model: Transformer, rung: str, prompts: int, length: int) -> None:
        self._together = make_prompts(prompts, length, model.config.vocab_size)
        self._config = SchedulerConfig(prefill_token_budget=prompts * length)
        in_flight = prompts * (RUN_AHEAD + 2)
        self.engine = Engine(
            model,
            recipe=rung,
            max_batch_size=in_flight,
            max_model_len=length + 1,
            num_kv_blocks=in_flight * blocks_for(length + 1, 64),
        )

    def run(self, steps: int) -> list[float]:
        """Run ``steps`` prefills, launched ahead of their results where possible.

        Returns the times (``perf_counter``) at which the host saw each prefill end.
        """
        scheduler = _Timed(self.engine, self._config)
        one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        scheduler.add_requests(steps * self._together, one_token)
        for _ in range(steps):
            with record_function(PROFILED_STEP):
                scheduler.step()
        while scheduler.has_unfinished:
            scheduler.step()
        return scheduler.ends


class _Timed(OnlineScheduler):
    """A scheduler that records when the host saw each step end."""

    def __init__(self, engine: Engine, config: SchedulerConfig) -> None:
        super().__init__(engine, config)
        self.ends: list[float] = []

    def record_step(self, done: Done, n_tokens: int) -> None:
        super().record_step(done, n_tokens)
        self.ends.append(time.perf_counter())
