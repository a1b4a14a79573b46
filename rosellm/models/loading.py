"""Loads what an engine needs: device, dtype, model and tokenizer."""

from __future__ import annotations

from os import PathLike

import torch

from rosellm.errors import CheckpointError, DeviceError
from rosellm.models.model import Transformer
from rosellm.models.tokenizer import DummyTokenizer, Tokenizer, load_dummy_tokenizer, load_tokenizer
from rosellm.models.weights import SHIPPED, checkpoint_folder, dummy_model, load_model

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LOAD_FORMATS = ("auto", "dummy")

AnyTokenizer = Tokenizer | DummyTokenizer


def resolve_device(name: str) -> torch.device:
    """``auto``, ``cuda`` or ``cpu`` → an available device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cuda", "cpu"):
        raise DeviceError(f"device {name!r} is unknown; use 'auto', 'cuda' or 'cpu'")
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device 'cuda' is not available on this machine; use device='cpu'")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is float16 on a GPU and float32 on a CPU; or a dtype by name."""
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    if not isinstance(name, str) or name not in DTYPES:
        raise DeviceError(f"dtype {name!r} is unknown; use 'auto', {', '.join(map(repr, DTYPES))}")
    return DTYPES[name]


def load_parts(
    model: str, device: str = "auto", dtype: str = "auto", load_format: str = "auto"
) -> tuple[Transformer, AnyTokenizer]:
    """A checkpoint (``rose-tiny``, a folder or a hub id) and its tokenizer.

    load_format: "auto", or "dummy" for seeded random weights in the checkpoint's shape and a tokenizer that
    needs no download. Raises ``CheckpointError`` or ``DeviceError``.
    """
    if not isinstance(model, (str, PathLike)):
        raise CheckpointError(f"model is {model!r}; give '{SHIPPED}', a folder or a hub id")
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(f"load_format {load_format!r} is unknown; use 'auto' or 'dummy'")
    where = resolve_device(device)
    kind = resolve_dtype(dtype, where)
    if load_format == "dummy":
        gpt = dummy_model(model, where, kind)
        return gpt, load_dummy_tokenizer(gpt.config)
    gpt = load_model(model, where, kind)
    return gpt, load_tokenizer(checkpoint_folder(model), gpt.config)
