"""The GPU-resident decode step: tokens, positions, appends, sampling and stops stay on the device.

One captured graph per batch bucket advances every running sequence by one token. The host admits sequences,
grows their block tables ahead of need, starts steps and, some steps later, reads their tokens from pinned
memory. A row that has ended is inert until it is reassigned. ``host.HostStep`` is the same step driven by the
host, and the specification of this one.

Blocks may change owners while steps are in flight: device work is ordered, so an earlier step's writes land
before a later owner's prefill, and a released row is made inert before any later step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as SequenceOf
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosellm.errors import RoseError
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.layers.attention import Binder
from rosellm.roseinfer.layers.fused import Layers
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.profile_range import profile_range
from rosellm.roseinfer.ranks.group import ALONE, Group
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.cuda_graph import Graphs, batch_bucket, batch_buckets
from rosellm.roseinfer.steps.in_flight import StepsInFlight
from rosellm.roseinfer.steps.logprob_ring import LogprobRing
from rosellm.roseinfer.steps.next_tokens import NextTokens
from rosellm.roseinfer.steps.prompts import Prompts
from rosellm.roseinfer.steps.rows import NO_ROWS, Batch, Rows
from rosellm.roseinfer.steps.step import STEP_RANGE

RUN_AHEAD = 3


class SamplingPlan(NamedTuple):
    """What the sequences of a step want: the chooser's mode, and which of them ask for log-probabilities."""

    batch: Batch
    mode: str
    asking: np.ndarray


