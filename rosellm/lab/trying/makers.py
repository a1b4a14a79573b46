"""Make the operands of a trial call: for each kernel, the function with the kernel's name.

Operands are laid out as in the engine: heads are slices of one fused projection, and positions and block
tables are columns of a device state. Where the engine passes inert rows (padding without a sequence, at
position or block -1), some rows are inert. Cache entries that must not be read are NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rosellm.lab.trying.case import EPS, Case, Operands
from rosellm.lab.trying.guarded_memory import GUARD_ROWS, Draw, poisoned
from rosellm.models.rope import Rope, Rotary
from rosellm.roseinfer.cache.device_state import ROUNDS, DeviceState
from rosellm.roseinfer.kernels.attention_plan import Variant, make_plan_ref
from rosellm.roseinfer.kernels.few_rows import FEW_ROWS, NormPrologue
from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import Tiles, tile_columns

WINDOW, SHORT, VOCABULARY = 6, 9, 70  # tokens
MOST_PLACES = 1 << 20  # maximum number of elements of a position table
ACTIVATIONS = "none", "gelu", "swiglu"


def _given(draw: Draw, dtype: torch.dtype, **values: Tensor | None) -> Operands:
    """Place each tensor between guards, and return the operands by name; None stays None."""
    return {name: None if one is None else draw.put(name, one, dtype) for name, one in values.items()}


# Keys and values.


def _heads(case: Case, draw: Draw, rows: int, *names: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of the first ``rows`` rows of a fused projection with more rows.

    names: the operands' names for q, k and v; "" if the kernel does not take that part.
    """
    h, kv = case.heads, case.kv_heads
    fused = draw.lay(draw.normal(rows + GUARD_ROWS, h + 2 * kv, case.head_dim), case.dtype)[:rows]
    q, k, v = fused.split((h, kv, kv), dim=1)
    for name, part in zip(names, (q, k, v), strict=True):
        if name:
            draw.name(name, part)
    return q, k, v


def _caches(case: Case, draw: Draw, blocks: int, fill: Callable[[Tensor], None]) -> Operands:
    """Return a layer's K and V caches ``[blocks, H_kv, BLOCK_SIZE, D]``.

    fill: writes the entries that may be read; all other entries are NaN.
    """
    shape = (blocks, case.kv_heads, case.block_size, case.head_dim)
    caches = {name: poisoned(shape, case.dtype, torch.device("cpu")) for name in ("k", "v")}
    for values in caches.values():
        fill(values)
    return _given(draw, case.dtype, k_cache_layer=caches["k"], v_cache_layer=caches["v"])


def kv_append_identity_pos(case: Case, draw: Draw, inert: bool = True) -> Operands:
    """Return an append of one token per row; beyond the batch, the index tensors continue with free blocks.

    inert: whether every third row is inert.
    """
    rows, all_rows = case.rows, case.rows + GUARD_ROWS
    _, key, value = _heads(case, draw, rows, "", "key_new", "value_new")
    blocks = draw.order(all_rows + 2)[:all_rows]
    if inert:
        blocks[1:rows:3] = -1
    block_idx = draw.name("block_idx", draw.lay(blocks, torch.int32)[:rows])
    pos = draw.name("pos", draw.lay(draw.whole(0, case.block_size, all_rows), torch.int32)[:rows])
    news = {"key_new": key, "value_new": value, "block_idx": block_idx, "pos": pos}
    return _caches(case, draw, all_rows + 2, lambda cache: None) | news


def kv_append(case: Case, draw: Draw) -> Operands:
    made = kv_append_identity_pos(case, draw, inert=False)
    n = max(1, case.rows - case.option % 3)  # some of the rows, in random order
    order = torch.cat((draw.order(case.rows), torch.zeros(GUARD_ROWS, dtype=torch.int64)))
    made["batch_idx"] = draw.name("batch_idx", draw.lay(order, torch.int32)[:n])
    return made | {"block_idx": made["block_idx"][:n], "pos": made["pos"][:n]}


