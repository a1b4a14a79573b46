"""The rows and columns of the weights that one rank holds (tensor parallelism: Shoeybi et al. 2019).

The joined query/key/value and gate/up projections, and the head, are cut by rows, which are their outputs.
``out`` and ``down`` are cut by columns, which are their inputs, so each rank computes a partial sum. Every
rank holds the whole of each remaining weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rosellm.errors import OptionError
from rosellm.models.arch import Arch

ALIGNMENT = 64  # rows of the vocabulary: the head's GEMM needs aligned stores


@dataclass(frozen=True)
class Part:
    """The part of the weights that rank ``rank`` of ``size`` ranks holds; the default is the whole model."""

    rank: int = 0
    size: int = 1

    def check(self, whole: Arch) -> None:
        """Raise ``OptionError`` if the model cannot be cut into ``size`` parts."""
        for what, n in (("attention heads", whole.n_heads), ("intermediate size", whole.d_ff)):
            if n % self.size:
                raise OptionError(f"tensor_parallel_size {self.size} does not divide the model's {n} {what}")
        n = whole.n_kv_heads
        if n % self.size and self.size % n:
            raise OptionError(
                f"tensor_parallel_size {self.size} neither divides the model's {n} key/value heads "
                "nor is a multiple of them"
            )
        if (self.size - 1) * self.share(whole) >= whole.vocab_size:
            raise OptionError(
                f"tensor_parallel_size {self.size} is too large: the vocabulary of {whole.vocab_size} is cut "
                f"into multiples of {ALIGNMENT}, and a rank would have no tokens"
            )

    def arch(self, whole: Arch) -> Arch:
        """Return the ``Arch`` of this part, with its own heads and its share of the MLP."""
        if self.size == 1:
            return whole
        n_kv_heads = max(1, whole.n_kv_heads // self.size)
        return replace(
            whole, n_heads=whole.n_heads // self.size, n_kv_heads=n_kv_heads, d_ff=whole.d_ff // self.size
        )

    def share(self, whole: Arch) -> int:
        """Return the number of token ids per rank; with several ranks, it is a multiple of ``ALIGNMENT``."""
        if self.size == 1:
            return whole.vocab_size
        return -(-whole.vocab_size // (self.size * ALIGNMENT)) * ALIGNMENT

    def words(self, whole: Arch) -> range:
        """Return the range of token ids whose logits this part computes."""
        share = self.share(whole)
        return range(self.rank * share, min((self.rank + 1) * share, whole.vocab_size))

    def pieces(self, name: str, whole: Arch, n_rows: int) -> list[Piece]:
        """Split a parameter's rows into consecutive pieces that are cut separately.

        name: name of the parameter in ``Transformer``.
        whole: the ``Arch`` of the whole model.
        n_rows: number of rows of the whole parameter.
        """
        projection = name.split(".")[-2]
        if projection == "qkv":
            d, n_kv = whole.head_dim, self._kv_heads(whole)
            query = Piece.share_of(whole.attention_width, self)
            return [query, *2 * [Piece(whole.n_kv_heads * d, range(n_kv.start * d, n_kv.stop * d))]]
        if projection == "up":
            n = n_rows // whole.d_ff
            return n * [Piece.share_of(whole.d_ff, self)]
        return [Piece(n_rows, self.words(whole) if projection == "lm_head" else range(n_rows))]

    def columns(self, name: str, n_columns: int) -> range:
        """Return the range of columns of a parameter that this part holds.

        name: name of the parameter in ``Transformer``.
        n_columns: number of columns of the whole parameter.
        """
        by_columns = name.endswith(("out.weight", "down.weight"))
        return Piece.share_of(n_columns, self).kept if by_columns else range(n_columns)

    def cut(self, name: str, value: Tensor, pieces: list[Piece]) -> Tensor:
        """Return this part of a parameter.

        name: name of the parameter in ``Transformer``.
        value: the whole parameter, or consecutive rows of it.
        pieces: the pieces of which ``value`` consists.
        """
        columns = self.columns(name, value.shape[-1])
        stacked = value.split([piece.n_rows for piece in pieces])
        kept = [rows[piece.kept.start : piece.kept.stop] for piece, rows in zip(pieces, stacked, strict=True)]
        rows = kept[0] if len(kept) == 1 else torch.cat(kept)
        return rows if rows.dim() == 1 else rows[:, columns.start : columns.stop]

    def _kv_heads(self, whole: Arch) -> range:
        """Return the range of key/value heads of this part; if ranks outnumber heads, ranks share heads."""
        first = self.rank * whole.n_kv_heads // self.size
        return range(first, first + max(1, whole.n_kv_heads // self.size))


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a parameter that are cut together, such as all query rows of ``qkv``.

    n_rows: number of rows of the piece in the whole model.
    kept: the range of these rows that this part holds.
    """

    n_rows: int
    kept: range

    @classmethod
    def share_of(cls, n: int, part: Part) -> Piece:
        """Return a piece of ``n`` rows that is divided equally among the ranks."""
        each = n // part.size
        return cls(n, range(part.rank * each, (part.rank + 1) * each))


WHOLE = Part()
