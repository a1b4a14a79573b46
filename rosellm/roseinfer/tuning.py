"""Tune the GEMMs of one model's decode steps on this GPU.

Each candidate is timed in whole steps, captured in a graph: no weight is in the L2 cache when it is needed,
and norms and attention overlap with the GEMMs as they do in serving. A choice is kept in :func:`tuned.table`
if steps with and without it, in turns, show that it makes a step at least 1% shorter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm

import rosellm
from rosellm.atomic import write_text
from rosellm.errors import OptionError, describe
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels import ring, tuned
from rosellm.roseinfer.kernels.compile_ahead import compile_ahead
from rosellm.roseinfer.kernels.few_rows import FEW_ROWS, FewRowsShape, filled
from rosellm.roseinfer.kernels.tile_tables import best
from rosellm.roseinfer.kernels.tuned import Choice, Gemm, LayersKey
from rosellm.roseinfer.layers.fused import FastestLayers, Layers, QuantizedLayers
from rosellm.roseinfer.layers.products import ALL
from rosellm.roseinfer.steps.cuda_graph import Graphs
from rosellm.roseinfer.steps.worker import Worker
from rosellm.triton_or_none import cdiv, triton

CONTEXT, REPLAYS, TURNS, SHORTER = 64, 8, 5, 0.99
SIZES = [size << i for i in range(6) for size in (512, 768)]  # n and k whose tiles are candidates
MOST_HELD = 16  # chunks of a weight in registers
REQUIRED = "tuning needs one Hopper GPU, fp16 or bf16, the rung small_gemm or later, and deterministic=False"

LayersFor = FastestLayers | QuantizedLayers
Turns = dict[str, list[float]]  # µs per step in each turn, "before" and "after"
Found = list[dict[str, Any]]


def tune_or_load(step: object, model: Transformer, folder: Path | None = None) -> None:
    """Tune a model as :func:`tune` does, or read the choices that an earlier process has written.

    folder: where the choices are; None for ``rosellm/tiles`` in the user's cache folder.

    Raises ``OptionError`` as :func:`tune` does, or if the file cannot be read or written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = (folder or cache / "rosellm" / "tiles") / f"{tuned.gpu_name()}.json"
    shapes = " ".join(f"{gemm.n}x{gemm.k}" for gemm in gemms_of(model, 1))
    form = f" {model.quantization}" if model.quantization else ""
    versions = " ".join(f"{it.__name__} {it.__version__}" for it in (rosellm, torch, triton))
    name = f"{shapes}{form}, {_worker_of(step).n_rows} rows, {versions}"
    with _named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if (found := _read(path).get(name)) is not None:
            tuned.table().update(tuned.parsed(found["choices"]))
            return
    found = tune(step, model)
    with _named(path):
        write_text(path, json.dumps(_read(path) | {name: found}, indent=1))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise OptionError(f"cannot use the tuned choices in {path}: {describe(error)}") from error


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


@torch.inference_mode()
def tune(step: object, model: Transformer) -> dict[str, Any]:
    """Tune a model for 1, 2, 4 and so on rows, up to the most that ``step`` decodes together.

    Earlier choices for these shapes are dropped first. The new ones are in force from then on, also for
    prefills of as many tokens. No sequence may hold blocks of the cache. Returns, as data:

    choices: the choices, each with ``step_us``, the µs per step with and without it in each turn.
    steps: number of rows → µs per step before and after tuning, in each turn.

    Steps are without the choice of tokens.

    Raises ``OptionError`` unless the GEMMs of decode steps can be ``ring.ring_linear``.
    """
    worker = _worker_of(step)
    layers_for = cast(LayersFor, worker.layers_for)
    steps, choices, turns = _Steps(worker), Found(), {}
    numbers = [1 << i for i in range((worker.n_rows - 1).bit_length() + 1)]
    gemms = {rows: gemms_of(model, rows, layers_for) for rows in numbers}
    for rows in numbers:
        _forget(gemms[rows])
        if isinstance(layers_for, FastestLayers):
            _forget([LayersKey(rows, layers_for.layer_parameters)])
    tries = [(gemm, one) for rows in numbers for gemm in gemms[rows] for one in candidates(gemm)]
    compile_ahead([partial(steps.run_one_layer, layers_for, gemm, choice) for gemm, choice in tries])
    for rows in tqdm(numbers, "tune", unit=" numbers of rows", delay=1):
        before = steps.captured(layers_for(rows), rows)
        found = _tuned_gemms(steps, layers_for, gemms[rows])
        if rows > 1 and isinstance(layers_for, FastestLayers):
            found += _tuned_kind(steps, layers_for, rows)
        if layers_for(rows) is not ours(layers_for, rows):  # these GEMMs are not used
            found = [choice for choice in found if "kind" in choice]
            _forget(gemms[rows])
        choices += found
        turns[str(rows)] = in_turns(before, steps.captured(layers_for(rows), rows))
    return {"choices": choices, "steps": turns}


