"""The GPU-resident decode step: tokens, positions, appends, sampling and stops stay on the device.

One captured graph a batch bucket takes every running sequence one token further. The host admits sequences,
grows their block tables ahead of need, starts steps and, some steps later, reads their tokens from pinned
memory. A row that has ended is inert until its slot is given to another sequence. ``host.HostStep`` is the
same step driven by the host, and this one's specification.

Blocks may change hands while steps are in flight: device work is ordered, so what an earlier step still
writes is written before a later owner's prefill; a row that gives up its slot is made inert before any later
step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from rosellm.errors import OptionError, SamplingError
from rosellm.roseinfer.cache.device_state import FIELDS, INERT, ROUNDS, DeviceState, row_bytes
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager
from rosellm.roseinfer.cache.staging import StagingBuffer
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.attention import Binder
from rosellm.roseinfer.layers.choosers import Chooser
from rosellm.roseinfer.layers.fused import Layers
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.cuda_graph import GraphPool, batch_bucket, record_graph
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from rosellm.roseinfer.steps.prefill import Prefill
from rosellm.roseinfer.steps.step import STEP_RANGE

RUN_AHEAD = 3


class _Clock:
    """When a step ended on the device; on a CPU it has ended once it was called."""

    __slots__ = ("_event", "_time")

    def __init__(self, on_gpu: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self._time = perf_counter()
        if self._event is not None:
            self._event.record()

    def has_ended(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, other: _Clock) -> float:
        if self._event is None:
            return self._time - other._time
        return other._event.elapsed_time(self._event) / 1e3


@dataclass(slots=True)
class _Begun:
    """A step in flight: its sequences, their slots and rounds, the end of the step before, and its own."""

    kind: str
    sequences: list[Sequence]
    slots: np.ndarray
    rounds: np.ndarray
    since: _Clock
    clock: _Clock


class ResidentStep:
    """Prefill and decode for as many sequences as ``state`` has rows; one engine's, one thread's.

    layers_for: rows → layers. bind: state and variant → attention that appends. chooser: hidden states →
    tokens. prefill: caches prompts and gives hidden states. capture: whether steps are captured as CUDA
    graphs; on a CPU there are none. pool: the graphs' memory.
    """

    run_ahead = RUN_AHEAD

    def __init__(
        self,
        blocks: KVBlockManager,
        state: DeviceState,
        layers_for: Callable[[int], Layers],
        bind: Binder,
        chooser: Chooser,
        prefill: Prefill | PackedPrefill,
        kernels: Kernels,
        capture: bool,
        pool: GraphPool | None,
    ) -> None:
        self.blocks, self.state, self.prefill = blocks, state, prefill
        self.layers_for, self.bind, self.chooser, self.advance = layers_for, bind, chooser, kernels.advance
        n_rows, device = len(state.rows), state.rows.device
        self._device, self._on_gpu = device, device.type == "cuda"
        self._capture = capture and self._on_gpu
        self._graph_pool = pool
        self._longest = state.table.shape[1] * blocks.block_size
        self._idle = DeviceState(n_rows, state.table.shape[1], device) if self._capture else None
        self._every_slot = torch.arange(n_rows, device=device)
        self._steps: dict[tuple[int, str, str], Callable[[], Tensor]] = {}
        self._staging = StagingBuffer(device, torch.int32)
        self._ring = state.ring.numpy()
        self._sequences: list[Sequence | None] = [None] * n_rows
        self._slot_of: dict[Sequence, int] = {}
        self._free = list(range(n_rows))  # a heap: the lowest slot first
        self._left = np.zeros(n_rows, np.int64)  # tokens that a row may still be asked for
        self._position = np.zeros(n_rows, np.int64)  # tokens cached once all begun steps have ended
        self._reserved = np.zeros(n_rows, np.int64)  # tokens that the books have slots for
        self._round = np.zeros(n_rows, np.int64)  # rounds begun of each row
        self._left_behind: set[int] = set()  # vacated slots whose rows the device may still run
        self._begun: deque[_Begun] = deque()
        self._ended: deque[Done] = deque()  # committed, and not yet collected
        self._listed: list[Sequence] | None = None
        self._running: tuple[list[Sequence], np.ndarray, str] | None = None
        self._clock: _Clock | None = None
        self._latest: tuple[Tensor, list[int]] | None = None

    @torch.inference_mode()
    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Cache ``counts[i]`` more tokens of each; those then cached wholly get a slot and their next token.

        Raises ``OptionError`` where there are not slots enough, and nothing is begun.
        """
        whole = [s.n_cached + n == s.prefill_length for s, n in zip(sequences, counts, strict=True)]
        if sum(whole) > len(self._free):
            raise OptionError(
                f"{sum(whole)} more sequences exceed the {len(self._sequences)} that run together at most: "
                f"{len(self._slot_of)} are running"
            )
        self._start_clock()
        hidden = self.prefill.run(sequences, counts)
        for sequence, n in zip(sequences, counts, strict=True):
            sequence.n_cached += n
        self._first_tokens([s for s, is_whole in zip(sequences, whole, strict=True) if is_whole], hidden)

    @torch.inference_mode()
    def begin_decode(self, sequences: list[Sequence]) -> int:
        """Begin a step; how many rows it takes further: 0 if all have been asked for their last token."""
        if sequences is not self._listed:
            self._reconcile(sequences)
            self._listed = sequences
        if not self._begun:
            self._send_edited(sequences)
        if self._running is None:
            self._running = self._list_running()
        running, slots, mode = self._running
        if not running:
            return 0
        with record_function(STEP_RANGE):
            with record_function(f"{STEP_RANGE}.reserve"):
                self._grow(running, slots)
                self._silence()
            bucket = min(batch_bucket(int(slots[-1]) + 1), len(self._sequences))
            self._start_clock()
            with record_function(f"{STEP_RANGE}.model"):
                variant = self.bind.variant(bucket, int(self._position[slots].max()))
                hidden = self._step(bucket, mode, variant)()
            self._note("decode", running, slots)
            self._round[:bucket] += 1
            self._position[slots] += 1
            self._left[slots] -= 1
            self._latest = hidden, [self._slot_of[s] for s in sequences if s in self._slot_of]
        if not self._left[slots].all():
            self._running = None
        return len(running)

    def collect(self, leave: int = 0) -> Iterator[Done]:
        """Waits until at most ``leave`` steps are in flight; commits and yields what has ended, in order."""
        while self._ended:
            yield self._ended.popleft()
        while self._begun:
            if len(self._begun) > leave:
                self._begun[0].clock.wait()
            elif not self._begun[0].clock.has_ended():
                return
            yield self._commit(self._begun.popleft())

    def release(self, sequence: Sequence) -> None:
        """Take the sequence's slot from it, if it has one."""
        slot = self._slot_of.get(sequence)
        if slot is not None:
            self._vacate(slot)
            self._left_behind.add(slot)

    @torch.inference_mode()
    def warm_up(self, rows: int | None = None) -> None:
        """Capture the greedy steps of ``rows`` sequences, None: of any number, and prefills of few tokens."""
        n_rows = len(self._sequences)
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
        """Logits ``[B, V]`` of the latest step begun, made anew from its final hidden states."""
        hidden, rows = self._latest
        return self.chooser.logits(hidden[torch.tensor(rows, device=self._device)])

    # Steps.

    def _first_tokens(self, sequences: list[Sequence], hidden: Tensor) -> None:
        """Rows and tokens for sequences cached wholly; ``hidden`` ``[n, C]`` of their last tokens."""
        if not sequences:
            return self._note("prefill", [], np.zeros(0, np.int64))
        slots = np.array([heapq.heappop(self._free) for _ in sequences])
        index = self._attach(sequences, slots, [s.prefill_length - 1 for s in sequences])
        chosen = self.chooser(hidden, self.state.at(index), self.chooser.mode([s.params for s in sequences]))
        self.advance(state=self.state, slots=index, values=chosen[0], indices=chosen[1])
        self._note("prefill", sequences, slots)
        self._round[slots] += 1
        self._position[slots] += 1
        self._left[slots] -= 1
        self._listed = None
        self._latest = hidden, list(range(len(slots)))

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
        """One token more for every row that is not inert; the final hidden states ``[rows, C]``."""
        rows = len(state.rows)
        hidden = self.layers_for(rows)(state.tokens, state.positions, self.bind(state, variant))
        values, indices = self.chooser(hidden, state, mode)
        self.advance(state=state, slots=self._every_slot[:rows], values=values, indices=indices)
        return hidden

    def _start_clock(self) -> None:
        """A step counts from the end of the one before it, or from now if there is none in flight."""
        if not self._begun:
            self._clock = _Clock(self._on_gpu)
        elif len(self._begun) >= ROUNDS - 1:
            self._ended += self.collect(leave=ROUNDS // 2)

    def _note(self, kind: str, sequences: list[Sequence], slots: np.ndarray) -> None:
        since, self._clock = self._clock, _Clock(self._on_gpu)
        self._begun.append(_Begun(kind, sequences, slots, self._round[slots], since, self._clock))

    def _commit(self, begun: _Begun) -> Done:
        """Tokens from the ring to their sequences; those that have ended meanwhile get none."""
        tokens = self._ring[begun.rounds % ROUNDS, begun.slots].tolist()
        got, n_cached = [], int(begun.kind == "decode")
        for sequence, token in zip(begun.sequences, tokens, strict=True):
            if sequence not in self._slot_of:
                continue
            if token < 0:
                raise SamplingError("the model's logits are not finite; nothing can be chosen from them")
            if sequence.commit(token, n_cached):
                got.append(sequence)
            if sequence.finish_reason is not None:
                self._vacate(self._slot_of[sequence])
        return Done(begun.kind, got, begun.clock.seconds_since(begun.since))

    # Rows.

    def _list_running(self) -> tuple[list[Sequence], np.ndarray, str]:
        self._close_ranks()
        slots = np.flatnonzero(self._left > 0)
        running = [self._sequences[slot] for slot in slots]
        return running, slots, self.chooser.mode([s.params for s in running])

    def _reconcile(self, sequences: list[Sequence]) -> None:
        """Exactly ``sequences`` have rows: others are set aside, and those set aside before come back."""
        wanted = set(sequences)
        others = [s for s in self._slot_of if s not in wanted]
        missing = [s for s in sequences if s not in self._slot_of]
        if others:
            self._ended += self.collect()  # the host must know where they stand
        for sequence in others:
            self.release(sequence)
        missing = [s for s in missing if s.finish_reason is None]
        if len(missing) > len(self._free):
            raise OptionError(
                f"{len(sequences)} sequences exceed the {len(self._sequences)} that run together"
            )
        if missing:
            slots = np.array([heapq.heappop(self._free) for _ in missing])
            self._attach(missing, slots, [s.n_cached for s in missing])
        self._running = None

    def _send_edited(self, sequences: list[Sequence]) -> None:
        """Rows anew for sequences whose last token is not the one that the device chose."""
        edited = [
            s
            for s in sequences
            if (slot := self._slot_of.get(s)) is not None
            and s.tokens[s.n_cached] != self._ring[(self._round[slot] - 1) % ROUNDS, slot]
        ]
        if edited:
            slots = np.array([self._slot_of[s] for s in edited])
            self._attach(edited, slots, [s.n_cached for s in edited])

    def _attach(self, sequences: list[Sequence], slots: np.ndarray, positions: list[int]) -> Tensor:
        """Give sequences their rows, on host and device; the slots as the device has them, ``[n]`` int64."""
        words = []
        for sequence, slot, position in zip(sequences, slots.tolist(), positions, strict=True):
            self._sequences[slot], self._slot_of[sequence] = sequence, slot
            self._left[slot] = sequence.max_length - position - 1
            self._position[slot] = position
            self._reserved[slot] = self.blocks.tokens_reserved(sequence.block_ids[0])
            words.append(row_bytes(sequence, position, int(self._round[slot])))
        self._left_behind.difference_update(slots.tolist())
        self._running = None
        fields = np.frombuffer(b"".join(words), np.int32).reshape(len(slots), FIELDS)
        return self._send(sequences, slots, fields)

    def _send(self, sequences: list[Sequence], slots: np.ndarray, fields: np.ndarray) -> Tensor:
        """Fields (none or all) and tables of these rows in one copy; the slots on the device."""
        n, n_fields = fields.shape
        width = self.state.table.shape[1]
        host = self._staging.host(n, 1 + n_fields + width)
        host[:, 0] = slots
        host[:, 1 : 1 + n_fields] = fields
        for row, sequence in zip(host[:, 1 + n_fields :], sequences, strict=True):
            ids = sequence.block_ids[0]
            row[: len(ids)] = ids
        sent = self._staging.send()
        index = sent[:, 0].long()
        rows = self.state.rows[:, FIELDS - n_fields : FIELDS + width]
        rows.index_copy_(0, index, sent[:, 1:])
        return index

    def _grow(self, running: list[Sequence], slots: np.ndarray) -> None:
        """Blocks for the rows whose next token has none reserved.

        Raises ``KVCacheExhausted`` before the step is begun; rows that got theirs keep it.
        """
        short = np.flatnonzero(self._position[slots] >= self._reserved[slots])
        if not short.size:
            return
        grown = []
        try:
            for row in short.tolist():
                sequence, slot = running[row], slots[row]
                room = self.blocks.block_size - self._reserved[slot] % self.blocks.block_size
                n_tokens = int(min(room, sequence.max_length - 1 - self._reserved[slot]))
                self.blocks.reserve_prompt(0, sequence.block_ids[0], n_tokens)
                self._reserved[slot] += n_tokens
                grown.append(row)
        finally:
            if grown:
                tables = np.zeros((len(grown), 0), np.int32)
                self._send([running[row] for row in grown], slots[grown], tables)

    def _vacate(self, slot: int) -> None:
        del self._slot_of[self._sequences[slot]]
        self._sequences[slot] = None
        self._left[slot] = 0
        heapq.heappush(self._free, slot)
        self._running = self._listed = None

    def _silence(self) -> None:
        """Make the rows of vacated slots inert."""
        if self._left_behind:
            slots = self._staging.host(len(self._left_behind))
            slots[:] = list(self._left_behind)
            self.state.positions.index_fill_(0, self._staging.send().long(), INERT)
            self._left_behind.clear()

    def _close_ranks(self) -> None:
        """Move the last rows into free slots where that lets a smaller bucket serve."""
        taken = np.flatnonzero(self._left > 0)
        if not taken.size or batch_bucket(int(taken[-1]) + 1) == batch_bucket(len(taken)):
            return
        free = [slot for slot in range(len(taken)) if self._sequences[slot] is None]
        sources = taken[len(taken) - len(free) :] if free else taken[:0]
        moves = [
            (source, target) for source, target in zip(sources[::-1], free, strict=False) if target < source
        ]
        if moves:
            self._move(*np.array(moves).T)

    def _move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Rows go to other slots; each slot's count of rounds stays its own."""
        host = self._staging.host(2, len(sources))
        host[:] = sources, targets
        source, target = self._staging.send().long()
        rounds = self.state.rounds[target]
        self.state.rows[target] = self.state.rows[source]
        self.state.rounds[target] = rounds
        self.state.positions.index_fill_(0, source, INERT)
        for books in (self._left, self._position, self._reserved):
            books[targets] = books[sources]
        for old, new in zip(sources.tolist(), targets.tolist(), strict=True):
            sequence, self._sequences[old] = self._sequences[old], None
            self._sequences[new], self._slot_of[sequence] = sequence, new
            self._left[old] = 0
            self._free.remove(new)
            self._left_behind.discard(new)
            self._free.append(old)
        heapq.heapify(self._free)
