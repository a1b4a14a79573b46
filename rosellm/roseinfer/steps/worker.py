"""The device side of the resident step: its state, layers, choice of tokens, and CUDA graphs.

Rank 0's planner calls a worker's methods by name, with numbers, strings and arrays. Every rank has a worker,
and all workers run the same calls in the same order. No method waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rosellm.roseinfer.cache.device_state import FIELDS, INERT, ROUND, ROUNDS, DeviceState
from rosellm.roseinfer.cache.kv_blocks import KVBlocks
from rosellm.roseinfer.cache.staging import StagingBuffer, current_stream
from rosellm.roseinfer.layers.attention import Binder
from rosellm.roseinfer.layers.choosers import NextTokens
from rosellm.roseinfer.layers.fused import Layers
from rosellm.roseinfer.layers.logprobs import likely_prompt_tokens
from rosellm.roseinfer.steps.captured_prefill import CapturedPrefill
from rosellm.roseinfer.steps.cuda_graph import Graphs
from rosellm.roseinfer.steps.logprob_ring import LogprobRing
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from rosellm.roseinfer.steps.planner import batch_bucket, batch_buckets
from rosellm.roseinfer.steps.prompt_inputs import Shape, Tiling
from rosellm.roseinfer.steps.step import warm_up

StepKey = tuple[int, str, str]  # rows, the chooser's mode, attention's variant


class Clock:
    """The time at which the device finishes all work submitted before this object was made or last set.

    On a CPU, where work is synchronous, it is the time of that call.
    """

    __slots__ = ("_event", "_time")

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.set()

    def set(self, stream: torch.cuda.Stream | None = None) -> None:
        """Record all work submitted so far to ``stream``; None means the current stream."""
        self._time = perf_counter()
        if self._event is not None:
            self._event.record(stream)

    def has_ended(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, other: Clock) -> float:
        if self._event is None or other._event is None:
            return self._time - other._time
        return other._event.elapsed_time(self._event) / 1e3


class Clocks:
    """A ring of n clocks: each call of :meth:`next` reuses the oldest.

    New events would take the host three times as long as reused ones.
    """

    def __init__(self, device: torch.device, n: int) -> None:
        self._device = device if device.type == "cuda" else None
        self._clocks = cycle([Clock(device) for _ in range(n)])

    def next(self) -> Clock:
        """Return a clock of all work submitted so far to the current stream."""
        clock = next(self._clocks)
        clock.set(None if self._device is None else current_stream(self._device))
        return clock


class Worker:
    """The device side of a planner: runs the planner's calls on the rows of ``state``.

    state: the device state; its last row is spare, and padding writes to it.
    counts: the table of ``TokenCounts``.
    layers_for: maps a number of rows to the layers.
    bind: maps a state and a variant to the attention, which also writes new keys and values to the cache.
    next_tokens: chooses tokens and advances the rows.
    logprobs: computes requested log-probabilities.
    graphs: captures decode steps as CUDA graphs; if None, every kernel is launched from Python.
    prompts: prefills packed prompts.
    clock: returns a clock of all work submitted so far; it is reused after 2 * ``ROUNDS`` more calls.
    hidden: the final hidden states from which the latest step chose its tokens.
    """

    def __init__(
        self,
        state: DeviceState,
        blocks: KVBlocks,
        counts: Tensor,
        layers_for: Callable[[int], Layers],
        bind: Binder,
        next_tokens: NextTokens,
        logprobs: LogprobRing,
        graphs: Graphs | None,
        prompts: PackedPrefill | CapturedPrefill,
    ) -> None:
        self.n_rows, width = len(state.rows) - 1, state.table.shape[1]
        self.state, self.blocks, self.counts = state.first(self.n_rows), blocks, counts
        self.layers_for, self.bind, self.next_tokens = layers_for, bind, next_tokens
        self.logprobs, self.graphs, self.prompts = logprobs, graphs, prompts
        self.device = state.rows.device
        self.longest = width * blocks.block_size
        sizes = len(state.rows), width, self.device, (), len(state.planes)
        idle = state if graphs is None else DeviceState(*sizes)  # shaped alike: kernels are compiled for that
        self._idle = idle.first(self.n_rows)
        self._idle.stop_tokens = state.stop_tokens  # their number is compiled into a kernel
        self._every_row = torch.arange(self.n_rows, device=self.device)
        self._staging = StagingBuffer(self.device, torch.int32)
        # Sources and targets of the captured moves; at most half of the rows move.
        self._moves = torch.zeros(2, -(-self.n_rows // 2), dtype=torch.int32, device=self.device)
        self._mover_run: Callable[[], object] | None = None
        self._steps: dict[StepKey, Callable[[], Tensor]] = {}
        self._warm_hidden: dict[int, Tensor] = {}  # hidden states of inert rows, by batch size
        self.hidden: Tensor | None = None
        self._prompt_hidden: Tensor | None = None  # of all tokens of the latest prefill, if kept
        self.clock = Clocks(self.device, 2 * ROUNDS).next
        self._inference = torch.inference_mode()  # constructed once: construction costs more than entry

    def call(self, name: str, *arguments: Any) -> Any:
        """Run the method ``name`` in inference mode; a nested call would end it too early.

        Ranks exchange the arguments: numbers, strings, arrays and functions of modules.
        """
        if name == "decode" and self.graphs is not None:  # to enter inference mode takes 3 us
            return self.decode(*arguments)
        with self._inference:
            return getattr(self, name)(*arguments)

    # Called by name, on every rank.

    def write_rows(self, words: np.ndarray, n_fields: int) -> None:
        """Write block tables, and fields unless ``n_fields`` is 0, to rows of the state.

        words: ``[n, 1 + n_fields + W]`` int32: per row, its index, its last ``n_fields`` fields and its block
            table.
        """
        sent = self._staging.put(words).send()
        columns = self.state.rows[:, FIELDS - n_fields : FIELDS - n_fields + words.shape[1] - 1]
        columns.index_copy_(0, sent[:, 0].long(), sent[:, 1:])

    def deactivate_rows(self, indices: np.ndarray) -> None:
        """Make state rows ``indices [n]`` inert."""
        self.state.positions.index_fill_(0, self._staging.put(indices).send().long(), INERT)

    def move_rows(self, indices: np.ndarray) -> None:
        """Copy state rows ``indices[0]`` to rows ``indices[1]``, and make the source rows inert.

        Rounds are not copied: each index keeps its own, on the host too.
        """
        if self.graphs is None:
            self._move_rows(self.state, self._staging.put(indices).send())
            return
        n_more = self._moves.shape[1] - indices.shape[1]
        # Repeat the first move: the graph has a fixed size.
        padded = np.concatenate((indices, indices[:, :1].repeat(n_more, 1)), 1)
        self._staging.put(padded).send(self._moves.view(-1))
        self._mover()()

    def write_counts(self, words: np.ndarray, n: int) -> None:
        """Write to rows of ``counts``.

        words: int32: ``n`` table rows to fill, and the value for each; then the rows, tokens and values of m
            entries to write.
        """
        sent = self._staging.put(words).send()
        place, token, number = sent[2 * n :].view(3, -1)
        if n:
            self.counts[sent[:n].long()] = sent[n : 2 * n, None]
        self.counts[place.long(), token.long()] = number

    def copy_block(self, source: int, target: int) -> None:
        """Copy the keys and values of block ``source`` to block ``target``, in every layer."""
        self.blocks.copy_block(source, target)

    def decode(self, rows: int, mode: str, variant: str) -> None:
        """Advance the first ``rows`` state rows by one token; ``rows`` is a captured batch size."""
        self.hidden = self.step(rows, mode, variant)()

    def prefill(self, words: np.ndarray, shape: Shape, mode: str | None, keep: bool) -> None:
        """Cache packed prompts and choose their first tokens, kernel by kernel.

        words: the inputs ``[shape.words]`` int32.
        mode: the chooser's mode; None chooses no tokens and keeps ``hidden``.
        keep: whether :meth:`prompt_logprobs` follows.
        """
        self._note(*self.prompts.run(words, shape, mode), keep)

    def captured_prefill(
        self, words: np.ndarray, tokens: int, tiling: Tiling, places: int, mode: str | None, keep: bool
    ) -> None:
        """Cache packed prompts and choose first tokens by replaying two graphs, captured first if missing.

        words: the inputs, laid out for ``tokens`` and ``places``.
        tokens, tiling, places: captured sizes.
        mode: the chooser's mode; None replays only the graph of the layers and chooses no tokens.
        keep: whether :meth:`prompt_logprobs` follows.
        """
        assert isinstance(self.prompts, CapturedPrefill)
        self._note(*self.prompts.replay(words, tokens, tiling, places, mode), keep)

    def prompt_logprobs(self, rows: np.ndarray, tokens: np.ndarray, wanted: int) -> np.ndarray:
        """Return ``likely_tokens`` of prompt tokens ``[n, W]``, after waiting for the prefill.

        rows: for each token, its row of the latest prefill's hidden states ``[n]``. tokens: ``[n]``.
        wanted: how many most likely tokens are found beside each token.
        """
        assert self._prompt_hidden is not None
        given = self._prompt_hidden, rows, tokens, wanted
        return likely_prompt_tokens(self.next_tokens.chooser.logits, self.logprobs.store, *given)

    def find_logprobs(self, asking: np.ndarray) -> None:
        """Start computing logprobs of the latest step's tokens, as ``LogprobRing.begin`` does."""
        assert self.hidden is not None
        self.logprobs.begin(self.hidden, asking)

    def logits(self, rows: np.ndarray) -> Tensor:
        """Recompute and return the logits ``[n, V]`` of rows ``rows [n]`` of ``hidden``."""
        assert self.hidden is not None
        return self.next_tokens.chooser.logits(self.hidden[torch.from_numpy(rows).to(self.device)])

    def apply(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call ``function(self, *arguments)``, such as one that profiles this rank.

        function: a function of a module, since ranks exchange its name.
        """
        function(self, *arguments)

    def warm_up(self, rows: int | None, n_tokens: int, is_compiled: bool) -> None:
        """Compile the kernels and capture the graphs on this rank, as :func:`step.warm_up` does."""
        warm_up(self, rows, n_tokens, is_compiled, self.device)

    # Called by this rank only.

    def choose(self, hidden: Tensor, indices: np.ndarray, mode: str) -> None:
        """Choose the tokens of state rows ``indices [n]`` from hidden ``[n, C]``, and advance these rows."""
        slots = torch.from_numpy(indices).to(self.device)
        self.next_tokens(hidden, self.state.at(slots), mode, self.state, slots)
        self.hidden = hidden

    def variant(self, rows: int, longest: int, mean: float) -> str:
        """Return the attention variant for ``rows`` rows with this longest and mean context, in tokens."""
        return self.bind.variant(rows, longest, mean)

    def step(self, rows: int, mode: str, variant: str) -> Callable[[], Tensor]:
        """Return a function that runs a decode step or replays its graph, which is captured first if missing.

        rows: number of state rows, a captured batch size.
        mode: the chooser's mode.
        variant: the attention variant.
        """
        key = rows, self.next_tokens.chooser.serving(mode, rows), variant
        if key not in self._steps:
            run: Callable[[], Tensor] = partial(self._run, self.state.first(rows), *key[1:])
            if self.graphs is not None:
                with torch.inference_mode():
                    run = self.graphs.capture(run, partial(self._warm_up_step, *key))
            self._steps[key] = run
        return self._steps[key]

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Return functions that capture the missing graphs, largest first: smaller graphs reuse their memory.

        rows: if given, only the graphs of decode steps that serve this many sequences.
        """
        if self.graphs is None:
            return []
        keys = [key for bucket in self._buckets(rows) for key in self._keys(bucket) if key not in self._steps]
        steps: list[Callable[[], object]] = [partial(self.step, *key) for key in keys]
        moves: list[Callable[[], object]] = [] if self._mover_run else [partial(self._mover)]
        if rows is not None:
            return steps + moves
        return self.prompts.captures() + steps + self.logprobs.captures() + moves

    def warm_ups(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Return functions that run each kernel once, on padding only, to compile it before its capture.

        rows: if given, only the kernels of decode steps that serve this many sequences.
        """
        if self.graphs is None:
            return []
        steps: list[Callable[[], object]] = [partial(self._run_idle, n) for n in self._buckets(rows)]
        if rows is not None:
            return steps
        return self.prompts.warm_ups() + steps + self.logprobs.warm_ups()

    def largest_captures(self) -> list[Callable[[], object]]:
        """Return those functions of :meth:`captures` that need the most memory."""
        steps = self.captures(self.n_rows)  # and the graph that moves rows
        return self.prompts.captures()[:1] + steps + self.logprobs.captures()[:1]

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """Return functions that run a prefill of ``n_tokens`` padding tokens, to compile its kernels."""
        return self.prompts.rehearsals(n_tokens)

    @property
    def n_captured(self) -> int:
        """The number of CUDA graphs captured so far."""
        return 0 if self.graphs is None else self.graphs.count

    def _mover(self) -> Callable[[], object]:
        """Return a function that moves rows as ``_moves`` says, by a graph that is captured first if missing.

        Launched kernel by kernel, a move would take the host as long as several steps.
        """
        if self._mover_run is None:
            assert self.graphs is not None
            idle = self._idle.first(self.n_rows), torch.zeros_like(self._moves)
            run = partial(self._move_rows, self.state, self._moves)
            self._mover_run = self.graphs.capture(run, partial(self._move_rows, *idle))
        return self._mover_run

    def _move_rows(self, state: DeviceState, moves: Tensor) -> None:
        """Move rows of a state. moves: int32 ``[2, n]``, sources and targets."""
        source, target = moves.long()
        fields = state.rows[:, ROUND + 1 :]
        fields.index_copy_(0, target, fields.index_select(0, source))
        state.positions.index_fill_(0, source, INERT)

    def _note(self, hidden: Tensor, chosen: Tensor | None, keep: bool) -> None:
        self._prompt_hidden = hidden if keep else None
        if chosen is not None:
            self.hidden = chosen

    def _buckets(self, rows: int | None) -> list[int]:
        """Return the captured batch sizes, largest first, or only the size that serves ``rows`` sequences."""
        buckets = batch_buckets(self.n_rows) if rows is None else [batch_bucket(rows)]
        return sorted({min(bucket, self.n_rows) for bucket in buckets}, reverse=True)

    def _keys(self, bucket: int) -> list[StepKey]:
        """Return the keys of all decode steps of one batch size, one for each mode and attention variant."""
        modes = self.next_tokens.chooser.modes(bucket)
        return [(bucket, mode, v) for v in self.variants(bucket) for mode in modes]

    def variants(self, rows: int) -> list[str]:
        """Return all attention variants that a batch of ``rows`` sequences can need, at any lengths."""
        longest = [min(1 << k, self.longest) for k in range((self.longest - 1).bit_length() + 1)]
        return sorted({self.variant(rows, most, mean) for most in longest for mean in (0, most)})

    def _run_idle(self, bucket: int) -> None:
        """Run every kernel of the decode steps of one batch size, on inert rows, which write nothing."""
        idle = self._idle.first(bucket)
        hidden = [self._hidden(idle, variant, 1) for variant in self.variants(bucket)]
        for mode in self.next_tokens.chooser.modes(bucket):
            self._choose(hidden[0], idle, mode)

    def _warm_up_step(self, bucket: int, mode: str, variant: str) -> None:
        """Run this variant and this mode on inert rows, unless captured steps of this batch size ran them."""
        idle, met = self._idle.first(bucket), [key[1:] for key in self._steps if key[0] == bucket]
        if variant not in [known for _, known in met]:
            self._warm_hidden[bucket] = self._hidden(idle, variant, 1)
        if mode not in [known for known, _ in met]:
            self._choose(self._warm_hidden[bucket], idle, mode)

    def _run(self, state: DeviceState, mode: str, variant: str) -> Tensor:
        """Advance every row that is not inert by one token; return the final hidden states ``[rows, C]``."""
        hidden = self._hidden(state, variant)
        self._choose(hidden, state, mode)
        return hidden

    def _hidden(self, state: DeviceState, variant: str, n_layers: int | None = None) -> Tensor:
        layers = self.layers_for(len(state.rows))
        return layers(state.tokens, state.positions, self.bind(state, variant), n_layers)

    def _choose(self, hidden: Tensor, state: DeviceState, mode: str) -> None:
        self.next_tokens(hidden, state, mode, state, self._every_row[: len(state.rows)])
