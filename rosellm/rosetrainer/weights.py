"""Loading and saving of Hugging Face GPT-2 checkpoints (safetensors only)."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rosellm.errors import CheckpointError
from rosellm.rosetrainer.config import KNOWN_SHAPES, ModelConfig
from rosellm.rosetrainer.model import GPT

SHIPPED = "rose-tiny"
WAYS_OUT = f"use '{SHIPPED}', a local folder, or --load-format dummy"
CHECKPOINT_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json"]

_LAYER_NAMES = {
    "ln_1": "ln_1",
    "attn.c_attn": "qkv",
    "attn.c_proj": "out",
    "ln_2": "ln_2",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}


def checkpoint_folder(model: str) -> Path:
    """The folder that holds ``model``: the shipped one, a local folder, or a hub id (fetched or cached)."""
    if model == SHIPPED:
        return Path(str(files("rosellm") / "assets" / SHIPPED))
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=CHECKPOINT_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model {model!r} is neither a local folder nor to be had from the hub "
            f"({type(error).__name__}); {WAYS_OUT}"
        ) from error


def load_config(folder: Path) -> ModelConfig:
    """The model's shape from ``folder/config.json``."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return ModelConfig.from_hf(fields)


def load_model(model: str, device: torch.device, dtype: torch.dtype) -> GPT:
    """The checkpoint ``model`` (shipped name, folder or hub id) on ``device`` in ``dtype``."""
    folder = checkpoint_folder(model)
    gpt = GPT.allocate(load_config(folder), device, dtype)
    _copy_weights(gpt, folder)
    return gpt


def dummy_model(model: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> GPT:
    """The real shape of ``model`` with seeded random weights; nothing is downloaded."""
    if model in KNOWN_SHAPES:
        config = KNOWN_SHAPES[model]
    elif model == SHIPPED or Path(model).is_dir():
        config = load_config(checkpoint_folder(model))
    else:
        known = ", ".join([*KNOWN_SHAPES, SHIPPED])
        raise CheckpointError(
            f"no shape is known for {model!r}; use one of {known}, or a folder with a config.json"
        )
    return GPT.allocate(config, device, dtype).initialise(seed)


def save_model(gpt: GPT, folder: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write ``config.json`` and ``model.safetensors``, for this module and ``transformers`` to read."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        theirs: tensor.detach().to("cpu", dtype).contiguous() for theirs, tensor in _named(gpt).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(gpt.config.to_hf() | {"torch_dtype": str(dtype).removeprefix("torch.")}, indent=1)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _named(gpt: GPT) -> dict[str, Tensor]:
    """Every parameter of ``gpt`` under its checkpoint name; a tied head is not listed."""
    names = {
        "transformer.wte.weight": gpt.token_embedding.weight,
        "transformer.wpe.weight": gpt.position_embedding.weight,
        "transformer.ln_f.weight": gpt.ln_f.weight,
        "transformer.ln_f.bias": gpt.ln_f.bias,
    }
    for i, block in enumerate(gpt.blocks):
        for theirs, ours in _LAYER_NAMES.items():
            for part in ("weight", "bias"):
                names[f"transformer.h.{i}.{theirs}.{part}"] = getattr(getattr(block, ours), part)
    if not gpt.config.tie_embeddings:
        names["lm_head.weight"] = gpt.lm_head.weight
    return names


@torch.no_grad()
def _copy_weights(gpt: GPT, folder: Path) -> None:
    shards = _shards(folder)
    wanted = _named(gpt)
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as tensors:
                available = set(tensors.keys())
                for name in [n for n in wanted if _find(n, available)]:
                    _copy(wanted.pop(name), tensors.get_tensor(_find(name, available)), name, shard)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{shard} cannot be read as safetensors: {error}") from error
    if wanted:
        raise CheckpointError(f"{folder} lacks {len(wanted)} tensors, the first is {next(iter(wanted))}")


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
    if not value.is_floating_point() or not torch.isfinite(value).all():
        raise CheckpointError(
            f"{name} in {shard.name} holds values that are not finite floating-point numbers"
        )
    parameter.copy_(value)


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            outside = [name for name in names if Path(name).name != name]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is not a valid safetensors index") from error
        if outside:
            raise CheckpointError(f"{index} names files outside its folder")
        shards = [folder / name for name in names]
    else:
        shards = [folder / "model.safetensors"]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)} (checkpoints are read from safetensors only)"
        )
    return shards
