"""Resolves device and dtype, and loads a model with its tokenizer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from os import PathLike
from pathlib import Path

import torch

from rosellm.errors import CheckpointError, DeviceError, describe
from rosellm.models.arch import Arch
from rosellm.models.checkpoint import SHIPPED, checkpoint_folder, load_config
from rosellm.models.model import Transformer
from rosellm.models.part import WHOLE, Part
from rosellm.models.shards import opened, shards_of
from rosellm.models.tokenizer import DummyTokenizer, Tokenizer, load_dummy_tokenizer, load_tokenizer
from rosellm.models.weights import dummy_model, dummy_shape, load_model

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FLOATS = {"F64": None, "F32": None, "F16": "float16", "BF16": "bfloat16"}  # in safetensors' words
LOAD_FORMATS = ("auto", "dummy")

AnyTokenizer = Tokenizer | DummyTokenizer


def resolve_device(name: str) -> torch.device:
    """Turn ``auto``, ``cuda`` or ``cpu`` into an available device. Raises ``DeviceError``."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cuda", "cpu"):
        raise DeviceError(f"device {describe(name)} is unknown; use 'auto', 'cuda' or 'cpu'")
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device 'cuda' is not available on this machine; use device='cpu'")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device, arch: Arch | None = None) -> torch.dtype:
    """Return the dtype of a given name.

    ``auto`` is the checkpoint's dtype on a GPU (float16 if ``arch`` has none) and float32 on a CPU, where
    16-bit GEMMs are slow. Raises ``DeviceError`` for an unknown name.
    """
    if name == "auto":
        if device.type != "cuda":
            return torch.float32
        own = arch.dtype if arch is not None else None
        return DTYPES.get(own or "float16", torch.float32)  # of float64 too
    if not isinstance(name, str) or name not in DTYPES:
        raise DeviceError(f"dtype {describe(name)} is unknown; use 'auto', {', '.join(map(repr, DTYPES))}")
    return DTYPES[name]


def arch_of(model: str, load_format: str = "auto") -> Arch:
    """Return the shape of the model that :func:`load_parts` would load.

    Its dtype is that of the config, or of the weight files if the config has none. Raises
    ``CheckpointError``.
    """
    if load_format == "dummy":
        return dummy_shape(model)
    folder = checkpoint_folder(model)
    arch = load_config(folder)
    return arch if arch.dtype is not None else replace(arch, dtype=stored_dtype(shards_of(folder)))


def stored_dtype(shards: list[Path]) -> str | None:
    """Return the name of the dtype that most values in the files have, or None if it is not a 16-bit dtype.

    Reads headers only. A few tensors may have another dtype: a float16 checkpoint may keep norms in float32.
    """
    n_values: Counter[str] = Counter()
    for file in map(opened, shards):
        for view in map(file.get_slice, file.keys()):
            n_values[view.get_dtype()] += prod(view.get_shape())
    floats = (kind for kind, _ in n_values.most_common() if kind in FLOATS)
    return FLOATS.get(next(floats, "F32"))


def load_parts(
    model: str, device: str = "auto", dtype: str = "auto", load_format: str = "auto", part: Part = WHOLE
) -> tuple[Transformer, AnyTokenizer]:
    """Load a checkpoint (``rose-tiny``, a folder or a hub id) and its tokenizer.

    dtype: see :func:`resolve_dtype`. load_format: "auto" reads the files; "dummy" makes seeded random weights
    of the same shape, and a tokenizer that needs no download. part: load only the weights of one rank. Raises
    ``CheckpointError``, ``DeviceError``, or ``OptionError`` if the model cannot be cut into such parts.
    """
    _check_source(model, load_format)
    where = resolve_device(device)
    resolve_dtype(dtype, where)  # an unknown one is refused before anything is fetched
    if load_format != "dummy":
        model = str(checkpoint_folder(model))
    arch = arch_of(model, load_format)
    part.check(arch)
    load = dummy_model if load_format == "dummy" else load_model
    gpt = load(model, where, resolve_dtype(dtype, where, arch), part=part)
    return gpt, load_tokenizer_of(model, load_format)


def load_tokenizer_of(model: str, load_format: str = "auto") -> AnyTokenizer:
    """Load only the tokenizer; see :func:`load_parts`. Raises ``CheckpointError``."""
    _check_source(model, load_format)
    if load_format == "dummy":
        return load_dummy_tokenizer(dummy_shape(model))
    folder = checkpoint_folder(model)
    return load_tokenizer(folder, load_config(folder))


def _check_source(model: str, load_format: str) -> None:
    if not isinstance(model, (str, PathLike)):
        raise CheckpointError(f"model is {describe(model)}; give '{SHIPPED}', a folder or a hub id")
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(f"load_format {describe(load_format)} is unknown; use 'auto' or 'dummy'")
