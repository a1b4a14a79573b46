"""Decode steps that can be run again and again: an engine's, those of transformers, or code of your own."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import nn
from torch.profiler import record_function

from rosellm.errors import PromptError, RoseError, describe
from rosellm.lab.records.account import PROFILED_STEP
from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.ledger import drive
from rosellm.models.model import Transformer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import Recipe, best_rung

STEPS = 8  # of one timed run
ROOM = 3 * STEPS  # new tokens that a sequence needs for all runs after one preparation
MOST_BATCH, MOST_CONTEXT = 4096, 2**20


class SubjectError(RoseError):
    """Something that cannot be diagnosed, or a batch or context that it cannot run."""


@dataclass(frozen=True)
class Work:
    """What one step is about: a new token for each of ``batch`` sequences.

    context: tokens cached a sequence; kv_bytes: of all keys and values that it attends to. Both None if not
    known. n_weights: parameters that it multiplies, in ``n_matrices``; all of them are read once.
    """

    batch: int
    context: float | None
    dtype: torch.dtype
    device: torch.device
    n_weights: int
    n_matrices: int
    kv_bytes: float | None

    @property
    def weight_bytes(self) -> int:
        return self.n_weights * self.dtype.itemsize

    @property
    def read_bytes(self) -> float:
        """What a step has to read, once."""
        return self.weight_bytes + (self.kv_bytes or 0)

    @property
    def flops(self) -> float:
        """Of its products with weights."""
        return 2.0 * self.n_weights * self.batch


class Steps(Protocol):
    """One side of a comparison: ``prepare()``, then ``run(n)`` up to ``ROOM`` steps in all."""

    name: str
    work: Work

    def prepare(self) -> None:
        """Back to where the steps start from."""

    def run(self, n: int) -> list[float]:
        """``n`` consecutive steps: when each was seen to end, seconds.

        Each is inside a range ``PROFILED_STEP``, but perhaps the first.
        """


def check_sizes(batch: int, context: int, positions: int) -> None:
    """Raises ``SubjectError`` for other than whole numbers in range, ``PromptError`` beyond the positions."""
    for name, value, most in (("batch", batch, MOST_BATCH), ("context", context, MOST_CONTEXT)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise SubjectError(f"{name} is {describe(value)}; it must be a whole number from 1 to {most}")
    if context + ROOM > positions:
        raise PromptError(
            f"context {context} and the {ROOM} new tokens of the measured steps exceed the model's "
            f"{positions} positions; use a context of at most {positions - ROOM}"
        )


class EngineSteps(Steps):
    """Steps of one recipe on a fresh engine that shares the weights of ``model``; greedy, seeded prompts.

    recipe: None is the device's best rung.
    """

    def __init__(self, model: Transformer, recipe: str | Recipe | None, batch: int, context: int) -> None:
        c = model.config
        check_sizes(batch, context, c.n_positions)
        chosen = best_rung(model.device) if recipe is None else recipe
        self.bench = Bench(model, chosen, make_prompts(batch, context, c.vocab_size), ROOM)
        self.name = self.bench.engine.rung or "a recipe of your own"
        attended = min(context, c.window or context)
        kv_bytes = batch * attended * c.kv_bytes_per_token(model.dtype.itemsize)
        matrices = c.n_layers * len(c.shapes) + 1
        n = c.n_step_parameters
        self.work = Work(batch, context, model.dtype, model.device, n, matrices, kv_bytes)

    @property
    def engine(self) -> Engine:
        return self.bench.engine

    def prepare(self) -> None:
        self.bench.restart()

    def run(self, n: int) -> list[float]:
        return drive(self.bench, n)


class Loop(Steps):
    """Code of your own: ``step()`` makes a token for each of ``batch`` sequences, with ``model``'s weights.

    start: puts back what the steps change, a cache for example; it is called before every run, of at most
    ``ROOM`` steps. kv_bytes: what all cached keys and values of a step take; None if you cannot tell. The
    model's first parameter tells dtype and device. On a GPU the host waits for it only after a run's first
    and last step.
    """

    def __init__(
        self,
        step: Callable[[], object],
        model: nn.Module,
        batch: int,
        *,
        start: Callable[[], object] = lambda: None,
        kv_bytes: float | None = None,
        name: str = "your loop",
    ) -> None:
        first = next(model.parameters(), None)
        if not callable(step) or first is None:
            raise SubjectError("a loop needs a step that can be called, and a model with parameters")
        check_sizes(batch, 1, 1 + ROOM)
        self.name, self._step, self._start = name, step, start
        n, matrices = multiplied_parameters(model)
        self.work = Work(batch, None, first.dtype, first.device, n, matrices, kv_bytes)

    def prepare(self) -> None:
        self._start()

    def run(self, n: int) -> list[float]:
        ends = []
        for i in range(n):
            with record_function(PROFILED_STEP):
                self._step()
                if i in (0, n - 1) and self.work.device.type == "cuda":
                    torch.cuda.synchronize(self.work.device)
            ends.append(time.perf_counter())
        return ends


class TransformersSteps(Steps):
    """The steps of transformers' own ``generate`` with its cache: greedy, seeded prompts, none compiled.

    static: a cache allocated at once in place of transformers' default, which grows by a token a step.
    """

    def __init__(self, model: Any, batch: int, context: int, static: bool = False) -> None:
        c = model.config.get_text_config()
        check_sizes(batch, context, getattr(c, "max_position_embeddings", MOST_CONTEXT))
        self.model, self.static = model, static
        self.name = "transformers, static cache" if static else "transformers"
        self.work = transformers_work(model, batch, context)
        prompts = torch.tensor(make_prompts(batch, context, c.vocab_size))
        self._prompts = self._tokens = prompts.to(self.work.device)
        self._cache: Any = None

    def prepare(self) -> None:
        self._tokens, self._cache = self._prompts, None
        if self.static:
            from transformers import StaticCache

            most = self._prompts.shape[1] + ROOM + 1
            self._cache = StaticCache(config=self.model.config, max_cache_len=most)
        self._generate(1)

    def run(self, n: int) -> list[float]:
        return self._generate(n)

    def _generate(self, n: int) -> list[float]:
        clock = _Clock(n)
        with patch.object(self.model.generation_config, "eos_token_id", None):
            made = self.model.generate(
                self._tokens,
                attention_mask=torch.ones_like(self._tokens),
                **({} if self._cache is None else {cache_name(): self._cache}),
                max_new_tokens=n,
                do_sample=False,
                pad_token_id=0,
                disable_compile=True,
                return_dict_in_generate=True,
                stopping_criteria=[clock],
            )
        self._tokens, self._cache = made.sequences, made[cache_name()]
        return clock.ends


def cache_name() -> str:
    """What this version of transformers calls the cache; an older name would be answered by a warning."""
    from transformers.generation import utils

    return "cache" if "cache" in getattr(utils, "ALL_CACHE_NAMES", ()) else "past_key_values"


class _Clock:
    """A stopping criterion that never stops: called when a token is made, it opens the next step's range."""

    def __init__(self, steps: int) -> None:
        self.ends: list[float] = []
        self._steps = steps
        self._range: AbstractContextManager[Any] = nullcontext()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._range.__exit__(None, None, None)
        self.ends.append(time.perf_counter())
        self._range = record_function(PROFILED_STEP) if len(self.ends) < self._steps else nullcontext()
        self._range.__enter__()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def transformers_work(model: Any, batch: int, context: int) -> Work:
    """The work of a step of a causal language model of transformers."""
    c, (n, matrices) = model.config.get_text_config(), multiplied_parameters(model)
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    kv_bytes = 2 * heads * head_dim * model.dtype.itemsize * batch * _attended(c, context)
    return Work(batch, context, model.dtype, model.device, n, matrices, kv_bytes)


def _attended(config: Any, context: int) -> int:
    """Cached tokens that a token attends to, summed over the layers; all have the window if none is named."""
    window = getattr(config, "sliding_window", None) or context
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return sum(min(context, window) if kind == "sliding_attention" else context for kind in kinds)


def multiplied_parameters(model: nn.Module) -> tuple[int, int]:
    """Parameters that a step reads whole, and matrices among them: not tables, of which it reads rows."""
    tables = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    tables -= {
        weight.data_ptr()
        for m in model.modules()
        if not isinstance(m, nn.Embedding) and isinstance(weight := getattr(m, "weight", None), torch.Tensor)
    }
    read = [p for p in model.parameters() if p.data_ptr() not in tables]
    return sum(p.numel() for p in read), sum(p.dim() > 1 for p in read)
