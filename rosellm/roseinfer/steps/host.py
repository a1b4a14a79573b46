"""The step driven by the host: reserve, stage, run, append, sample, commit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from rosellm.errors import RoseError
from rosellm.roseinfer.cache.block_tables import Tables
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager, Slots
from rosellm.roseinfer.layers.logprobs import likely_of, likely_tokens, tell
from rosellm.roseinfer.layers.sampler import Sampler
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.profile_range import profile_range
from rosellm.roseinfer.request import Sequence, commit_tokens
from rosellm.roseinfer.steps.kv_append import Append
from rosellm.roseinfer.steps.planner import batch_bucket, batch_buckets
from rosellm.roseinfer.steps.prefill import Prefill
from rosellm.roseinfer.steps.runner import DecodeInputs, EagerRunner, GraphRunner
from rosellm.roseinfer.steps.step import STEP_RANGE, warm_up


def dense_mask(
    context_lens: Tensor, max_context: int, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """The penalty added to the scores to hide padding: ``[B, max_context + 1]``.

    0 for real tokens within the window, else the lowest number; made by ``arange``, a comparison with the
    lengths, a column of ones for the new token, a cast, and the conversion into a penalty.
    """
    positions = torch.arange(max_context, device=context_lens.device)
    held = positions[None, :] < context_lens[:, None]  # [B, max_context]
    if window is not None:
        held &= positions[None, :] > context_lens[:, None] - window
    new = torch.ones(len(context_lens), 1, dtype=torch.bool, device=context_lens.device)
    seen = torch.cat((held, new), dim=1).to(dtype)
    return (1 - seen) * torch.finfo(dtype).min


def no_mask(context_lens: Tensor, max_context: int, dtype: torch.dtype, window: int | None = None) -> None:
    """Paged attention needs only the lengths."""


MASKS = {"dense": dense_mask, "none": no_mask}


@dataclass(eq=False)
class HostStep:
    """Decode for a batch of sequences, each with one token not cached yet; all variants are chosen upfront.

    When ``begin_prefill`` or ``begin_decode`` returns, the step has ended and its tokens are committed.
    most_rows: the most sequences of a step.
    """

    blocks: KVBlockManager
    tables: Tables
    mask: Callable[[Tensor, int, torch.dtype, int | None], Tensor | None]
    runner: EagerRunner | GraphRunner
    append: Append
    prefill: Prefill
    sampler: Sampler
    most_rows: int
    run_ahead = 0

    def __post_init__(self) -> None:
        self._ended: deque[Done] = deque()
        self._logits: Tensor | None = None

    @torch.inference_mode()
    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        """See :class:`Step`."""
        start = perf_counter()
        whole = [s for s, n in zip(sequences, counts, strict=True) if s.completes_prefill(n)]
        self._logits = self.prefill.model.logits(self.prefill.run(sequences, counts))
        tokens = self.sampler(self._logits, whole)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.n_cached += count
        got, failed = commit_tokens(whole, tokens, n_cached=0)
        self._tell(whole, got)
        self._ended.append(Done("prefill", got, perf_counter() - start, failed))

    def begin_decode(self, sequences: list[Sequence]) -> int:
        """See :class:`Step`."""
        start = perf_counter()
        got, failed = self(sequences)
        self._tell(sequences, got)
        self._ended.append(Done("decode", got, perf_counter() - start, failed))
        return len(sequences)

    def collect(self, leave: int = 0) -> Iterator[Done]:
        """See :class:`Step`; there is nothing to wait for."""
        while self._ended:
            yield self._ended.popleft()

    def release(self, sequence: Sequence) -> None:
        """See :class:`Step`; nothing is kept of a sequence."""

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """See :class:`Step`; only the runner has graphs."""
        buckets = batch_buckets(self.most_rows) if rows is None else [batch_bucket(rows)]
        return self.runner.captures(buckets, self.tables.max_blocks)

    def warm_ups(self, rows: int | None = None) -> list[Callable[[], object]]:
        """See :class:`Step`; none: every capture compiles, and may tune, its own kernels."""
        return []

    def largest_captures(self) -> list[Callable[[], object]]:
        """See :class:`Step`."""
        return self.captures()[:1]

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """See :class:`Step`; every token of a prefill is real."""
        return []

    def warm_up(self, rows: int | None, n_tokens: int) -> None:
        """See :class:`Step`."""
        warm_up(self, rows, n_tokens, self.blocks.k_cache.device)

    @property
    def n_captured(self) -> int:
        """See :class:`Step`."""
        return self.runner.n_captured

    def last_logits(self) -> Tensor:
        """See :class:`Step`."""
        if self._logits is None:
            raise RoseError("no step has been begun; there are no logits yet")
        return self._logits

    @torch.inference_mode()
    def __call__(self, sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Advance every sequence by one token: its block lists, cached length and tokens are updated.

        Returns what :func:`commit_tokens` returns.
        """
        with profile_range(STEP_RANGE):
            slots, block_ids = self._reserve(sequences)
            inputs = self._stage(sequences, block_ids)
            with profile_range(f"{STEP_RANGE}.model"):
                outputs = self.runner(inputs)
            with profile_range(f"{STEP_RANGE}.kv_append"):
                self.append(self.blocks, outputs.keys, outputs.values, slots)
            with profile_range(f"{STEP_RANGE}.sample"):
                self._logits = outputs.logits
                tokens = self.sampler(self._logits, sequences)
            with profile_range(f"{STEP_RANGE}.commit"):
                return commit_tokens(sequences, tokens, n_cached=1)

    def _tell(self, sequences: list[Sequence], got: list[Sequence]) -> None:
        """Log-probabilities of their new tokens for those that ask; logits are in the order of sequences."""
        asking = {s for s in got if s.logprobs is not None}
        rows = [row for row, s in enumerate(sequences) if s in asking]
        if self._logits is None or not rows:
            return
        own = [sequences[row] for row in rows]
        tokens = torch.tensor([s.last_token for s in own], device=self._logits.device)
        tell(own, likely_of(likely_tokens(self._logits[rows], tokens).cpu(), own))

    def _reserve(self, sequences: list[Sequence]) -> tuple[list[Slots], list[list[list[int]]]]:
        with profile_range(f"{STEP_RANGE}.reserve"):
            pools = range(self.blocks.num_pools)
            block_ids = [[s.block_ids[pool] for s in sequences] for pool in pools]
            return [self.blocks.reserve_tokens(pool, block_ids[pool]) for pool in pools], block_ids

    def _stage(self, sequences: list[Sequence], block_ids: list[list[list[int]]]) -> DecodeInputs:
        tables = self.tables.stage(block_ids)
        with profile_range(f"{STEP_RANGE}.stage_tokens"):
            contexts = [s.n_cached for s in sequences]
            device = self.blocks.k_cache.device
            ints = torch.tensor([[s.last_token for s in sequences], contexts], dtype=torch.int32).to(device)
        with profile_range(f"{STEP_RANGE}.build_mask"):
            window = self.prefill.model.config.window
            mask = self.mask(ints[1], max(contexts), self.blocks.k_cache.dtype, window)
        return DecodeInputs(ints[0], ints[1], ints[1], tables, mask, max(contexts))
