"""One pass over the weights for decoding rows and prompt tokens together (Sarathi-Serve, arXiv:2403.02310).

A decode step is held until prompts are chosen, and runs in the same pass as they do. Two kinds of graph are
replayed one after the other, as in ``captured_prefill``: the layers, for a number of rows, of tokens and a
variant of attention, with prompts' keys in pieces or not; and the choice of next and first tokens, for a
number of rows, of places and a mode. The rung ``one_pass`` loads it: first tokens come sooner than from
separate passes, and goodput is hardly higher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as SequenceOf
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosellm.models.arch import Arch
from rosellm.models.attention import Attend
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import tile_columns
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.attention import Binder
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.captured_prefill import CapturedPrefill, PromptBuffer, room_of
from rosellm.roseinfer.steps.cuda_graph import Graphs
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from rosellm.roseinfer.steps.planner import NO_ROWS, Batch, batch_bucket
from rosellm.roseinfer.steps.prompt_inputs import Chunks, PromptLayout
from rosellm.roseinfer.steps.prompts import PackedPrompts
from rosellm.roseinfer.steps.resident import ResidentStep, SamplingPlan, asking_of
from rosellm.roseinfer.steps.step import STEP_RANGE, profile_range
from rosellm.roseinfer.steps.worker import Worker

JOINED_TOKENS = 32, 128, 256, 512, 1024  # of prompts; a step with more of them is left to separate passes
JOINED_PLACES = 16, 64  # prompts
FEWEST_ROWS = 32


def joined_rows(rows: int) -> int:
    """The captured number of decoding rows that serves ``rows``: a power of two, so that there are few."""
    return max(FEWEST_ROWS, 1 << (rows - 1).bit_length())


LayerKey = tuple[int, int, str, bool]  # decoding rows, prompts' tokens, attention's variant, in pieces


class Sizes(NamedTuple):
    """Room of one run: decoding rows, prompt tokens, and prompts."""

    rows: int
    tokens: int
    places: int


def captured_sizes(rows: int, tokens: int, places: int) -> Sizes:
    """The smallest that are captured."""
    fitting = (next(n for n in JOINED_TOKENS if tokens <= n), next(n for n in JOINED_PLACES if places <= n))
    return Sizes(joined_rows(rows), *fitting)


def launched_sizes(rows: int, tokens: int, places: int) -> Sizes:
    """What is launched from Python needs no padding."""
    return Sizes(batch_bucket(rows), tokens, places)


class JoinedPass:
    """The part of a joined step on the device.

    The packed batch is the state's first rows and then the prompts' tokens; what is padding is inert. bind:
    attention of the decoding rows. graphs: captures the runs; None: each kernel is launched from Python.
    most_tokens: no step has more of prompts; larger graphs are not captured. room: see
    ``captured_prefill.room_of``; 0: prompts' keys are never cut.
    """

    def __init__(
        self, packed: PackedPrefill, bind: Binder, graphs: Graphs | None, most_tokens: int, room: int = 0
    ) -> None:
        self.packed, self.bind, self._graphs = packed, bind, graphs
        self._most_tokens = min(most_tokens, JOINED_TOKENS[-1])
        self._sizes = launched_sizes if graphs is None else captured_sizes
        self.state, model = packed.state, packed.model
        n_rows = self._spare = packed.spare
        device, width = model.device, packed.state.table.shape[1]
        self._idle = DeviceState(n_rows + 1, width, device)
        self._idle.stop_tokens = self.state.stop_tokens  # their number is compiled into a kernel
        self._every_row = torch.arange(n_rows + 1, device=device)
        self.layout = PromptLayout(JOINED_TOKENS[-1], JOINED_PLACES[-1], room, packed.row_words)
        self._buffer = PromptBuffer(packed, self.layout)
        most = n_rows + JOINED_TOKENS[-1]
        self._hidden = torch.zeros(most, model.config.d_model, dtype=model.dtype, device=device)
        self._layer_runs: dict[LayerKey, Callable[[], object]] = {}
        self._token_runs: dict[tuple[int, int, str], Callable[[], Tensor]] = {}

    def takes(self, counts: list[int]) -> bool:
        """Whether so many tokens of each prompt fit into one run."""
        return sum(counts) <= JOINED_TOKENS[-1] and len(counts) <= JOINED_PLACES[-1]

    def sizes(self, rows: int, counts: list[int]) -> Sizes:
        """The run that serves the first ``rows`` rows and so many tokens of each prompt."""
        sizes = self._sizes(rows, sum(counts), len(counts))
        return sizes._replace(rows=min(sizes.rows, self._spare))

    def __call__(self, sizes: Sizes, words: np.ndarray, in_pieces: bool, variant: str, mode: str) -> Tensor:
        """Cache the chunks of ``words``, write whole prompts' rows, and let all rows have their next token.

        Returns final hidden states ``[rows + places, C]`` of the rows and of whole prompts' last tokens. What
        is not captured yet is captured first.
        """
        rows, tokens, places = sizes
        run_layers = self._layer_run(rows, tokens, variant, in_pieces)
        choose = self._token_run(rows, places, mode)
        self._buffer.send(words, tokens, places)
        run_layers()
        return choose()

    def captures(self, variants: Callable[[int], SequenceOf[str]]) -> list[Callable[[], object]]:
        """Calls that capture what is not captured yet, the largest first; variants: of so many rows."""
        if self._graphs is None:
            return []
        layers = [key for key in self._layer_keys(variants) if key not in self._layer_runs]
        tokens = [key for key in self._token_keys() if key not in self._token_runs]
        layer_runs = [partial(self._layer_run, *key) for key in layers]
        return layer_runs + [partial(self._token_run, *key) for key in tokens]

    def warm_ups(self, variants: Callable[[int], SequenceOf[str]]) -> list[Callable[[], object]]:
        """See ``step.Step.warm_ups``; variants: as of :meth:`captures`."""
        if self._graphs is None:
            return []
        runs: list[Callable[[], object]] = []
        for key in self._layer_keys(variants):
            runs.append(partial(self._buffer.inertly, key[1], 1, partial(self._run_layers, *key, self._idle)))
        for kind in self._token_keys():
            runs.append(partial(self._buffer.inertly, 1, kind[1], partial(self._choose, *kind, self._idle)))
        return runs

    def _layer_keys(self, variants: Callable[[int], SequenceOf[str]]) -> list[LayerKey]:
        """Of the captured runs of the layers; in pieces where tiles may be fewer than there is room for."""
        most_in_pieces = min(self._most_tokens, (self.layout.room - 1) * BLOCK_M)
        sizes = [(n, False) for n in _up_to(self._most_tokens, JOINED_TOKENS)]
        sizes += [(n, True) for n in _up_to(most_in_pieces, JOINED_TOKENS)]
        sizes.sort(reverse=True)
        return [(r, n, v, cut) for r in self._captured_rows() for n, cut in sizes for v in variants(r)]

    def _token_keys(self) -> list[tuple[int, int, str]]:
        """Rows, places and mode of the captured choices."""
        places = _up_to(min(self._spare, JOINED_PLACES[-1]), JOINED_PLACES)
        modes = self.packed.next_tokens.chooser.modes
        return [(r, n, mode) for r in self._captured_rows() for n in places for mode in modes(r + n)]

    def _captured_rows(self) -> list[int]:
        """The most first."""
        return sorted({min(joined_rows(n), self._spare) for n in range(1, self._spare + 1)}, reverse=True)

    def _layer_run(self, rows: int, tokens: int, variant: str, in_pieces: bool) -> Callable[[], object]:
        key = rows, tokens, variant, in_pieces
        if key not in self._layer_runs:
            self._layer_runs[key] = self._captured(partial(self._run_layers, *key), tokens, 1)
        return self._layer_runs[key]

    def _token_run(self, rows: int, places: int, mode: str) -> Callable[[], Tensor]:
        key = rows, places, self.packed.next_tokens.chooser.serving(mode, rows + places)
        if key not in self._token_runs:
            self._token_runs[key] = self._captured(partial(self._choose, *key), 1, places)
        return self._token_runs[key]

    def _captured(
        self, run: Callable[[DeviceState], Tensor], tokens: int, places: int
    ) -> Callable[[], Tensor]:
        """Warmed up with inert rows and inputs, which write nothing that anyone reads."""
        if self._graphs is None:
            return partial(run, self.state)
        self._buffer.send_inert(tokens, places)
        return self._graphs.capture(partial(run, self.state), partial(run, self._idle))

    def _run_layers(
        self, rows: int, tokens: int, variant: str, in_pieces: bool, state: DeviceState
    ) -> Tensor:
        """The layers; final hidden states ``[rows + tokens, C]`` stay in the buffer that choices read."""
        inputs = self._buffer.layer_inputs(tokens, "pieces" if in_pieces else "many")
        decoding = state.first(rows)
        attend = joined_attention(rows, self.bind(decoding, variant), self.packed.bind(inputs, in_pieces))
        ids = torch.cat((decoding.tokens, inputs.ids))
        positions = torch.cat((decoding.positions, inputs.positions))
        hidden = self.packed.layers_for(rows + tokens)(ids, positions, attend)
        return self._hidden[: rows + tokens].copy_(hidden)

    def _choose(self, rows: int, places: int, mode: str, state: DeviceState) -> Tensor:
        """Write the rows of whole prompts, and choose for them and the decoding ones; hidden states of both.

        Where such a prompt takes one of the first ``rows``, that row was inert in the layers; the spare row
        has its place among the decoding ones. Settings are gathered before hidden states: the kernel that
        follows may read what is written two kernels ago, but not what is written by the one before it.
        """
        inputs = self._buffer.place_inputs(places)
        state.rows.index_copy_(0, inputs.slots, inputs.rows)
        decoding = self._every_row.index_fill(0, inputs.slots, self._spare)[:rows]
        slots = torch.cat((decoding, inputs.slots))
        settings = state.at(slots)
        hidden = torch.cat((self._hidden[:rows], self._hidden[rows:][inputs.last]))
        self.packed.next_tokens(hidden, settings, mode, state, slots)
        return hidden


def joined_attention(rows: int, of_rows: Attend, of_tokens: Attend) -> Attend:
    """Two kernels a layer: the first ``rows`` of a packed batch decode, the others are tokens of prompts."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        decoded = of_rows(layer, q[:rows], k[:rows], v[:rows])
        return torch.cat((decoded, of_tokens(layer, q[rows:], k[rows:], v[rows:])))

    return attend


