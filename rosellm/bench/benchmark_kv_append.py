"""Time the KV append of one layer for each variant.

On a GPU: device time per call, from replays of a CUDA graph of many calls, and wall time of eager calls.
Calls write different slots from different tensors each time, so that neither stays in the L2 cache. On a CPU:
wall time of the torch versions; Triton's interpreter is not timed. Every variant is first compared with the
specification bit for bit.

One line per batch size is printed as soon as it is measured: the baseline is index_put, "triton" the generic
append (on a CPU its torch version). The record has all variants.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rosellm.bench.options import add_device_options, add_record_option, command_parser, count, counts
from rosellm.bench.record import check_writable, new_record, write_record
from rosellm.command_line import command
from rosellm.models.loading import resolve_device, resolve_dtype
from rosellm.roseinfer.kernels.table import Kernels, choose_kernels
from rosellm.roseinfer.kv_append_triton import kv_append_bytes, kv_append_ref
from rosellm.roseinfer.steps.cuda_graph import Graphs
from rosellm.roseinfer.steps.worker import Clock

CALLS = {"cuda": 50, "cpu": 5}
ROTATED_BYTES = {"cuda": 128 << 20, "cpu": 4 << 20}
MOST_ROWS = 1 << 40


@dataclass(frozen=True)
class Shape:
    """The sizes of one layer's cache and of an append.

    batch: number of tokens to append, B.
    n_heads: number of key/value heads, H.
    head_dim: head size, D.
    block_size: tokens per block, BLOCK_SIZE.
    """

    batch: int
    n_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_moved(self) -> int:
        return kv_append_bytes(self.batch, self.n_heads, self.head_dim, self.dtype)


@dataclass(frozen=True)
class Operands:
    """Inputs and outputs of one append, which writes row b to slot ``pos`` of the block ``block_idx[b]``.

    batch_idx, block_idx, pos_tensor: ``[B]`` int32; ``pos_tensor`` holds ``pos`` for every row.
    """

    caches: dict[str, Tensor]  # k_cache_layer, v_cache_layer [N_BLOCKS = B, H, BLOCK_SIZE, D]
    news: dict[str, Tensor]  # key_new, value_new [B, H, D]
    batch_idx: Tensor
    block_idx: Tensor
    pos_tensor: Tensor
    pos: int

    def bind(self, variant: str, kernels: Kernels) -> Callable[[], None]:
        """Return a function without arguments that calls ``variant``; index tensors are made beforehand."""
        blocks = {"block_idx": self.block_idx}
        index = {"batch_idx": self.batch_idx, **blocks, "pos": self.pos_tensor}
        calls: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
            "index_put": (kv_append_ref, {name: tensor.long() for name, tensor in index.items()}),
            "generic": (kernels.kv_append, index),
            "full_batch": (kernels.kv_append_full_batch, blocks | {"pos": self.pos}),
            "identity_pos": (kernels.kv_append_identity_pos, blocks | {"pos": self.pos_tensor}),
        }
        append, own = calls[variant]
        return partial(append, **self.caches, **self.news, **own)


VARIANTS = ("index_put", "generic", "full_batch", "identity_pos")


def make_caches(shape: Shape) -> dict[str, Tensor]:
    """Return a layer's K and V caches, filled with NaN to mark slots that are never written."""
    sizes = shape.batch, shape.n_heads, shape.block_size, shape.head_dim
    empty = torch.full(sizes, torch.nan, dtype=shape.dtype, device=shape.device)
    return {"k_cache_layer": empty, "v_cache_layer": empty.clone()}


def make_operands(shape: Shape, n_sets: int, seed: int = 0) -> list[Operands]:
    """Return ``n_sets`` operand sets without common slots or inputs; BLOCK_SIZE sets share one cache."""
    device, generator = shape.device, torch.Generator(device=shape.device).manual_seed(seed)
    new = partial(torch.randn, shape.batch, shape.n_heads, shape.head_dim, dtype=shape.dtype, device=device)
    sets = []
    for i in range(n_sets):
        pos = i % shape.block_size
        if pos == 0:
            caches = make_caches(shape)
        news = {name: new(generator=generator) for name in ("key_new", "value_new")}
        rows = torch.arange(shape.batch, dtype=torch.int32, device=device)
        blocks = torch.randperm(shape.batch, dtype=torch.int32, device=device, generator=generator)
        sets.append(Operands(caches, news, rows, blocks, torch.full_like(rows, pos), pos))
    return sets


