"""Loading of a model and its tokenizer, on a device and in a dtype given by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from os import PathLike
from pathlib import Path

import torch

from rosellm.errors import CheckpointError, DeviceError, OptionError, describe
from rosellm.models.arch import Arch
from rosellm.models.calibration import calibrated, windows_of
from rosellm.models.checkpoint import SHIPPED, checkpoint_folder, load_config
from rosellm.models.model import Transformer
from rosellm.models.part import WHOLE, Part
from rosellm.models.quantized import check_quantization
from rosellm.models.shards import opened, shards_of
from rosellm.models.tokenizer import DummyTokenizer, Tokenizer, load_dummy_tokenizer, load_tokenizer
from rosellm.models.weights import dummy_model, dummy_shape, load_model

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ALIASES = {"float": "float32", "half": "float16"} | {dtype: name for name, dtype in DTYPES.items()}
FLOATS = {"F64": None, "F32": None, "F16": "float16", "BF16": "bfloat16"}  # None: not 16-bit
LOAD_FORMATS = ("auto", "dummy")

AnyTokenizer = Tokenizer | DummyTokenizer


def resolve_device(name: str) -> torch.device:
    """Return the device named "auto", "cuda" or "cpu"; raise ``DeviceError`` if it is not available."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cuda", "cpu"):
        raise DeviceError(f"device {describe(name)} is unknown; use 'auto', 'cuda' or 'cpu'")
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device 'cuda' is not available on this machine; use device='cpu'")
    return torch.device(name)


def resolve_dtype(name: str | torch.dtype, device: torch.device, arch: Arch | None = None) -> torch.dtype:
    """Return the dtype named ``name``; raise ``DeviceError`` for an unknown name.

    name: a key of ``DTYPES``, "half", "float", a dtype of torch, or "auto": on a GPU the dtype of ``arch``
        (float16 if it has none), on a CPU float32, since 16-bit GEMMs are slow there.
    arch: the model's architecture; used only by "auto".
    """
    if name == "auto":
        if device.type != "cuda":
            return torch.float32
        own = arch.dtype if arch is not None else None
        return DTYPES.get(own or "float16", torch.float32)  # float64 becomes float32
    name = ALIASES.get(name, name) if isinstance(name, (str, torch.dtype)) else name
    if not isinstance(name, str) or name not in DTYPES:
        raise DeviceError(f"dtype {describe(name)} is unknown; use 'auto', {', '.join(map(repr, DTYPES))}")
    return DTYPES[name]


def arch_of(model: str, load_format: str = "auto") -> Arch:
    """Return the ``Arch`` of the model that :func:`load_parts` would load.

    Its dtype is that of the config or, if the config has none, that of the weight files. Raises
    ``CheckpointError`` if there is no such model or its config is not supported.
    """
    if load_format == "dummy":
        return dummy_shape(model)
    folder = checkpoint_folder(model)
    arch = load_config(folder)
    return arch if arch.dtype is not None else replace(arch, dtype=stored_dtype(shards_of(folder)))


def stored_dtype(shards: list[Path]) -> str | None:
    """Return the name of the dtype that most values in the files have, or None if it is not a 16-bit dtype.

    Only the files' headers are read. Most values decide, since a few tensors may have another dtype: a
    float16 checkpoint may keep norms in fp32.
    """
    n_values: Counter[str] = Counter()
    for file in map(opened, shards):
        for view in map(file.get_slice, file.keys()):
            n_values[view.get_dtype()] += prod(view.get_shape())
    floats = (kind for kind, _ in n_values.most_common() if kind in FLOATS)
    return FLOATS.get(next(floats, "F32"))


