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
    """An object that can be warmed up: a step, or the part of it that has graphs."""

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Return a call for each graph that is not captured yet; the call captures it.

        rows: if given, only graphs of decode steps of that many sequences.
        """

    def warm_ups(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Return calls that run every kernel of :meth:`captures` uncaptured, with inert inputs."""

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """Return calls that run every kernel of a prefill of ``n_tokens`` uncaptured, with inert inputs.

        They compile the kernels and take as much memory as a prefill does. Empty if the step has no such
        runs.
        """

    def largest_captures(self) -> list[Callable[[], object]]:
        """Return the calls of :meth:`captures` that take the most memory, in every mode."""

    @property
    def n_captured(self) -> int:
        """The number of CUDA graphs captured so far."""


class Step(Warmable, Protocol):
    """Runs the prefills and decode steps that an engine asks for; their tokens may arrive later.

    The caller has made room in the cache; the step reserves the blocks it writes to. ``run_ahead``: how many
    begun steps a scheduler leaves unfinished; a sequence may be in one more than that.
    """

    run_ahead: int

    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Cache ``counts[i]`` more tokens of sequence i; one that is then fully cached gets its next token.

        On return ``num_cached_tokens`` of the other sequences has advanced.
        """

    def begin_decode(self, sequences: list[Sequence]) -> int:
        """Begin one more token for each sequence; return the number of rows that run.

        Sequences whose last token is in flight are left out. A list that is passed again must not have been
        modified in between.
        """

    def collect(self, leave: int = 0) -> Iterator[Done]:
        """Wait until at most ``leave`` begun steps are unfinished; yield all that have ended, in order.

        Before a step is yielded, its tokens are committed to those of its sequences that are not released.
        """

    def release(self, sequence: Sequence) -> None:
        """Give the sequence no further token: it has ended or is abandoned, and its blocks will be freed."""

    def warm_up(self, rows: int | None, n_tokens: int) -> None:
        """See :func:`warm_up`."""

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
