"""Test cases for the kernels of keys, values and positions: the KV append, attention, and its preparation.

Operands are laid out as in the engine: heads are slices of one fused projection, positions and tables are
columns of a device state, and some rows are inert where a kernel may meet such rows. Cache entries that must
not be read are NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rosellm.lab.trying.case import EPS, Case, Maker, Operands
from rosellm.lab.trying.guarded_memory import GUARD_ROWS, Draw, poisoned
from rosellm.models.rope import Rope, Rotary
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.attention_plan import Variant, make_plan_ref
from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import Tiles, tile_columns

WINDOW, SHORT = 6, 9  # tokens


# The KV append.


def _heads(case: Case, draw: Draw, rows: int, names: tuple[str, str, str]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of the first ``rows`` rows of a fused projection with more rows.

    names: of the parts that are operands, "" for the others.
    """
    h, kv = case.heads, case.kv_heads
    fused = draw.lay(draw.normal(rows + GUARD_ROWS, h + 2 * kv, case.head_dim), case.dtype)[:rows]
    q, k, v = fused.split((h, kv, kv), dim=1)
    for name, part in zip(names, (q, k, v), strict=True):
        if name:
            draw.name(name, part)
    return q, k, v


def _caches(case: Case, draw: Draw, blocks: int, held: Callable[[Tensor], None] | None = None) -> Operands:
    """Return a layer's caches ``[blocks, H_kv, BLOCK_SIZE, D]``: NaN except for what ``held`` fills in."""
    shape, caches = (blocks, case.kv_heads, case.block_size, case.head_dim), {}
    for name in ("k_cache_layer", "v_cache_layer"):
        values = poisoned(shape, case.dtype, torch.device("cpu"))
        if held is not None:
            held(values)
        caches[name] = draw.put(name, values, case.dtype)
    return caches


def _append(case: Case, draw: Draw, inert: bool) -> Operands:
    """Return operands for one token per row; index tensors continue past the batch with free blocks."""
    rows, all_rows = case.rows, case.rows + GUARD_ROWS
    _, key, value = _heads(case, draw, rows, ("", "key_new", "value_new"))
    blocks = draw.order(all_rows + 2)[:all_rows]
    if inert:
        blocks[1:rows:3] = -1
    block_idx = draw.name("block_idx", draw.lay(blocks, torch.int32)[:rows])
    pos = draw.name("pos", draw.lay(draw.whole(0, case.block_size, all_rows), torch.int32)[:rows])
    news = {"key_new": key, "value_new": value, "block_idx": block_idx, "pos": pos}
    return _caches(case, draw, all_rows + 2) | news


def _kv_append(case: Case, draw: Draw) -> Operands:
    made = _append(case, draw, inert=False)
    n = max(1, case.rows - case.option % 3)  # not all rows, in random order
    order = torch.cat((draw.order(case.rows), torch.zeros(GUARD_ROWS, dtype=torch.int64)))
    made["batch_idx"] = draw.name("batch_idx", draw.lay(order, torch.int32)[:n])
    return made | {"block_idx": made["block_idx"][:n], "pos": made["pos"][:n]}


def _kv_append_full_batch(case: Case, draw: Draw) -> Operands:
    return _append(case, draw, inert=False) | {"pos": int(draw.whole(0, case.block_size, 1))}


def _kv_append_identity_pos(case: Case, draw: Draw) -> Operands:
    return _append(case, draw, inert=True)


# Attention.