def load_parts(
    model: str,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    load_format: str = "auto",
    part: Part = WHOLE,
    tokenizer: str | None = None,
    quantization: str | None = None,
    calibration: str | list[str] | None = None,
) -> tuple[Transformer, AnyTokenizer]:
    """Load a checkpoint and its tokenizer.

    model: ``rose-tiny``, a folder or a hub id.
    device, dtype: names, as for :func:`resolve_device` and :func:`resolve_dtype`.
    load_format: "auto" reads the files; "dummy" makes seeded random weights in the same shapes, and a
        tokenizer that needs no download.
    part: the part of the weights to load.
    tokenizer: a folder or hub id with the tokenizer to load instead of the checkpoint's own.
    quantization: "fp8", "int8" or "int4" quantises the weights of all layers and the head (:mod:`quantized`);
        None does not.
    calibration: a text, or a list of texts, for which codes of "int4" are chosen (:mod:`calibration`); the
        model is first loaded in the CPU's memory. None chooses them by the weights alone.

    Raises ``CheckpointError``, ``DeviceError``, or ``OptionError`` if the model cannot be quantised, or
    sharded over the ranks of ``part``.
    """
    _check_source(model, load_format)
    where = resolve_device(device)
    resolve_dtype(dtype, where)  # refuses an unknown name before anything is downloaded
    check_quantization(quantization, where)
    if load_format != "dummy":
        model = str(checkpoint_folder(model))
    arch = arch_of(model, load_format)
    part.check(arch)
    stored = arch.quantization
    if None not in (quantization, stored) and quantization != stored:
        raise OptionError(f"quantization is {quantization!r}; the checkpoint has {stored!r} weights")
    check_quantization(quantization or stored, where, part.arch(arch))
    load = dummy_model if load_format == "dummy" else load_model
    reader = load_tokenizer_of(model, load_format, tokenizer)
    kind = resolve_dtype(dtype, where, arch)
    if calibration is None:
        gpt = load(model, where, kind, part=part, quantization=quantization)
    elif quantization != "int4" or stored is not None or load_format == "dummy":
        raise OptionError("calibration needs quantization='int4' and a checkpoint that is not quantised")
    else:
        windows = windows_of(calibration, reader, arch.n_positions)
        gpt = calibrated(load_model(model, torch.device("cpu"), kind), windows, where)
    gpt.whole, gpt.config = (_ended_by(reader, arch) for arch in (gpt.whole, gpt.config))
    return gpt, reader


def load_draft(
    model: str, target: Transformer, tokenizer: AnyTokenizer | None, load_format: str
) -> Transformer:
    """Load the model that drafts for ``target``, on its device and in its dtype.

    tokenizer: that of ``target``; None if no text is encoded.

    Raises ``CheckpointError``, also if the two models have different tokens.
    """
    try:
        draft, own = load_parts(model, target.device.type, target.dtype, load_format)
    except CheckpointError as error:
        raise CheckpointError(f"draft {error}") from None
    if tokenizer is not None and not own.has_tokens_of(tokenizer):
        raise CheckpointError(f"draft model {describe(model)} has other tokens than the model it drafts for")
    return draft


def _ended_by(tokenizer: AnyTokenizer, arch: Arch) -> Arch:
    """Add the tokenizer's end-of-sequence token, which fine-tunes may forget to add to the configs."""
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return replace(arch, eos_token_ids=tuple(dict.fromkeys(arch.eos_token_ids + own)))


def load_tokenizer_of(model: str, load_format: str = "auto", tokenizer: str | None = None) -> AnyTokenizer:
    """Load only the tokenizer that :func:`load_parts` would load; raise ``CheckpointError`` if that fails."""
    _check_source(model, load_format)
    if tokenizer is not None:
        return load_tokenizer(checkpoint_folder(tokenizer), arch_of(model, load_format))
    if load_format == "dummy":
        return load_dummy_tokenizer(dummy_shape(model))
    folder = checkpoint_folder(model)
    return load_tokenizer(folder, load_config(folder))


def _check_source(model: str, load_format: str) -> None:
    if not isinstance(model, (str, PathLike)):
        raise CheckpointError(f"model is {describe(model)}; give '{SHIPPED}', a folder or a hub id")
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(f"load_format {describe(load_format)} is unknown; use 'auto' or 'dummy'")
