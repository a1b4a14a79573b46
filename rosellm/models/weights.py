"""Loading and saving of Hugging Face GPT-2 checkpoints (safetensors only)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rosellm.atomic import replacing, write_text
from rosellm.errors import CheckpointError
from rosellm.models.config import KNOWN_SHAPES, ModelConfig
from rosellm.models.model import GPT

SHIPPED = "rose-tiny"
WAYS_OUT = f"use '{SHIPPED}', a local folder, or load_format='dummy'"
STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CHECKPOINT_FILES = ["*.json", "*.txt", "*.safetensors"]

_EMBEDDING, _HEAD = "transformer.wte.weight", "lm_head.weight"
_CHECKPOINT_NAMES = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "blocks": "transformer.h",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "ln_f": "transformer.ln_f",
}


def checkpoint_folder(model: str) -> Path:
    """The folder that holds ``model``: the shipped one, a local folder, or a hub id (fetched or cached)."""
    if model == SHIPPED:
        return Path(str(files("rosellm") / "assets" / SHIPPED))
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=CHECKPOINT_FILES))
    except Exception as error:  # the client raises OSErrors, ValueErrors and those of its HTTP library
        raise CheckpointError(
            f"model {model!r} is neither a local folder nor available from the hub "
            f"({_reason(error)}); {WAYS_OUT}"
        ) from error


def _reason(error: Exception) -> str:
    """Why the hub download failed; its client reports a lost network as a file missing from its cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error.__cause__ or error.__context__, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and it is not cached"
    if isinstance(error, (LocalEntryNotFoundError, ConnectionError)):
        return "no network, and it is not cached"
    return type(error).__name__


def load_config(folder: Path) -> ModelConfig:
    """The model's shape from ``folder/config.json``."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return ModelConfig.from_hf(fields)


def load_model(model: str, device: torch.device, dtype: torch.dtype) -> GPT:
    """The checkpoint ``model`` (shipped name, folder or hub id) on ``device`` in ``dtype``."""
    folder = checkpoint_folder(model)
    config, shards = load_config(folder), _shards(folder)
    _check_extent(config, shards, folder)
    gpt = GPT.allocate(_with_its_head(config, shards), device, dtype)
    _copy_weights(gpt, shards, folder)
    return gpt


def dummy_model(model: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> GPT:
    """The real shape of ``model`` with seeded random weights; nothing is downloaded."""
    if model in KNOWN_SHAPES:
        config = KNOWN_SHAPES[model]
    elif model == SHIPPED or os.path.isdir(model):
        config = load_config(checkpoint_folder(model))
    else:
        known = ", ".join([*KNOWN_SHAPES, SHIPPED])
        raise CheckpointError(
            f"no shape is known for {model!r}; use one of {known}, or a folder with a config.json"
        )
    _check_memory(config, device, dtype)
    return GPT.allocate(config, device, dtype).initialise(seed)


def _check_memory(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    wanted = config.n_parameters * dtype.itemsize
    on_gpu = device.type == "cuda"
    there = torch.cuda.mem_get_info(device)[1] if on_gpu else psutil.virtual_memory().total
    if wanted > there:
        raise CheckpointError(
            f"{config.n_parameters:,} parameters in {_dtype_name(dtype)} take {wanted / 1e9:,.0f} GB; "
            f"device {device.type!r} has {there / 1e9:,.0f} GB"
        )


def save_model(gpt: GPT, folder: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write ``config.json`` and ``model.safetensors``, readable by this module and ``transformers``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        theirs: tensor.detach().to("cpu", dtype).contiguous() for theirs, tensor in _named(gpt).items()
    }
    with replacing(folder / "model.safetensors") as unfinished:
        save_file(tensors, unfinished, metadata={"format": "pt"})
    text = json.dumps(gpt.config.to_hf() | {"torch_dtype": _dtype_name(dtype)}, indent=1)
    write_text(folder / "config.json", text + "\n")


def _named(gpt: GPT) -> dict[str, Tensor]:
    """Every parameter of ``gpt`` by checkpoint name; a tied head is left out."""
    return {
        ".".join(_CHECKPOINT_NAMES.get(part, part) for part in name.split(".")): parameter
        for name, parameter in gpt.named_parameters()
    }


def _check_extent(config: ModelConfig, shards: list[Path], folder: Path) -> None:
    """Refuse a config that asks for more than its files can hold, before anything is allocated."""
    n_bytes = 0
    for shard in shards:
        with _opened(shard):
            n_bytes += shard.stat().st_size
    if config.n_parameters > n_bytes:
        raise CheckpointError(
            f"{folder} holds {n_bytes:,} bytes of safetensors and lacks tensors: "
            f"its config.json asks for {config.n_parameters:,} parameters"
        )


def _with_its_head(config: ModelConfig, shards: list[Path]) -> ModelConfig:
    """``config``, untied if the files' head differs from the token embedding (as in transformers 5)."""
    if not config.tie_embeddings:
        return config
    both = [tensor.double() for _, tensor, _ in _tensors(shards, [_HEAD, _EMBEDDING])]
    return replace(config, tie_embeddings=len(both) < 2 or torch.equal(*both))


