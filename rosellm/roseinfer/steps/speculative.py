"""Speculative decoding inside the resident step: one graph drafts, verifies, accepts and advances.

A step gives each row 1 to k + 1 tokens, the same as single steps would. Whether a batch's next step drafts is
decided on the host, from the times and the accepted drafts of earlier steps: with many rows, verifying costs
more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rosellm.models.attention import Attend
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.device_state import INERT, DeviceState
from rosellm.roseinfer.kernels import attention, ring
from rosellm.roseinfer.kernels.attention_plan import Plan, Variant
from rosellm.roseinfer.kernels.paged_cache import SMALLEST_DOT
from rosellm.roseinfer.kernels.prefill import Launch, launch_for
from rosellm.roseinfer.kernels.prefill_tiles import COLUMNS, Tiles
from rosellm.roseinfer.kernels.speculation import DraftKernels, Texts, Verified
from rosellm.roseinfer.kernels.table import Kernels, is_stock
from rosellm.roseinfer.kernels.verify_attention import fastest_variant, takes, verify_attention
from rosellm.roseinfer.layers.attention import PagedAttention
from rosellm.roseinfer.layers.logprobs import add_likely
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.captured_prefill import CapturedPrefill
from rosellm.roseinfer.steps.draft_model import DraftModel
from rosellm.roseinfer.steps.pace import Pace
from rosellm.roseinfer.steps.planner import NO_ROWS, RELEASED, Batch
from rosellm.roseinfer.steps.resident import Begun, ResidentStep
from rosellm.roseinfer.steps.worker import Worker
from rosellm.triton_or_none import next_power_of_2

VERIFY = "verify/"  # begins the attention variants of steps that verify drafts; their pieces follow
MOST_VERIFIED = 256  # verify rows of a step
FEWER_DRAFTS = 7, 3, 1  # per row, of batches for which more are too many verify rows
KEYS_OF_PIECE = 256  # the fewest cached tokens for which another program is worth its combination
HEADS_AT_ONCE = 8  # query heads of a program, at most
# Accepted drafts expected of a new row, as a multiple of those that pay: at most; and before any step drafts
SURE, HOPEFUL, DOUBTFUL = 3.0, 1.2, 0.9
MANY = 1.0  # accepted drafts that pay, above which a row must first show them


def verify_rows(n_rows: int, n_drafts: int) -> int:
    """Return the maximum number of verify rows of a step; each has a row in the table of ``TokenCounts``."""
    return min(n_rows * (n_drafts + 1), MOST_VERIFIED)


class SpeculativeWorker(Worker):
    """A worker whose steps can also draft and verify ``n_drafts`` tokens per row.

    kernels, drafting: the device functions.
    invariant: whether logits must be bitwise those of single steps. Verify rows then attend as rows of a
        decode step do, twice: the first time caches their keys and values.
    draft: the model that drafts; None if drafts come from the rows' own texts.
    parts: the arguments of ``Worker``.
    """

    def __init__(
        self,
        model: Transformer,
        kernels: Kernels,
        drafting: DraftKernels,
        n_drafts: int,
        invariant: bool,
        draft: DraftModel | None = None,
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        self.kernels, self.drafting = kernels, drafting
        self.n_drafts, self.invariant, self.draft = n_drafts, invariant, draft
        self._catch_ups: dict[int, Callable[[], object]] = {}
        self._verify_variants: dict[tuple[int, int], str] = {}
        if draft is not None:
            self.blocks.copy_everywhere = partial(self.call, "copy_block")
        self.config = model.config
        self._rotary = [model.rotary(layer) for layer in range(model.config.n_layers)]
        self._wide = DeviceState(verify_rows(self.n_rows, n_drafts), self.state.table.shape[1], self.device)
        self._wide.stop_tokens = self.state.stop_tokens
        sizes = [self.n_rows * self.longest, 2 * self.n_rows]
        self._texts = torch.zeros(sum(sizes), dtype=torch.int32, device=self.device)
        tokens, numbers = self._texts.split(sizes)
        self._numbers = numbers.view(2, -1).T  # ``[S, 2]``: each row's ``wants_drafts`` and ``n_cached``
        self.texts = Texts(tokens.view(self.n_rows, -1), *self._numbers.T)
        packed = self.prompts.packed if isinstance(self.prompts, CapturedPrefill) else self.prompts
        packed.write_prompts = partial(drafting.write_prompts, texts=self.texts)
        queries = self.config.group * (n_drafts + 1), self.config.head_dim, self.blocks.block_size
        can_run = ring.runs_on(self.device, model.dtype) and is_stock(kernels, "append_and_attend")
        can_run = can_run and isinstance(self.blocks.k_cache, torch.Tensor)
        self.in_one_tile = can_run and not (invariant or self.config.window) and takes(*queries)
        self._attention = partial(verify_attention, dependent=drafting.dependent)
        self._layers_for = self.layers_for if invariant or self.in_one_tile else packed.layers_for
        self._launch = {}
        on_gpu = self.device.type == "cuda"
        self._num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count if on_gpu else 0
        usual = launch_for(model.dtype, self.config.head_dim, self.config.group)
        self._heads = min(self.config.group & -self.config.group, HEADS_AT_ONCE)
        if is_stock(kernels, "prefill_attention"):
            self._launch = {"launch": Launch(usual.block_n, 4, usual.num_stages, self._heads)}

    # Called by name, as the methods of ``Worker``.

    def write_texts(self, words: np.ndarray) -> None:
        """Write to ``texts``. words: int32 ``[2, n]``: places in its three tensors, end to end; values."""
        places, values = self._staging.put(words).send()
        self._texts.index_copy_(0, places.long(), values)

    def copy_block(self, source: int, target: int) -> None:
        super().copy_block(source, target)
        if self.draft is not None:
            self.draft.prompts.blocks.copy_block(source, target)

    def catch_up(self, rows: int) -> None:
        """Let the draft model cache the next tokens of the first ``rows`` state rows."""
        self._catch_up(rows)()

    def find_logprobs(self, asking: np.ndarray, n_drafts: int = 0) -> None:
        """Start computing logprobs of the latest step's tokens, as ``LogprobRing.begin`` does.

        n_drafts: number of draft tokens that the step verified per row.
        """
        chosen, width = self.logprobs.state, n_drafts + 1
        tokens, rounds = (x.view(self.n_rows, -1) for x in (chosen.tokens, chosen.rounds))
        tokens[:, 0] = self.state.tokens
        rounds.copy_(self.state.rounds[:, None])
        if n_drafts:
            assert self.hidden is not None
            after = 1 + self._wide.positions[: len(self.hidden)].view(-1, width).long()
            tokens[: len(after), :width] = self.texts.tokens[: len(after)].gather(1, after)
        super().find_logprobs(asking)

    def _move_rows(self, state: DeviceState, moves: Tensor) -> None:
        super()._move_rows(state, moves)
        source, target = moves.long()
        for texts in (self.texts.tokens, self._numbers):
            texts.index_copy_(0, target, texts.index_select(0, source))

    # Called by this rank only.

    def drafts_for(self, rows: int) -> int:
        """Return how many drafts per row a step of this captured batch size verifies; 0 for large batches."""
        fewer = (self.n_drafts, *(k for k in FEWER_DRAFTS if k < self.n_drafts))
        return next((k for k in fewer if rows * (k + 1) <= len(self._wide.rows)), 0)

    def verify_variant(self, rows: int, longest: int) -> str:
        """Return the attention variant of a step that verifies drafts of ``rows`` rows.

        longest: the highest position at which the step may cache a token.
        """
        key = rows, (longest - 1).bit_length()
        if key not in self._verify_variants:
            self._verify_variants[key] = self._verify_variant(rows, 1 << key[1])
        return self._verify_variants[key]

    def _verify_variant(self, rows: int, longest: int) -> str:
        c = self.config
        if self.in_one_tile:
            queries = c.group * (self.drafts_for(rows) + 1)
            sizes = rows, c.n_kv_heads, longest, self._num_sms, queries, c.head_dim
            return f"{VERIFY}{fastest_variant(*sizes)}"
        programs = max(1, rows * c.n_heads // self._heads)
        most = 1 if self.invariant else min(2 * self._num_sms // programs, longest // KEYS_OF_PIECE)
        return f"{VERIFY}{Variant(SMALLEST_DOT, 1 << (max(most, 1).bit_length() - 1))}"

    def variants(self, rows: int) -> list[str]:
        plain = super().variants(rows)
        if not self.drafts_for(rows):
            return plain
        longest = [min(1 << power, self.longest) for power in range((self.longest - 1).bit_length() + 1)]
        return plain + sorted({self.verify_variant(rows, n) for n in longest})

    def _verified(self, state: DeviceState, pieces: int) -> Verified:
        rows, columns = len(state.rows), None
        if not self.invariant:
            columns = torch.empty(COLUMNS, rows * pieces, dtype=torch.int32, device=self.device)
        n_drafts = self.drafts_for(rows)
        wide = self._wide.first(rows * (n_drafts + 1))
        return Verified(wide, columns, n_drafts, pieces, copies=self.n_rows)

    def _run(self, state: DeviceState, mode: str, variant: str) -> Tensor:
        if not variant.startswith(VERIFY):
            return super()._run(state, mode, variant)
        hidden, verified = self._verify(state, variant, mode)
        self._accept(hidden, state, verified, mode)
        return hidden

    def _choose(self, hidden: Tensor, state: DeviceState, mode: str) -> None:
        every_row = self._every_row[: len(state.rows)]
        self.next_tokens(hidden, state, mode, state, every_row, self.texts.tokens)

    def _verify(
        self, state: DeviceState, variant: str, mode: str, n_layers: int | None = None
    ) -> tuple[Tensor, Verified]:
        chosen = Variant.parse(variant.removeprefix(VERIFY))
        verified = self._verified(state, 1 if self.in_one_tile else chosen.pieces)
        if self.draft is not None:
            self.draft.draft(state, self.texts, verified.n_drafts, mode, n_layers)
        self.drafting.propose(state=state, texts=self.texts, verified=verified)
        wide = verified.state
        if self.in_one_tile:
            attend = self._attend_in_one_tile(state, wide, chosen)
        else:
            attend = self._attend_by_rows(wide) if self.invariant else self._attend_by_tiles(state, verified)
        return self._layers_for(len(wide.rows))(wide.tokens, wide.positions, attend, n_layers), verified

    def _accept(self, hidden: Tensor, state: DeviceState, verified: Verified, mode: str) -> None:
        chooser, counted = self.next_tokens.chooser, None
        mode = chooser.serving(mode, len(hidden))
        if mode == "penalised":
            counted = {"state": state, "wide": verified.state, "table": self.counts}
            self.drafting.fork_counts(**counted)
        values, indices = chooser(hidden, verified.state, mode)
        given = {"state": state, "texts": self.texts, "verified": verified}
        self.drafting.accept(**given, values=values, indices=indices)
        if counted is not None:
            self.drafting.count_accepted(**counted)
        if self.draft is not None:
            cached = self.texts.n_cached[: len(state.rows)]
            cached.copy_(torch.where(state.positions >= 0, state.positions, cached))

    def _attend_in_one_tile(self, state: DeviceState, wide: DeviceState, variant: Variant) -> Attend:
        """Return an attention that reads each row's cache once for all of its verify rows."""
        plan = Plan(variant)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attention(
                q=q,
                k_new=k,
                v_new=v,
                k_cache_layer=self.blocks.k_cache[layer],
                v_cache_layer=self.blocks.v_cache[layer],
                block_table=state.table,
                positions=state.positions,
                verified_positions=wide.positions,
                scale=self.config.scale,
                rotary=self._rotary[layer],
                plan=plan,
            )

        return attend

    def _attend_by_tiles(self, state: DeviceState, verified: Verified) -> Attend:
        """Return the attention of prefills, for which each row's new tokens are a chunk of a prompt."""
        assert verified.columns is not None
        size = max(SMALLEST_DOT, next_power_of_2(verified.n_drafts + 1))
        tiles = Tiles(verified.columns, size, verified.pieces > 1, are_drafts=True)
        position, attend_tiles = self.kernels.position_heads, self.kernels.prefill_attention

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if rotary := self._rotary[layer]:
                position(q=q, k=k, positions=verified.state.positions, rotary=rotary)
            return attend_tiles(
                q=q,
                k_new=k,
                v_new=v,
                k_cache_layer=self.blocks.k_cache[layer],
                v_cache_layer=self.blocks.v_cache[layer],
                block_table=state.table,
                tiles=tiles,
                scale=self.config.scale,
                window=self.config.window,
                **self._launch,
            )

        return attend

    def _attend_by_rows(self, wide: DeviceState) -> Attend:
        """Return an attention that sums as decode steps do. It reads a row's cache for each verify row."""
        once = self.bind(wide, self.bind.variant(len(wide.rows), 1, 1))
        if not isinstance(once, PagedAttention) or self.kernels.name == "torch":
            return once  # row by row
        again = replace(once, kernel=attention.append_and_attend)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            once(layer, q, k, v)
            return again(layer, q, k, v)

        return attend

    def _catch_up(self, rows: int) -> Callable[[], object]:
        assert self.draft is not None
        if rows not in self._catch_ups:
            run: Callable[[], object] = partial(self.draft.catch_up, self.state.first(rows), self.texts)
            if self.graphs is not None:
                idle = partial(self.draft.catch_up, self._idle.first(rows), self.texts, 1)
                run = self.graphs.capture(run, idle)
            self._catch_ups[rows] = run
        return self._catch_ups[rows]

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        missing = [n for n in self._buckets(rows) if self.drafts_for(n) and n not in self._catch_ups]
        with_draft = self.graphs is not None and self.draft is not None
        return super().captures(rows) + [partial(self._catch_up, n) for n in missing if with_draft]

    def _run_idle(self, bucket: int) -> None:
        super()._run_idle(bucket)
        if self.draft is not None and self.drafts_for(bucket):
            self.draft.catch_up(self._idle.first(bucket), self.texts, 1)
        for variant in [one for one in self.variants(bucket) if one.startswith(VERIFY)][:1]:
            self._verify_idle(bucket, variant)  # also accepts, which is the same for every variant

    def _verify_idle(self, bucket: int, variant: str) -> None:
        idle = self._idle.first(bucket)
        for mode in self.next_tokens.chooser.modes(bucket):
            hidden, verified = self._verify(idle, variant, mode, 1)
            self._accept(hidden, idle, verified, mode)

    def _hidden(self, state: DeviceState, variant: str, n_layers: int | None = None) -> Tensor:
        if variant.startswith(VERIFY):
            return self._verify(state, variant, "greedy", n_layers)[0]
        return super()._hidden(state, variant, n_layers)

    def _warm_up_step(self, bucket: int, mode: str, variant: str) -> None:
        if variant.startswith(VERIFY):
            self._verify_idle(bucket, variant)
        else:
            super()._warm_up_step(bucket, mode, variant)


