"""Checkpoints whose weights have 8 or 4 bits, in the formats of compressed-tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rosellm.errors import CheckpointError, describe
from rosellm.models.quantized import GROUP, QuantizedWeight

STORED = {  # formats, by those of compressed-tensors and bits
    ("float-quantized", 8): "fp8",
    ("int-quantized", 8): "int8",
    ("pack-quantized", 8): "int8",
    ("pack-quantized", 4): "int4",
}
SUPPORTED = (
    "compressed-tensors with symmetric weights for all layers, of 8 bits and one scale per output or tensor, "
    f"or of 4 bits and one per {GROUP} inputs, not reordered, is"
)


def stored_format(config: dict[str, Any]) -> str | None:
    """Return the format of a checkpoint's weights, of ``WEIGHT_FORMS``; None if they are not quantised.

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
        reason = " ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise CheckpointError(f"quantization_config is not supported: {reason}; {SUPPORTED}") from error
    groups = list(read.config_groups.values())
    form = _form(groups[0], read.format) if len(groups) == 1 else None
    if form is None or read.kv_cache_scheme is not None or read.ignore != ["lm_head"]:
        raise CheckpointError(f"this quantization_config is not supported; {SUPPORTED}")
    return form


def _form(group: Any, stored: Any) -> str | None:
    """Return the format of a group of layers if it is all of them, with weights that kernels can read."""
    weights = group.weights
    if weights is None or list(group.targets) != ["Linear"]:
        return None
    form = STORED.get((str(getattr(group, "format", None) or stored), weights.num_bits))
    kind = "float" if form == "fp8" else "int"
    in_groups = (weights.strategy, weights.group_size, weights.actorder == "group") == ("group", GROUP, False)
    shared = in_groups if form == "int4" else weights.strategy in ("channel", "tensor")
    return form if shared and (weights.type, weights.symmetric) == (kind, True) else None


def copy_codes(weight: QuantizedWeight, name: str, stored: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Copy codes and scales of a checkpoint to a weight ``[N, K]``.

    name: the weight's name in the checkpoint, for errors.
    stored: its tensors by the last part of their names.
    dtype: the model's dtype, which must hold the weights.

    Raises ``CheckpointError`` if they are not those of such a weight.
    """
    n, k = weight.shape
    codes, scales = stored.get("weight_packed"), stored["weight_scale"]
    codes = stored["weight"] if codes is None else codes
    is_packed, in_groups = codes.dtype == torch.int32, weight.form == "int4"
    if is_packed and codes.dim() == 2:
        from compressed_tensors.compressors import unpack_from_int32

        bits = 4 if in_groups else 8
        codes = unpack_from_int32(codes, bits, torch.Size((len(codes), codes.shape[1] * 32 // bits)))
    if not is_packed if in_groups else codes.dtype != weight.dtype:
        kind = str(codes.dtype).removeprefix("torch.")
        raise CheckpointError(f"{name} is stored as {kind}; quantization_config says {weight.form}")
    scales = scales.to(weight.scales.dtype).float()
    scales = scales if in_groups else scales.view(-1, 1)
    if codes.shape != weight.shape or scales.shape not in (
        [(n, k // GROUP)] if in_groups else [(n, 1), (1, 1)]
    ):
        shapes = f"{list(codes.shape)} with {scales.numel()} scales"
        raise CheckpointError(f"{name} has shape {shapes}; the config asks for {list(weight.shape)}")
    if "weight_g_idx" in stored or stored.get("weight_zero_point", scales.new_zeros(1)).float().any():
        raise CheckpointError(
            f"{name} has zero points or reordered inputs, which is not supported; {SUPPORTED}"
        )
    if not (scales > 0).all():
        kind = str(weight.scales.dtype).removeprefix("torch.")
        raise CheckpointError(f"{name} holds scales that are not above 0 in {kind}")
    groups = codes.float().view(n, scales.shape[1], -1)
    if not (groups.abs().amax(2) * scales <= torch.finfo(dtype).max).all():  # nor if any is NaN
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{name} holds values that are not finite in {kind}")
    weight.store(codes, scales)
