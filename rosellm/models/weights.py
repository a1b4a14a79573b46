"""Loading and saving of Hugging Face checkpoints (safetensors only).

A checkpoint's tensors are copied one by one into the rows of the model's joined weights: the most memory ever
needed is the model's and one tensor.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from rosellm.atomic import replacing, write_text
from rosellm.errors import CheckpointError, told
from rosellm.models.arch import Arch
from rosellm.models.checkpoint import SHIPPED_MODELS, checkpoint_folder, load_config
from rosellm.models.families.table import FAMILIES, KNOWN_SHAPES, write_arch
from rosellm.models.model import Transformer
from rosellm.models.part import WHOLE, Part
from rosellm.models.shards import opened, shards_of

STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_EMBEDDING, _HEAD = "token_embedding.weight", "lm_head.weight"
_LAYER = re.compile(r"^blocks\.(\d+)\.")
COMPARED_ROWS = 4096
TABLES = 3  # of angles, in memory while one is made
TOLD_FROM = 256 << 20  # bytes of a checkpoint whose loading shows its progress


def load_model(model: str, device: torch.device, dtype: torch.dtype, part: Part = WHOLE) -> Transformer:
    """The checkpoint ``model`` (shipped name, folder or hub id), or a part, on ``device`` in ``dtype``."""
    folder = checkpoint_folder(model)
    config, shards = load_config(folder), shards_of(folder)
    _check_extent(config, shards, folder)
    config = _with_its_head(config, shards)
    _check_memory(part.arch(config), device, dtype)
    gpt = Transformer.allocate(config, device, dtype, part)
    _copy_weights(gpt, shards, folder)
    return gpt


def dummy_model(
    model: str, device: torch.device, dtype: torch.dtype, seed: int = 0, part: Part = WHOLE
) -> Transformer:
    """The real shape of ``model`` with seeded random weights, made on ``device``; nothing is downloaded."""
    config = dummy_shape(model)
    _check_memory(part.arch(config), device, dtype)
    return Transformer.allocate(config, device, dtype, part).initialise(seed)


def dummy_shape(model: str) -> Arch:
    """The shape of ``model``: a known one, or that of a folder's ``config.json``."""
    if model in KNOWN_SHAPES:
        return KNOWN_SHAPES[model]
    if model in SHIPPED_MODELS or os.path.isdir(model):
        return load_config(checkpoint_folder(model))
    known = ", ".join([*KNOWN_SHAPES, *SHIPPED_MODELS])
    raise CheckpointError(
        f"no shape is known for {told(model)}; use one of {known}, or a folder with a config.json"
    )


def save_model(gpt: Transformer, folder: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write ``config.json`` and ``model.safetensors``, readable by this module and ``transformers``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        place.name: place.stored(place.rows.detach()).to("cpu", dtype).contiguous() for place in places(gpt)
    }
    with replacing(folder / "model.safetensors") as unfinished:
        save_file(tensors, unfinished, metadata={"format": "pt"})
    text = json.dumps(write_arch(gpt.config) | {"torch_dtype": dtype_name(dtype)}, indent=1)
    write_text(folder / "config.json", text + "\n")


@dataclass(frozen=True)
class Place:
    """Where one tensor of a checkpoint belongs: a parameter's rows, and whether it is stored transposed.

    shape: the whole tensor's, as the parameter has it. cut: such a tensor → what of it belongs there.
    """

    name: str
    rows: Tensor
    transposed: bool
    shape: tuple[int, ...]
    cut: Callable[[Tensor], Iterable[Tensor]]

    def stored(self, rows: Tensor) -> Tensor:
        return rows.t() if self.transposed else rows


def places(gpt: Transformer) -> Iterator[Place]:
    """The places of all parameters; a tied head is left out."""
    family = FAMILIES[gpt.config.family]
    with torch.device("meta"):
        shapes = Transformer(gpt.whole).own_parameters
    for name, parameter in gpt.own_parameters.items():
        number, template = _split_name(name)
        theirs = [source.format(number) for source in family.tensors[template]]
        transposed = template in family.transposed
        n_rows, *width = shapes[name].shape
        pieces = gpt.part.pieces(name, gpt.whole, n_rows)
        groups = [pieces] if len(theirs) == 1 else [[piece] for piece in pieces]
        parts = parameter.split([sum(len(piece.kept) for piece in group) for group in groups])
        for source, rows, group in zip(theirs, parts, groups, strict=True):
            shape = (sum(piece.n_rows for piece in group), *width)
            yield Place(source, rows, transposed, shape, partial(gpt.part.of, name, pieces=group))


def _split_name(name: str) -> tuple[str, str]:
    """A parameter's layer, empty outside the layers, and its name with ``{}`` for the layer."""
    found = _LAYER.match(name)
    return (found[1], _LAYER.sub("blocks.{}.", name)) if found else ("", name)


