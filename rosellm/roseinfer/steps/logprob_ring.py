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

SIZES = (
    1,
    16,
    64,
    128,
)  # rows computed at once; batches of more rows are divided, to bound the memory of logits


class LogprobRing:
    """A ring with the logprobs of the latest steps, in pinned memory: ``[ROUNDS + 1, S, W]`` int32.

    The entry of a row's r-th step is at ``[r % ROUNDS, row]``, like its token in the ring of the state, and
    holds the result of ``likely_tokens``: W 32-bit integers. Padding writes to the last, unused round.
    Logprobs are computed by kernels of their own after the step, so a step in which no request wants them
    runs no extra kernel.

    state: the device state, whose tokens are read.
    logits: maps final hidden states ``[n, C]`` of ``dtype`` to logits ``[n, V]``.
    store: ``kernels.store_likely``.
    graphs: captures the computation as CUDA graphs; if None, every kernel is launched from Python.
    """

    def __init__(
        self,
        state: DeviceState,
        logits: Callable[[Tensor], Tensor],
        store: Callable[..., None],
        config: Arch,
        dtype: torch.dtype,
        graphs: Graphs | None,
    ) -> None:
        self._tokens, self._logits, self.store, self._graphs = state.tokens, logits, store, graphs
        device, words = state.rows.device, likely_words(config.vocab_size)
        sizes, is_pinned = (ROUNDS + 1, len(state.rows), words), device.type == "cuda"
        self._ring = torch.zeros(sizes, dtype=torch.int32, device="cpu", pin_memory=is_pinned)
        self._hidden = torch.zeros(SIZES[-1], config.d_model, dtype=dtype, device=device)
        self._inputs = torch.zeros(4 * SIZES[-1], dtype=torch.int64, device=device)
        self._staging = StagingBuffer(device, torch.int64)
        self._runs: dict[int, Callable[[], object]] = {}

    def begin(
        self, hidden: Tensor, places: np.ndarray, slots: np.ndarray, rounds: np.ndarray, wanted: np.ndarray
    ) -> None:
        """Start computing the logprobs of a step's new tokens, without waiting for the device.

        hidden: final hidden states ``[m, C]`` of the step.
        places: for each token, the row of ``hidden`` from which it was chosen ``[n]``.
        slots: for each token, its row of the device state ``[n]``.
        rounds: for each token, the round of that row when the step began ``[n]``.
        wanted: for each token, how many most likely tokens are found beside it ``[n]``.
        """
        for first in range(0, len(places), SIZES[-1]):
            part = slice(first, first + SIZES[-1])
            size = next(size for size in SIZES if len(places[part]) <= size)
            run = self._run(size)
            inputs = self._send(size, places[part], slots[part], rounds[part], wanted[part])
            torch.index_select(hidden, 0, inputs[0], out=self._hidden[:size])
            run()

    def read(self, rounds: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Return the entries ``[n, W]`` of finished steps.

        rounds, indices: round and state row of each entry, ``[n]``.
        """
        return self._ring.numpy()[rounds, indices]

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

    def _send(self, size: int, *columns: np.ndarray) -> Tensor:
        """Send the four columns, padded with inert entries; return them as int64 ``[4, size]``."""
        host = self._staging.host(4, size)
        host[:, : len(columns[0])] = columns
        host[:, len(columns[0]) :] = [[0], [0], [ROUNDS], [0]]
        return self._staging.send(self._inputs)

    def _find_inert(self, size: int) -> None:
        no_rows = np.zeros(0, np.int64)
        self._send(size, no_rows, no_rows, no_rows, no_rows)
        self._find(size)

    def _find(self, size: int) -> None:
        _, slots, rounds, wanted = self._inputs[: 4 * size].view(4, size)
        places = {"slots": slots, "rounds": rounds, "wanted": wanted}
        logits = self._logits(self._hidden[:size])
        self.store(logits=logits, tokens=self._tokens, **places, ring=self._ring)