@torch.no_grad()
def _copy_weights(gpt: GPT, shards: list[Path], folder: Path) -> None:
    wanted = _named(gpt)
    for name, value, shard in _tensors(shards, list(wanted)):
        _copy(wanted.pop(name), value, name, shard)
    if gpt.config.tie_embeddings and _EMBEDDING in wanted:
        for _, value, shard in _tensors(shards, [_HEAD]):
            _copy(wanted.pop(_EMBEDDING), value, _HEAD, shard)
    if wanted:
        raise CheckpointError(f"{folder} lacks {len(wanted)} tensors, the first is {next(iter(wanted))}")


def _tensors(shards: list[Path], names: list[str]) -> Iterator[tuple[str, Tensor, Path]]:
    """Each of ``names`` that the shards hold, once: name, values on the CPU, shard file."""
    missing = dict.fromkeys(names)
    for shard in shards:
        with _opened(shard) as tensors:
            available = set(tensors.keys())
            for name in [n for n in missing if _find(n, available)]:
                del missing[name]
                yield name, tensors.get_tensor(_find(name, available)), shard


@contextmanager
def _opened(shard: Path) -> Iterator[safe_open]:
    try:
        with safe_open(shard, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{shard} cannot be read as safetensors: {error}") from error


def _find(name: str, available: set[str]) -> str | None:
    """``name`` as the shard spells it, with or without the ``transformer.`` prefix."""
    bare = name.removeprefix("transformer.")
    return next((n for n in (name, bare) if n in available), None)


def _copy(parameter: Tensor, value: Tensor, name: str, shard: Path) -> None:
    if parameter.shape != value.shape:
        raise CheckpointError(
            f"{name} in {shard.name} has shape {list(value.shape)}; "
            f"the config asks for {list(parameter.shape)}"
        )
    if value.dtype not in STORED_DTYPES:
        known = ", ".join(map(_dtype_name, STORED_DTYPES))
        raise CheckpointError(f"{name} in {shard.name} is stored as {_dtype_name(value.dtype)}; use {known}")
    value = value.to(parameter.dtype)
    if not torch.isfinite(value).all():
        raise CheckpointError(
            f"{name} in {shard.name} holds values that are not finite in {_dtype_name(parameter.dtype)}"
        )
    parameter.copy_(value)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    names = _indexed(index) if index.is_file() else ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)} (checkpoints are read from safetensors only)"
        )
    return [folder / name for name in names]


def _indexed(index: Path) -> list[str]:
    """The files named by a safetensors index; all must be in its folder."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a valid safetensors index") from error
    if outside:
        raise CheckpointError(f"{index} names files outside its folder")
    return names
