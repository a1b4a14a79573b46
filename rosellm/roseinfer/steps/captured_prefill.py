"""Prefill by CUDA graphs: after one copy the device caches the prompts and chooses their first tokens.

A prefill replays two graphs: one of the layers, captured for each padded number of tokens, then one that
chooses the first tokens, captured for each padded number of places and mode. (A place holds the inputs of one
sequence, or padding.) Graphs that do both would be needed for every combination, three times as many as all
decode steps have. The second replay is submitted while the first one runs. Some graphs of the layers have
fewer attention programs, for prefills of few prompts, or split keys into pieces, for few tokens after a long
prefix (``prefill_tiles``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rosellm.models.model import Transformer
from rosellm.roseinfer.kernels.prefill import BLOCK_M, room_for
from rosellm.roseinfer.kernels.prefill_tiles import LONG_PREFIX
from rosellm.roseinfer.steps.cuda_graph import Graphs
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from rosellm.roseinfer.steps.prompt_inputs import FEW, PromptInputs, PromptLayout, Shape, Tiling

CAPTURED_TOKENS = 4096
FEW_TOKENS = 1024  # above this number, programs without a tile cost little in comparison
# Captured numbers of places. The head's GEMM reads all of its weights even for one row, and computes tiles of
# 16 or 64 rows.
PLACES = 1, 16, 64, 256


def bucket_of(n_tokens: int) -> int:
    """Return the captured number of tokens to which ``n_tokens`` tokens are padded.

    The captured numbers are powers of two up to 256, then multiples of 128 up to 1,024, of 256 up to 2,048,
    and of 512 beyond: in a large prefill, a padding token takes as long as a real one.
    """
    for limit, step in ((256, None), (1024, 128), (2048, 256)):
        if n_tokens <= limit:
            return 1 << (n_tokens - 1).bit_length() if step is None else -(-n_tokens // step) * step
    return -(-n_tokens // 512) * 512


def places_for(n_sequences: int) -> int:
    """Return the smallest captured number of places that suffices for ``n_sequences``, at one place each.

    n_sequences: at most ``PLACES[-1]``.
    """
    return next(places for places in PLACES if n_sequences <= places)


LayerSize = tuple[int, Tiling]  # number of tokens, tiling


def layer_size(n_tokens: int, n_prompts: int, in_pieces: bool) -> LayerSize:
    """Return the size of the layers' graph that serves a prefill.

    n_tokens, n_prompts: new tokens and sequences of the prefill.
    in_pieces: whether any tile's keys are split into pieces; the graph then has at least ``BLOCK_M`` tokens.
    """
    tokens = bucket_of(n_tokens)
    if in_pieces:
        return max(tokens, BLOCK_M), "pieces"
    return tokens, "few" if n_prompts <= FEW < tokens <= FEW_TOKENS else "many"


def room_of(model: Transformer, most_positions: int) -> int:
    """Return how many attention tiles, with all their heads, the GPU runs at once.

    Returns 0 on a CPU, and if ``most_positions`` is too few for any prefix to be split into pieces.
    """
    if model.device.type != "cuda" or most_positions <= LONG_PREFIX:
        return 0
    num_sms, c = torch.cuda.get_device_properties(model.device).multi_processor_count, model.config
    return room_for(model.dtype, c.head_dim, c.n_heads, c.group, num_sms)


class PromptBuffer:
    """The device buffer ``[words]`` int32 that captured prefills read, at fixed addresses.

    packed: the prefill whose inputs it holds.
    layout: the layout of these inputs.
    """

    def __init__(self, packed: PackedPrefill, layout: PromptLayout) -> None:
        self.packed, self.layout = packed, layout
        device = packed.state.rows.device
        self.words = torch.zeros(layout.largest.words, dtype=torch.int32, device=device)
        self._parts: dict[tuple[int, int], Tensor] = {}  # of ``words``, by number of tokens and places

    def layer_inputs(self, tokens: int, tiling: Tiling = "many") -> PromptInputs[Tensor]:
        """Return the inputs of the layers, which have the same addresses for every number of places.

        tokens: captured number of tokens.
        tiling: which attention programs are launched.
        """
        inputs = self._inputs(self.layout.shape(tokens, self.layout.most_places))
        return inputs._replace(columns=inputs.columns[:, : self.layout.n_tiles(tokens, tiling)])

    def place_inputs(self, places: int) -> PromptInputs[Tensor]:
        """Return the inputs for choosing first tokens: those per place, and ``ids``.

        Their addresses are the same for every number of tokens.
        """
        return self._inputs(self.layout.shape(self.layout.most_tokens, places))

    def send(self, words: np.ndarray, tokens: int, places: int) -> None:
        """Copy the inputs ``words`` of a prefill with this many tokens and places to the device."""
        size = tokens, places
        if size not in self._parts:
            self._parts[size] = self.words[self.layout.span(self.layout.shape(*size))]
        self.packed.send(words, self._parts[size])

    def send_inert(self, tokens: int, places: int) -> None:
        """Send padding only, so that a prefill writes nothing but the state's spare row."""
        self.send(self.packed.inert(self.layout.shape(tokens, places)), tokens, places)

    def inertly(self, tokens: int, places: int, run: Callable[[], object]) -> None:
        """Send inert inputs of this size, then call ``run``."""
        self.send_inert(tokens, places)
        run()

    def _inputs(self, shape: Shape) -> PromptInputs[Tensor]:
        return PromptInputs.of(self.words[self.layout.span(shape)], shape)