def _forget(keys: Sequence[Gemm | LayersKey]) -> None:
    for key in keys:
        tuned.table().pop(key, None)


def _worker_of(step: object) -> Worker:
    worker = getattr(step, "worker", None)
    layers_for = getattr(worker, "layers_for", None)
    with_ring = isinstance(layers_for, FastestLayers) and layers_for.with_ring
    if not (with_ring or isinstance(layers_for, QuantizedLayers)):
        raise OptionError(REQUIRED)
    return cast(Worker, worker)


def gemms_of(model: Transformer, rows: int, layers_for: LayersFor | None = None) -> list[Gemm]:
    """Return the GEMMs of a layer, or those that can be tuned in ``layers_for``, the largest weight first."""
    gemms = []
    for name in layers_for.tunable(rows) if isinstance(layers_for, QuantizedLayers) else ALL:
        n, k = getattr(model.blocks[0], name).weight.shape
        activation = model.config.mlp if name == "up" else "none"
        gemms.append(Gemm(rows, n, k, activation, model.quantization))
    return sorted(gemms, key=lambda gemm: -gemm.n * gemm.k)


def candidates(gemm: Gemm) -> list[Choice]:
    """Return the tiles that the rules choose for any shape, and the ring, each with several ranges of K.

    For quantised weights, return only the ring, with 64 and 128 weight rows per program.
    """
    rows, n, k, activation, form = gemm
    ranges = [parts for parts in (1, 2, 4, 8) if parts == 1 or activation == "none"]
    if form is not None:
        whole = [parts for parts in ranges if cdiv(k, ring.BLOCK_K) >= 2 * parts]
        return [Choice(parts, (m * ring.BLOCK_N,)) for parts in whole for m in (1, 2)]
    shapes = [(n, k) for n in SIZES for k in SIZES]
    if rows == 1:
        one_row = {FewRowsShape(*best("few_rows", rows=1, n=n, k=k, bits=16)) for n, k in shapes}
        held = {filled(tile, k) for tile in one_row if tile.block_k}
        return [Choice(1, tuple(tile)) for tile in sorted(held) if tile.held <= MOST_HELD]
    found = []
    for parts in ranges:
        in_ring = cdiv(k, ring.BLOCK_K) >= 2 * parts and parts * cdiv(n, ring.BLOCK_N) <= 2 * ring.NUM_SMS
        if rows <= 2 * ring.MOST_ROWS and k % 8 == 0 and n % 16 == 0 and in_ring:
            found.append(Choice(parts, None))
        split = {"parts": parts, "bits": 16}
        tiles = {best("some_rows", rows=rows, n=n, k=k, narrow=min(n, k), **split) for n, k in shapes}
        few = rows <= ring.MOST_ROWS  # split, only the ring is fast for so few
        fitting = (it for it in sorted(tiles) if k % (parts * it[2]) == 0 and (parts == 1 or not few))
        found += [Choice(parts, tile) for tile in fitting]
    return found


