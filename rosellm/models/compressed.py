"""Checkpoints whose weights have 8 bits, in the formats of compressed-tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rosellm.errors import CheckpointError, describe
from rosellm.models.quantized import QuantizedWeight

STORED = {"float-quantized": "fp8", "int-quantized": "int8", "pack-quantized": "int8"}
SUPPORTED = "compressed-tensors with 8-bit weights and one scale per output or tensor, for all layers, is"


def stored_format(config: dict[str, Any]) -> str | None:
    """Return the format of the weights of a checkpoint, a key of ``CODES``; None if they are not quantised.

    config: the fields of its ``config.json``.

    Activations may have been quantised, too; here they are not. Raises ``CheckpointError`` for other formats.
    """
    fields = config.get("quantization_config")
    if fields is None:
        return None
    if not isinstance(fields, dict) or fields.get("quant_method") != "compressed-tensors":
        method = fields.get("quant_method") if isinstance(fields, dict) else fields
        raise CheckpointError(f"quantization_config of {describe(method)} is not supported; {SUPPORTED}")
    try:
        from compressed_tensors.quantization import QuantizationConfig
    except ImportError:
        raise CheckpointError("the checkpoint is quantised; pip install compressed-tensors") from None
    try:
        read = QuantizationConfig.model_validate(fields)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"quantization_config cannot be read: {reason}") from error
    groups = list(read.config_groups.values())
    form = STORED.get(str(getattr(groups[0], "format", None) or read.format)) if len(groups) == 1 else None
    others = read.kv_cache_scheme is not None or read.ignore != ["lm_head"]
    if form is None or others or not _fits(groups[0], form):
        raise CheckpointError(f"this quantization_config is not supported; {SUPPORTED}")
    return form


def _fits(group: Any, form: str) -> bool:
    """Return whether a group of layers is all of them, with weights of a format that kernels can read."""
    kind, weights = "float" if form == "fp8" else "int", group.weights
    if weights is None or list(group.targets) != ["Linear"] or weights.strategy not in ("channel", "tensor"):
        return False
    return (weights.num_bits, weights.type, weights.symmetric) == (8, kind, True)


def copy_codes(weight: QuantizedWeight, name: str, stored: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Copy codes and scales of a checkpoint to a weight ``[N, K]``.

    name: the weight's name in the checkpoint, for errors.
    stored: its tensors by the last part of their names.
    dtype: the model's dtype, which must hold the weights.

    Raises ``CheckpointError`` if they are not those of such a weight.
    """
    codes, scales = stored.get("weight"), stored["weight_scale"].float().flatten()
    if codes is None:
        from compressed_tensors.compressors import unpack_from_int32

        codes = unpack_from_int32(stored["weight_packed"], 8, torch.Size(stored["weight_shape"].tolist()))
    if codes.dtype != weight.dtype:
        kind = str(codes.dtype).removeprefix("torch.")
        raise CheckpointError(f"{name} is stored as {kind}; quantization_config says {weight.form}")
    if codes.shape != weight.shape or scales.numel() not in (1, len(weight)):
        shapes = f"{list(codes.shape)} with {scales.numel()} scales"
        raise CheckpointError(f"{name} has shape {shapes}; the config asks for {list(weight.shape)}")
    if not (scales > 0).all():
        raise CheckpointError(f"{name} holds scales that are not above 0")
    if not (codes.float().abs().amax(1) * scales <= torch.finfo(dtype).max).all():  # nor if any is NaN
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{name} holds values that are not finite in {kind}")
    weight.codes.copy_(codes)
    weight.scales.copy_(scales.expand(len(weight)))
