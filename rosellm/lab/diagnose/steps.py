"""Repeatable decode steps of an engine, of transformers, or of your own code."""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.profiler import record_function

from rosellm.errors import CheckpointError, PromptError, RoseError, describe
from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.ledger import drive
from rosellm.lab.records.trace import PROFILED_STEP
from rosellm.models.checkpoint import checkpoint_folder
from rosellm.models.model import Transformer
from rosellm.models.weights import save_model
from rosellm.roseinfer.recipe import best_rung
from rosellm.roseinfer.rung import Rung

STEPS = 6  # per timed run
ROOM = 3 * STEPS  # maximum new tokens per sequence of all runs after one ``prepare()``
MOST_BATCH, MOST_CONTEXT = 4096, 2**20


class SubjectError(RoseError):
    """An object that cannot be diagnosed, or that cannot run the requested batch or context."""


@dataclass(frozen=True)
class Work:
    """The work of one step, which generates a token for each of ``batch`` sequences.

    context: cached tokens per sequence; None if unknown.
    n_weights: number of parameters that the step must read, each once.
    n_matrices: number of matrices among these parameters.
    kv_bytes: bytes of all keys and values that the step reads; None if unknown.
    """

    batch: int
    context: float | None
    dtype: torch.dtype
    device: torch.device
    n_weights: int
    n_matrices: int
    kv_bytes: float | None

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def weight_bytes(self) -> int:
        return self.n_weights * self.dtype.itemsize

    @property
    def read_bytes(self) -> float:
        """Number of bytes that a step must read: weights, and keys and values if known."""
        return self.weight_bytes + (self.kv_bytes or 0)

    @property
    def flops(self) -> float:
        """FLOPs of the step's GEMMs with weights, two per parameter and sequence."""
        return 2.0 * self.n_weights * self.batch


class Steps(ABC):
    """Decode steps to measure: call ``prepare()``, then ``run(n)`` for up to ``ROOM`` steps in total."""

    name: str
    work: Work

    @abstractmethod
    def prepare(self) -> None:
        """Reset to the state before the first step."""

    @abstractmethod
    def run(self, n: int) -> list[float]:
        """Run ``n`` consecutive steps; return the time in seconds at which the host saw each step end.

        Each step, except possibly the first, runs inside a ``PROFILED_STEP`` range.
        """