def _check_memory(config: Arch, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a model whose weights, or table of angles, the whole device could not hold."""
    angles = 0 if config.rope is None else TABLES * 4 * config.n_positions * config.head_dim
    wanted = config.n_parameters * dtype.itemsize + angles
    on_gpu = device.type == "cuda"
    there = torch.cuda.mem_get_info(device)[1] if on_gpu else psutil.virtual_memory().total
    if wanted > there:
        raise CheckpointError(
            f"{config.n_parameters:,} parameters in {dtype_name(dtype)} take {wanted / 1e9:,.0f} GB "
            f"with {config.n_positions:,} positions; device {device.type!r} has {there / 1e9:,.0f} GB"
        )


def _check_extent(config: Arch, shards: list[Path], folder: Path) -> None:
    """Refuse a config that asks for more than its files can hold, before anything is allocated."""
    n_bytes = 0
    for shard in shards:
        with opened(shard):
            n_bytes += shard.stat().st_size
    if config.n_parameters > n_bytes:
        raise CheckpointError(
            f"{folder} holds {n_bytes:,} bytes of safetensors and lacks tensors: "
            f"its config.json asks for {config.n_parameters:,} parameters"
        )


def _with_its_head(config: Arch, shards: list[Path]) -> Arch:
    """``config``, untied if the files' head differs from the token embedding (as in transformers 5)."""
    if not config.tie_embeddings:
        return config
    family = FAMILIES[config.family]
    head, embedding = (
        _located(family.tensors[name][0], family.prefix, shards) for name in (_HEAD, _EMBEDDING)
    )
    return replace(config, tie_embeddings=head is None or embedding is None or _are_equal(head, embedding))


Located = tuple[Path, str]


def _located(name: str, prefix: str, shards: list[Path]) -> Located | None:
    """The shard that holds a tensor, and how it spells its name."""
    for shard in shards:
        with opened(shard) as tensors:
            if found := _find(name, prefix, set(tensors.keys())):
                return shard, found
    return None


def _are_equal(one: Located, other: Located) -> bool:
    """Whether two matrices are equal, a few rows in memory at a time."""
    with opened(one[0]) as mine, opened(other[0]) as theirs:
        a, b = mine.get_slice(one[1]), theirs.get_slice(other[1])
        if a.get_shape() != b.get_shape():
            return False
        ends = range(0, a.get_shape()[0], COMPARED_ROWS)
        return all(
            torch.equal(a[row : row + COMPARED_ROWS].double(), b[row : row + COMPARED_ROWS].double())
            for row in ends
        )


@torch.no_grad()
def _copy_weights(gpt: Transformer, shards: list[Path], folder: Path) -> None:
    prefix = FAMILIES[gpt.config.family].prefix
    wanted = {place.name: place for place in places(gpt)}
    if gpt.config.tie_embeddings:
        _name_the_shared(gpt, wanted, shards, prefix)
    with _progress(shards) as progress:
        for shard in shards:
            with opened(shard) as tensors:
                available = set(tensors.keys())
                for name in list(wanted):
                    if stored := _find(name, prefix, available):
                        value = tensors.get_tensor(stored)
                        _copy(wanted.pop(name), value, shard)
                        progress.update(value.nbytes)
    if wanted:
        raise CheckpointError(f"{folder} lacks {len(wanted)} tensors, the first is {next(iter(wanted))}")


def _progress(shards: list[Path]) -> tqdm:
    """A bar over the files' bytes; a small checkpoint's is not shown."""
    n_bytes = sum(shard.stat().st_size for shard in shards)
    return tqdm(total=n_bytes, desc="weights", unit="B", unit_scale=True, disable=n_bytes < TOLD_FROM)


def _name_the_shared(gpt: Transformer, wanted: dict[str, Place], shards: list[Path], prefix: str) -> None:
    """Take a tied embedding from the head, if the files have only that."""
    names = FAMILIES[gpt.config.family].tensors
    embedding, head = names[_EMBEDDING][0], names[_HEAD][0]
    if not _located(embedding, prefix, shards) and _located(head, prefix, shards):
        wanted[head] = replace(wanted.pop(embedding), name=head)


def _find(name: str, prefix: str, available: set[str]) -> str | None:
    """``name`` as the shard spells it, with or without the family's prefix."""
    return next((n for n in (name, name.removeprefix(prefix)) if n in available), None)


def _copy(place: Place, value: Tensor, shard: Path) -> None:
    where = f"{place.name} in {shard.name}"
    if value.dtype not in STORED_DTYPES:
        known = ", ".join(map(dtype_name, STORED_DTYPES))
        raise CheckpointError(f"{where} is stored as {dtype_name(value.dtype)}; use {known}")
    whole = place.stored(value)
    if whole.shape != place.shape:
        shape, wanted = list(value.shape), list(place.shape)
        raise CheckpointError(
            f"{where} has shape {shape}; the config asks for {wanted[::-1] if place.transposed else wanted}"
        )
    first = 0
    for rows in place.cut(whole):
        place.rows[first : first + len(rows)].copy_(rows)
        first += len(rows)
    extremes = torch.stack(place.rows.aminmax())  # NaN if any value is; unlike isfinite it needs no memory
    if not extremes.isfinite().all():
        raise CheckpointError(f"{where} holds values that are not finite in {dtype_name(place.rows.dtype)}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
