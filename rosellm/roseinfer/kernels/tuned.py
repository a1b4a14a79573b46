"""GEMMs tuned for one model's shapes: which kernel, tiles and ranges of K were fastest in whole steps.

``tiles/<gpu>.json`` has the choices of the package; :mod:`tuning` finds those of other models. A shape
without a choice follows the rules of :mod:`tile_tables` and :mod:`ring`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from rosellm.triton_or_none import next_power_of_2

FOLDER = Path(__file__).parent / "tiles"


class Gemm(NamedTuple):
    """A GEMM of a decode step.

    rows: number of rows, rounded up to a power of two.
    n, k: shape of the weight.
    activation: "none", "gelu" or "swiglu".
    form: the format of a quantised weight, one of ``quantized.WEIGHT_FORMS``; None for 16 bits.
    """

    rows: int
    n: int
    k: int
    activation: str
    form: str | None = None


class LayersKey(NamedTuple):
    """The layers of a decode step. rows: as in :class:`Gemm`. parameters: number of parameters per layer."""

    rows: int
    parameters: int


class Choice(NamedTuple):
    """How to compute a GEMM.

    parts: number of ranges of K.
    tile: a ``few_rows.FewRowsShape`` for one row, otherwise a ``linear.Shape``; None for the ring. For a
        quantised weight, which only the ring multiplies, a tuple of the weight rows per program.
    """

    parts: int
    tile: Any


def choice_of(rows: int, n: int, k: int, activation: str, form: str | None = None) -> Choice | None:
    """Return the tuned choice or None. Arguments as in :class:`Gemm`, but rows may be any number."""
    return table().get(Gemm(next_power_of_2(rows), n, k, activation, form))


def kind_of(rows: int, parameters: int) -> Literal["few", "some", "library"] | None:
    """Return the tuned kind of layers, as in ``fused.fastest_products``, or None."""
    return table().get(LayersKey(next_power_of_2(rows), parameters))


@cache
def table() -> dict[Gemm | LayersKey, Any]:
    """Return the choices in force: those of the package for this GPU; callers may add to them."""
    path = FOLDER / f"{gpu_name()}.json"
    models = json.loads(path.read_text(encoding="utf-8"))["models"] if path.exists() else {}
    return {key: value for model in models.values() for key, value in parsed(model["choices"])}


def gpu_name() -> str:
    """Return the name of the first GPU in lower case, with "-" for other characters; "cpu" without one."""
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def parsed(choices: Iterable[dict[str, Any]]) -> Iterable[tuple[Gemm | LayersKey, Any]]:
    """Yield the key and the value of each choice, given as in ``tiles/<gpu>.json``."""
    for it in choices:
        if "kind" in it:
            yield LayersKey(it["rows"], it["parameters"]), it["kind"]
        else:
            tile = None if it["tile"] is None else tuple(it["tile"])
            gemm = Gemm(it["rows"], it["n"], it["k"], it["activation"], it.get("form"))
            yield gemm, Choice(it["parts"], tile)
