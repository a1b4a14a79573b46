"""The inputs of a packed prefill: one int32 buffer, sent in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rosellm.roseinfer.cache.device_state import FIELDS, INERT, POSITION
from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import COLUMNS
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.planner import write_tables

A = TypeVar("A", Tensor, np.ndarray)
ALIGNED = 4  # words
# What a graph of the layers has attention programs for: the tiles of any number of prompts, the tiles of at
# most FEW prompts, or pieces of tiles. A program without a tile does nothing, but takes its turn on the GPU.
Tiling = Literal["many", "few", "pieces"]
FEW = 16


class Chunks(NamedTuple):
    """Chunks of prompts in packed order, those that complete their prompts first.

    starts, counts: numbers of cached and new tokens of each; n_whole: how many complete their prompts.
    """

    sequences: list[Sequence]
    starts: list[int]
    counts: list[int]
    n_whole: int

    @classmethod
    def of(cls, sequences: list[Sequence], counts: list[int]) -> Chunks:
        pairs = list(zip(sequences, counts, strict=True))
        whole = [pair for pair in pairs if pair[0].completes_prefill(pair[1])]
        parts = [pair for pair in pairs if not pair[0].completes_prefill(pair[1])]
        ordered = whole + parts
        starts = [s.num_cached_tokens for s, _ in ordered]
        return cls([s for s, _ in ordered], starts, [n for _, n in ordered], len(whole))

    @property
    def whole(self) -> list[Sequence]:
        """The sequences that are fully cached after these chunks."""
        return self.sequences[: self.n_whole]


NO_CHUNKS = Chunks([], [], [], 0)
NO_SLOTS, NO_FIELDS = np.zeros(0, np.int64), np.zeros((0, FIELDS), np.int32)


class Shape(NamedTuple):
    """The sizes of a prefill's inputs: tokens, attention tiles, places (a sequence each), words per row."""

    tokens: int
    tiles: int
    places: int
    row_words: int

    @property
    def spans(self) -> list[slice]:
        """The slice of the buffer for each part of the inputs, in order."""
        return _layout(self)[0]

    @property
    def place_words(self) -> int:
        """The number of words of all places, which precede the tokens."""
        return self.spans[3].start

    @property
    def words(self) -> int:
        return _layout(self)[1]


@lru_cache(1024)
def _layout(shape: Shape) -> tuple[list[slice], int]:
    """Return the slices of a shape's parts, and the number of words in all."""
    n, tiles, places, row_words = shape
    sizes = 2 * places, 2 * places, row_words * places, n, n, COLUMNS * tiles
    *starts, end = accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)], end


@dataclass(frozen=True)
class PromptLayout:
    """The layout of every captured run's inputs in one buffer, for at most these tokens and places.

    The tokens of every run begin at the same address, right after its places; only the part that a run uses
    is sent. room: number of tiles, or pieces of tiles, in runs that split tiles; 0 if no run does.
    """

    most_tokens: int
    most_places: int
    room: int
    row_words: int

    def shape(self, tokens: int, places: int) -> Shape:
        """Return a run's shape, with as many tiles as its tokens can need for any number of prompts."""
        tiles = _most_tiles(tokens, self.most_places)
        return Shape(tokens, max(tiles, self.room), places, self.row_words)

    def span(self, shape: Shape) -> slice:
        """Return the slice of the buffer that a run of this shape uses."""
        start = self.largest.place_words - shape.place_words
        return slice(start, start + shape.words)

    @cached_property
    def largest(self) -> Shape:
        return self.shape(self.most_tokens, self.most_places)

    def table_rows(self, places: int) -> range:
        """Return the rows of the layers' block table that a run with ``places`` places uses."""
        return range(self.most_places - places, self.most_places)

    def n_tiles(self, tokens: int, tiling: Tiling) -> int:
        """Return the number of programs per head that the attention kernel is launched with."""
        return (
            self.room
            if tiling == "pieces"
            else _most_tiles(tokens, FEW if tiling == "few" else self.most_places)
        )


def _most_tiles(tokens: int, prompts: int) -> int:
    """Return the most tiles that ``tokens`` tokens of ``prompts`` prompts can have."""
    return min(tokens, prompts + tokens // BLOCK_M)


@dataclass(frozen=True)
class PromptInputs(Generic[A]):
    """The inputs of a packed prefill, as views of consecutive parts of one int32 buffer.

    For each place: last ``[B]`` int64, the index of its last token among the packed ones; slots ``[B]``
    int64, its row of the device state; rows ``[B, FIELDS + W]``, the new contents of that row. Then ids and
    positions ``[N]``, and columns ``[COLUMNS, T]`` of the attention's tiles. Padding is inert: tiles of no
    rows, positions of −1, and places whose slot is the state's spare row. Each part starts at a multiple of
    16 bytes, whatever the shape: Triton recompiles a kernel for pointers that are aligned otherwise.
    """

    last: A
    slots: A
    rows: A
    ids: A
    positions: A
    columns: A

    @classmethod
    def of(cls, buffer: A, shape: Shape) -> PromptInputs[A]:
        """Return views of ``buffer [shape.words]``, which is contiguous and aligned to 16 bytes."""
        last, slots, rows, ids, positions, columns = (buffer[span] for span in shape.spans)
        wide = torch.int64 if isinstance(buffer, Tensor) else np.int64
        rows, columns = rows.reshape(shape.places, shape.row_words), columns.reshape(COLUMNS, shape.tiles)
        return cls(last.view(wide), slots.view(wide), rows, ids, positions, columns)


def fill_inputs(
    inputs: PromptInputs[np.ndarray],
    chunks: Chunks,
    columns: np.ndarray,
    slots: np.ndarray,
    fields: np.ndarray,
    spare: int,
) -> None:
    """Fill every part of ``inputs``, including the padding.

    columns: the result of ``prefill_tiles.tile_columns``. slots ``[n]``, fields ``[n, FIELDS]``: the state
    rows of the chunks that complete their prompts. spare: the state row of places without a first token.
    """
    _fill_tokens(inputs, chunks)
    inputs.columns[:, : columns.shape[1]] = columns
    inputs.columns[:, columns.shape[1] :] = 0
    n = chunks.n_whole
    inputs.last[:n] = np.array(chunks.counts[:n], np.int64).cumsum() - 1
    inputs.slots[:n], inputs.rows[:n, :FIELDS] = slots, fields
    inputs.last[n:], inputs.slots[n:], inputs.rows[n:, :FIELDS] = 0, spare, 0
    inputs.rows[n:, POSITION] = INERT
    write_tables(inputs.rows[:, FIELDS:], chunks.sequences)


def _fill_tokens(inputs: PromptInputs[np.ndarray], chunks: Chunks) -> None:
    sequences, starts, counts, _ = chunks
    n, added = sum(counts), np.array(counts, np.int64)
    ids: list[int] = []
    for sequence, start, count in zip(sequences, starts, counts, strict=True):
        ids += sequence.tokens[start : start + count]
    inputs.ids[:n], inputs.ids[n:] = ids, 0
    shift = np.array(starts, np.int64) - added.cumsum() + added  # from packed row to position
    inputs.positions[:n] = np.arange(n) + shift.repeat(added)
    inputs.positions[n:] = INERT
