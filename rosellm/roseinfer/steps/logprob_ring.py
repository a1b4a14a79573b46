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
from rosellm.roseinfer.layers.logprobs import likely_tokens, likely_words
from rosellm.roseinfer.steps.cuda_graph import Graphs

SIZES = 1, 16, 64  # rows computed at once; batches of more rows are divided, to bound the memory of logits


class LogprobRing:
    """A ring on the device with the logprobs of the latest steps: ``[ROUNDS + 1, S, W]`` int32.

    The entry of a row's r-th step is at ``[r % ROUNDS, row]``, like its token in the ring of the state, and
    holds the result of ``likely_tokens``: W 32-bit integers. Padding writes to the last, unused round.
    Logprobs are computed by kernels of their own after the step, so a step in which no request wants them
    runs no extra kernel.

    state: the device state, whose tokens are read.
    logits: maps final hidden states ``[n, C]`` of ``dtype`` to logits ``[n, V]``.
    graphs: captures the computation as CUDA graphs; if None, every kernel is launched from Python.
    """

    def __init__(
        self,
        state: DeviceState,
        logits: Callable[[Tensor], Tensor],
        config: Arch,
        dtype: torch.dtype,
        graphs: Graphs | None,
    ) -> None:
        self._tokens, self._logits, self._graphs = state.tokens, logits, graphs
        device, words = state.rows.device, likely_words(config.vocab_size)
        # Padding writes to the extra round.
        self._words = torch.zeros(ROUNDS + 1, len(state.rows), words, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(SIZES[-1], config.d_model, dtype=dtype, device=device)
        self._inputs = torch.zeros(3 * SIZES[-1], dtype=torch.int64, device=device)
        self._staging = StagingBuffer(device, torch.int64)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._runs: dict[int, Callable[[], object]] = {}

    def begin(self, hidden: Tensor, places: np.ndarray, slots: np.ndarray, rounds: np.ndarray) -> None:
        """Start computing the logprobs of a step's new tokens, without waiting for the device.

        hidden: final hidden states ``[m, C]`` of the step.
        places: for each token, the row of ``hidden`` from which it was chosen ``[n]``.
        slots: for each token, its row of the device state ``[n]``.
        rounds: for each token, the round of that row when the step began ``[n]``.
        """
        for first in range(0, len(places), SIZES[-1]):
            part = slice(first, first + SIZES[-1])
            size = next(size for size in SIZES if len(places[part]) <= size)
            run = self._run(size)
            inputs = self._send(size, places[part], slots[part], rounds[part])
            torch.index_select(hidden, 0, inputs[0], out=self._hidden[:size])
            run()

    def read(self, rounds: np.ndarray, indices: np.ndarray) -> Tensor:
        """Return the entries ``[n, W]`` of finished steps on the CPU, without waiting for later steps.

        rounds, indices: round and state row of each entry, ``[n]``.
        """
        with torch.cuda.stream(self._stream):
            places = torch.from_numpy(np.stack((rounds, indices))).to(self._words.device)
            return self._words[places[0], places[1]].cpu()

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
        """Send places, slots and rounds, padded with inert entries; return them as int64 ``[3, size]``."""
        host = self._staging.host(3, size)
        host[:, : len(columns[0])] = columns
        host[:, len(columns[0]) :] = [[0], [0], [ROUNDS]]
        return self._staging.send(self._inputs)

    def _find_inert(self, size: int) -> None:
        no_rows = np.zeros(0, np.int64)
        self._send(size, no_rows, no_rows, no_rows)
        self._find(size)

    def _find(self, size: int) -> None:
        _, slots, rounds = self._inputs[: 3 * size].view(3, size)
        self._words[rounds, slots] = likely_tokens(self._logits(self._hidden[:size]), self._tokens[slots])