class SpeculativeStep(ResidentStep):
    """A resident step that may give each row several tokens at once.

    worker: a :class:`SpeculativeWorker`.
    """

    worker: SpeculativeWorker

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.pace = Pace()
        self._planes = self.worker.state.planes.numpy()
        self._latest_counts: dict[Sequence, int] = {}  # of the latest step, if it verified drafts
        self._latest_places = 1  # its verify rows per row
        self._able = NO_ROWS, 0  # the latest batch, and how many drafts per row it can have at most
        self._asking: tuple[np.ndarray, int, np.ndarray] | None = None  # a plan's, for drafts: of their rows

    def _n_drafts(self, rows: int, batch: Batch) -> int:
        """Return how many drafts the next step verifies per row; 0 if none pay."""
        if self.pace.rests(batch):
            return 0
        pace, planner = self.pace, self.planner
        if batch is not self._able[0]:
            self._able = batch, planner.most_drafts(batch, self.worker.drafts_for(rows))
            expected = self._expected(rows)
            if planner.guess(batch, expected):
                pace.begin(rows, expected)
        _, n_drafts = self._able
        if not n_drafts:
            pace.rest(batch)
            return 0
        if not pace.drafts(rows, planner.accepted_by(batch), batch):
            return 0
        if pace.is_probing:  # forget what was accepted long ago
            planner.expect(batch, pace.needed(rows))
        planner.send_texts(batch)
        return n_drafts

    def _expected(self, rows: int) -> float:
        """Return how many accepted drafts per step are expected of a row about which nothing is known."""
        needed, usual = self.pace.needed(rows), self.planner.usual
        if math.isnan(usual):
            return needed * (HOPEFUL if needed <= MANY else DOUBTFUL)
        return min(usual, SURE * needed)

    def _launch(self, rows: int, batch: Batch, n_drafts: int, cached: tuple[int, float]) -> None:
        if not n_drafts:
            super()._launch(rows, batch, 0, cached)
            return
        if self.worker.draft is not None:
            for _ in range(0, self.planner.n_behind(batch), self.worker.draft.places(rows)):
                self._call("catch_up", rows)
        self._call("decode", rows, self._plan.mode, self.worker.verify_variant(rows, cached[0]))

    def _find_logprobs(self, asking: np.ndarray, n_drafts: int = 0) -> None:
        if not asking.size:
            return
        if self._asking is None or self._asking[0] is not asking or self._asking[1] != n_drafts:
            (first, slot, wanted), i = asking[:, :, None], np.arange(n_drafts + 1)
            every = first * len(i) + i, slot * len(self._planes) + i, wanted + 0 * i
            self._asking = asking, n_drafts, np.stack(every).reshape(3, -1)
        self._call("find_logprobs", self._asking[2], n_drafts)

    def _commit(self, begun: Begun) -> Done:
        self._latest_counts, self._latest_places = {}, begun.n_drafts + 1
        done = self._commit_drafts(begun) if begun.n_drafts else super()._commit(begun)
        if self.pace.is_timed:
            self._time(begun)
        return done

    def _time(self, begun: Begun) -> None:
        if begun.kind == "decode":
            self.pace.note(begun.n_rows, begun.n_drafts > 0, perf_counter())
        else:
            self.pace.pause()

    def _commit_drafts(self, begun: Begun) -> Done:
        """Copy the tokens of a step that verified drafts to its sequences, as ``_commit`` does."""
        rows, sequences, indices, _ = begun.batch
        chosen = self._planes[: begun.n_drafts + 1, begun.rounds, indices]  # the last token first
        tokens = chosen.T.tolist()
        n_chosen = [len(own) - own.count(INERT) + (own[0] == INERT) for own in tokens]  # 1 for an inert row
        self.planner.accept(begun.batch, n_chosen, begun.n_drafts)
        self.pace.reconsider()
        live = [i for i, row in enumerate(rows) if row.index != RELEASED]
        self._latest_counts = {sequences[i]: n_chosen[i] for i in live}
        before = [sequences[i].num_cached_tokens for i in live]
        n_new = [sequences[i].commit_all(tokens[i][n_chosen[i] - 1 :: -1]) for i in live]
        if begun.has_logprobs:
            self._give_logprobs_of_drafts(begun, live, before, n_new)
        got = [sequences[i] for i, n in zip(live, n_new, strict=True) if n]
        failed = [sequences[i] for i in live if sequences[i].finish_reason == "failed"]
        self._free_ended([rows[i] for i in live])
        seconds = begun.clock.seconds_since(begun.since)
        return Done("decode", got, seconds, failed, [n for n in n_new if n])

    def _give_logprobs_of_drafts(
        self, begun: Begun, live: list[int], before: list[int], n_new: list[int]
    ) -> None:
        """Give sequences the log-probabilities that they request.

        live: positions within the batch of the rows not released.
        before, n_new: for each of them, its cached tokens before the step, and its new tokens.
        """
        new: list[tuple[int, int]] = []  # position within the batch, place
        sequences = begun.batch.sequences
        for i, cached, n in zip(live, before, n_new, strict=True):
            if sequences[i].logprobs is not None:
                end = sequences[i].num_cached_tokens - cached
                new += [(i, place) for place in range(end - n, end)]
        if new:
            at, places = np.array(new).T
            words = self.worker.logprobs.read(begun.rounds[at], begun.batch.indices[at], places)
            add_likely([sequences[i] for i in at], words)

    def last_logits(self) -> Tensor:
        """Return logits as ``ResidentStep`` does: those from which each row's last token was chosen."""
        self._settle()
        self._may_be_edited = True
        if self._latest is None or not self._latest_counts:
            return super().last_logits()
        sequences, batch = self._latest
        first = (batch.indices * self._latest_places).tolist()
        place = dict(zip(batch.sequences, first, strict=True))
        rows = [place[s] + self._latest_counts[s] - 1 for s in sequences if s in self._latest_counts]
        return self._call("logits", np.array(rows))