def check_variant(variant: str, operands: Operands, kernels: Kernels, shape: Shape) -> None:
    """Raise ``AssertionError`` unless ``variant`` writes exactly the bits of the specification."""
    found, wanted = make_caches(shape), make_caches(shape)
    replace(operands, caches=wanted).bind("index_put", kernels)()
    replace(operands, caches=found).bind(variant, kernels)()
    for name, cache in wanted.items():
        if not torch.equal(found[name].view(torch.uint8), cache.view(torch.uint8)):
            raise AssertionError(f"{variant} at batch {shape.batch}: {name} differs from the specification")


def seconds_per_call(
    calls: Sequence[Callable[[], object]], repeats: int, device: torch.device, on_device: bool = False
) -> list[float]:
    """Return seconds per call, one value per repeat of all calls, after one repeat that is not timed.

    on_device: if True, measure device time of replays of a CUDA graph of all calls; otherwise measure wall
        time of calls from Python until the device is idle.
    """

    def run() -> None:
        for call in calls:
            call()

    repeat, clocked = (Graphs().capture(run, calls[0]), device) if on_device else (run, torch.device("cpu"))
    times = []
    for _ in range(repeats + 1):
        start = Clock(clocked)
        repeat()
        if device.type == "cuda" and not on_device:
            torch.cuda.synchronize(device)
        end = Clock(clocked)
        end.wait()
        times.append(end.seconds_since(start) / len(calls))
    return times[1:]


def measure_shape(shape: Shape, kernels: Kernels, repeats: int) -> list[dict[str, Any]]:
    """Measure every variant at one shape; return one row of the record for each.

    Times are in seconds. Raises ``AssertionError`` if a variant differs from the specification.
    """
    device = shape.device
    sets = make_operands(shape, max(2, -(-ROTATED_BYTES[device.type] // shape.bytes_moved)))
    rows = []
    for variant in VARIANTS:
        check_variant(variant, sets[-1], kernels, shape)
        bound = [operands.bind(variant, kernels) for operands in sets]
        rotating = bound * -(-CALLS[device.type] // len(bound))
        times = {"wall": seconds_per_call(rotating, repeats, device)}
        if device.type == "cuda":
            times["device_rotating"] = seconds_per_call(rotating, repeats, device, on_device=True)
        medians = {way: float(np.median(seconds)) for way, seconds in times.items()}
        row = {"batch_size": shape.batch, "variant": variant, "bytes_moved": shape.bytes_moved}
        rows.append(row | {"repeats_s": times, "medians_s": medians})
    return rows


def measure(options: Namespace) -> dict[str, Any]:
    """Measure all batch sizes, print the results, and return the record."""
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    kernels = choose_kernels("auto", "fixed", device)
    print(f"KV append, {kernels.name} kernels, {device.type}, {dtype}")
    rows = []
    for batch in options.batch_sizes:
        shape = Shape(batch, options.num_heads, options.head_dim, options.block_size, dtype, device)
        of_batch = measure_shape(shape, kernels, options.repeats)
        print(gain_line(of_batch), flush=True)
        rows += of_batch
    facts = {
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "kernels": kernels.name,
    }
    return new_record("kv_append", device, **facts, rows=rows)


def gain_line(rows: list[dict[str, Any]]) -> str:
    """Format the generic append's speedup over ``index_put`` from the rows of one batch size."""
    way = "device_rotating" if "device_rotating" in rows[0]["medians_s"] else "wall"
    seconds = {row["variant"]: row["medians_s"][way] for row in rows}
    baseline, triton = seconds["index_put"], seconds["generic"]
    times = f"baseline {baseline * 1e6:.2f}us, triton {triton * 1e6:.2f}us"
    return f"B={rows[0]['batch_size']}: {times}, speedup {baseline / triton:.3f}x"


def parse_options(argv: list[str] | None = None) -> Namespace:
    """Parse this command's options; None reads the command line."""
    parser = command_parser("benchmark_kv_append", __doc__)
    add = parser.add_argument
    add("--batch-sizes", **counts((128, 256, 512, 1024, 2048), MOST_ROWS), help="tokens per call")
    add("--num-heads", **count(12), help="key and value heads")
    add("--head-dim", **count(64), help="elements per head")
    add("--block-size", **count(64), help="tokens per block")
    add("--repeats", **count(20), help="measurements of each figure; medians are reported")
    add_record_option(parser)
    add_device_options(parser)
    return parser.parse_args(argv)


@command
def main(argv: list[str] | None = None) -> None:
    """Parse the options, measure, and write the record if requested."""
    options = parse_options(argv)
    if options.json:
        check_writable(options.json)
    record = measure(options)
    if options.json:
        write_record(options.json, record)


if __name__ == "__main__":
    sys.exit(main())
