"""The first rung, which is also the base class of all host-driven decode steps.

A step gives each of B sequences one new token: it reserves cache slots, copies inputs to the device, runs the
model, stores the new keys and values, and samples. Attention reads the cache and the new token; the new keys
and values are written to the cache after the model has run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rosellm.errors import RoseError
from rosellm.ladder.pools import PooledBlocks, Slots, Table, TuplePool
from rosellm.ladder.prefill import Prefill
from rosellm.models.attention import Attend
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.cache.token_counts import dense_entries
from rosellm.roseinfer.kernels.draw import draw, finite_only, penalised_ref
from rosellm.roseinfer.kernels.likely import likely_tokens
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.kv_append_triton import kv_append_ref
from rosellm.roseinfer.layers.logprobs import add_likely
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.request import Sequence, commit_tokens
from rosellm.roseinfer.steps.step import STEP_RANGE, profile_range, warm_up

BUILD_RANGE = f"{STEP_RANGE}.build_block_tables"
H2D_RANGE = f"{STEP_RANGE}.h2d_block_tables"
Tables = list[Tensor] | Tensor  # ``[B, MAX_BLOCKS]`` int32 for each pool


@dataclass
class DecodeInputs:
    """The inputs of a step, on the device."""

    ids: Tensor  # [B] int32
    context_lens: Tensor  # [B] int32, tokens cached before this step
    tables: Tables
    mask: Tensor | None = None  # [B, max_context + 1], added to scores; None if not needed
    max_context: int = 0  # the longest context, known to the host


@dataclass
class DecodeOutputs:
    """The outputs of a step.

    logits: ``[B, V]``.
    keys, values: the new keys and values of each layer, ``[B, H_kv, D]``.
    """

    logits: Tensor
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Dense:
    """A host-driven decode step with the interface of ``Step``; later rungs override a few methods.

    When ``begin_prefill`` or ``begin_decode`` returns, the step has ended and its tokens are committed.

    pool_kind: the class of the pools of KV blocks.
    run_ahead: as in ``Step``; 0, since no step is left unfinished.
    most_rows: maximum number of sequences in a step.
    max_model_len: maximum number of tokens of a sequence.
    tables_of: maps a request's id to its table of blocks in each pool.
    """

    pool_kind: type[TuplePool] = TuplePool
    run_ahead = n_captured = 0

    @staticmethod
    def pool_of(n_layers: int) -> list[int]:
        """Return the index of the pool that each layer uses; here, each layer has its own."""
        return list(range(n_layers))

    def __init__(
        self, model: Transformer, blocks: PooledBlocks, kernels: Kernels, most_rows: int, max_model_len: int
    ) -> None:
        self.model, self.blocks, self.kernels, self.most_rows = model, blocks, kernels, most_rows
        self.max_blocks = blocks_for(max_model_len, blocks.block_size)
        self.prefill = Prefill(model, blocks, blocks.pool_of)
        self.tables_of: dict[int, list[Table]] = {}  # a request's table in each pool
        self._ended: deque[Done] = deque()
        self._logits: Tensor | None = None
        self.prepare()

    def prepare(self) -> None:
        """Allocate the buffers that a rung reuses in every step; this rung has none."""

    @torch.inference_mode()
    def decode(self, sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Advance every sequence by one token; return the sequences that received one, and those that failed.

        A sequence fails if no token can be chosen, for example because of NaN logits.
        """
        with profile_range(STEP_RANGE):
            slots, tables = self.reserve(sequences)
            inputs = self.stage(sequences, tables)
            with profile_range(f"{STEP_RANGE}.model"):
                outputs = self.run_model(inputs)
            with profile_range(f"{STEP_RANGE}.kv_append"):
                self.append(outputs.keys, outputs.values, slots)
            with profile_range(f"{STEP_RANGE}.sample"):
                tokens = self.sample(outputs.logits, sequences)
            with profile_range(f"{STEP_RANGE}.commit"):
                return commit_tokens(sequences, tokens, num_newly_cached=1)

    def reserve(self, sequences: list[Sequence]) -> tuple[list[Slots], list[list[Table]]]:
        """Reserve a slot for each sequence's token in every pool.

        Returns the slots of each pool, and the tables as ``[pool][row]``.
        """
        with profile_range(f"{STEP_RANGE}.reserve"):
            tables = self.tables(sequences)
            return [
                pool.reserve_tokens(own) for pool, own in zip(self.blocks.pools, tables, strict=True)
            ], tables

    def stage(self, sequences: list[Sequence], tables: list[list[Table]]) -> DecodeInputs:
        """Copy the inputs of the model to the device.

        tables: the sequences' tables, as ``[pool][row]``.
        """
        staged = self.stage_tables(tables)
        with profile_range(f"{STEP_RANGE}.stage_tokens"):
            contexts = [s.num_cached_tokens for s in sequences]
            ints = torch.tensor([[s.last_token for s in sequences], contexts], dtype=torch.int32)
            ids, context_lens = ints.to(self.model.device)
        with profile_range(f"{STEP_RANGE}.build_mask"):
            mask = self.build_mask(context_lens, max(contexts))
        return DecodeInputs(ids, context_lens, staged, mask, max(contexts))

    def stage_tables(self, tables: list[list[Table]]) -> Tables:
        """Copy ``tables[pool][row]`` to the device, as ``[B, MAX_BLOCKS]`` int32 per pool.

        Each pool's tables are sent by their own pageable copy.
        """
        with profile_range(BUILD_RANGE):
            padded = [[row + [0] * (self.max_blocks - len(row)) for row in rows] for rows in tables]
        with profile_range(H2D_RANGE):
            return [torch.tensor(rows, dtype=torch.int32).to(self.model.device) for rows in padded]

    def build_mask(self, context_lens: Tensor, max_context: int) -> Tensor | None:
        """Return the mask ``[B, max_context + 1]`` that is added to the scores to exclude padding."""
        return dense_mask(context_lens, max_context, self.model.dtype, self.model.config.window)

    def run_model(self, inputs: DecodeInputs) -> DecodeOutputs:
        """Run the model, launching every kernel from Python."""
        attend = self.attention(inputs)
        keys, values = [], []

        def keep_and_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k)
            values.append(v)
            return attend(layer, q, k, v)

        hidden = self.model(inputs.ids, inputs.context_lens, keep_and_attend)
        return DecodeOutputs(self.model.logits(hidden), keys, values)

    def attention(self, inputs: DecodeInputs) -> Attend:
        """Return masked attention over past keys and values gathered into dense ``[B, H_kv, L, D]`` tensors.

        Torch's fused attention is not used, since it may choose a backend that builds a new plan for every
        new length; here the length changes at every step.
        """
        blocks, scale = self.blocks, self.model.config.scale
        used = blocks_for(inputs.max_context, blocks.block_size)
        slots = torch.arange(inputs.max_context, device=self.model.device)
        held = slots[None, :] < inputs.context_lens[:, None]  # [B, max_context]
        mask = cast(Tensor, inputs.mask)

        def gather(cache: Tensor, table: Tensor, new: Tensor) -> Tensor:
            past = cache[table[:, :used].long()].transpose(1, 2)  # [B, H_kv, blocks, BLOCK_SIZE, D]
            past = past.reshape(len(table), new.shape[1], -1, new.shape[2])[:, :, : inputs.max_context]
            past = torch.where(held[:, None, :, None], past, 0)  # 0 * NaN is NaN
            return torch.cat((past, new[:, :, None]), dim=2)  # [B, H_kv, max_context + 1, D]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            table = inputs.tables[blocks.pool_of[layer]]
            k_all = gather(blocks.k_cache[layer], table, k)
            v_all = gather(blocks.v_cache[layer], table, v)
            grouped = q.view(len(q), k.shape[1], -1, q.shape[2])  # [B, H_kv, G, D]
            scores = grouped @ k_all.transpose(2, 3) * scale  # [B, H_kv, G, max_context + 1]
            weights = (scores + mask[:, None, None]).softmax(dim=-1, dtype=torch.float32)
            return (weights.to(v.dtype) @ v_all).view_as(q)

        return attend

    def append(self, keys: list[Tensor], values: list[Tensor], slots: list[Slots]) -> None:
        """Write the new keys and values ``[B, H_kv, D]`` of each layer by two ``index_put`` calls.

        slots: the reserved slots of each pool.
        """
        self.append_indexed(kv_append_ref, torch.int64, keys, values, slots)

    def append_indexed(
        self,
        kernel: Callable[..., None],
        dtype: torch.dtype,
        keys: list[Tensor],
        values: list[Tensor],
        slots: list[Slots],
    ) -> None:
        """Write each layer's new keys and values by one call of ``kernel``.

        kernel: called like ``kv_append_ref``.
        dtype: that of the tensors of row, block and position indices, which are made once per pool.
        keys, values: the new keys and values of each layer.
        slots: the reserved slots of each pool.
        """
        batch_idx = list(range(len(slots[0].pos)))
        rows = chain.from_iterable((batch_idx, s.block_idx, s.pos) for s in slots)
        tensors = self.index_tensors(rows, dtype)
        for layer, pool in enumerate(self.blocks.pool_of):
            rows_of, block_idx, pos = tensors[3 * pool : 3 * pool + 3]
            operands = self.blocks.operands(layer, keys[layer], values[layer])
            kernel(**operands, batch_idx=rows_of, block_idx=block_idx, pos=pos)

    def index_tensors(self, rows: Iterable[list[int]], dtype: torch.dtype) -> list[Tensor]:
        """Return a new device tensor for each list of integers, each sent by its own pageable copy."""
        return [torch.tensor(row, dtype=dtype).to(self.model.device) for row in rows]

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        """Return B token ids for logits ``[B, V]``: the argmax, or a seeded draw.

        A row without probabilities (with NaN, with +inf, or all -inf) gives ``NOT_FINITE``.
        """
        self._logits = adjusted = logits
        if any(s.params.is_penalised for s in sequences):
            adjusted = self._penalised(logits, sequences)
        tokens = finite_only(*adjusted.max(dim=-1))
        drawn = [row for row, s in enumerate(sequences) if not s.params.is_greedy]
        if drawn:
            tokens[drawn] = self._draw(adjusted[drawn], [sequences[row] for row in drawn])
        self._give_logprobs(logits, tokens, sequences)
        return tokens.tolist()

    def _draw(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        params = [s.params for s in sequences]
        floats = torch.tensor([[p.temperature, p.top_p, p.min_p] for p in params], dtype=torch.float64)
        temperature, top_p, min_p = floats.float().to(logits.device).unbind(1)
        integers = [[s.seed, len(s.tokens), p.top_k] for s, p in zip(sequences, params, strict=True)]
        seeds, positions, top_k = torch.tensor(integers).to(logits.device).unbind(1)
        noise = self.kernels.gumbel_noise
        return draw(logits, temperature, top_k, top_p, min_p, seeds, positions, noise).long()

    def _penalised(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        entries = np.stack([dense_entries(s, logits.shape[1]) for s in sequences])
        params = [s.params for s in sequences]
        floats = [[p.repetition, p.presence_penalty, p.frequency_penalty] for p in params]
        by = torch.tensor(floats, dtype=torch.float32)
        words = torch.from_numpy(entries).to(logits.device)
        return penalised_ref(logits, words, *by.to(logits.device).unbind(1))

    def _give_logprobs(self, logits: Tensor, tokens: Tensor, sequences: list[Sequence]) -> None:
        """Give the logprobs of the new tokens to the sequences that request them."""
        rows = [row for row, s in enumerate(sequences) if s.logprobs is not None and tokens[row] >= 0]
        if rows:
            words = likely_tokens(logits[rows], tokens[rows]).cpu().numpy()
            add_likely([sequences[row] for row in rows], words)

    def tables(self, sequences: list[Sequence]) -> list[list[Table]]:
        """Return the tables of these sequences as ``[pool][row]``."""
        rows = [self.tables_of[sequence.request_id] for sequence in sequences]
        return [[row[pool] for row in rows] for pool in range(len(self.blocks.pools))]

    @torch.inference_mode()
    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Cache ``counts[i]`` more tokens of sequence i.

        A sequence that this completes also receives its next token.
        """
        start, others = perf_counter(), range(1, len(self.blocks.pools))
        for s in sequences:
            self.tables_of.setdefault(s.request_id, [s.block_ids, *([] for _ in others)])
        tables = self.tables(sequences)
        for pool, own in zip(self.blocks.pools, tables, strict=True):
            for table, count in zip(own, counts, strict=True):
                pool.reserve_prompt(table, count)
        whole = [s for s, n in zip(sequences, counts, strict=True) if s.completes_prefill(n)]
        hidden = self.prefill.run(sequences, counts, tables)
        tokens = self.sample(self.model.logits(hidden), whole)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.num_cached_tokens += count
        got, failed = commit_tokens(whole, tokens, num_newly_cached=0)
        self._ended.append(Done("prefill", got, perf_counter() - start, failed))

    def begin_decode(self, sequences: list[Sequence]) -> int:
        """Give each sequence one more token; return the number of sequences."""
        start = perf_counter()
        got, failed = self.decode(sequences)
        self._ended.append(Done("decode", got, perf_counter() - start, failed))
        return len(sequences)

    def collect(self, leave: int = 0) -> Iterator[Done]:
        """Yield every step that has not been yielded yet.

        ``leave`` has no effect, since all steps have ended.
        """
        while self._ended:
            yield self._ended.popleft()

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of the sequence in all pools except the first, whose blocks the engine frees."""
        tables = self.tables_of.pop(sequence.request_id, [])
        for pool, table in zip(self.blocks.pools[1:], tables[1:], strict=False):
            pool.release(table)

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Return an empty list, since this rung captures no graphs."""
        return []

    def warm_ups(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Return an empty list, since each capture compiles and tunes its own kernels."""
        return []

    def largest_captures(self) -> list[Callable[[], object]]:
        """Return a list of the first of :meth:`captures`, which takes the most memory, or an empty list."""
        return self.captures()[:1]

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """Return an empty list, since there is no way to run this prefill before there are prompts."""
        return []

    def warm_up(self, rows: int | None, n_tokens: int, is_compiled: bool) -> None:
        """Capture the graphs of decode steps of ``rows`` sequences, or all graphs if ``rows`` is None."""
        warm_up(self, rows, n_tokens, is_compiled, self.model.device)

    def last_logits(self) -> Tensor:
        """Return the logits ``[B, V]`` of the latest step; raise ``RoseError`` if there was none."""
        if self._logits is None:
            raise RoseError("no step has been begun; there are no logits yet")
        return self._logits


def dense_mask(
    context_lens: Tensor, max_context: int, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """Return the mask ``[B, max_context + 1]``: 0 for tokens to attend to, else the dtype's lowest number.

    context_lens: ``[B]``, the number of cached tokens; the last column is the new token.
    max_context: the largest of them.
    window: number of tokens that each query attends to, including the new one; None for all.

    This takes seven kernels: ``arange``, a comparison with the lengths, a column of ones for the new token,
    its concatenation, a cast, a subtraction and a multiplication.
    """
    positions = torch.arange(max_context, device=context_lens.device)
    held = positions[None, :] < context_lens[:, None]  # [B, max_context]
    if window is not None:
        held &= positions[None, :] > context_lens[:, None] - window
    new = torch.ones(len(context_lens), 1, dtype=torch.bool, device=context_lens.device)
    seen = torch.cat((held, new), dim=1).to(dtype)
    return (1 - seen) * torch.finfo(dtype).min
