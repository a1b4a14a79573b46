"""The device's side of the resident step: state, layers, the choice of tokens, and their CUDA graphs.

Rank 0's planner calls a worker's methods by name, with numbers, strings and arrays; every rank has a worker,
which runs the same calls in the same order. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rosellm.roseinfer.cache.device_state import FIELDS, INERT, DeviceState
from rosellm.roseinfer.cache.kv_blocks import KVBlocks
from rosellm.roseinfer.cache.staging import StagingBuffer
from rosellm.roseinfer.layers.attention import Binder
from rosellm.roseinfer.layers.choosers import NextTokens
from rosellm.roseinfer.layers.fused import Layers
from rosellm.roseinfer.steps.captured_prefill import CapturedPrefill
from rosellm.roseinfer.steps.cuda_graph import Graphs
from rosellm.roseinfer.steps.logprob_ring import LogprobRing
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from rosellm.roseinfer.steps.planner import batch_bucket, batch_buckets
from rosellm.roseinfer.steps.prompt_inputs import Shape, Tiling
from rosellm.roseinfer.steps.step import warm_up

StepKey = tuple[int, str, str]  # rows, the chooser's mode, attention's variant


class Clock:
    """The time at which a step ends on the device; on a CPU, the time of the call."""

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

    def seconds_since(self, other: Clock) -> float:
        if self._event is None or other._event is None:
            return self._time - other._time
        return other._event.elapsed_time(self._event) / 1e3


class Worker:
    """Runs a planner's calls on the rows of ``state``, whose last row is a spare one that padding writes.

    counts ``[S, V]`` int32: see ``TokenCounts``. layers_for: rows → layers. bind: state and variant →
    attention that appends. graphs: captures the runs; None: each kernel is launched from Python. prompts:
    caches packed prompts. ``hidden``: the final hidden states from which the latest step chose its tokens.
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
        self._longest = width * blocks.block_size
        self._idle = self.state if graphs is None else DeviceState(self.n_rows, width, self.device)
        self._idle.stop_tokens = state.stop_tokens  # their number is compiled into a kernel
        self._every_row = torch.arange(self.n_rows, device=self.device)
        self._staging = StagingBuffer(self.device, torch.int32)
        self._steps: dict[StepKey, Callable[[], Tensor]] = {}
        self._warm_hidden: dict[int, Tensor] = {}  # of inert rows, by bucket
        self.hidden: Tensor | None = None

    def call(self, name: str, *arguments: Any) -> Any:
        """Run the method ``name``; its arguments are numbers, strings and arrays, for other ranks too."""
        return getattr(self, name)(*arguments)

    # Called by name, on every rank.

    @torch.inference_mode()
    def write_rows(self, words: np.ndarray, n_fields: int) -> None:
        """Write ``words [n, 1 + n_fields + W]``: each row's index, its last fields and its block table."""
        sent = self._staging.put(words).send()
        columns = self.state.rows[:, FIELDS - n_fields : FIELDS - n_fields + words.shape[1] - 1]
        columns.index_copy_(0, sent[:, 0].long(), sent[:, 1:])

    @torch.inference_mode()
    def deactivate_rows(self, indices: np.ndarray) -> None:
        """Make rows ``indices [n]`` inert."""
        self.state.positions.index_fill_(0, self._staging.put(indices).send().long(), INERT)

    @torch.inference_mode()
    def move_rows(self, indices: np.ndarray) -> None:
        """Move rows ``indices[0]`` to ``indices[1]``; each place keeps its own round."""
        source, target = self._staging.put(indices).send().long()
        rounds = self.state.rounds[target]
        self.state.rows[target] = self.state.rows[source]
        self.state.rounds[target] = rounds
        self.state.positions.index_fill_(0, source, INERT)

    @torch.inference_mode()
    def write_counts(self, words: np.ndarray, n: int) -> None:
        """Overwrite rows ``words[:n]`` of ``counts`` by the rows, tokens and numbers that follow."""
        sent = self._staging.put(words).send()
        place, token, number = sent[n:].view(3, -1)
        self.counts.index_fill_(0, sent[:n].long(), 0)
        self.counts[place.long(), token.long()] = number

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """See ``KVBlocks.copy_block``."""
        self.blocks.copy_block(source, target)

    @torch.inference_mode()
    def decode(self, rows: int, mode: str, variant: str) -> None:
        """Advance the first ``rows`` rows, a captured number of them, by one token."""
        self.hidden = self.step(rows, mode, variant)()

    @torch.inference_mode()
    def prefill(self, words: np.ndarray, shape: Shape, mode: str | None) -> None:
        """Cache packed prompts, kernel by kernel; mode: for first tokens, None if there are none."""
        self._keep(self.prompts.run(words, shape, mode), mode)

    @torch.inference_mode()
    def captured_prefill(
        self, words: np.ndarray, tokens: int, tiling: Tiling, places: int, mode: str | None
    ) -> None:
        """Like :meth:`prefill`, by two graphs; what is not captured yet is captured first."""
        assert isinstance(self.prompts, CapturedPrefill)
        self._keep(self.prompts.replay(words, tokens, tiling, places, mode), mode)

    @torch.inference_mode()
    def find_logprobs(self, inputs: np.ndarray) -> None:
        """Find log-probabilities; inputs ``[3, n]``: rows of ``hidden``, rows of the state, rounds."""
        assert self.hidden is not None
        self.logprobs.begin(self.hidden, *inputs)

    @torch.inference_mode()
    def logits(self, rows: np.ndarray) -> Tensor:
        """Return logits ``[n, V]`` of rows ``[n]`` of ``hidden``, computed again."""
        assert self.hidden is not None
        return self.next_tokens.chooser.logits(self.hidden[torch.from_numpy(rows).to(self.device)])

    @torch.inference_mode()
    def warm_up(self, rows: int | None, n_tokens: int) -> None:
        """See ``step.warm_up``."""
        warm_up(self, rows, n_tokens, self.device)

    # Called by this rank only.

    def choose(self, hidden: Tensor, indices: np.ndarray, mode: str) -> None:
        """Choose the tokens of rows ``indices [n]`` from hidden ``[n, C]``, and advance them."""
        slots = torch.from_numpy(indices).to(self.device)
        self.next_tokens(hidden, self.state.at(slots), mode, self.state, slots)
        self.hidden = hidden

    def clock(self) -> Clock:
        """Return a clock that stops when the device has finished all work so far."""
        return Clock(self.device.type == "cuda")

    def variant(self, rows: int, longest: int, mean: float) -> str:
        """Return the attention variant for ``rows`` contexts, the longest and their mean in tokens."""
        return self.bind.variant(rows, longest, mean)

    def step(self, rows: int, mode: str, variant: str) -> Callable[[], Tensor]:
        """Return a function that runs a step, or replays its graph, capturing it first if needed."""
        key = rows, mode, variant
        if key not in self._steps:
            run: Callable[[], Tensor] = partial(self._run, self.state.first(rows), mode, variant)
            if self.graphs is not None:
                run = self.graphs.capture(run, partial(self._warm_up_step, *key))
            self._steps[key] = run
        return self._steps[key]

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """See ``step.Step``; the largest steps come first, so that smaller ones fit into their memory."""
        if self.graphs is None:
            return []
        keys = [key for bucket in self._buckets(rows) for key in self._keys(bucket) if key not in self._steps]
        steps: list[Callable[[], object]] = [partial(self.step, *key) for key in keys]
        if rows is not None:
            return steps
        return self.prompts.captures() + steps + self.logprobs.captures()

    def warm_ups(self, rows: int | None = None) -> list[Callable[[], object]]:
        """See ``step.Step``."""
        if self.graphs is None:
            return []
        steps: list[Callable[[], object]] = [partial(self._run_idle, n) for n in self._buckets(rows)]
        if rows is not None:
            return steps
        return self.prompts.warm_ups() + steps + self.logprobs.warm_ups()

    def largest_captures(self) -> list[Callable[[], object]]:
        """See ``step.Step``."""
        return self.prompts.captures()[:1] + self.captures(self.n_rows) + self.logprobs.captures()[:1]

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """See ``step.Step``."""
        return self.prompts.rehearsals(n_tokens)

    @property
    def n_captured(self) -> int:
        """See ``step.Step``."""
        return 0 if self.graphs is None else self.graphs.count

    def _keep(self, hidden: Tensor, mode: str | None) -> None:
        if mode is not None:
            self.hidden = hidden

    def _buckets(self, rows: int | None) -> list[int]:
        """Return the row counts of captured steps, largest first; rows: only the one that serves them."""
        buckets = batch_buckets(self.n_rows) if rows is None else [batch_bucket(rows)]
        return sorted({min(bucket, self.n_rows) for bucket in buckets}, reverse=True)

    def _keys(self, bucket: int) -> list[StepKey]:
        """Return the steps of a bucket: one for each mode and attention variant."""
        return [(bucket, mode, v) for v in self.variants(bucket) for mode in self.next_tokens.chooser.modes]

    def variants(self, rows: int) -> list[str]:
        """Return the attention variants that ``rows`` contexts of any lengths can need."""
        longest = [min(1 << k, self._longest) for k in range((self._longest - 1).bit_length() + 1)]
        return sorted({self.variant(rows, most, mean) for most in longest for mean in (0, most)})

    def _run_idle(self, bucket: int) -> None:
        """Run every kernel of the bucket's steps with inert rows, which write nothing."""
        idle = self._idle.first(bucket)
        hidden = [self._hidden(idle, variant) for variant in self.variants(bucket)]
        for mode in self.next_tokens.chooser.modes:
            self._choose(hidden[0], idle, mode)

    def _warm_up_step(self, bucket: int, mode: str, variant: str) -> None:
        """Run the variant and the mode that no step of the bucket has had yet, with inert rows."""
        idle, met = self._idle.first(bucket), [key[1:] for key in self._steps if key[0] == bucket]
        if variant not in [known for _, known in met]:
            self._warm_hidden[bucket] = self._hidden(idle, variant)
        if mode not in [known for known, _ in met]:
            self._choose(self._warm_hidden[bucket], idle, mode)

    def _run(self, state: DeviceState, mode: str, variant: str) -> Tensor:
        """Advance every row that is not inert by one token; return the final hidden states ``[rows, C]``."""
        hidden = self._hidden(state, variant)
        self._choose(hidden, state, mode)
        return hidden

    def _hidden(self, state: DeviceState, variant: str) -> Tensor:
        layers = self.layers_for(len(state.rows))
        return layers(state.tokens, state.positions, self.bind(state, variant))

    def _choose(self, hidden: Tensor, state: DeviceState, mode: str) -> None:
        self.next_tokens(hidden, state, mode, state, self._every_row[: len(state.rows)])
