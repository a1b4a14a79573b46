"""Sharded safetensors checkpoints of a known shape, with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from rosellm.atomic import write_text
from rosellm.models.arch import Arch
from rosellm.models.families.table import write_arch
from rosellm.models.model import Transformer
from rosellm.models.weights import Place, dtype_name, places

STD = 0.02
INDEX = "model.safetensors.index.json"


def stored_tensors(arch: Arch) -> list[tuple[str, torch.Size]]:
    """Name and shape of every tensor of a checkpoint; a tied head is left out."""
    with torch.device("meta"):
        shapes = Transformer(arch)
    return [(place.name, _shape(place)) for place in places(shapes)]


def _shape(place: Place) -> torch.Size:
    return place.stored(place.rows).shape


def write_checkpoint(
    arch: Arch, folder: Path, dtype: torch.dtype, shard_bytes: int, device: torch.device
) -> list[Path]:
    """``config.json``, the index, and shards of at most ``shard_bytes`` unless one tensor is larger.

    Values are normal, drawn on ``device``, one shard in host memory at a time. Returns the shards.
    """
    made = torch.Generator(device).manual_seed(0)
    where: dict[str, str] = {}
    shards = list(_dealt(stored_tensors(arch), shard_bytes, dtype.itemsize))
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        tensors = {
            name: torch.empty(shape, dtype=dtype, device=device).normal_(0, STD, generator=made).cpu()
            for name, shape in names
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    write_text(folder / INDEX, json.dumps({"metadata": {}, "weight_map": where}))
    write_text(folder / "config.json", json.dumps(write_arch(arch) | {"torch_dtype": dtype_name(dtype)}))
    return [folder / file for file in dict.fromkeys(where.values())]


def _dealt(
    tensors: Iterable[tuple[str, torch.Size]], shard_bytes: int, itemsize: int
) -> Iterator[list[tuple[str, torch.Size]]]:
    """The tensors in order, cut into shards."""
    shard: list[tuple[str, torch.Size]] = []
    held = 0
    for name, shape in tensors:
        size = shape.numel() * itemsize
        if shard and held + size > shard_bytes:
            yield shard
            shard, held = [], 0
        shard.append((name, shape))
        held += size
    yield shard