def _up_to(most: int, sizes: tuple[int, ...]) -> list[int]:
    """Those that serve 1 to ``most``, the largest first."""
    return sorted({next(size for size in sizes if n <= size) for n in range(1, most + 1)}, reverse=True)


class JoinedWorker(Worker):
    """A worker that also has the passes for rows and prompts together."""

    def __init__(self, model: Transformer, **parts: Any) -> None:
        super().__init__(**parts)
        packed = self.prompts.packed if isinstance(self.prompts, CapturedPrefill) else self.prompts
        assert packed is not None
        longest = self.state.table.shape[1] * self.blocks.block_size
        room = room_of(model, longest)
        self.joined = JoinedPass(packed, self.bind, self.graphs, self.n_rows * longest, room)

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """See :class:`step.Step`."""
        joined = [] if rows is not None else self.joined.captures(self.variants)
        return joined + super().captures(rows)

    def warm_ups(self, rows: int | None = None) -> list[Callable[[], object]]:
        """See :class:`step.Step`."""
        joined = [] if rows is not None else self.joined.warm_ups(self.variants)
        return joined + super().warm_ups(rows)

    def largest_captures(self) -> list[Callable[[], object]]:
        """See :class:`step.Step`."""
        return self.joined.captures(self.variants)[:1] + super().largest_captures()


