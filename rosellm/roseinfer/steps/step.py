"""The interface of a step to the engine, its warm-up, and its named ranges in profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import profiler
from tqdm import tqdm

from rosellm.roseinfer.cache.gpu_memory import GPUMemory
from rosellm.roseinfer.kernels.compile_ahead import compile_ahead
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.request import Sequence

STEP_RANGE = "roseinfer.decode_step_sessions"
PREFILL_RANGE = "roseinfer.prefill_sessions"
_NO_RANGE = nullcontext()


def profile_range(name: str) -> AbstractContextManager[object]:
    """Return ``torch.profiler.record_function(name)`` if a profiler is active, else a null context.

    A ``record_function`` costs microseconds of host time even when no profiler is active.
    """
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NO_RANGE  # noqa: SLF001


class Warmable(Protocol):
    """The interface of what can be warmed up: a step, or the part of a step that has graphs."""

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Return functions that capture one missing graph each.

        rows: if given, only the graphs of decode steps that serve this many sequences.
        """

    def warm_ups(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Return functions that run every kernel of :meth:`captures` uncaptured, with inert inputs."""

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """Return functions that run a prefill of ``n_tokens`` uncaptured, with inert inputs.

        They compile the kernels of a prefill and take as much memory. The list may be empty.
        """

    def largest_captures(self) -> list[Callable[[], object]]:
        """Return the functions of :meth:`captures` that take the most memory, in every mode."""

    @property
    def n_captured(self) -> int:
        """The number of CUDA graphs captured so far."""


class Step(Warmable, Protocol):
    """The interface by which an engine runs prefills and decode steps, whose tokens may arrive later.

    The caller has made room in the cache; the step reserves the blocks it writes to. run_ahead: how many
    begun steps a scheduler leaves unfinished; a sequence may be in one more.
    """

    run_ahead: int

    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Cache ``counts[i]`` more tokens of sequence i; one that is then fully cached gets its next token.

        On return, the ``num_cached_tokens`` of all other sequences have advanced.
        """

    def begin_decode(self, sequences: list[Sequence]) -> int:
        """Begin a step that gives each sequence one more token; return the number of rows that it runs.

        Sequences whose last token is in flight are left out. A list that is passed again must not have been
        modified in between.
        """

    def collect(self, leave: int = 0) -> Iterator[Done]:
        """Wait until at most ``leave`` begun steps are unfinished; yield all that have ended, in order.

        A step's tokens are committed before it is yielded, except those of released sequences.
        """

    def release(self, sequence: Sequence) -> None:
        """Give the sequence no further token: it has ended or is abandoned, and its blocks will be freed."""

    def warm_up(self, rows: int | None, n_tokens: int) -> None:
        """Compile the kernels and capture the graphs, as :func:`warm_up` does."""

    def last_logits(self) -> Tensor:
        """Return logits ``[B, V]`` of the latest step begun, one row per sequence that gets a token."""


@torch.inference_mode()
def warm_up(step: Warmable, rows: int | None, n_tokens: int, device: torch.device) -> None:
    """Compile the kernels and capture the graphs of every decode step and prefill, in every mode.

    rows: if given, only decode steps of that many sequences. n_tokens: the size of the prefill that is run
    uncaptured. Progress bars on stderr show what takes longer than a second.
    """
    runs = step.captures(rows)
    if device.type == "cuda":
        rehearsals = step.rehearsals(n_tokens) if rows is None else []
        compile_ahead(rehearsals + step.warm_ups(rows))
        runs = rehearsals + runs
    for run in tqdm(runs, "warm-up", unit=" runs", delay=1, disable=not runs):
        run()
    if runs and device.type == "cuda":
        GPUMemory(device).settle()  # frees memory cached by the runs before each capture
