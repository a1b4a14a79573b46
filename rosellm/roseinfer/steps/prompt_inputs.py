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
from rosellm.roseinfer.kernels.wide_prefixes import Prefixes
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.planner import write_tables

A = TypeVar("A", Tensor, np.ndarray)
ALIGNED = 4  # 32-bit integers
# The attention programs of a layers' graph: enough for any number of prompts ("many"), for at most FEW
# prompts ("few"), or for pieces of tiles ("pieces"). Launching a program without a tile also takes time.
Tiling = Literal["many", "few", "pieces"]
FEW = 16


class Chunks(NamedTuple):
    """Chunks of prompts in packed order; chunks that complete their prompts come first.

    sequences: the sequence of each chunk.
    starts, counts: numbers of cached and of new tokens of each sequence.
    n_whole: how many chunks complete their prompts.
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
        """The sequences whose prompts are fully cached after these chunks."""
        return self.sequences[: self.n_whole]


class Shape(NamedTuple):
    """The sizes of a prefill's inputs.

    tokens: number of packed tokens.
    tiles: number of attention tiles.
    places: number of places, one per sequence or padding.
    row_words: number of 32-bit integers in a row of the device state.
    """

    tokens: int
    tiles: int
    places: int
    row_words: int

    @property
    def spans(self) -> list[slice]:
        """The slice of the buffer for each part of the inputs, in the order of ``PromptInputs``."""
        return _layout(self)[0]

    @property
    def place_words(self) -> int:
        """The number of 32-bit integers of all places; the tokens follow them in the buffer."""
        return self.spans[3].start

    @property
    def words(self) -> int:
        return _layout(self)[1]


@lru_cache(1024)
def _layout(shape: Shape) -> tuple[list[slice], int]:
    """Return the slices of the parts of a shape, and the total number of 32-bit integers."""
    n, tiles, places, row_words = shape
    sizes = 2 * places, 2 * places, row_words * places, n, n, COLUMNS * tiles
    *starts, end = accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)], end


@dataclass(frozen=True)
class PromptLayout:
    """The layout of the inputs of every captured prefill in one buffer.

    most_tokens, most_places: upper bounds on the tokens and places of a prefill.
    room: number of tiles, or pieces of tiles, in a prefill that splits tiles; 0 if none does.
    row_words: number of 32-bit integers in a row of the device state.

    The tokens begin at the same address in every prefill, right after its places. Only the part that a
    prefill uses is sent.
    """

    most_tokens: int
    most_places: int
    room: int
    row_words: int

    def shape(self, tokens: int, places: int) -> Shape:
        """Return the shape of a prefill, with enough tiles for its tokens in any number of prompts."""
        tiles = _most_tiles(tokens, self.most_places)
        return Shape(tokens, max(tiles, self.room), places, self.row_words)

    def span(self, shape: Shape) -> slice:
        """Return the slice of the buffer that a prefill of this shape uses."""
        start = self.largest.place_words - shape.place_words
        return slice(start, start + shape.words)

    @cached_property
    def largest(self) -> Shape:
        return self.shape(self.most_tokens, self.most_places)

    def table_rows(self, places: int) -> range:
        """Return the rows of the layers' block table that a prefill with ``places`` places uses."""
        return range(self.most_places - places, self.most_places)

    def n_tiles(self, tokens: int, tiling: Tiling) -> int:
        """Return the number of programs per head with which the attention kernel is launched."""
        return (
            self.room
            if tiling == "pieces"
            else _most_tiles(tokens, FEW if tiling == "few" else self.most_places)
        )


def _most_tiles(tokens: int, prompts: int) -> int:
    """Return the maximum number of tiles of ``tokens`` tokens in at most ``prompts`` prompts."""
    return min(tokens, prompts + tokens // BLOCK_M)


class PromptInputs(NamedTuple, Generic[A]):
    """The inputs of a packed prefill, as views of consecutive parts of one int32 buffer.

    A place is one sequence of the batch, or padding. Per place:

    last: int64 ``[B]``, the index among the packed tokens of the sequence's last token.
    slots: int64 ``[B]``, the sequence's row of the device state.
    rows: ``[B, row_words]``, the new contents of that row.

    Per token:

    ids, positions: ``[N]``.

    Per tile:

    columns: ``[COLUMNS, T]``.

    Not part of the buffer:

    prefixes: as in ``Tiles``.

    Padding is inert: tiles of no tokens, tokens at position -1, and places whose slot is the state's spare
    row. Each part starts at a multiple of 16 bytes, whatever the shape, because Triton recompiles a kernel
    when the alignment of a pointer changes.
    """

    last: A
    slots: A
    rows: A
    ids: A
    positions: A
    columns: A
    prefixes: Prefixes | None = None

    @classmethod
    def of(cls, buffer: A, shape: Shape) -> PromptInputs[A]:
        """Return views of ``buffer [shape.words]``, which must be contiguous and aligned to 16 bytes."""
        last, slots, rows, ids, positions, columns = (buffer[span] for span in shape.spans)
        wide = torch.int64 if isinstance(buffer, Tensor) else np.int64
        rows, columns = rows.reshape(shape.places, shape.row_words), columns.reshape(COLUMNS, shape.tiles)
        return cls(last.view(wide), slots.view(wide), rows, ids, positions, columns)


def inert_words(shape: Shape, spare: int) -> np.ndarray:
    """Return inputs ``[shape.words]`` int32 that are all padding; ``spare`` is its state row."""
    words = np.zeros(shape.words, np.int32)
    inputs = PromptInputs.of(words, shape)
    inputs.slots[:], inputs.rows[:, POSITION], inputs.positions[:] = spare, INERT, INERT
    return words


def fill_inputs(
    inputs: PromptInputs[np.ndarray],
    chunks: Chunks,
    columns: np.ndarray,
    slots: np.ndarray,
    fields: np.ndarray,
) -> None:
    """Write the chunks to ``inputs``, which consist of padding so far.

    columns: the result of ``prefill_tiles.tile_columns``.
    slots, fields: int64 ``[n]`` and int32 ``[n, FIELDS]``: indices and fields of the state rows of the n
        sequences that the chunks complete; the places of other sequences stay padding.
    """
    sequences, starts, counts, n_whole = chunks
    inputs.columns[:, : columns.shape[1]] = columns
    added = np.array(counts, np.int64)
    ends = added.cumsum()
    inputs.last[:n_whole] = ends[:n_whole] - 1
    inputs.slots[:n_whole], inputs.rows[:n_whole, :FIELDS] = slots, fields
    write_tables(inputs.rows[:, FIELDS:], sequences)
    ids: list[int] = []
    for sequence, start, count in zip(sequences, starts, counts, strict=True):
        ids += sequence.tokens[start : start + count]
    inputs.ids[: len(ids)] = ids
    shift = np.array(starts, np.int64) - ends + added  # from packed row to position
    inputs.positions[: len(ids)] = np.arange(len(ids)) + shift.repeat(added)
