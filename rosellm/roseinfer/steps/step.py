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
    """The interface of a step, or a part of one, whose kernels and graphs can be prepared before use."""

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Return functions that each capture one missing graph.

        rows: if given, only the graphs of decode steps that serve this many sequences.
        """

    def warm_ups(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Return functions that run each kernel once, on padding only, to compile it before its capture.

        rows: as in :meth:`captures`.
        """

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """Return functions that run a prefill of ``n_tokens`` padding tokens, without capture.

        They compile the kernels of such a prefill and take as much memory as a real one. The list may be
        empty.
        """

    def largest_captures(self) -> list[Callable[[], object]]:
        """Return those functions of :meth:`captures` that need the most memory, in every mode."""

    @property
    def n_captured(self) -> int:
        """The number of CUDA graphs captured so far."""


class Step(Warmable, Protocol):
    """The interface by which an engine runs prefills and decode steps, whose tokens may arrive later.

    The caller has made sure that the cache has enough free blocks; the step reserves the blocks it writes to.

    run_ahead: how many begun steps a scheduler leaves unfinished. When it begins the next step, a sequence
        may be in ``run_ahead + 1`` steps.
    """

    run_ahead: int

    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Cache ``counts[i]`` more tokens of sequence i; choose its next token if it is then fully cached.

        On return, the ``num_cached_tokens`` of every sequence has advanced; next tokens are committed later,
        by :meth:`collect`.
        """

    def begin_decode(self, sequences: list[Sequence]) -> int:
        """Begin a step that gives each sequence one more token; return the number of rows that it advances.

        Sequences whose last token is already in flight are left out. A list that is passed again must not
        have been modified in between.
        """

    def collect(self, leave: int = 0) -> Iterator[Done]:
        """Wait until at most ``leave`` begun steps are unfinished; yield all steps that have ended, in order.

        The tokens of a step are committed before it is yielded, except those of released sequences.
        """

    def release(self, sequence: Sequence) -> None:
        """Stop generating for a sequence that has ended or is abandoned; the caller then frees its blocks."""

    def warm_up(self, rows: int | None, n_tokens: int, is_compiled: bool) -> None:
        """Compile the kernels and capture the graphs, as :func:`warm_up` does."""

    def last_logits(self) -> Tensor:
        """Return the logits ``[B, V]`` of the latest step begun, one row per sequence given a token."""


@torch.inference_mode()
def warm_up(step: Warmable, rows: int | None, n_tokens: int, is_compiled: bool, device: torch.device) -> None:
    """Compile the kernels and capture the graphs of every decode step and prefill, in every mode.

    rows: if given, only the decode steps of that many sequences.
    n_tokens: size of the prefill that runs uncaptured, to compile the kernels of large prefills.
    is_compiled: whether the kernels have been compiled already.

    Progress bars on stderr show work that takes longer than a second.
    """
    runs = step.captures(rows)
    if device.type == "cuda":
        rehearsals = step.rehearsals(n_tokens) if rows is None else []
        if not is_compiled:
            compile_ahead(step.warm_ups(rows) + rehearsals)
        runs = rehearsals + runs
    for run in tqdm(runs, "warm-up", unit=" runs", delay=1, disable=not runs):
        run()
    if runs and device.type == "cuda":
        GPUMemory(device).release()  # frees memory cached by the runs before each capture