class _Steps:
    """Decode steps on rows that have cached ``CONTEXT`` tokens, without the choice of new ones."""

    def __init__(self, worker: Worker) -> None:
        self.worker, blocks = worker, worker.blocks
        self.state = DeviceState(worker.n_rows, worker.state.table.shape[1], worker.device)
        self.state.positions.fill_(min(CONTEXT, worker.longest - 1))
        ids = torch.arange(self.state.table.numel(), device=worker.device) % blocks.max_blocks_per_layer
        self.state.table.copy_(ids.view(self.state.table.shape))

    def run(self, layers: Layers, rows: int, n_layers: int | None = None) -> Tensor:
        rows, seen = min(rows, self.worker.n_rows), CONTEXT + 1
        state = self.state.first(rows)
        attend = self.worker.bind(state, self.worker.variant(rows, seen, seen))
        return layers(state.tokens, state.positions, attend, n_layers)

    def run_one_layer(self, layers_for: LayersFor, gemm: Gemm, choice: Choice) -> None:
        with trying(gemm, choice):
            self.run(ours(layers_for, gemm.rows), gemm.rows, 1)

    def captured(self, layers: Layers, rows: int) -> Callable[[], object]:
        self.run(layers, rows, 1)
        return Graphs().capture(partial(self.run, layers, rows), None)


def ours(layers_for: LayersFor, rows: int) -> Layers:
    """Return the layers whose GEMMs are tuned."""
    if isinstance(layers_for, QuantizedLayers):
        return layers_for(rows)
    return layers_for.variants["few" if rows == 1 else "some"]


@contextmanager
def trying(gemm: Gemm, choice: Choice) -> Iterator[None]:
    """Put a choice into force for the duration of the context."""
    table = tuned.table()
    before = table.get(gemm)
    table[gemm] = choice
    try:
        yield
    finally:
        if before is None:
            del table[gemm]
        else:
            table[gemm] = before


def step_us(replay: Callable[[], object]) -> float:
    """Return the µs per step of ``REPLAYS`` steps, after two."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(REPLAYS + 2):
        if i == 2:
            start.record()
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / REPLAYS


def in_turns(before: Callable[[], object], after: Callable[[], object]) -> Turns:
    """Return the µs per step of each turn, before and after."""
    turns: Turns = {"before": [], "after": []}
    for _ in range(TURNS):
        for us, replay in zip(turns.values(), (before, after), strict=True):
            us.append(step_us(replay))
    return turns


def is_shorter(turns: Turns) -> bool:
    return median(turns["after"]) <= SHORTER * median(turns["before"])


def _tuned_gemms(steps: _Steps, layers_for: LayersFor, gemms: list[Gemm]) -> Found:
    """Tune one GEMM after another, each with the choices made so far."""
    found: Found = []
    for gemm in gemms:
        layers = ours(layers_for, gemm.rows)
        now = steps.captured(layers, gemm.rows)
        best_us, chosen, replay = inf, None, now
        for choice in candidates(gemm):
            with suppress(triton.OutOfResources), trying(gemm, choice):
                tried = steps.captured(layers, gemm.rows)
                if (us := step_us(tried)) < best_us:
                    best_us, chosen, replay = us, choice, tried
        if chosen is not None and is_shorter(turns := in_turns(now, replay)):
            tuned.table()[gemm] = chosen
            found.append(gemm._asdict() | chosen._asdict() | {"step_us": turns})
    return found


def _tuned_kind(steps: _Steps, layers_for: FastestLayers, rows: int) -> Found:
    """Choose between fused norms, our GEMMs and the library's; return the choice if it is a new one."""
    parameters, now = layers_for.layer_parameters, layers_for(rows)
    kinds = [kind for kind in layers_for.variants if kind != "few" or rows <= FEW_ROWS]
    replays = {kind: steps.captured(layers_for.variants[kind], rows) for kind in kinds}
    times = {kind: step_us(replay) for kind, replay in replays.items()}
    kind = min(times, key=lambda one: times[one])
    turns = in_turns(steps.captured(now, rows), replays[kind])
    if layers_for.variants[kind] is now or not is_shorter(turns):
        return []
    tuned.table()[LayersKey(rows, parameters)] = kind
    return [{"rows": rows, "parameters": parameters, "kind": kind, "step_us": turns}]