class CapturedPrefill:
    """A prefill that replays the work of ``packed`` from CUDA graphs, on inputs with padding.

    For a short prefill, the host takes longer to launch the kernels than the GPU takes to run them. A prefill
    of more than ``most_tokens`` tokens or ``PLACES[-1]`` sequences is not captured: ``packed`` runs it kernel
    by kernel. All graphs read one buffer.

    packed: the prefill that the graphs capture.
    graphs: captures the graphs.
    most_tokens: upper bound on the tokens of a captured prefill; rounded up to a captured size, and at most
        ``CAPTURED_TOKENS``.
    room: the result of :func:`room_of`; 0 means that tiles are never split into pieces.
    """

    def __init__(self, packed: PackedPrefill, graphs: Graphs, most_tokens: int, room: int = 0) -> None:
        self.packed, self._graphs = packed, graphs
        self.spare, self.row_words = packed.spare, packed.row_words
        self.most_tokens = min(bucket_of(most_tokens), CAPTURED_TOKENS)
        self.buffer = PromptBuffer(packed, PromptLayout(self.most_tokens, PLACES[-1], room, self.row_words))
        model = packed.model
        self._hidden = torch.zeros(
            self.most_tokens, model.config.d_model, dtype=model.dtype, device=model.device
        )
        self._layer_runs: dict[LayerSize, Callable[[], object]] = {}
        self._token_runs: dict[tuple[int, str], Callable[[], Tensor]] = {}

    def takes(self, n_tokens: int, n_prompts: int) -> bool:
        """Return whether graphs can serve this many tokens and prompts."""
        return n_tokens <= self.most_tokens and n_prompts <= self.layout.most_places

    @property
    def layout(self) -> PromptLayout:
        return self.buffer.layout

    def run(self, words: np.ndarray, shape: Shape, mode: str | None) -> tuple[Tensor, Tensor | None]:
        """Run a prefill that is too large for any graph, kernel by kernel, as ``packed`` does."""
        return self.packed.run(words, shape, mode)

    def replay(
        self, words: np.ndarray, tokens: int, tiling: Tiling, places: int, mode: str | None
    ) -> tuple[Tensor, Tensor | None]:
        """Replay a prefill, and return final hidden states as :meth:`run` does.

        words: the inputs, laid out by ``layout.shape(tokens, places)``.
        tokens, tiling: the size of the layers' graph.
        places: captured number of places.
        mode: the chooser's mode for first tokens; None replays only the layers' graph.

        Missing graphs are captured first, before the inputs are sent, since a capture overwrites the buffer.
        """
        run_layers = self._layer_run(tokens, tiling)
        choose = None if mode is None else self._token_run(places, mode)
        self.buffer.send(words, tokens, places)
        run_layers()
        return self._hidden, None if choose is None else choose()

    def captures(self) -> list[Callable[[], object]]:
        """Return functions that capture the missing graphs, the largest first."""
        sizes = [size for size in self._layer_sizes() if size not in self._layer_runs]
        layer_runs = [partial(self._layer_run, *size) for size in sizes]
        missing = [kind for kind in self._token_kinds() if kind not in self._token_runs]
        return layer_runs + [partial(self._token_run, *kind) for kind in missing]

    def warm_ups(self) -> list[Callable[[], object]]:
        """Return functions that run each kernel once, on padding only, to compile it before its capture."""
        runs: list[Callable[[], object]] = []
        for places, mode in self._token_kinds():  # first, since their kernels take longest to compile
            runs.append(partial(self.buffer.inertly, 1, places, partial(self._choose, places, mode)))
        for size in self._layer_sizes():
            run = partial(self._run_layers, *size, n_layers=1)
            runs.append(partial(self.buffer.inertly, size[0], PLACES[-1], run))
        return runs

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """Return functions that run a prefill of ``n_tokens`` padding tokens, to compile its kernels."""
        return self.packed.rehearsals(n_tokens)

    def _layer_sizes(self) -> list[LayerSize]:
        """Return the sizes of all graphs of the layers, from most to fewest tokens.

        Graphs that split tiles into pieces exist only for sizes whose tiles do not fill the GPU.
        """
        most_in_pieces = min(self.most_tokens, (self.layout.room - 1) * BLOCK_M)
        tokens, most_prompts = range(1, self.most_tokens + 1), self.spare
        whole = {layer_size(n, m, False) for n in tokens for m in (1, min(n, most_prompts))}
        in_pieces = {layer_size(n, 1, True) for n in range(1, most_in_pieces + 1)}
        return sorted(whole | in_pieces, reverse=True)

    def _token_kinds(self) -> list[tuple[int, str]]:
        """Return number of places and mode of each graph that chooses first tokens, most places first."""
        most = places_for(min(self.spare, PLACES[-1]))
        modes = self.packed.next_tokens.chooser.modes
        return [(n, mode) for n in reversed(PLACES) if n <= most for mode in modes(n)]

    def _layer_run(self, tokens: int, tiling: Tiling) -> Callable[[], object]:
        size = tokens, tiling
        if size not in self._layer_runs:
            run = partial(self._run_layers, *size)
            self._layer_runs[size] = self._captured(run, partial(run, n_layers=1), tokens, PLACES[-1])
        return self._layer_runs[size]

    def _token_run(self, places: int, mode: str) -> Callable[[], Tensor]:
        kind = places, self.packed.next_tokens.chooser.serving(mode, places)
        if kind not in self._token_runs:
            run = partial(self._choose, *kind)
            self._token_runs[kind] = self._captured(run, run, 1, places)
        return self._token_runs[kind]

    def _captured(
        self, run: Callable[[], Tensor], warm_up: Callable[[], Tensor], tokens: int, places: int
    ) -> Callable[[], Tensor]:
        """Capture ``run`` after ``warm_up`` with inert inputs, which write to the spare state row only."""
        self.buffer.send_inert(tokens, places)
        return self._graphs.capture(run, warm_up)

    def _run_layers(self, tokens: int, tiling: Tiling, n_layers: int | None = None) -> Tensor:
        inputs = self.buffer.layer_inputs(tokens, tiling)
        return self._hidden[:tokens].copy_(self.packed.layers(inputs, tiling == "pieces", n_layers))

    def _choose(self, places: int, mode: str) -> Tensor:
        return self.packed.first_tokens(self.buffer.place_inputs(places), self._hidden, mode)
