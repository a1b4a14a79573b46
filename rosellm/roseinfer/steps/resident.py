"""The GPU-resident decode step: tokens, positions, appends, sampling and stops stay on the device.

One captured graph per batch bucket advances every running sequence by one token. The host admits sequences,
grows their block tables ahead of need, starts steps and, some steps later, reads their tokens from pinned
memory. A row that has ended is inert until it is reassigned. ``host.HostStep`` is the same step driven by the
host, and the specification of this one.

Blocks may change owners while steps are in flight: device work is ordered, so an earlier step's writes land
before a later owner's prefill, and a released row is made inert before any later step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from rosellm.errors import RoseError
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager
from rosellm.roseinfer.cache.token_counts import TokenCounts
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.attention import Binder
from rosellm.roseinfer.layers.choosers import Chooser
from rosellm.roseinfer.layers.fused import Layers
from rosellm.roseinfer.layers.logprobs import LogprobRing, likely_tokens, rounds_of
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.cuda_graph import GraphPool, batch_bucket, record_graph
from rosellm.roseinfer.steps.in_flight import StepsInFlight
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from rosellm.roseinfer.steps.prefill import Prefill
from rosellm.roseinfer.steps.rows import NOBODY, Batch, Rows
from rosellm.roseinfer.steps.step import STEP_RANGE

RUN_AHEAD = 3
LOGPROBS = "+logprobs"  # ends the mode of a step that tells them


class ResidentStep:
    """Prefill and decode for as many sequences as ``state`` has rows; for one engine and one thread.

    counts: of penalised requests' tokens. layers_for: rows → layers. bind: state and variant → attention that
    appends. chooser: hidden states → tokens. prefill: caches prompts and returns hidden states. capture:
    whether steps are captured as CUDA graphs (GPU only). pool: the graphs' memory.
    """

    run_ahead = RUN_AHEAD

    def __init__(
        self,
        blocks: KVBlockManager,
        state: DeviceState,
        counts: TokenCounts,
        layers_for: Callable[[int], Layers],
        bind: Binder,
        chooser: Chooser,
        prefill: Prefill | PackedPrefill,
        kernels: Kernels,
        capture: bool,
        pool: GraphPool | None,
    ) -> None:
        self.state, self.prefill, self.rows = state, prefill, Rows(state, blocks, counts)
        self.layers_for, self.bind, self.chooser, self.advance = layers_for, bind, chooser, kernels.advance
        n_rows, width = state.table.shape
        device = state.rows.device
        self._capture, self._graph_pool = capture and device.type == "cuda", pool
        self._longest = width * blocks.block_size
        self._idle = DeviceState(n_rows, width, device) if self._capture else state
        self._every_row = torch.arange(n_rows, device=device)
        self._steps: dict[tuple[int, str, str], Callable[[], Tensor]] = {}
        self._logprobs = LogprobRing(n_rows, device)
        self._in_flight = StepsInFlight(self.rows, self._logprobs)
        self._listed: list[Sequence] | None = None  # the list that rows were last reconciled with
        self._mode: tuple[Batch, str] = NOBODY, chooser.mode([])
        self._latest: tuple[Tensor, list[Sequence], Batch] | None = None

    @torch.inference_mode()
    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Cache ``counts[i]`` more tokens of each; those now fully cached get a row and their next token.

        Raises ``OptionError``, and begins nothing, if there are not enough free rows.
        """
        whole = [s for s, n in zip(sequences, counts, strict=True) if s.completes_prefill(n)]
        self.rows.check_room(len(whole))
        self._in_flight.start()
        hidden = self.prefill.run(sequences, counts)
        for sequence, n in zip(sequences, counts, strict=True):
            sequence.n_cached += n
        batch = self._first_tokens(whole, hidden) if whole else NOBODY
        self._in_flight.note("prefill", batch, any(s.logprobs is not None for s in whole))
        self.rows.begin_step(batch, batch.indices)

    @torch.inference_mode()
    def begin_decode(self, sequences: list[Sequence]) -> int:
        """Begin a step; returns how many rows it advances: 0 if all have been asked for their last token."""
        if sequences is not self._listed:
            self._reconcile(sequences)
        if not self._in_flight:
            self._send_edited()
        batch = self.rows.running()
        if not batch.rows:
            return 0
        with record_function(STEP_RANGE):
            with record_function(f"{STEP_RANGE}.reserve"):
                self.rows.grow(batch)
                self.rows.silence()
            bucket = min(batch_bucket(int(batch.indices[-1]) + 1), len(self.rows))
            self._in_flight.start()
            with record_function(f"{STEP_RANGE}.model"):
                variant = self.bind.variant(bucket, int(self.rows.position[batch.indices].max()))
                mode = self._mode_of(batch)
                hidden = self._step(bucket, mode, variant)()
            self._in_flight.note("decode", batch, mode.endswith(LOGPROBS))
            self.rows.begin_step(batch, slice(bucket))
            self._latest = hidden, sequences, batch
        return len(batch.rows)

    def collect(self, leave: int = 0) -> Iterator[Done]:
        """Wait until at most ``leave`` steps are in flight; commit and yield what has ended, in order."""
        return self._in_flight.collect(leave)

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's row, if it has one."""
        self.rows.release(sequence)
        self._listed = None

    @torch.inference_mode()
    def warm_up(self, rows: int | None = None) -> None:
        """Capture the greedy steps of ``rows`` sequences (None: of any number) and short prefills."""
        n_rows = len(self.rows)
        every = {min(batch_bucket(n), n_rows) for n in ([rows] if rows else range(1, n_rows + 1))}
        mode = self.chooser.mode([])
        powers = [1 << k for k in range((self._longest - 1).bit_length() + 1)]
        reach = [n for power in powers for n in (power - 1, power)]
        for bucket in sorted(every, reverse=True):
            for variant in {self.bind.variant(bucket, min(n, self._longest)) for n in reach}:
                self._step(bucket, mode, variant)
        self.prefill.warm_up(rows or n_rows)

    @torch.inference_mode()
    def last_logits(self) -> Tensor:
        """Logits ``[B, V]`` of the latest step begun, recomputed from its final hidden states."""
        if self._latest is None:
            raise RoseError("no step has been begun; there are no logits yet")
        hidden, sequences, batch = self._latest
        place = dict(zip(batch.sequences, batch.indices.tolist(), strict=True))
        rows = [place[sequence] for sequence in sequences if sequence in place]
        return self.chooser.logits(hidden[torch.tensor(rows, device=hidden.device)])

    def _first_tokens(self, sequences: list[Sequence], hidden: Tensor) -> Batch:
        """Rows and next tokens for fully cached sequences; ``hidden`` ``[n, C]`` of their last tokens."""
        index = self.rows.attach(sequences, [s.prefill_length - 1 for s in sequences])
        batch = self.rows.batch(sequences)
        self._choose(hidden, self.state.at(index), self.state, index, self._mode_for(sequences))
        self._listed = None
        self._latest = hidden, sequences, batch._replace(indices=np.arange(len(sequences)))
        return batch

    def _reconcile(self, sequences: list[Sequence]) -> None:
        """Give rows to exactly ``sequences``: others are set aside, and those set aside before come back."""
        wanted = set(sequences)
        others = [s for s in self.rows.sequences if s not in wanted]
        if others:
            self._in_flight.settle()  # the host must know their latest tokens
        for sequence in others:
            self.rows.release(sequence)
        missing = [s for s in sequences if s not in self.rows and s.finish_reason is None]
        if missing:
            self.rows.attach(missing, [s.n_cached for s in missing])
        self._listed = sequences

    def _send_edited(self) -> None:
        """Resend the rows of sequences whose last token is not the one that the device chose."""
        batch = self.rows.batch(self.rows.sequences)
        chosen = zip(batch.sequences, self.rows.last_tokens(batch), strict=True)
        edited = [s for s, token in chosen if s.tokens[s.n_cached] != token]
        if edited:
            self.rows.attach(edited, [s.n_cached for s in edited])

    def _mode_of(self, batch: Batch) -> str:
        if batch is not self._mode[0]:
            self._mode = batch, self._mode_for(batch.sequences)
        return self._mode[1]

    def _mode_for(self, sequences: list[Sequence]) -> str:
        """The chooser's mode, and whether log-probabilities are asked for."""
        mode = self.chooser.mode([s.params for s in sequences])
        return mode + LOGPROBS if any(s.logprobs is not None for s in sequences) else mode

    def _step(self, bucket: int, mode: str, variant: str) -> Callable[[], Tensor]:
        key = bucket, mode, variant
        if key not in self._steps:
            self._steps[key] = (self._captured if self._capture else self._called)(*key)
        return self._steps[key]

    def _called(self, bucket: int, mode: str, variant: str) -> Callable[[], Tensor]:
        return lambda: self._run(self.state.first(bucket), mode, variant)

    def _captured(self, bucket: int, mode: str, variant: str) -> Callable[[], Tensor]:
        """Warmed up with inert rows, which write nothing."""
        idle, state = self._idle.first(bucket), self.state.first(bucket)
        return record_graph(
            lambda: self._run(state, mode, variant), lambda: self._run(idle, mode, variant), self._graph_pool
        )

    def _run(self, state: DeviceState, mode: str, variant: str) -> Tensor:
        """Advance every row that is not inert by one token; returns final hidden states ``[rows, C]``."""
        rows = len(state.rows)
        hidden = self.layers_for(rows)(state.tokens, state.positions, self.bind(state, variant))
        self._choose(hidden, state, state, self._every_row[:rows], mode)
        return hidden

    def _choose(
        self, hidden: Tensor, rows: DeviceState, state: DeviceState, slots: Tensor, mode: str
    ) -> None:
        """Choose the next tokens of ``rows``, which are ``slots`` of ``state``; they then advance."""
        rounds = rounds_of(rows) if mode.endswith(LOGPROBS) else None
        values, indices = self.chooser(hidden, rows, mode.removesuffix(LOGPROBS))
        self.advance(state=state, slots=slots, values=values, indices=indices)
        if rounds is not None:
            words = likely_tokens(self.chooser.logits(hidden), state.tokens[slots])
            self._logprobs.write(words, rounds, slots)