class ResidentStep:
    """Prefill and decode for as many sequences as there are ``rows``; for one engine and one thread.

    layers_for: rows → layers. bind: state and variant → attention that appends. prompts: caches prompts and
    chooses their first tokens. logprobs: finds log-probabilities of both kinds of token. graphs: captures the
    steps; None: each kernel is launched from Python.
    """

    run_ahead = RUN_AHEAD

    def __init__(
        self,
        rows: Rows,
        layers_for: Callable[[int], Layers],
        bind: Binder,
        next_tokens: NextTokens,
        prompts: Prompts,
        logprobs: LogprobRing,
        graphs: Graphs | None,
        group: Group = ALONE,
    ) -> None:
        self.rows, self.state, self.prompts, self.graphs = rows, rows.state, prompts, graphs
        self.layers_for, self.bind, self.next_tokens, self.logprobs = layers_for, bind, next_tokens, logprobs
        n_rows, width = self.state.table.shape
        device = self.state.rows.device
        self._longest = width * rows.blocks.block_size
        self._idle = self.state if graphs is None else DeviceState(n_rows, width, device)
        self._idle.stop_tokens = self.state.stop_tokens  # their number is compiled into a kernel
        self._every_row = torch.arange(n_rows, device=device)
        self._steps: dict[tuple[int, str, str], Callable[[], Tensor]] = {}  # by bucket, mode and variant
        self._warm_hidden: dict[int, Tensor] = {}  # of inert rows, by bucket
        self._in_flight = StepsInFlight(self.rows, logprobs, group)
        self._decode = group.broadcast("decode", self._run_decode)
        self._begin_logprobs = group.broadcast("logprobs", self._run_logprobs)
        self._logits = group.broadcast("logits", self._run_logits)
        self._listed: list[Sequence] | None = None  # the list that rows were last reconciled with
        self._plan = self._plan_of(NO_ROWS)
        self._latest: tuple[Tensor, list[Sequence], Batch] | None = None

    @torch.inference_mode()
    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Cache ``counts[i]`` more tokens of each; those now fully cached get a row and their next token.

        Raises ``OptionError``, and begins nothing, if there are not enough free rows.
        """
        whole = [s for s, n in zip(sequences, counts, strict=True) if s.completes_prefill(n)]
        self.rows.check_room(len(whole))
        self._in_flight.start()
        hidden, batch = self.prompts.run(sequences, counts)
        for sequence, n in zip(sequences, counts, strict=True):
            sequence.n_cached += n
        if whole:
            self._listed = None
            self._latest = hidden, whole, batch._replace(indices=np.arange(len(whole)))
        plan = self._plan_of(batch)
        self._find_logprobs(hidden, plan, np.arange(len(batch.rows)))
        self._in_flight.note("prefill", batch, has_logprobs=bool(plan.asking.size))
        self.rows.begin_step(batch, batch.indices)

    @torch.inference_mode()
    def begin_decode(self, sequences: list[Sequence]) -> int:
        """Begin a step; returns how many rows it advances: 0 if all have been asked for their last token."""
        batch = self._to_run(sequences)
        if batch.rows:
            self._begin_step(sequences, batch)
        return len(batch.rows)

    def collect(self, leave: int = 0) -> Iterator[Done]:
        """Wait until at most ``leave`` steps are in flight; commit and yield what has ended, in order."""
        return self._in_flight.collect(leave)

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's row, if it has one."""
        self.rows.release(sequence)
        self._listed = None

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """See :class:`Step`; the largest steps come first, so that smaller ones fit into their memory."""
        if self.graphs is None:
            return []
        modes = self.next_tokens.chooser.modes
        steps = [step for bucket in self._buckets(rows) for step in self._steps_of(bucket, modes)]
        return steps if rows is not None else self.prompts.captures() + steps + self.logprobs.captures()

    def warm_ups(self, rows: int | None = None) -> list[Callable[[], object]]:
        """See :class:`Step`."""
        if self.graphs is None:
            return []
        steps: list[Callable[[], object]] = [partial(self._run_all, n) for n in self._buckets(rows)]
        return steps if rows is not None else self.prompts.warm_ups() + steps + self.logprobs.warm_ups()

    def largest_captures(self) -> list[Callable[[], object]]:
        """See :class:`Step`."""
        largest = self.prompts.captures()[:1] + self.captures(len(self.rows))
        return largest + self.logprobs.captures()[:1]

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """See :class:`Step`."""
        return self.prompts.rehearsals(n_tokens)

    @property
    def n_captured(self) -> int:
        """See :class:`Step`."""
        return 0 if self.graphs is None else self.graphs.count

    def _to_run(self, sequences: list[Sequence]) -> Batch:
        """The rows that a step for ``sequences`` would advance, brought up to date."""
        if sequences is not self._listed:
            self._reconcile(sequences)
        if not self._in_flight:
            self._send_edited()
        return self.rows.running()

    def _begin_step(self, sequences: list[Sequence], batch: Batch) -> None:
        with profile_range(STEP_RANGE):
            with profile_range(f"{STEP_RANGE}.reserve"):
                self.rows.grow(batch)
                self.rows.deactivate()
            bucket = min(batch_bucket(int(batch.indices[-1]) + 1), len(self.rows))
            self._in_flight.start()
            with profile_range(f"{STEP_RANGE}.model"):
                variant = self._variant(bucket, batch)
                if batch is not self._plan.batch:
                    self._plan = self._plan_of(batch)
                hidden = self._step(bucket, self._plan.mode, variant)()
                self._find_logprobs(hidden, self._plan, batch.indices)
            self._in_flight.note("decode", batch, has_logprobs=bool(self._plan.asking.size))
            self.rows.begin_step(batch, slice(bucket))
            self._latest = hidden, sequences, batch

    def _buckets(self, rows: int | None) -> list[int]:
        """Rows of the captured steps, the most first; rows: only the step for so many."""
        most = len(self.rows)
        of_rows = batch_buckets(most) if rows is None else [batch_bucket(rows)]
        return sorted({min(bucket, most) for bucket in of_rows}, reverse=True)

    def _steps_of(self, bucket: int, modes: SequenceOf[str]) -> list[Callable[[], object]]:
        """Captures of the bucket's steps; contexts between powers of two have one variant of attention."""
        keys = [(bucket, mode, variant) for variant in self._variants_of(bucket) for mode in modes]
        return [partial(self._prepared, *key) for key in keys if key not in self._steps]

    def _run_all(self, bucket: int) -> None:
        """Whatever the bucket's steps run, with inert rows, which write nothing."""
        idle = self._idle.first(bucket)
        hidden = [self._hidden(idle, variant) for variant in self._variants_of(bucket)]
        for mode in self.next_tokens.chooser.modes:
            self._choose(hidden[0], idle, mode)

    def _variant(self, rows: int, batch: Batch) -> str:
        """The attention variant for what the batch has cached."""
        cached = self.rows.position[batch.indices]
        return self.bind.variant(rows, int(cached.max()), float(cached.mean()))

    def _variants_of(self, rows: int) -> list[str]:
        """For any lengths, all equal or most of them short."""
        longest = [min(1 << k, self._longest) for k in range((self._longest - 1).bit_length() + 1)]
        return sorted({self.bind.variant(rows, most, mean) for most in longest for mean in (0, most)})

    @torch.inference_mode()
    def last_logits(self) -> Tensor:
        """Logits ``[B, V]`` of the latest step begun, recomputed from its final hidden states."""
        if self._latest is None:
            raise RoseError("no step has been begun; there are no logits yet")
        hidden, sequences, batch = self._latest
        place = dict(zip(batch.sequences, batch.indices.tolist(), strict=True))
        rows = [place[sequence] for sequence in sequences if sequence in place]
        return self._logits(hidden, np.array(rows))

    def _run_logits(self, hidden: Tensor, rows: np.ndarray) -> Tensor:
        return self.next_tokens.chooser.logits(hidden[torch.from_numpy(rows).to(hidden.device)])

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

    def _plan_of(self, batch: Batch) -> SamplingPlan:
        mode = self.next_tokens.chooser.mode([s.params for s in batch.sequences])
        asking = np.flatnonzero([s.logprobs is not None for s in batch.sequences])
        return SamplingPlan(batch, mode, asking)

    def _find_logprobs(self, hidden: Tensor, plan: SamplingPlan, places: np.ndarray) -> None:
        """Those that are asked for; places ``[n]``: the batch's rows of hidden."""
        if plan.asking.size:
            indices = plan.batch.indices[plan.asking]
            inputs = np.stack((places[plan.asking], indices, self.rows.round[indices]))
            self._begin_logprobs(hidden, inputs)

    def _run_logprobs(self, hidden: Tensor, inputs: np.ndarray) -> None:
        self.logprobs.begin(hidden, *inputs)

    def _step(self, bucket: int, mode: str, variant: str) -> Callable[[], Tensor]:
        return partial(self._decode, bucket, mode, variant)

    def _run_decode(self, bucket: int, mode: str, variant: str) -> Tensor:
        """The part of a step on the device."""
        return self._prepared(bucket, mode, variant)()

    def _prepared(self, bucket: int, mode: str, variant: str) -> Callable[[], Tensor]:
        """Run or replay a step; what is not captured yet is captured first."""
        key = bucket, mode, variant
        if key not in self._steps:
            run: Callable[[], Tensor] = partial(self._run, self.state.first(bucket), mode, variant)
            if self.graphs is not None:
                run = self.graphs.capture(run, partial(self._warm_up, *key))
            self._steps[key] = run
        return self._steps[key]

    def _warm_up(self, bucket: int, mode: str, variant: str) -> None:
        """Run what no step of the bucket has had yet, with inert rows, which write nothing."""
        idle, met = self._idle.first(bucket), [key[1:] for key in self._steps if key[0] == bucket]
        if variant not in [known for _, known in met]:
            self._warm_hidden[bucket] = self._hidden(idle, variant)
        if mode not in [known for known, _ in met]:
            self._choose(self._warm_hidden[bucket], idle, mode)

    def _run(self, state: DeviceState, mode: str, variant: str) -> Tensor:
        """Advance every row that is not inert by one token; returns final hidden states ``[rows, C]``."""
        hidden = self._hidden(state, variant)
        self._choose(hidden, state, mode)
        return hidden

    def _hidden(self, state: DeviceState, variant: str) -> Tensor:
        layers = self.layers_for(len(state.rows))
        return layers(state.tokens, state.positions, self.bind(state, variant))

    def _choose(self, hidden: Tensor, state: DeviceState, mode: str) -> None:
        self.next_tokens(hidden, state, mode, state, self._every_row[: len(state.rows)])
