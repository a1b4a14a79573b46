"""Loading and saving of Hugging Face checkpoints (safetensors only).

Tensors are copied one by one into the rows of the model's joined weights, so loading needs memory only for
the model and for one tensor.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from rosellm.atomic import replacing, write_text
from rosellm.errors import CheckpointError, describe
from rosellm.models.arch import DTYPE_NAMES, Arch
from rosellm.models.checkpoint import SHIPPED_DRAFTS, SHIPPED_MODELS, checkpoint_folder, load_config
from rosellm.models.compressed import copy_codes
from rosellm.models.families.table import FAMILIES, KNOWN_SHAPES, write_arch
from rosellm.models.model import Transformer
from rosellm.models.part import WHOLE, Part
from rosellm.models.quantized import AnyWeight, QuantizedWeight, bytes_per_weight, full
from rosellm.models.shards import opened, shards_of

NUMBER = re.compile(r"(?<=^blocks\.)\d+")  # a layer's index in a parameter's name
TABLES = 3  # copies of the angle table in memory while it is computed
PROGRESS_FROM = 128 << 20  # parameters; larger models show a progress bar
Holders = dict[str, tuple[safe_open, str]]


def load_model(
    model: str, device: torch.device, dtype: torch.dtype, part: Part = WHOLE, quantization: str | None = None
) -> Transformer:
    """Load a checkpoint, or one rank's part of it, in ``dtype`` on ``device``.

    model: a shipped model's name, a folder or a hub id.
    part: the part of the weights to load.
    quantization: the format to which the weights of layers and head are quantised, one tensor at a time, or
        None. A quantised checkpoint keeps its own.

    Raises ``CheckpointError`` if the checkpoint is missing, corrupt, not supported or too large.
    """
    folder = checkpoint_folder(model)
    config, shards = load_config(folder), shards_of(folder)
    holders = _holders(shards, FAMILIES[config.family].prefix)
    _check_extent(config, shards, folder)
    config = replace(config, tie_embeddings=config.tie_embeddings and _is_tied(config, holders))
    quantization = config.quantization or quantization
    check_memory(part.arch(config), device, dtype, quantization)
    gpt = Transformer.allocate(config, device, dtype, part, quantization)
    _copy_weights(gpt, holders, folder)
    return gpt


def dummy_model(
    model: str,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    part: Part = WHOLE,
    quantization: str | None = None,
) -> Transformer:
    """Make a model with the ``Arch`` of ``model`` and seeded random weights, without a download.

    model: a known name or a folder with a ``config.json``.
    part: the part of the weights to make.
    quantization: as in :func:`load_model`.
    """
    config = dummy_shape(model)
    quantization = config.quantization or quantization
    check_memory(part.arch(config), device, dtype, quantization)
    return Transformer.allocate(config, device, dtype, part, quantization).initialise(seed)


def dummy_shape(model: str) -> Arch:
    """Return the ``Arch`` of ``model``, a known name or a folder; raise ``CheckpointError`` otherwise."""
    if model in KNOWN_SHAPES:
        return KNOWN_SHAPES[model]
    if model in SHIPPED_MODELS + SHIPPED_DRAFTS or os.path.isdir(model):
        return load_config(checkpoint_folder(model))
    known = ", ".join([*KNOWN_SHAPES, *SHIPPED_MODELS])
    raise CheckpointError(
        f"no shape is known for {describe(model)}; use one of {known}, or a folder with a config.json"
    )


def save_model(gpt: Transformer, folder: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write ``config.json`` and ``model.safetensors``, which this module and ``transformers`` can read.

    dtype: the dtype of the stored tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        one.name: one.stored(full(one.rows).detach()).to("cpu", dtype).contiguous() for one in places(gpt)
    }
    with replacing(folder / "model.safetensors") as unfinished:
        save_file(tensors, unfinished, metadata={"format": "pt"})
    text = json.dumps(write_arch(gpt.config) | {"torch_dtype": dtype_name(dtype)}, indent=1)
    write_text(folder / "config.json", text + "\n")


@dataclass(frozen=True)
class Place:
    """A tensor of a checkpoint, and the rows of a parameter to which it is copied.

    name: the tensor's name in the checkpoint.
    rows: these rows of the parameter, as a view.
    transposed: whether the tensor is stored as ``[inputs, outputs]``.
    shape: shape of the stored tensor.
    cut: maps a whole tensor ``[outputs, inputs]`` to this rank's part of it.
    """

    name: str
    rows: AnyWeight
    transposed: bool
    shape: tuple[int, ...]
    cut: Callable[[Tensor], Tensor]

    def stored(self, rows: Tensor) -> Tensor:
        return rows.t() if self.transposed else rows


def places(gpt: Transformer) -> Iterator[Place]:
    """Yield a ``Place`` for every tensor in a checkpoint of ``gpt``; a tied head has none."""
    family = FAMILIES[gpt.config.family]
    with torch.device("meta"):
        shapes = Transformer(gpt.whole).own_parameters
    for name, parameter in gpt.own_parameters.items():
        template, number = NUMBER.sub("{}", name), NUMBER.search(name)
        theirs = [source.format(number and number[0]) for source in family.tensors[template]]
        transposed = template in family.transposed
        n_rows, *width = shapes[name].shape
        pieces = gpt.part.pieces(name, gpt.whole, n_rows)
        groups = [pieces] if len(theirs) == 1 else [[piece] for piece in pieces]
        parts = parameter.split([sum(len(piece.kept) for piece in group) for group in groups])
        for source, rows, group in zip(theirs, parts, groups, strict=True):
            shape = (sum(piece.n_rows for piece in group), *width)
            shape = shape[::-1] if transposed else shape
            yield Place(source, rows, transposed, shape, partial(gpt.part.cut, name, pieces=group))


def check_memory(config: Arch, device: torch.device, dtype: torch.dtype, quantization: str | None) -> None:
    """Raise ``CheckpointError`` if weights and angle table together exceed the memory of the device."""
    angles = 0 if config.rope is None else TABLES * 4 * config.n_positions * config.head_dim
    wanted = config.n_parameters * dtype.itemsize + angles
    if quantization is not None:
        saved = dtype.itemsize - bytes_per_weight(quantization, dtype)
        wanted -= int(config.n_layers * config.n_layer_parameters * saved)
        if config.quantization is None:
            wanted -= config.vocab_size * config.d_model * (dtype.itemsize - 1)
    on_gpu = device.type == "cuda"
    there = torch.cuda.mem_get_info(device)[1] if on_gpu else psutil.virtual_memory().total
    if wanted > there:
        raise CheckpointError(
            f"{config.n_parameters:,} parameters in {dtype_name(dtype)} take {wanted / 1e9:,.0f} GB "
            f"with {config.n_positions:,} positions; device {device.type!r} has {there / 1e9:,.0f} GB"
        )


def _holders(shards: list[Path], prefix: str) -> Holders:
    """Map each tensor name to the first file that has the tensor, and to its name in that file.

    prefix: removed from the keys, but not from the names in files.
    """
    holders: Holders = {}
    for file in map(opened, shards):
        names = file.keys()
        holders = {name.removeprefix(prefix): (file, name) for name in names} | holders
    return holders


def _check_extent(config: Arch, shards: list[Path], folder: Path) -> None:
    """Raise ``CheckpointError``, before anything is allocated, if the files are too small for the config."""
    n_bytes = sum(shard.stat().st_size for shard in shards)
    if config.n_parameters > n_bytes * (2 if config.quantization == "int4" else 1):
        raise CheckpointError(
            f"{folder} holds {n_bytes:,} bytes of safetensors and lacks tensors: "
            f"its config.json asks for {config.n_parameters:,} parameters"
        )


def _is_tied(config: Arch, holders: Holders) -> bool:
    """Return whether the head is absent from the files or equals the token embedding, as in transformers 5.

    If the files have only the head, its tensor is added to ``holders`` under the embedding's name, too.
    """
    family = FAMILIES[config.family]
    head, embedding = (
        family.tensors[name][0].removeprefix(family.prefix)
        for name in ("lm_head.weight", "token_embedding.weight")
    )
    if head not in holders:
        return True
    pair = holders[head], holders.setdefault(embedding, holders[head])
    a, b = (file.get_tensor(name) for file, name in pair)
    return a.dtype == b.dtype and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


@torch.no_grad()
def _copy_weights(gpt: Transformer, holders: Holders, folder: Path) -> None:
    prefix = FAMILIES[gpt.config.family].prefix
    wanted = {place.name.removeprefix(prefix): place for place in places(gpt)}
    codes = {short: _codes(short, holders) for short, one in wanted.items() if _has_codes(one, gpt)}
    names = {short: codes.get(short, [short]) for short in wanted}
    if missing := [wanted[short].name for short, own in names.items() if not holders.keys() >= set(own)]:
        raise CheckpointError(f"{folder} lacks {len(missing)} tensors, the first is {missing[0]}")
    is_small = gpt.config.n_parameters < PROGRESS_FROM
    for short, place in tqdm(wanted.items(), desc="weights", unit=" tensors", disable=is_small):
        values = [file.get_tensor(name) for file, name in map(holders.__getitem__, names[short])]
        if short in codes:
            kinds = [one.rpartition(".")[2] for one in codes[short]]
            stored = dict(zip(kinds, values, strict=True))
            copy_codes(cast(QuantizedWeight, place.rows), place.name, stored, gpt.dtype)
        else:
            _copy(place, values[0], gpt.dtype)


def _has_codes(place: Place, gpt: Transformer) -> bool:
    return isinstance(place.rows, QuantizedWeight) and gpt.whole.quantization is not None


def _codes(name: str, holders: Holders) -> list[str]:
    """Return the names of the tensors that hold the quantised weight ``name``."""
    packed = f"{name}_packed"
    others = (f"{name}_{part}" for part in ("g_idx", "zero_point"))
    return [packed if packed in holders else name, f"{name}_scale", *(o for o in others if o in holders)]


def _copy(place: Place, value: Tensor, dtype: torch.dtype) -> None:
    if dtype_name(value.dtype) not in DTYPE_NAMES:
        known = ", ".join(DTYPE_NAMES)
        raise CheckpointError(f"{place.name} is stored as {dtype_name(value.dtype)}; use {known}")
    if value.shape != place.shape:
        shape, wanted = list(value.shape), list(place.shape)
        raise CheckpointError(f"{place.name} has shape {shape}; the config asks for {wanted}")
    rows = place.cut(place.stored(value))
    if isinstance(place.rows, QuantizedWeight):
        rows = rows.to(dtype)
        place.rows.copy_(rows)
    else:
        rows = place.rows.copy_(rows)
    extremes = torch.stack(rows.aminmax())  # NaN if any value is; unlike isfinite it needs no memory
    if not extremes.isfinite().all():
        raise CheckpointError(f"{place.name} holds values that are not finite in {dtype_name(dtype)}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