def kv_append_full_batch(case: Case, draw: Draw) -> Operands:
    pos = {"pos": int(draw.whole(0, case.block_size, 1))}
    return kv_append_identity_pos(case, draw, inert=False) | pos


# Attention.


def _cached(case: Case, draw: Draw, lengths: Tensor, n_new: Tensor | int) -> tuple[Tensor, Operands]:
    """Return the block table ``[B, W]`` and the caches of rows whose blocks are in random order.

    lengths: number of cached tokens of each row.
    n_new: number of tokens to add to each row.

    Table entries that these tokens do not need are invalid block ids.
    """
    lengths, size = lengths.clamp_min(0), case.block_size
    tokens = lengths + n_new
    width = -(-int(tokens.max() + 1) // size)
    n_blocks, column = len(lengths) * width + 1, torch.arange(width)
    table = draw.order(n_blocks)[: len(lengths) * width].view(len(lengths), width)
    table = torch.where(column * size < tokens[:, None], table, n_blocks + column % 4)

    def fill(cache: Tensor) -> None:
        for blocks, length in zip(table, lengths.tolist(), strict=True):
            at = torch.arange(length)
            values = draw.normal(length, case.kv_heads, case.head_dim)
            cache[blocks[at // size], :, at % size] = values.to(cache.dtype)

    return table, _caches(case, draw, n_blocks, fill)


def _contexts(case: Case, draw: Draw, least: int) -> Tensor:
    """Return the number of cached tokens of each row: some at block boundaries, most of them short.

    least: -1 to make some rows inert, else 0.
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
    """Return the operands that both decode attentions take, the cached tokens of each row, and the state.

    least: -1 if the kernel also appends the new token and may meet inert rows, else 0.
    """
    lengths = _contexts(case, draw, least)
    table, caches = _cached(case, draw, lengths, n_new=-least)
    q, k, v = _heads(case, draw, case.rows, "q", "k_new", "v_new")
    state = draw.state(case.rows, table.shape[1])
    state.table.copy_(table)
    made = {"q": q, "k_new": k, "v_new": v, "scale": case.head_dim**-0.5, "block_table": state.table}
    return caches | made | {"window": _window(case)}, lengths, state


def _window(case: Case) -> int | None:
    """Return a window, three quarters of a long context, for every fourth option; else None."""
    return max(WINDOW, case.cached * 3 // 4) if case.option % 4 == 2 else None


def paged_attention_decode(case: Case, draw: Draw) -> Operands:
    made, lengths, _ = _attended(case, draw, least=0)
    return made | _given(draw, torch.int32, context_lens=lengths)


def append_and_attend(case: Case, draw: Draw) -> Operands:
    made, lengths, state = _attended(case, draw, least=-1)
    state.positions.copy_(lengths)
    pieces, stages = 0 if case.option % 2 else 2 * case.rows, 1 if case.heads == case.kv_heads else 2
    plan = make_plan_ref(state.positions, Variant(16, pieces, 1, stages), made["window"])
    if plan.starts is not None and plan.covers is not None:
        starts = draw.put("plan.starts", plan.starts.cpu(), torch.int32)
        plan = plan._replace(starts=starts, covers=draw.put("plan.covers", plan.covers.cpu(), torch.int32))
    return made | {"positions": state.positions, "rotary": _rotary(case, draw, case.option % 3), "plan": plan}


def _rotary(case: Case, draw: Draw, kind: int) -> Rotary | None:
    """Return no rotary embedding (kind 0), one without norms (kind 1), or one with norms of q and k (2)."""
    if kind == 0:
        return None
    angles = Rope().table(case.positions, case.head_dim, torch.device("cpu"))
    cos_sin = draw.put("rotary.cos_sin", angles, torch.float32)
    if kind == 1:
        return Rotary(cos_sin, None, None, EPS)
    names = "rotary.q_norm", "rotary.k_norm"
    q_norm, k_norm = (draw.put(name, 1 + 0.3 * draw.normal(case.head_dim), case.dtype) for name in names)
    return Rotary(cos_sin, q_norm, k_norm, EPS)


def prefill_attention(case: Case, draw: Draw) -> Operands:
    counts = draw.whole(1, 20, min(case.rows, 4))
    starts = draw.whole(0, 2 * case.block_size + 2, len(counts))
    starts[0], counts[-1] = case.cached, BLOCK_M + 3 if case.option % 3 == 1 else 2
    table, made = _cached(case, draw, starts, counts)
    q, k, v = _heads(case, draw, int(counts.sum()), "q", "k_new", "v_new")
    pieces = None if case.option % 2 else [3, 1, 2, 1][: len(counts)]
    columns = torch.tensor(tile_columns(starts.numpy(), counts.numpy(), None, BLOCK_M, pieces))
    made |= {"q": q, "k_new": k, "v_new": v} | _given(draw, torch.int32, block_table=table)
    tiles = Tiles(draw.put("tiles", columns, torch.int32), BLOCK_M, pieces is not None)
    return made | {"tiles": tiles, "scale": case.head_dim**-0.5, "window": _window(case)}


def plan_attention(case: Case, draw: Draw) -> Operands:
    state = draw.state(case.rows, 3)
    state.positions.copy_(_contexts(case, draw, least=-1))
    variant = Variant(16, pieces=(7, 2 * case.rows, 0)[case.option % 3], warps=1)
    return {"positions": state.positions, "variant": variant, "window": _window(case)}


def position_heads(case: Case, draw: Draw) -> Operands:
    rotary = _rotary(case, draw, max(1, case.option % 3))
    state = draw.state(case.rows, 3)
    state.positions.copy_(draw.whole(-1, case.positions, case.rows))
    state.positions[0] = case.positions - 1
    q, k, _ = _heads(case, draw, case.rows, "q", "k", "v")
    return {"q": q, "k": k, "positions": state.positions, "rotary": rotary}


# Between the GEMMs.


def embed(case: Case, draw: Draw) -> Operands:
    """Return operands in which the first row holds the last token of the vocabulary at the last position."""
    state, words = draw.state(case.rows, 3), max(VOCABULARY, case.outputs)
    places = min(case.positions, MOST_PLACES // case.width)
    for column, low, n in ((state.tokens, 0, words), (state.positions, -1, places)):
        column.copy_(draw.whole(low, n, case.rows))
        column[0] = n - 1
    tokens = draw.normal(words, case.width)
    table = draw.normal(places, case.width) if case.option % 2 == 0 else None
    ids = {"ids": state.tokens, "positions": state.positions}
    return ids | _given(draw, case.dtype, tokens=tokens, places=table)


def _normal_rows(draw: Draw, rows: int, width: int) -> Tensor:
    """Return random rows, each with another mean and scale."""
    return draw.normal(rows, width) * (0.5 + draw.normal(rows, 1).abs()) + draw.normal(rows, 1)


def add_norm(case: Case, draw: Draw) -> Operands:
    """Return operands with fp32 partial sums, one sum in x's dtype, or none; options omit bias or shift."""
    parts, width, dtype = (1, 4, 0)[case.option % 3], case.width, case.dtype
    x, delta = _normal_rows(draw, case.rows, width), draw.normal(parts, case.rows, width) if parts else None
    bias = draw.normal(width) if parts and case.option % 4 != 3 else None
    scale, shift = draw.normal(width), draw.normal(width) if case.option % 5 != 1 else None
    made = _given(draw, dtype, x=x) | _given(draw, torch.float32 if parts > 1 else dtype, delta=delta)
    return made | _given(draw, dtype, bias=bias, scale=scale, shift=shift) | {"eps": EPS}


def silu_mul(case: Case, draw: Draw) -> Operands:
    return _given(draw, case.dtype, x=draw.normal(case.rows, 2 * case.width))


# The GEMMs.


def _product(case: Case, draw: Draw, rows: int) -> Operands:
    weight = draw.normal(case.outputs, case.width) * case.width**-0.5
    x = _normal_rows(draw, rows, case.width)
    bias = draw.normal(case.outputs) if case.option % 3 != 2 else None
    return _given(draw, case.dtype, x=x, weight=weight, bias=bias)


def few_rows_linear(case: Case, draw: Draw) -> Operands:
    rows, activation = min(case.rows, FEW_ROWS), ACTIVATIONS[case.option // 2 % 3]
    made = _product(case, draw, rows) | {"activation": activation}
    made["norm"] = _prologue(case, draw, made["weight"]) if case.option % 2 else None
    width = case.outputs // 2 if activation == "swiglu" else case.outputs
    residual = draw.normal(rows, width) if case.option % 4 in (0, 3) else None
    return made | _given(draw, case.dtype, residual=residual)


def _prologue(case: Case, draw: Draw, weight: Tensor) -> NormPrologue:
    """Return an RMSNorm with gain 0.5 or, with ``norm.sums``, a LayerNorm with gain 2, by option."""
    scale = draw.put("norm.scale", 1 + 0.3 * draw.normal(case.width), case.dtype)
    if case.option % 4 == 1:
        return NormPrologue(scale, EPS, gain=0.5)
    sums = (weight.float() @ scale.float()).cpu()
    return NormPrologue(scale, EPS, draw.put("norm.sums", sums, torch.float32), gain=2.0)


def some_rows_linear(case: Case, draw: Draw) -> Operands:
    made, use = _product(case, draw, case.rows), case.option % 4
    if case.width % 256 == 0 and use == 3:
        return made | {"activation": "none", "parts": 4}
    return made | {"activation": (*ACTIVATIONS, "none")[use], "parts": 1}


# The end of a step.


def best_tokens(case: Case, draw: Draw) -> Operands:
    """Return hidden states that are each close to one row of the weight, so that no two logits nearly tie."""
    hidden, weight = draw.normal(case.rows, case.width), draw.normal(case.outputs, case.width)
    near = draw.whole(0, case.outputs, case.rows)
    near[0] = case.outputs - 1
    made = _given(draw, case.dtype, hidden=hidden + 4 * weight[near], weight=weight)
    state, sampled = draw.state(case.rows, 3), bool(case.option % 2)
    state.positions.copy_(draw.whole(0, case.positions, case.rows))
    state.seeds.copy_(draw.whole(0, 1 << 62, case.rows))
    if sampled:
        state.temperatures.copy_(draw.whole(0, 3, case.rows) * 0.5)
    settings = {"temperature": state.temperatures, "seeds": state.seeds, "positions": state.positions}
    return made | settings | {"sampled": sampled}


def gumbel_noise(case: Case, draw: Draw) -> Operands:
    state = draw.state(case.rows, 3)
    state.seeds.copy_(draw.whole(0, 1 << 62, case.rows))
    positions = draw.put("positions", draw.whole(0, case.positions, case.rows), torch.int32)
    return {"seeds": state.seeds, "positions": positions, "vocab_size": (case.width, 1025)[case.option % 2]}


def advance(case: Case, draw: Draw) -> Operands:
    """Return state rows that continue, reach their limit, stop, have no token, or are inert.

    Some values tie. With many tiles of a large vocabulary, the best value of some rows is in the last tile.
    """
    rows, tiles, tokens = case.rows + 2, (max(3, case.outputs // 8), 1, 9)[case.option % 3], 12
    state = draw.state(rows, 3, (5, 7) if case.option % 2 else ())
    spans = {"tokens": (0, tokens), "positions": (-1, 6), "limits": (3, 9), "stops": (-1, tokens)}
    for column, span in (spans | {"rounds": (0, ROUNDS)}).items():
        getattr(state, column).copy_(draw.whole(*span, rows))
    values: Tensor | None = None
    if case.option % 3 != 1:
        values = draw.whole(0, 4, case.rows, tiles).float()
        values[::4, 0], values[1::4, -1] = float("inf"), 4.0
    made = _given(draw, torch.float32, values=values)
    made |= _given(draw, torch.int32, indices=draw.whole(0, tokens, case.rows, tiles))
    return {"state": state} | _given(draw, torch.int64, slots=draw.order(rows)[: case.rows]) | made