class JoinedStep(ResidentStep):
    """A decode step is held until the next call: a prefill that fits joins it, any other call begins it.

    Holding it loses nothing if the call comes at once. The first ``collect`` after it that may leave steps
    unfinished therefore yields nothing, since the scheduler chooses prompts next. For a joined step,
    ``collect`` yields two: the decode step, which has all of its time, and the prefill. ``run_ahead`` is one
    less than for other steps, so that prompts are not chosen later than theirs.
    """

    run_ahead = ResidentStep.run_ahead - 1

    worker: JoinedWorker
    prompts: PackedPrompts

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.joined = self.worker.joined
        self._held: list[Sequence] | None = None  # whose decode step has blocks, and is not begun
        self._awaits_prompts = False

    @torch.inference_mode()
    def begin_decode(self, sequences: list[Sequence]) -> int:
        """See :class:`step.Step`; reserves the blocks."""
        self._begin_held()
        batch = self._to_run(sequences)
        if batch.rows:
            self.planner.grow(batch)
            self._held, self._awaits_prompts = sequences, True
        return len(batch.rows)

    @torch.inference_mode()
    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        """See :class:`step.Step`; more tokens than fit are cached by a pass of their own."""
        self._awaits_prompts = False
        asked = any(s.prompt_logprobs is not None for s in sequences)
        if self._held is not None and self.joined.takes(counts) and not asked:
            self._begin_joined(sequences, counts)
        else:
            self._begin_held()
            super().begin_prefill(sequences, counts)

    def collect(self, leave: int = 0) -> Iterator[Done]:
        """See :class:`step.Step`."""
        waits, self._awaits_prompts = self._awaits_prompts and leave > 0, False
        if waits:
            return iter(())
        self._begin_held()
        return super().collect(leave)

    def release(self, sequence: Sequence) -> None:
        """See :class:`step.Step`."""
        self._begin_held()
        super().release(sequence)

    def last_logits(self) -> Tensor:
        """See :class:`step.Step`."""
        self._begin_held()
        return super().last_logits()

    @torch.inference_mode()
    def _begin_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._begin_step(held, self.planner.running())

    @torch.inference_mode()
    def _begin_joined(self, sequences: list[Sequence], counts: list[int]) -> None:
        planner, prompts = self.planner, self.prompts
        whole = [s for s, n in zip(sequences, counts, strict=True) if s.completes_prefill(n)]
        planner.check_room(len(whole))
        held, self._held = self._held or [], None
        decoding = planner.running()
        self._start()
        with profile_range(STEP_RANGE):
            planner.allow_stops()
            planner.deactivate()  # before their places are given to prompts, which the layers have not seen
            chunks = prompts.reserved(sequences, counts)
            sizes = self.joined.sizes(int(decoding.indices[-1]) + 1, counts)
            mode = self.worker.next_tokens.chooser.mode([s.params for s in decoding.sequences + chunks.whole])
            cached = planner.cached_at_most(decoding).tolist()
            variant = self.worker.variant(sizes.rows, max(cached), sum(cached) / len(cached))
            pieces = prompts.pieces(chunks, self.joined.layout.room)
            words = self._filled(sizes, chunks, pieces)
            self.worker.hidden = self.joined(sizes, words, pieces is not None, variant, mode)
            for sequence, n in zip(sequences, counts, strict=True):
                sequence.num_cached_tokens += n
            prefilled = planner.batch(chunks.whole) if whole else NO_ROWS
            self._note_joined(sizes, decoding, prefilled, mode)
        self._latest = held + whole, _of_hidden(sizes, decoding, prefilled)
        if whole:
            self._listed = None

    def _filled(self, sizes: Sizes, chunks: Chunks, pieces: list[int] | None) -> np.ndarray:
        layout = self.joined.layout
        rows = layout.table_rows(sizes.places)[: len(chunks.counts)]
        columns = tile_columns(chunks.starts, chunks.counts, rows, BLOCK_M, pieces)
        return self.prompts.filled(chunks, columns, layout.shape(sizes.tokens, sizes.places))

    def _note_joined(self, sizes: Sizes, decoding: Batch, prefilled: Batch, mode: str) -> None:
        both = _together(decoding, prefilled, prefilled.indices)
        asking = asking_of(both, _of_hidden(sizes, decoding, prefilled).indices)
        self._find_logprobs(asking)
        self._note("decode", SamplingPlan(decoding, mode, asking))
        self._note("prefill", SamplingPlan(prefilled, mode, asking))
        self.planner.advance(both, np.union1d(np.arange(sizes.rows), prefilled.indices))


def _of_hidden(sizes: Sizes, decoding: Batch, prefilled: Batch) -> Batch:
    """Both, with their rows of the hidden states that tokens were chosen from."""
    return _together(decoding, prefilled, sizes.rows + np.arange(len(prefilled.rows)))


def _together(first: Batch, second: Batch, indices: np.ndarray) -> Batch:
    """One batch of both, the second with these indices."""
    rows, sequences = first.rows + second.rows, first.sequences + second.sequences
    both = np.concatenate((first.indices, indices))
    return Batch(rows, sequences, both, both)


def check_serves(config: Arch) -> None:
    """Accept every model."""


def build_step(model: Transformer, kernels: Kernels, **parts: Any) -> ResidentStep:
    """See ``exhibits.load_exhibit``."""
    return JoinedStep.on(JoinedWorker(model, **parts), model)
