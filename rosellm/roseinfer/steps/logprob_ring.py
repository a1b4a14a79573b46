"""Log-probabilities of new tokens, if requested: computed on the device after a step, and read later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rosellm.models.arch import Arch
from rosellm.roseinfer.cache.device_state import ROUNDS, DeviceState
from rosellm.roseinfer.cache.staging import StagingBuffer
from rosellm.roseinfer.kernels.likely import likely_words
from rosellm.roseinfer.steps.cuda_graph import Graphs

# Rows computed at once; batches of more rows are divided, to bound the memory of logits.
SIZES = 1, 16, 64, 128
NOBODY = np.zeros((3, 0), np.int64)


class LogprobRing:
    """A ring with the logprobs of the latest steps, in pinned memory: ``[ROUNDS, S * P, W]`` int32.

    A step gives a row at most P tokens. The entry of the i-th token of a row's r-th step is at
    ``[r % ROUNDS, row * P + i]``, and holds the result of ``likely_tokens``: W 32-bit integers. Logprobs are
    computed by kernels of their own after the step, so a step in which no request wants them runs no extra
    kernel.

    state: a device state of S * P rows, whose tokens and rounds are read.
    logits: maps final hidden states ``[n, C]`` of ``dtype`` to logits ``[n, V]``.
    store: ``kernels.store_likely``.
    graphs: captures the computation as CUDA graphs; if None, every kernel is launched from Python.
    n_places: P.
    """

    def __init__(
        self,
        state: DeviceState,
        logits: Callable[[Tensor], Tensor],
        store: Callable[..., None],
        config: Arch,
        dtype: torch.dtype,
        graphs: Graphs | None,
        n_places: int = 1,
    ) -> None:
        self.state, self._logits, self.store, self._graphs = state, logits, store, graphs
        self.n_places = n_places
        device, words = state.rows.device, likely_words(config.vocab_size)
        sizes, is_pinned = (ROUNDS, len(state.rows), words), device.type == "cuda"
        self._ring = torch.zeros(sizes, dtype=torch.int32, device="cpu", pin_memory=is_pinned)
        self._hidden = torch.zeros(SIZES[-1], config.d_model, dtype=dtype, device=device)
        self._inputs = torch.zeros(3 * SIZES[-1], dtype=torch.int64, device=device)
        self._staging = StagingBuffer(device, torch.int64)
        self._sent: np.ndarray | None = None  # what ``_inputs`` holds
        self._runs: dict[int, Callable[[], object]] = {}

    def begin(self, hidden: Tensor, asking: np.ndarray) -> None:
        """Start computing the logprobs of a step's new tokens, without waiting for the device.

        hidden: final hidden states ``[m, C]`` of the step, the latest one.
        asking: int64 ``[3, n]``: per token, the row of ``hidden`` from which it was chosen, its row of
            ``state``, and how many most likely tokens are found beside it. The same array, unchanged, is
            not sent again.
        """
        for first in range(0, asking.shape[1], SIZES[-1]):
            part = asking if asking.shape[1] <= SIZES[-1] else asking[:, first : first + SIZES[-1]]
            size = next(size for size in SIZES if part.shape[1] <= size)
            run = self._run(size)
            if part is not self._sent:
                self._send(size, part)
            torch.index_select(hidden, 0, self._inputs[:size], out=self._hidden[:size])
            run()

    def read(self, rounds: np.ndarray, indices: np.ndarray, places: np.ndarray | int = 0) -> np.ndarray:
        """Return the entries ``[n, W]`` of finished steps.

        rounds, indices, places: for each entry, the row's round, the row, and which of its tokens, ``[n]``.
        """
        return self._ring.numpy()[rounds, indices * self.n_places + places]

    def captures(self) -> list[Callable[[], object]]:
        """Return functions that capture the missing graphs, the largest first."""
        sizes = SIZES if self._graphs is not None else ()
        return [partial(self._run, size) for size in reversed(sizes) if size not in self._runs]

    def warm_ups(self) -> list[Callable[[], object]]:
        """Return functions that run each kernel once, on padding only, to compile it before its capture."""
        sizes = SIZES if self._graphs is not None else ()
        return [partial(self._find_inert, size) for size in sizes]

    def _run(self, size: int) -> Callable[[], object]:
        if size not in self._runs:
            run: Callable[[], object] = partial(self._find, size)
            if self._graphs is not None:
                run = self._graphs.capture(run, partial(self._find_inert, size))
            self._runs[size] = run
        return self._runs[size]

    def _send(self, size: int, asking: np.ndarray) -> None:
        """Send ``asking``, padded to ``size`` columns that write nothing."""
        host, n = self._staging.host(3, size), asking.shape[1]
        host[:, :n] = asking
        host[:, n:] = [[0], [-1], [0]]
        self._staging.send(self._inputs[: 3 * size])
        self._sent = asking

    def _find_inert(self, size: int) -> None:
        self._send(size, NOBODY)
        self._find(size)

    def _find(self, size: int) -> None:
        _, slots, wanted = self._inputs[: 3 * size].view(3, size)
        logits, state = self._logits(self._hidden[:size]).float(), self.state
        given = {"logits": logits, "tokens": state.tokens, "rounds": state.rounds}
        self.store(**given, slots=slots, wanted=wanted, ring=self._ring)
