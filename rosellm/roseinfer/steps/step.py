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
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NO_RANGE


class Step(Protocol):
    """Runs prefill and decode for an engine, which decides for whom and how much; tokens may arrive later.

    The caller has made room in the cache; the step reserves the blocks it writes to. ``run_ahead``: how many
    begun steps a scheduler leaves unfinished; a sequence may be in that many and in one more.
    """

    run_ahead: int

    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Cache ``counts[i]`` more tokens of each; a sequence then fully cached gets its next token.

        ``n_cached`` of the others has advanced on return.
        """

    def begin_decode(self, sequences: list[Sequence]) -> int:
        """One more token for each; returns how many rows actually run.

        That may leave out sequences already asked for their last token. A list that is passed again is
        unchanged.
        """

    def collect(self, leave: int = 0) -> Iterator[Done]:
        """Wait until at most ``leave`` begun steps are unfinished; yield all that have ended, in order.

        A step's tokens are committed to its sequences before it is yielded, except to released ones.
        """

    def release(self, sequence: Sequence) -> None:
        """The sequence has ended or is abandoned: it gets no further token, and its blocks will be freed."""

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Calls that capture what is not captured yet, so that no request has to wait for it: a graph each.

        rows: only decode steps of so many sequences.
        """

    def warm_ups(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Calls that run, uncaptured and with inert inputs, every kernel of :meth:`captures`."""

    def largest_captures(self) -> list[Callable[[], object]]:
        """Those of them that take the most memory, in every mode."""

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """Calls that run, uncaptured, all that a prefill of ``n_tokens`` may, with inert inputs.

        They compile kernels, and take as much memory as a prefill does. Empty if it cannot be run so.
        """

    def warm_up(self, rows: int | None, n_tokens: int) -> None:
        """See :func:`warm_up`."""

    @property
    def n_captured(self) -> int:
        """CUDA graphs captured so far."""

    def last_logits(self) -> Tensor:
        """Logits ``[B, V]`` of the latest step begun, in the order of the sequences that get a token."""


class Warmable(Protocol):
    """What can be warmed up: a step, or the part of it that has graphs."""

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """See :class:`Step`."""

    def warm_ups(self, rows: int | None = None) -> list[Callable[[], object]]:
        """See :class:`Step`."""

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """See :class:`Step`."""


@torch.inference_mode()
def warm_up(step: Warmable, rows: int | None, n_tokens: int, device: torch.device) -> None:
    """Compile kernels and capture graphs: of every decode step and prefill, in every mode.

    rows: if given, only decode steps of that many sequences. n_tokens: the most of a prefill that is
    rehearsed uncaptured. Progress bars on stderr show what takes longer than a second.
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