def check_sizes(batch: int, context: int, positions: int) -> None:
    """Check that batch and context are integers in range and fit into ``positions``.

    positions: number of positions of the model, which must also suffice for ``ROOM`` new tokens.

    Raises ``SubjectError`` for an invalid value, ``PromptError`` if the positions do not suffice.
    """
    for name, value, most in (("batch", batch, MOST_BATCH), ("context", context, MOST_CONTEXT)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise SubjectError(f"{name} is {describe(value)}; it must be a whole number from 1 to {most}")
    if context + ROOM > positions:
        raise PromptError(
            f"context {context} and the {ROOM} new tokens of the measured steps exceed the model's "
            f"{positions} positions; use a context of at most {positions - ROOM}"
        )


class EngineSteps(Steps):
    """Greedy decode steps of a new engine that shares the weights of ``model``, after seeded prompts.

    recipe: name of a rung, or a recipe; None for the device's best rung.
    batch, context: sequences per step, and cached tokens per sequence.
    """

    def __init__(self, model: Transformer, recipe: str | Rung | None, batch: int, context: int) -> None:
        c = model.config
        check_sizes(batch, context, c.n_positions)
        self.model, self.recipe, self.context = model, recipe or best_rung(model.device), context
        self.bench = Bench(model, self.recipe, make_prompts(batch, context, c.vocab_size), ROOM)
        self.rung = self.bench.engine.rung
        self.name = self.rung or "a recipe of your own"
        kv_bytes = batch * min(context, c.window or context) * c.kv_bytes_per_token(model.dtype.itemsize)
        sizes = c.n_step_parameters, c.n_layers * len(c.shapes) + 1
        self.work = Work(batch, context, model.dtype, model.device, *sizes, kv_bytes)

    def prepare(self) -> None:
        self.bench.restart()

    def run(self, n: int) -> list[float]:
        return drive(self.bench, n)


class Loop(Steps):
    """Decode steps of your own code.

    step: generates one token for each sequence.
    model: its weights are read by a step; its first parameter determines the dtype and device.
    batch: number of sequences.
    start: resets what the steps change, such as a cache; called before at most ``ROOM`` steps.
    kv_bytes: bytes of all cached keys and values that a step reads; None if unknown.

    On a GPU, the host synchronizes only after the first and the last step of a run.
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
        self.work = Work(batch, None, first.dtype, first.device, *multiplied_parameters(model), kv_bytes)

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
    """Greedy decode steps of transformers' ``generate`` with a KV cache, after seeded prompts; not compiled.

    batch, context: sequences per step, and cached tokens per sequence.
    static: whether the cache is preallocated; the default cache of transformers grows by one token per step.
    """

    def __init__(self, model: Any, batch: int, context: int, static: bool = False) -> None:
        c = model.config.get_text_config()
        check_sizes(batch, context, getattr(c, "max_position_embeddings", MOST_CONTEXT))
        self.model, self.context, self.static = model, context, static
        self.name = "transformers, static cache" if static else "transformers"
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        kv_bytes = 2 * heads * head_dim * model.dtype.itemsize * batch * _attended(c, context)
        sizes = multiplied_parameters(model)
        self.work = Work(batch, context, model.dtype, model.device, *sizes, kv_bytes)
        prompts = torch.tensor(make_prompts(batch, context, c.vocab_size))
        self._prompts = self._tokens = prompts.to(model.device)
        self._cache: Any = None

    def prepare(self) -> None:
        self._tokens, self._cache = self._prompts, None
        if self.static:
            from transformers import StaticCache

            self._cache = StaticCache(config=self.model.config, max_cache_len=self.context + ROOM + 1)
        self.run(1)

    def run(self, n: int) -> list[float]:
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
    """Return the name of ``generate``'s cache argument, which depends on the version of transformers."""
    from transformers.generation import utils

    return "cache" if "cache" in getattr(utils, "ALL_CACHE_NAMES", ()) else "past_key_values"


class _Clock:
    """A stopping criterion that never stops; it records each token's time and begins a profiler range."""

    def __init__(self, steps: int) -> None:
        self.ends: list[float] = []
        self._steps, self._range = steps, ExitStack()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._range.close()
        self.ends.append(time.perf_counter())
        if len(self.ends) < self._steps:
            self._range.enter_context(record_function(PROFILED_STEP))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _attended(config: Any, context: int) -> int:
    """Return the number of cached tokens that a token attends to, summed over layers.

    If ``config`` has no layer types, all layers use the window, if any.
    """
    window = getattr(config, "sliding_window", None) or context
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return sum(min(context, window) if kind == "sliding_attention" else context for kind in kinds)


def multiplied_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters that a step reads, and the number of matrices among them.

    Embedding tables are excluded, since a step reads only a few of their rows, unless the head shares them.
    """
    others = (m for m in model.modules() if not isinstance(m, nn.Embedding))
    read = {p for m in others for p in m.parameters(recurse=False)}
    return sum(p.numel() for p in read), sum(p.dim() > 1 for p in read)


def load_transformers(name: str, load_format: str, ours: Transformer) -> Any:
    """Load a checkpoint as a transformers model, on the device and in the dtype of ``ours``.

    name, load_format: the checkpoint and format from which ``ours`` was loaded.

    Dummy weights are copied from ``ours``. Raises ``CheckpointError`` if transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if load_format == "dummy" else checkpoint_folder(name)
        if load_format == "dummy":
            save_model(ours, folder, ours.dtype)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=ours.dtype)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"transformers cannot load {name!r}: {error}") from error
        return model.to(ours.device)
