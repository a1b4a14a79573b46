"""Test cases for the kernels of rows: embeddings, norms, GEMMs, and the end of a step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rosellm.lab.trying.case import EPS, Case, Maker, Operands
from rosellm.lab.trying.guarded_memory import Draw
from rosellm.roseinfer.cache.device_state import ROUNDS
from rosellm.roseinfer.kernels.few_rows import FEW_ROWS, NormPrologue

VOCABULARY = 70
MOST_PLACES = 1 << 20  # elements of a position table


# Between the GEMMs.


def _embed(case: Case, draw: Draw) -> Operands:
    """Return operands in which the first row has the last token at the last position."""
    state, words = draw.state(case.rows, 3), max(VOCABULARY, case.outputs)
    places = min(case.positions, MOST_PLACES // case.width)
    for column, low, n in ((state.tokens, 0, words), (state.positions, -1, places)):
        column.copy_(draw.whole(low, n, case.rows))
        column[0] = n - 1
    tables = {"tokens": draw.put("tokens", draw.normal(words, case.width), case.dtype), "places": None}
    if case.option % 2 == 0:
        tables["places"] = draw.put("places", draw.normal(places, case.width), case.dtype)
    return {"ids": state.tokens, "positions": state.positions} | tables


def _normal_rows(case: Case, draw: Draw, width: int) -> Tensor:
    """Return rows of different mean and scale."""
    return draw.normal(case.rows, width) * (0.5 + draw.normal(case.rows, 1).abs()) + draw.normal(case.rows, 1)


def _add_norm(case: Case, draw: Draw) -> Operands:
    """Return fp32 partial sums, or a single one of x's dtype; options omit the sums, bias or shift."""
    parts, width = (1, 4, 0)[case.option % 3], case.width
    made: Operands = {"x": draw.put("x", _normal_rows(case, draw, width), case.dtype)}
    given = {
        "delta": parts,
        "bias": parts and case.option % 4 != 3,
        "scale": True,
        "shift": case.option % 5 != 1,
    }
    for name, there in given.items():
        shape = (parts, case.rows, width) if name == "delta" else (width,)
        dtype = torch.float32 if name == "delta" and parts > 1 else case.dtype
        made[name] = draw.put(name, draw.normal(*shape), dtype) if there else None
    return made | {"eps": EPS}


def _silu_mul(case: Case, draw: Draw) -> Operands:
    return {"x": draw.put("x", draw.normal(case.rows, 2 * case.width), case.dtype)}


# The GEMMs.


def _product(case: Case, draw: Draw, rows: int) -> Operands:
    few = replace(case, rows=rows)
    weight = draw.normal(case.outputs, case.width) * case.width**-0.5
    made = {"x": draw.put("x", _normal_rows(few, draw, case.width), case.dtype)}
    made["weight"] = draw.put("weight", weight, case.dtype)
    return made | {
        "bias": draw.put("bias", draw.normal(case.outputs), case.dtype) if case.option % 3 != 2 else None
    }


def _few_rows_linear(case: Case, draw: Draw) -> Operands:
    rows = min(case.rows, FEW_ROWS)
    made = _product(case, draw, rows)
    made["activation"] = ("none", "gelu", "swiglu")[case.option // 2 % 3]
    made["norm"] = _prologue(case, draw, made["weight"]) if case.option % 2 else None
    width = case.outputs // 2 if made["activation"] == "swiglu" else case.outputs
    there = case.option % 4 in (0, 3)
    made["residual"] = draw.put("residual", draw.normal(rows, width), case.dtype) if there else None
    return made


def _prologue(case: Case, draw: Draw, weight: Tensor) -> NormPrologue:
    """Return LayerNorm or RMSNorm by the case's option, each with a gain."""
    scale = draw.put("norm.scale", 1 + 0.3 * draw.normal(case.width), case.dtype)
    if case.option % 4 == 1:
        return NormPrologue(scale, EPS, gain=0.5)
    sums = (weight.float() @ scale.float()).cpu()
    return NormPrologue(scale, EPS, draw.put("norm.sums", sums, torch.float32), gain=2.0)


def _some_rows_linear(case: Case, draw: Draw) -> Operands:
    made, use = _product(case, draw, case.rows), case.option % 4
    if case.width % 256 == 0 and use == 3:
        return made | {"bias": None, "activation": "none", "parts": 4}
    return made | {"activation": ("none", "gelu", "swiglu", "none")[use], "parts": 1}


def _best_tokens(case: Case, draw: Draw) -> Operands:
    """Return hidden states each close to one weight row, so that no two logits nearly tie."""
    hidden, weight = draw.normal(case.rows, case.width), draw.normal(case.outputs, case.width)
    near = draw.whole(0, case.outputs, case.rows)
    near[0] = case.outputs - 1
    hidden = hidden + 4 * weight[near]
    made = {
        "hidden": draw.put("hidden", hidden, case.dtype),
        "weight": draw.put("weight", weight, case.dtype),
    }
    state, sampled = draw.state(case.rows, 3), bool(case.option % 2)
    state.positions.copy_(draw.whole(0, case.positions, case.rows))
    state.seeds.copy_(draw.whole(0, 1 << 62, case.rows))
    if sampled:
        state.temperatures.copy_(draw.whole(0, 3, case.rows) * 0.5)
    settings = {"temperature": state.temperatures, "seeds": state.seeds, "positions": state.positions}
    return made | settings | {"sampled": sampled}


# Sampling, and the end of a step.


def _gumbel_noise(case: Case, draw: Draw) -> Operands:
    state = draw.state(case.rows, 3)
    state.seeds.copy_(draw.whole(0, 1 << 62, case.rows))
    positions = draw.put("positions", draw.whole(0, case.positions, case.rows), torch.int32)
    return {"seeds": state.seeds, "positions": positions, "vocab_size": (case.width, 1025)[case.option % 2]}


def _advance(case: Case, draw: Draw) -> Operands:
    """Return rows that continue, end by length, stop, or have no token, and inert ones; equal values tie.

    A large vocabulary has many tiles; for some rows the best is in the last one.
    """
    rows, tiles, tokens = case.rows + 2, (max(3, case.outputs // 8), 1, 9)[case.option % 3], 12
    state = draw.state(rows, 3, (5, 7) if case.option % 2 else ())
    columns = (
        (state.tokens, 0, tokens),
        (state.positions, -1, 6),
        (state.limits, 3, 9),
        (state.stops, -1, tokens),
    )
    for column, low, high in (*columns, (state.rounds, 0, ROUNDS)):
        column.copy_(draw.whole(low, high, rows))
    values: Tensor | None = None
    if case.option % 3 != 1:
        drawn = draw.whole(0, 4, case.rows, tiles).float()
        drawn[::4, 0], drawn[1::4, -1] = float("inf"), 4.0
        values = draw.put("values", drawn, torch.float32)
    indices = draw.put("indices", draw.whole(0, tokens, case.rows, tiles), torch.int32)
    slots = draw.put("slots", draw.order(rows)[: case.rows], torch.int64)
    return {"state": state, "slots": slots, "values": values, "indices": indices}


ROWS: dict[str, Maker] = {
    "gumbel_noise": _gumbel_noise,
    "embed": _embed,
    "add_norm": _add_norm,
    "silu_mul": _silu_mul,
    "few_rows_linear": _few_rows_linear,
    "some_rows_linear": _some_rows_linear,
    "best_tokens": _best_tokens,
    "advance": _advance,
}
