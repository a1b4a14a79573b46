"""Which rows and columns of a model's weights one rank has (tensor parallelism: Shoeybi et al. 2019).

The joined query/key/value and gate/up projections, and the head, are cut by rows, that is by their outputs;
``out`` and ``down`` by columns, so that their products are partial sums over the ranks. All else is whole on
every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rosellm.errors import OptionError
from rosellm.models.arch import Arch

ALIGNMENT = 64  # of the vocabulary, in rows: the head's product needs aligned stores


@dataclass(frozen=True)
class Part:
    """What rank ``rank`` of ``size`` has; the default is the whole."""

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
        """The shape of this part: its heads and its share of the MLP; its head has only :meth:`words`."""
        if self.size == 1:
            return whole
        n_kv_heads = max(1, whole.n_kv_heads // self.size)
        return replace(
            whole, n_heads=whole.n_heads // self.size, n_kv_heads=n_kv_heads, d_ff=whole.d_ff // self.size
        )

    def share(self, whole: Arch) -> int:
        """Words of a rank, the last of which may have fewer: a multiple of ``ALIGNMENT``, if it is cut."""
        if self.size == 1:
            return whole.vocab_size
        return -(-whole.vocab_size // (self.size * ALIGNMENT)) * ALIGNMENT

    def words(self, whole: Arch) -> range:
        """The words whose logits this part gives."""
        share = self.share(whole)
        return range(self.rank * share, min((self.rank + 1) * share, whole.vocab_size))

    def pieces(self, name: str, whole: Arch, n_rows: int) -> list[Piece]:
        """What a parameter's rows consist of, in order; ``n_rows``: of the whole parameter."""
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
        """Which columns of a parameter this part has."""
        by_columns = name.endswith(("out.weight", "down.weight"))
        return Piece.share_of(n_columns, self).kept if by_columns else range(n_columns)

    def cut(self, name: str, value: Tensor, pieces: list[Piece]) -> Tensor:
        """Return this part of a whole parameter, or of those ``pieces`` of it that ``value`` holds."""
        columns = self.columns(name, value.shape[-1])
        stacked = value.split([piece.n_rows for piece in pieces])
        kept = [rows[piece.kept.start : piece.kept.stop] for piece, rows in zip(pieces, stacked, strict=True)]
        rows = kept[0] if len(kept) == 1 else torch.cat(kept)
        return rows if rows.dim() == 1 else rows[:, columns.start : columns.stop]

    def _kv_heads(self, whole: Arch) -> range:
        """Each key/value head belongs to one rank, or to several if there are fewer heads than ranks."""
        first = self.rank * whole.n_kv_heads // self.size
        return range(first, first + max(1, whole.n_kv_heads // self.size))


@dataclass(frozen=True)
class Piece:
    """Rows that are cut alike: the queries of a joined projection, say; kept: this part's."""

    n_rows: int
    kept: range

    @classmethod
    def share_of(cls, n: int, part: Part) -> Piece:
        """An equal share of ``n`` rows."""
        each = n // part.size
        return cls(n, range(part.rank * each, (part.rank + 1) * each))


WHOLE = Part()
