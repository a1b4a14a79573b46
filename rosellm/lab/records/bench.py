"""Run the engine for notebooks and records: time and count steps, compare tokens and logits."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rosellm.lab.records.parameters import ParameterError, model_path
from rosellm.lab.records.trace import Trace, record_trace
from rosellm.ladder.rungs import TritonAppend
from rosellm.models.loading import AnyTokenizer, load_parts
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.rung import Rung
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig


@lru_cache(maxsize=2)
def get_parts(
    model: str, device: str = "auto", dtype: str = "auto", load_format: str = "auto"
) -> tuple[Transformer, AnyTokenizer]:
    """Return a model and its tokenizer, loaded at first use and cached.

    model: a name, or a folder, resolved as in :func:`model_path`.
    """
    return load_parts(model_path(model), device, dtype, load_format)


def get_model(
    model: str, device: str = "auto", dtype: str = "auto", load_format: str = "auto"
) -> Transformer:
    """Return the model of :func:`get_parts`."""
    return get_parts(model, device, dtype, load_format)[0]


def free_memory() -> None:
    """Return the memory of unreferenced engines to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_prompts(batch: int, lengths: int | list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return ``batch`` prompts of random token ids; their lengths cycle through ``lengths``."""
    lengths = [lengths] if isinstance(lengths, int) else lengths
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(lengths[i % len(lengths)])] for i in range(batch)]


class Bench:
    """An engine of one recipe with a batch of prefilled sequences, ready to decode.

    prompts: token ids, one list per sequence.
    new_tokens: maximum number of tokens that each sequence generates.
    gate_from: minimum batch size for the Triton append kernel, on rungs that have this threshold; None reads
        it from the environment, as a command would.
    prepare: modifies the engine before its steps are captured.
    build: makes the engine of several ranks, as ``tensor_parallel.load_ranks`` returns it.

    ``params`` holds the sampling parameters of each sequence, initially greedy; changes take effect at the
    next :meth:`restart`.
    """

    def __init__(
        self,
        model: Transformer,
        recipe: str | Rung,
        prompts: list[list[int]],
        new_tokens: int,
        *,
        block_size: int = 64,
        gate_from: int | None = None,
        kernels: str | Kernels = "auto",
        prepare: Callable[[Engine], None] | None = None,
        build: Callable[..., Engine] = Engine,
    ) -> None:
        longest = max(map(len, prompts)) + new_tokens
        self.engine = build(
            model,
            recipe=recipe,
            max_batch_size=len(prompts),
            max_model_len=min(longest, model.config.n_positions),
            num_kv_blocks=sum(blocks_for(len(prompt) + new_tokens, block_size) for prompt in prompts),
            block_size=block_size,
            kernels=kernels,
            warm_up=False,  # warmed up below, for these prompts only
        )
        if gate_from is not None and isinstance(self.engine.step, TritonAppend):
            self.engine.step.append_from = gate_from
        if prepare is not None:
            prepare(self.engine)
        self._prompts = prompts
        greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        self.params = [greedy] * len(prompts)
        self.sequences: list[Sequence] = []
        self.engine.warm_up(len(prompts))
        self.restart()

    def restart(self) -> None:
        """Release all sequences and prefill the same prompts again."""
        for sequence in self.sequences:
            self.engine.release(sequence)
        pairs = zip(self._prompts, self.params, strict=True)
        self.sequences = [self.engine.make_sequence(prompt, params) for prompt, params in pairs]
        waiting = self.sequences
        while waiting:
            counts = _within_budget([s.n_to_prefill for s in waiting])
            begun = self.engine.begin_prefill(waiting[: len(counts)], counts)
            for _ in self.engine.step.collect():
                pass
            waiting = waiting[len(begun) :]

    def decode(self, steps: int = 1) -> list[float]:
        """Decode ``steps`` tokens per sequence; return the seconds of each step.

        A step ends when its tokens are on the host.
        """
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self.engine.decode(self.sequences)
            seconds.append(time.perf_counter() - start)
        return seconds

    def logits(self) -> Tensor:
        """Return a copy of the latest step's logits ``[B, V]``, fp32, on the host."""
        return self.engine.step.last_logits().to("cpu", torch.float32, copy=True)

    def run_ahead(self, steps: int) -> list[float]:
        """Decode with steps launched as far ahead as the engine allows; return the device seconds of each."""
        done: list[Done] = []
        for _ in range(steps):
            self.engine.begin_decode(self.sequences)
            done += self.engine.step.collect(self.engine.step.run_ahead)
        done += self.engine.step.collect()
        return [step.seconds for step in done]

    def trace(self) -> Trace:
        """Return the trace of one step, after a step that warms up the profiler: two tokens per sequence."""
        return record_trace(self.decode)

    @property
    def tokens(self) -> list[list[int]]:
        return [s.output for s in self.sequences]


def _within_budget(wanted: list[int]) -> list[int]:
    """Return how many tokens of each prompt a scheduler would compute in the next prefill.

    wanted: uncached tokens per prompt. Prompts beyond the token budget are omitted.
    """
    left = SchedulerConfig().prefill_token_budget
    ends = [min(end, left) for end in accumulate(wanted)]
    return [n for n in (b - a for a, b in pairwise([0, *ends])) if n]


@dataclass(frozen=True)
class Run:
    """The result of running one recipe.

    tokens: the generated tokens of each sequence.
    step_seconds: duration of each timed step.
    trace: one profiled step.
    """

    name: str
    tokens: list[list[int]]
    step_seconds: list[float]
    trace: Trace

    @property
    def step_ms(self) -> float:
        """Median milliseconds per step."""
        return float(np.median(self.step_seconds)) * 1e3


WARM_UP_STEPS = 2
LEAST_TOKENS = 1 + WARM_UP_STEPS + 2 + 1  # prefill, warm-up, profiler, one timed step


def run_recipe(
    model: Transformer, recipe: str | Rung, prompts: list[list[int]], new_tokens: int, **options: Any
) -> Run:
    """Generate ``new_tokens`` per sequence: prefill, warm up, profile one step, and time the remaining steps.

    options: further arguments of :class:`Bench`.

    At least ``LEAST_TOKENS`` are generated, so that a step is timed; any beyond ``new_tokens`` are dropped.
    Raises ParameterError if prompts and generated tokens exceed the model's positions.
    """
    decoded = max(new_tokens, LEAST_TOKENS)
    longest, positions = max(map(len, prompts)), model.config.n_positions
    if longest + decoded > positions:
        raise ParameterError(
            f"a timed run decodes {decoded} tokens, and after a prompt of {longest} the model's {positions} "
            "positions have no room for them; give shorter prompts"
        )
    bench = Bench(model, recipe, prompts, decoded, **options)
    bench.decode(WARM_UP_STEPS)
    trace = bench.trace()
    seconds = bench.decode(decoded - LEAST_TOKENS + 1)
    tokens = [row[:new_tokens] for row in bench.tokens]
    return Run(recipe if isinstance(recipe, str) else "custom", tokens, seconds, trace)


def decode_tokens(
    model: Transformer, recipe: str | Rung, prompts: list[list[int]], new_tokens: int, **options: Any
) -> list[list[int]]:
    """Return the ``new_tokens`` that a recipe generates for each sequence, without timing or profiling.

    options: further arguments of :class:`Bench`.
    """
    bench = Bench(model, recipe, prompts, new_tokens, **options)
    bench.decode(new_tokens - 1)
    return bench.tokens


def compare(
    model: Transformer,
    before: str | Rung,
    after: str | Rung,
    prompts: list[list[int]],
    new_tokens: int,
    **options: Any,
) -> tuple[Run, Run]:
    """Run :func:`run_recipe` with the same arguments for two recipes, one after the other."""
    first = run_recipe(model, before, prompts, new_tokens, **options)
    return first, run_recipe(model, after, prompts, new_tokens, **options)


def forced_logits(
    model: Transformer, recipe: str | Rung, prompts: list[list[int]], tokens: list[list[int]], **options: Any
) -> Tensor:
    """Return the logits of a recipe that is fed the given tokens instead of those that it chooses.

    tokens: ``tokens[row][step]`` is the input after the prompt; all rows have equal lengths.
    options: further arguments of :class:`Bench`.

    Returns ``[steps, B, V]`` fp32 on the host; entry i holds the logits that decide token i.
    """
    steps = len(tokens[0])
    bench = Bench(model, recipe, prompts, steps, **options)
    logits = [bench.logits()]
    for step in range(steps - 1):
        for sequence, row in zip(bench.sequences, tokens, strict=True):
            sequence.tokens[-1] = row[step]
        bench.decode()
        logits.append(bench.logits())
    return torch.stack(logits)


def first_difference(
    expected: Tensor, reference: list[list[int]], tokens: list[list[int]]
) -> dict[str, float] | None:
    """Return where a run's tokens first differ from the reference's; None if they are equal.

    expected: the reference's logits ``[steps, B, V]``.
    reference, tokens: ``[row][step]`` token ids.

    Returns ``token`` (the step), ``request`` (the row), and ``logit_gap``: by how much the reference's token
    exceeds the run's in the reference's logits. Up to there both had the same inputs, so that rounding alone
    closed the gap.
    """
    at = [(step, row) for step in range(len(expected)) for row in range(len(reference))]
    parted = ((step, row) for step, row in at if reference[row][step] != tokens[row][step])
    if (first := next(parted, None)) is None:
        return None
    step, row = first
    logits = expected[step, row]
    gap = logits[reference[row][step]] - logits[tokens[row][step]]
    return {"token": step, "request": row, "logit_gap": gap.item()}


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
