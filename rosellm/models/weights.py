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
from rosellm.errors import CheckpointError, describe
from rosellm.models.arch import Arch
from rosellm.models.checkpoint import SHIPPED_MODELS, checkpoint_folder, load_config
from rosellm.models.families.table import FAMILIES, KNOWN_SHAPES, write_arch
from rosellm.models.model import Transformer
from rosellm.models.part import WHOLE, Part
from rosellm.models.shards import opened, shards_of

STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_LAYER = re.compile(r"^blocks\.(\d+)\.")
COMPARED_ROWS = 4096
TABLES = 3  # of angles, in memory while one is made
PROGRESS_FROM = 256 << 20  # bytes of a checkpoint whose loading shows its progress


def load_model(model: str, device: torch.device, dtype: torch.dtype, part: Part = WHOLE) -> Transformer:
    """Load the checkpoint ``model`` (shipped name, folder or hub id), or a part, to ``device`` in ``dtype``.

    Raises ``CheckpointError``.
    """
    folder = checkpoint_folder(model)
    config, shards = load_config(folder), shards_of(folder)
    holders = _holders(shards)
    _check_extent(config, shards, folder)
    config = _with_its_head(config, holders)
    _check_memory(part.arch(config), device, dtype)
    gpt = Transformer.allocate(config, device, dtype, part)
    _copy_weights(gpt, holders, folder)
    return gpt


def dummy_model(
    model: str, device: torch.device, dtype: torch.dtype, seed: int = 0, part: Part = WHOLE
) -> Transformer:
    """Make the real shape of ``model`` with seeded random weights on ``device``; download nothing."""
    config = dummy_shape(model)
    _check_memory(part.arch(config), device, dtype)
    return Transformer.allocate(config, device, dtype, part).initialise(seed)


def dummy_shape(model: str) -> Arch:
    """Return the shape of ``model``: a known one, or that of a folder's ``config.json``."""
    if model in KNOWN_SHAPES:
        return KNOWN_SHAPES[model]
    if model in SHIPPED_MODELS or os.path.isdir(model):
        return load_config(checkpoint_folder(model))
    known = ", ".join([*KNOWN_SHAPES, *SHIPPED_MODELS])
    raise CheckpointError(
        f"no shape is known for {describe(model)}; use one of {known}, or a folder with a config.json"
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
    """A tensor of a checkpoint and where it belongs: a parameter's rows, perhaps stored transposed.

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
    """Yield the places of all parameters, without a tied head."""
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


def _holders(shards: list[Path]) -> dict[str, Path]:
    """Tensor → the file that holds it, the first of several."""
    holders: dict[str, Path] = {}
    for shard in shards:
        with opened(shard) as tensors:
            holders = dict.fromkeys(tensors.keys(), shard) | holders
    return holders


def _check_extent(config: Arch, shards: list[Path], folder: Path) -> None:
    """Refuse a config that asks for more than its files can hold, before anything is allocated."""
    n_bytes = sum(shard.stat().st_size for shard in shards)
    if config.n_parameters > n_bytes:
        raise CheckpointError(
            f"{folder} holds {n_bytes:,} bytes of safetensors and lacks tensors: "
            f"its config.json asks for {config.n_parameters:,} parameters"
        )


def _with_its_head(config: Arch, holders: dict[str, Path]) -> Arch:
    """``config``, untied if the files' head differs from the token embedding (as in transformers 5)."""
    if not config.tie_embeddings:
        return config
    head, embedding = (_find(name, config, holders) for name in _vocabulary(config))
    equal = head is None or embedding is None or _are_equal(head, embedding, holders)
    return replace(config, tie_embeddings=equal)


def _vocabulary(config: Arch) -> tuple[str, str]:
    """The head and the token embedding, as the checkpoint's family names them."""
    names = FAMILIES[config.family].tensors
    return names["lm_head.weight"][0], names["token_embedding.weight"][0]


def _are_equal(one: str, other: str, holders: dict[str, Path]) -> bool:
    """Whether two matrices are equal, a few rows in memory at a time."""
    with opened(holders[one]) as mine, opened(holders[other]) as theirs:
        a, b = mine.get_slice(one), theirs.get_slice(other)
        if a.get_shape() != b.get_shape():
            return False
        rows = (slice(row, row + COMPARED_ROWS) for row in range(0, a.get_shape()[0], COMPARED_ROWS))
        return all(torch.equal(a[some].double(), b[some].double()) for some in rows)


def _find(name: str, config: Arch, holders: dict[str, Path]) -> str | None:
    """``name`` as the files spell it, with or without the family's prefix."""
    short = name.removeprefix(FAMILIES[config.family].prefix)
    return next((one for one in (name, short) if one in holders), None)


@torch.no_grad()
def _copy_weights(gpt: Transformer, holders: dict[str, Path], folder: Path) -> None:
    config, wanted = gpt.config, {place.name: place for place in places(gpt)}
    head, embedding = _vocabulary(config)
    if config.tie_embeddings and not _find(embedding, config, holders) and _find(head, config, holders):
        wanted[head] = replace(wanted.pop(embedding), name=head)
    if missing := [name for name in wanted if not _find(name, config, holders)]:
        raise CheckpointError(f"{folder} lacks {len(missing)} tensors, the first is {missing[0]}")
    stored = {_find(name, config, holders) or name: place for name, place in wanted.items()}
    shards = sorted(set(holders.values()))
    n_bytes = sum(shard.stat().st_size for shard in shards)
    quiet = n_bytes < PROGRESS_FROM  # of a small checkpoint
    with tqdm(total=n_bytes, desc="weights", unit="B", unit_scale=True, disable=quiet) as progress:
        for shard in shards:
            with opened(shard) as tensors:
                for name in (name for name in stored if holders[name] == shard):
                    value = tensors.get_tensor(name)
                    _copy(stored[name], value, shard)
                    progress.update(value.nbytes)


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