@dataclass
class _Held:
    """Rows' cached tokens in blocks of their own, in random order."""

    lengths: Tensor
    table: Tensor  # [B, W]
    n_blocks: int
    case: Case
    draw: Draw

    @classmethod
    def of(cls, case: Case, draw: Draw, lengths: Tensor, n_new: Tensor | int) -> _Held:
        """Build from the cached tokens of each row (``lengths``) and the tokens to add (``n_new``).

        Table entries beyond both are invalid block ids.
        """
        tokens = lengths.clamp_min(0) + n_new
        width = -(-int(tokens.max() + 1) // case.block_size)
        n_blocks = len(lengths) * width + 1
        table = draw.order(n_blocks)[: len(lengths) * width].view(len(lengths), width)
        column = torch.arange(width)
        table = torch.where(column * case.block_size < tokens[:, None], table, n_blocks + column % 4)
        return cls(lengths, table, n_blocks, case, draw)

    def caches(self) -> Operands:
        def fill(cache: Tensor) -> None:
            for blocks, length in zip(self.table, self.lengths.clamp_min(0).tolist(), strict=True):
                at = torch.arange(length)
                size = self.case.block_size
                values = self.draw.normal(length, self.case.kv_heads, self.case.head_dim)
                cache[blocks[at // size], :, at % size] = values.to(cache.dtype)

        return _caches(self.case, self.draw, self.n_blocks, fill)


def _contexts(case: Case, draw: Draw, least: int) -> Tensor:
    """Return short contexts per row, except for block boundaries and the case's long context.

    least: -1 to make some rows inert.
    """
    most = min(3 * case.block_size + 1, case.block_size + 9)
    lengths = draw.whole(0, min(most, SHORT), case.rows)
    edges = torch.tensor([0, case.block_size, case.block_size - 1, most - 1])[: case.rows]
    lengths[: len(edges)] = edges
    if case.cached:
        lengths[0] = case.cached
    if least < 0:
        lengths[4::3] = least
    return lengths


def _attended(case: Case, draw: Draw, least: int) -> tuple[Operands, Tensor, DeviceState]:
    """Return the operands of both decode attentions, the cached tokens, and the state with the table."""
    lengths = _contexts(case, draw, least)
    held = _Held.of(case, draw, lengths, n_new=1 if least < 0 else 0)
    q, k, v = _heads(case, draw, case.rows, ("q", "k_new", "v_new"))
    made = held.caches() | {"q": q, "k_new": k, "v_new": v, "scale": case.head_dim**-0.5}
    state = draw.state(case.rows, held.table.shape[1])
    state.table.copy_(held.table)
    return made | {"block_table": state.table, "window": _window(case)}, lengths, state


def _window(case: Case) -> int | None:
    """Return most of a long context as the window, for every fourth option."""
    return max(WINDOW, case.cached * 3 // 4) if case.option % 4 == 2 else None


def _paged_attention_decode(case: Case, draw: Draw) -> Operands:
    made, lengths, _ = _attended(case, draw, least=0)
    return made | {"context_lens": draw.put("context_lens", lengths, torch.int32)}


def _append_and_attend(case: Case, draw: Draw) -> Operands:
    made, lengths, state = _attended(case, draw, least=-1)
    state.positions.copy_(lengths)
    pieces, stages = 0 if case.option % 2 else 2 * case.rows, 1 if case.heads == case.kv_heads else 2
    plan = make_plan_ref(state.positions, Variant(16, pieces, 1, stages), made["window"])
    if plan.starts is not None and plan.covers is not None:
        starts = draw.put("plan.starts", plan.starts.cpu(), torch.int32)
        plan = plan._replace(starts=starts, covers=draw.put("plan.covers", plan.covers.cpu(), torch.int32))
    return made | {"positions": state.positions, "rotary": _rotary(case, draw), "plan": plan}


def _rotary(case: Case, draw: Draw, at_least: int = 0) -> Rotary | None:
    """Return None, angles, or angles and norms, by the case's option."""
    kind = max(case.option % 3, at_least)
    if kind == 0:
        return None
    angles = Rope().table(case.positions, case.head_dim, torch.device("cpu"))
    cos_sin = draw.put("rotary.cos_sin", angles, torch.float32)
    norms: list[Tensor | None] = [None, None]
    if kind == 2:
        names = "rotary.q_norm", "rotary.k_norm"
        norms = [draw.put(name, 1 + 0.3 * draw.normal(case.head_dim), case.dtype) for name in names]
    return Rotary(cos_sin, norms[0], norms[1], EPS)


def _prefill_attention(case: Case, draw: Draw) -> Operands:
    counts = draw.whole(1, 20, min(case.rows, 4))
    starts = draw.whole(0, 2 * case.block_size + 2, len(counts))
    starts[0], counts[-1] = case.cached, BLOCK_M + 3 if case.option % 3 == 1 else 2
    held = _Held.of(case, draw, starts, counts)
    q, k, v = _heads(case, draw, int(counts.sum()), ("q", "k_new", "v_new"))
    made = held.caches() | {"q": q, "k_new": k, "v_new": v}
    pieces = None if case.option % 2 else [3, 1, 2, 1][: len(counts)]
    columns = torch.from_numpy(tile_columns(starts.numpy(), counts.numpy(), None, BLOCK_M, pieces))
    made["block_table"] = draw.put("block_table", held.table, torch.int32)
    made["tiles"] = Tiles(draw.put("tiles", columns, torch.int32), BLOCK_M, pieces is not None)
    return made | {"scale": case.head_dim**-0.5, "window": _window(case)}


def _plan_attention(case: Case, draw: Draw) -> Operands:
    lengths = _contexts(case, draw, least=-1)
    state = draw.state(case.rows, 3)
    state.positions.copy_(lengths)
    variant = Variant(16, pieces=(7, 2 * case.rows, 0)[case.option % 3], warps=1)
    return {"positions": state.positions, "variant": variant, "window": _window(case)}


def _position_heads(case: Case, draw: Draw) -> Operands:
    rotary = _rotary(case, draw, at_least=1)
    state = draw.state(case.rows, 3)
    positions = draw.whole(-1, case.positions, case.rows)
    positions[0] = case.positions - 1
    state.positions.copy_(positions)
    q, k, _ = _heads(case, draw, case.rows, ("q", "k", "v"))
    return {"q": q, "k": k, "positions": state.positions, "rotary": rotary}


CACHED: dict[str, Maker] = {
    "paged_attention_decode": _paged_attention_decode,
    "kv_append": _kv_append,
    "kv_append_full_batch": _kv_append_full_batch,
    "kv_append_identity_pos": _kv_append_identity_pos,
    "prefill_attention": _prefill_attention,
    "position_heads": _position_heads,
    "append_and_attend": _append_and_attend,
    "plan_attention": _plan_attention,
}
