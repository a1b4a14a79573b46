"""Measure how a large checkpoint loads: seconds, and the most memory of the host and of the GPU.

A sharded bf16 checkpoint of the model's shape with random weights is written to a temporary folder, loaded by
processes of their own, and removed. The record is DIR/MODEL/loading.json. Needs Linux.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rosellm.command_line import OneLineParser, command
from rosellm.errors import RoseError
from rosellm.lab.records.model_runs import short_name
from rosellm.lab.records.random_checkpoint import stored_tensors, write_checkpoint
from rosellm.models.arch import Arch
from rosellm.models.loading import resolve_device
from rosellm.models.model import Transformer
from rosellm.models.weights import dummy_model, dummy_shape, load_model
from rosellm.roseinfer.bench.record import check_writable, new_record, write_record

MODEL, DTYPE = "meta-llama/Llama-3.1-8B", torch.bfloat16
SHARD_BYTES = 5_000_000_000
EVERY_S = 0.002  # a look at the host's memory
STATUS = Path("/proc/self/status")


def loading_figures(model: str, device: torch.device, scratch: Path | None = None) -> dict[str, Any]:
    """Writes, loads and removes a checkpoint in ``scratch`` (None: the system's folder); bytes and seconds.

    ``uncached``: loaded after the system was asked to drop the files from its page cache. ``cached``: once
    more. ``dummy``: random weights made in place, without files. Raises ``RoseError``.
    """
    arch = dummy_shape(model)
    sizes = [shape.numel() * DTYPE.itemsize for _, shape in stored_tensors(arch)]
    figures: dict[str, Any] = {"weights_bytes": sum(sizes), "largest_tensor_bytes": max(sizes)}
    figures["angles_bytes"] = _angles_bytes(arch)
    with tempfile.TemporaryDirectory(prefix="rosellm-loading-", dir=scratch) as name:
        folder = Path(name)
        _check_room(folder, sum(sizes))
        start = time.perf_counter()
        shards = write_checkpoint(arch, folder, DTYPE, SHARD_BYTES, device)
        for shard in shards:
            drop_from_page_cache(shard)
        figures |= {"shards": len(shards), "write_s": time.perf_counter() - start}
        for way in ("uncached", "cached"):
            figures[way] = _in_new_process(partial(load_model, name, device, DTYPE), device)
    return figures | {"dummy": _in_new_process(partial(dummy_model, model, device, DTYPE), device)}


def _angles_bytes(arch: Arch) -> int:
    """Of the table of rotary angles, which a checkpoint has not."""
    return 0 if arch.rope is None else 4 * arch.n_positions * arch.head_dim


def _check_room(folder: Path, n_bytes: int) -> None:
    if not STATUS.is_file():
        raise RoseError(f"the host's memory is read from {STATUS}, which this system does not have")
    free = shutil.disk_usage(folder).free
    if free < 1.01 * n_bytes:
        raise RoseError(
            f"the checkpoint takes {n_bytes / 1e9:.1f} GB and {folder.parent} has {free / 1e9:.1f} GB free; "
            "name another folder with --scratch"
        )


def drop_from_page_cache(path: Path) -> None:
    """Once written to the disk, a file's pages may go; a file system in memory keeps them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _in_new_process(load: Callable[[], Transformer], device: torch.device) -> dict[str, float]:
    """So that nothing that was loaded before counts. Raises ``RoseError`` if the system kills it."""
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(measured, load, device).result()
    except BrokenProcessPool:
        raise RoseError("the process that loads the model was killed; is there memory for it?") from None


def measured(load: Callable[[], Transformer], device: torch.device) -> dict[str, float]:
    """Seconds of ``load``, and by how many bytes the process grew at most meanwhile.

    ``rss``: its pages in memory, files that it reads among them. ``anonymous``: its own, which the system
    cannot take back as it can the page cache's. ``gpu``: PyTorch's allocations, 0 on a CPU.
    """
    import transformers.modeling_rope_utils  # noqa: F401  (here: its time and memory do not count)

    on_gpu = device.type == "cuda"
    torch.zeros(1, device=device)  # the driver's own memory is there
    before, peak, done = _host_bytes(), _host_bytes(), threading.Event()

    def watch() -> None:
        while not done.is_set():
            for kind, n_bytes in _host_bytes().items():
                peak[kind] = max(peak[kind], n_bytes)
            done.wait(EVERY_S)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    model = load()
    if on_gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    del model
    grown = {f"{kind}_peak_bytes": peak[kind] - before[kind] for kind in peak}
    return {"seconds": seconds, **grown, "gpu_peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0}


def _host_bytes() -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    names = {"rss": "VmRSS", "anonymous": "RssAnon"}
    return {kind: int(lines[field].split()[0]) * 1024 for kind, field in names.items()}


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m rosellm.lab.records.loading_record", description=__doc__)
    add = parser.add_argument
    add("--model", default=MODEL, help="a known shape, or a folder with a config.json")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda if available")
    add("--scratch", type=Path, metavar="DIR", help="where the checkpoint is written; default: the system's")
    add("--output", type=Path, default=Path("build/records"), metavar="DIR", help="folder of the records")
    return parser


def _record_path(output: Path, model: str) -> Path:
    """Where the record goes; its folder is made. Raises ``RoseError`` for an unknown model, before that."""
    dummy_shape(model)
    folder = output / short_name(model)
    folder.mkdir(parents=True, exist_ok=True)
    return check_writable(folder / "loading.json")


@command
def main(argv: list[str] | None = None) -> None:
    """Measure, record, and say what was found."""
    arguments = _parser().parse_args(argv)
    device = resolve_device(arguments.device)
    if arguments.scratch is not None and not arguments.scratch.is_dir():
        raise RoseError(f"--scratch {arguments.scratch} is not a folder")
    path = _record_path(arguments.output, arguments.model)
    figures = loading_figures(arguments.model, device, arguments.scratch)
    write_record(path, new_record("loading", device, model=arguments.model, figures=figures))
    print(f"weights: {figures['weights_bytes'] / 1e9:.2f} GB, shards: {figures['shards']}")
    for way in ("uncached", "cached", "dummy"):
        one = figures[way]
        gb = ", ".join(
            f"{name} {one[f'{name}_peak_bytes'] / 1e9:.2f} GB" for name in ("anonymous", "rss", "gpu")
        )
        print(f"{way}: {one['seconds']:.1f} s, at most {gb}")


if __name__ == "__main__":
    sys.exit(main())
