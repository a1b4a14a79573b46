"""Weights of 8 bits: one code per weight, and one scale per output.

A weight is its code times its row's scale, rounded to nearest. Codes are floating-point numbers of 8 bits
with 3 bits of mantissa ("fp8", ``float8_e4m3fn``), or integers from -127 to 127 ("int8"). Activations keep
the model's dtype, which holds all codes exactly; kernels multiply sums by scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rosellm.errors import DeviceError, OptionError, describe
from rosellm.models.arch import Arch

CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}  # by format
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # codes
FP8_FROM = (8, 9)  # compute capability
GROUP = 64  # inputs
QUANTIZATION = "quantise the weights of all layers to 8 bits"


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight ``[N, K]`` of 8 bits; K is a multiple of ``GROUP``.

    codes: ``[N, K]`` in a dtype of ``CODES``, in the order of :func:`packed`.
    scales: ``[N]`` fp32.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype

    def __len__(self) -> int:
        return len(self.codes)

    def split(self, sizes: list[int]) -> list[QuantizedWeight]:
        """Return views of consecutive rows, as ``Tensor.split`` does."""
        pairs = zip(self.codes.split(sizes), self.scales.split(sizes), strict=True)
        return [QuantizedWeight(*pair) for pair in pairs]

    def copy_(self, weight: Tensor) -> QuantizedWeight:
        """Quantise a weight ``[N, K]``; the largest weight of a row gets the largest code. Return self."""
        wide = weight.to(self.codes.device, torch.float32)
        scales = wide.abs().amax(dim=1) / LARGEST[self.dtype]
        self.scales.copy_(scales.clamp_min(torch.finfo(torch.float32).tiny))
        codes = packed(wide / self.scales[:, None])
        self.codes.copy_(codes.round_() if self.dtype == torch.int8 else codes)
        return self

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight ``[N, K]`` in a floating-point dtype."""
        return (unpacked(self.codes.float()) * self.scales[:, None]).to(dtype)


AnyWeight = Tensor | QuantizedWeight


def packed(codes: Tensor) -> Tensor:
    """Return codes ``[N, K]`` in the order in which a thread of a GEMM on tensor cores needs them.

    Of each ``GROUP`` inputs, a thread multiplies 16, two of every 8, which become adjacent.
    """
    return codes.unflatten(1, (-1, 4, 2, 4, 2)).permute(0, 1, 4, 2, 3, 5).flatten(1)


def unpacked(codes: Tensor) -> Tensor:
    """Return codes ``[N, K]`` in the order of the inputs."""
    return codes.unflatten(1, (-1, 4, 4, 2, 2)).permute(0, 1, 3, 4, 2, 5).flatten(1)


def empty_weight(n: int, k: int, form: str, device: torch.device) -> QuantizedWeight:
    """Return a quantised weight ``[n, k]`` of zeros. form: a key of ``CODES``."""
    codes = torch.zeros(n, k, dtype=CODES[form], device=device)
    return QuantizedWeight(codes, torch.ones(n, device=device))


def full_weight(weight: AnyWeight) -> Tensor:
    """Return a weight as a tensor, dequantised to fp32 if it is quantised."""
    return weight.dequantized() if isinstance(weight, QuantizedWeight) else weight


def parts_of_weight(weight: AnyWeight) -> tuple[Tensor, Tensor | None]:
    """Return a weight's codes and scales, or a weight that is not quantised and None."""
    return (weight.codes, weight.scales) if isinstance(weight, QuantizedWeight) else (weight, None)


class QuantizedProjection(nn.Module):
    """A linear layer whose weight is quantised.

    weight: as in :class:`QuantizedWeight`.
    bias: ``[N]``, or None.
    """

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.dequantized(x.dtype), self.bias)


def check_quantization(form: str | None, device: torch.device, arch: Arch | None = None) -> None:
    """Raise ``OptionError`` or ``DeviceError`` if the weights of a model cannot be quantised.

    form: a key of ``CODES``, or None.
    device: the model's device.
    arch: the model's architecture, if it is known.
    """
    if form is None:
        return
    if not isinstance(form, str) or form not in CODES:
        raise OptionError(f"quantization {describe(form)} is unknown; use {', '.join(map(repr, CODES))}")
    if form == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_FROM:
        raise DeviceError("quantization 'fp8' needs a GPU of compute capability 8.9 or later; use 'int8'")
    for name, (_, k) in arch.shapes.items() if arch is not None else ():
        if k % GROUP:
            raise OptionError(
                f"quantization {form!r} needs inputs in multiples of {GROUP}; {name!r} of this model has {k}"
            )
