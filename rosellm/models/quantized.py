"""Weights, activations, keys and values of 8 bits, and weights of 4 bits: codes and their scales.

A weight is its code times its row's scale, rounded to nearest. Codes are floating-point numbers of 8 bits
with 3 bits of mantissa ("fp8", ``float8_e4m3fn``), or integers from -127 to 127 ("int8"). Weights can also be
integers from -8 to 7 ("int4"), with one scale for each ``GROUP`` inputs of a row. GEMMs multiply codes, by
activations in the model's dtype or by codes of activations, and their sums by scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rosellm.errors import DeviceError, OptionError, describe
from rosellm.models.arch import Arch

CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}  # by format
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # codes
FP8_FROM = (8, 9)  # compute capability
FINER = {torch.float8_e4m3fn: 16.0, torch.int8: 254.0}  # a code of one digit divided by one of the next
ROW_FORMS = {"fp8": "fp8", "int8": "int8", "int4": "int8"}  # of activations, by that of weights
WEIGHT_FORMS = tuple(ROW_FORMS)
GROUP = 128  # consecutive inputs that share a scale in "int4"
ENDS = (-7.0, -7.5, -8.0, -8.5, -9.0, -9.5, -10.0)  # codes of a group's furthest element, before clipping
SLICE = 1 << 20  # elements of a weight that are rounded to 4 bits at a time, in fp32
MULTIPLE = 16  # of inputs and outputs
HEAD_FORM = "int8"  # of the LM head, whose sums decide which token is chosen: those of integers are exact
AT_ONCE = 4096  # rows of a weight that are quantised or dequantised together
QUANTIZATION = "quantise the weights of layers and LM head"
KV_DTYPE = "quantise keys and values to 8 bits"


def form_of(codes: Tensor) -> str:
    """Return the format of codes, a key of ``CODES``."""
    return next(form for form, dtype in CODES.items() if dtype == codes.dtype)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight ``[N, K]`` of 8 bits.

    codes: ``[N, K]`` in a dtype of ``CODES``.
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

    @property
    def form(self) -> str:
        """The format, one of ``WEIGHT_FORMS``."""
        return form_of(self.codes)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> QuantizedWeight:
        return QuantizedWeight(self.codes[rows], self.scales[rows])

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def split(self, sizes: int | list[int]) -> list[QuantizedWeight]:
        """Return views of consecutive rows, as ``Tensor.split`` does."""
        pairs = zip(self.codes.split(sizes), self.scales.split(sizes), strict=True)
        return [QuantizedWeight(*pair) for pair in pairs]

    def copy_(self, weight: Tensor) -> QuantizedWeight:
        """Quantise a weight ``[N, K]``; the largest weight of a row gets the largest code. Return self."""
        for own, rows in zip(self.split(AT_ONCE), weight.split(AT_ONCE), strict=True):
            wide = rows.to(self.codes.device, torch.float32)
            scales = scales_of(wide, self.dtype)[:, None]
            own.store(nearest(wide / scales, self.dtype), scales)
        return self

    def store(self, codes: Tensor, scales: Tensor) -> None:
        """Store codes ``[N, K]``, and scales ``[N, 1]`` or ``[1, 1]``."""
        self.codes.copy_(codes)
        self.scales.copy_(scales[:, 0])

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight ``[N, K]`` in a floating-point dtype."""
        return (self.codes.float() * self.scales[:, None]).to(dtype)


@dataclass(frozen=True)
class GroupedWeight(QuantizedWeight):
    """A weight ``[N, K]`` of 4 bits, with one scale for each row and ``GROUP`` consecutive columns.

    codes: ``[N, K / 2]`` uint8, as :func:`packed` returns them.
    scales: ``[K / GROUP, N]`` in the model's dtype.
    """

    @property
    def shape(self) -> torch.Size:
        n, width = self.codes.shape
        return torch.Size((n, 2 * width))

    @property
    def form(self) -> str:
        return "int4"

    def __getitem__(self, rows: Any) -> QuantizedWeight:
        return GroupedWeight(self.codes[rows], self.scales[:, rows])

    def split(self, sizes: int | list[int]) -> list[QuantizedWeight]:
        pairs = zip(self.codes.split(sizes), self.scales.split(sizes, dim=1), strict=True)
        return [GroupedWeight(*pair) for pair in pairs]

    def copy_(self, weight: Tensor) -> QuantizedWeight:
        """Quantise a weight ``[N, K]``, some rows at a time, with :func:`group_scales`. Return self."""
        n_rows = -(-SLICE // weight.shape[1])
        for own, rows in zip(self.split(n_rows), weight.split(n_rows), strict=True):
            groups = rows.to(self.codes.device, torch.float32).unflatten(1, (-1, GROUP))
            scales = group_scales(groups, self.scales.dtype)
            own.store(codes_of_4_bits(groups, scales).flatten(1), scales[:, :, 0])
        return self

    def store(self, codes: Tensor, scales: Tensor) -> None:
        """Store codes ``[N, K]`` from -8 to 7 and scales ``[N, K / GROUP]``."""
        self.codes.copy_(packed(codes.to(torch.int8)))
        self.scales.copy_(scales.t())

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        groups = unpacked(self.codes).unflatten(1, (-1, GROUP))
        return (groups * self.scales.t()[:, :, None].float()).flatten(1).to(dtype)


def group_scales(groups: Tensor, dtype: torch.dtype, importance: Tensor | float = 1.0) -> Tensor:
    """Return scales ``[N, K / GROUP, 1]`` fp32 with which codes of 4 bits have the least squared errors.

    groups: ``[N, K / GROUP, GROUP]`` fp32.
    dtype: that of the weight's scales, to which they are rounded.
    importance: factors of the squared errors, ``[K / GROUP, GROUP]``.

    The element of a group that is furthest from 0 gets a negative code, since codes reach -8 but only 7;
    scales may be negative. Its code is one of ``ENDS``, clipped to -8: finer steps for the others can be
    worth its error.
    """
    low, high = groups.aminmax(dim=2, keepdim=True)
    furthest = torch.where(high > -low, high, low)
    tiny = max(torch.finfo(dtype).tiny * torch.finfo(dtype).eps, torch.finfo(torch.float32).tiny)
    scales, least = torch.ones_like(furthest), torch.full_like(furthest, torch.inf)
    for end in ENDS:
        scale = (furthest / end).to(dtype).float()
        scale = torch.where(scale.abs() < tiny, tiny, scale)
        error = codes_of_4_bits(groups, scale).mul_(scale).sub_(groups).square_().mul_(importance)
        total = error.sum(2, keepdim=True)
        scales = torch.where(total < least, scale, scales)
        least = torch.minimum(total, least)
    return scales


def codes_of_4_bits(x: Tensor, scales: Tensor) -> Tensor:
    """Return the codes of x, from -8 to 7, as floating-point numbers. scales: broadcast against x."""
    return (x / scales).round_().clamp_(-8, 7)


def packed(codes: Tensor) -> Tensor:
    """Return codes ``[N, K]`` int8 from -8 to 7 as ``[N, K / 2]`` uint8, two in a byte.

    Column 32 w + 16 h + 4 c + i of a group, with w, c and i below 4, is in the group's byte 16 c + 4 w + i:
    in the low half if h is 0, in the high half if it is 1. So the bytes that a thread needs of a row for its
    tensor core, those of one c, are consecutive.
    """
    low, high = codes.view(torch.uint8).view(len(codes), -1, 4, 2, 4, 4).transpose(2, 4).unbind(3)
    return (high << 4 | low & 15).flatten(1)


def unpacked(packed: Tensor) -> Tensor:
    """Return the codes ``[N, K]`` int8 of :func:`packed` bytes ``[N, K / 2]``."""
    signed = packed.view(torch.int8).view(len(packed), -1, 4, 4, 4)
    return torch.stack((signed << 4 >> 4, signed >> 4), dim=3).transpose(2, 4).flatten(1)


class RowFormat(NamedTuple):
    """A format of quantised activations. name: a key of ``CODES``. digits: codes per element, 1 or 2."""

    name: str
    digits: int


@dataclass(frozen=True)
class QuantizedRows:
    """Activations ``[M, K]`` as codes of 8 bits, for GEMMs that multiply codes by codes.

    An element is its row's scale times ``code[0] + code[1] / FINER``: the second of its codes, its digits, is
    the rest that the first leaves. With one digit, an element is rounded as a weight is; with two, about as
    in bf16 ("fp8") or more finely ("int8").

    codes: ``[M, digits, K]`` in a dtype of ``CODES``.
    scales: ``[M]`` fp32.
    dtype: the dtype of the activations, and of results.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, form: RowFormat) -> QuantizedRows:
        """Quantise x ``[M, K]``."""
        dtype = CODES[form.name]
        scales = scales_of(x.float(), dtype)
        left, codes = x.float() * (1 / scales)[:, None], []
        for _ in range(form.digits):
            codes.append(nearest(left, dtype).to(dtype))
            left = (left - codes[-1].float()) * FINER[dtype]
        return cls(torch.stack(codes, dim=1), scales, x.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[2]

    @property
    def digits(self) -> int:
        return self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __len__(self) -> int:
        return len(self.codes)

    def dequantized(self) -> Tensor:
        """Return the activations ``[M, K]`` in fp32."""
        digits = range(self.digits)
        wide = sum(self.codes[:, d].float() / FINER[self.codes.dtype] ** d for d in digits)
        return wide * self.scales[:, None]


AnyWeight = Tensor | QuantizedWeight
AnyRows = Tensor | QuantizedRows


def scales_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of each row of x ``[..., K]`` fp32, for codes of a dtype."""
    scales = x.abs().amax(dim=-1) / LARGEST[dtype]
    return scales.clamp_min(torch.finfo(torch.float32).tiny)


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x, rounded if a cast to a dtype of ``CODES`` would truncate it."""
    return x.round() if dtype == torch.int8 else x


@dataclass(frozen=True)
class QuantizedHeads:
    """Cached keys or values of 8 bits, with one scale per token and head. Assignments quantise.

    codes: ``[..., D]`` in a dtype of ``CODES``.
    scales: ``[...]`` fp32.
    dtype: the dtype of keys and values that are not quantised.

    Indices are those of the codes, and must leave the last dimension whole.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def form(self) -> str:
        """The format, a key of ``CODES``."""
        return form_of(self.codes)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, place: Any) -> QuantizedHeads:
        return QuantizedHeads(self.codes[place], self.scales[place], self.dtype)

    def __setitem__(self, place: Any, heads: Tensor) -> None:
        wide = heads.float()
        scales = scales_of(wide, self.codes.dtype)
        self.scales[place] = scales
        codes = nearest(wide * (1 / scales)[..., None], self.codes.dtype)
        self.codes[place] = codes.to(self.codes.dtype)

    def flatten(self, first: int, last: int) -> QuantizedHeads:
        """Return a view with dimensions ``first`` to ``last`` as one, as ``Tensor.flatten`` does."""
        return QuantizedHeads(self.codes.flatten(first, last), self.scales.flatten(first, last), self.dtype)

    def dequantized(self) -> Tensor:
        """Return the keys or values in fp32."""
        return self.codes.float() * self.scales[..., None]


AnyHeads = Tensor | QuantizedHeads


def full(x: AnyWeight | AnyRows | AnyHeads) -> Tensor:
    """Return x as a tensor, dequantised to fp32 if it is quantised."""
    return x if isinstance(x, Tensor) else x.dequantized()


def rounded_heads(heads: Tensor, form: str) -> Tensor:
    """Return heads ``[..., D]`` as they would be read from a cache of a format, in their dtype."""
    codes = torch.empty_like(heads, dtype=CODES[form])
    held = QuantizedHeads(codes, heads.new_empty(heads.shape[:-1], dtype=torch.float32), heads.dtype)
    held[...] = heads
    return held.dequantized().to(heads.dtype)


def rounded_like(cache: AnyHeads, heads: Tensor) -> Tensor:
    """Return heads ``[..., D]`` as they would be read from a cache, in their dtype."""
    return heads if isinstance(cache, Tensor) else rounded_heads(heads, cache.form)


def empty_weight(n: int, k: int, form: str, device: torch.device, dtype: torch.dtype) -> QuantizedWeight:
    """Return a quantised weight ``[n, k]`` of zeros.

    form: one of ``WEIGHT_FORMS``.
    dtype: that of the model, and of the scales of "int4".
    """
    if form == "int4":
        codes = torch.zeros(n, k // 2, dtype=torch.uint8, device=device)
        return GroupedWeight(codes, torch.ones(k // GROUP, n, dtype=dtype, device=device))
    codes = torch.zeros(n, k, dtype=CODES[form], device=device)
    return QuantizedWeight(codes, torch.ones(n, dtype=torch.float32, device=device))


def bytes_per_weight(form: str, dtype: torch.dtype) -> float:
    """Return the bytes of an element of a quantised weight, with its share of the scales of groups.

    form: one of ``WEIGHT_FORMS``.
    dtype: that of the model.
    """
    return 0.5 + dtype.itemsize / GROUP if form == "int4" else 1.0


def parts_of_weight(weight: AnyWeight) -> tuple[Tensor, Tensor | None]:
    """Return a weight's codes and scales, or a weight that is not quantised and None."""
    return (weight.codes, weight.scales) if isinstance(weight, QuantizedWeight) else (weight, None)


def parts_of_rows(x: AnyRows) -> tuple[Tensor, Tensor | None, int]:
    """Return the codes, scales and number of digits of activations; x, None and 1 if it is not quantised."""
    return (x, None, 1) if isinstance(x, Tensor) else (x.codes, x.scales, x.digits)


class QuantizedEmbedding(nn.Module):
    """An embedding ``[V, C]`` whose weight is quantised. dtype: that of the embedded tokens."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = weight, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids].dequantized(self.dtype)


class QuantizedProjection(nn.Module):
    """A linear layer whose weight is quantised.

    weight: as in :class:`QuantizedWeight`.
    bias: ``[N]``, or None.
    digits: the number of codes to which each input is rounded first; None leaves it as it is.
    """

    digits: int | None = None

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        if self.digits is not None:
            form = RowFormat(ROW_FORMS[self.weight.form], self.digits)
            x = QuantizedRows.of(x, form).dequantized().to(x.dtype)
        biases = repeat(None) if self.bias is None else self.bias.split(AT_ONCE)
        parts = zip(self.weight.split(AT_ONCE), biases, strict=False)
        return torch.cat([F.linear(x, rows.dequantized(x.dtype), bias) for rows, bias in parts], dim=-1)


def check_fp8(form: str, device: torch.device, option: str) -> None:
    """Raise ``DeviceError`` if a format is "fp8", but not of the device. option: the name of the option."""
    if form == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_FROM:
        raise DeviceError(f"{option} 'fp8' needs a GPU of compute capability 8.9 or later; use 'int8'")


def check_quantization(form: str | None, device: torch.device, arch: Arch | None = None) -> None:
    """Raise ``OptionError`` or ``DeviceError`` if the weights of a model cannot be quantised.

    form: one of ``WEIGHT_FORMS``, or None.
    device: the model's device.
    arch: the model's architecture, if it is known.
    """
    if form is None:
        return
    if not isinstance(form, str) or form not in WEIGHT_FORMS:
        known = ", ".join(map(repr, WEIGHT_FORMS))
        raise OptionError(f"quantization {describe(form)} is unknown; use {known}")
    check_fp8(form, device, "quantization")
    for name, (n, k) in arch.shapes.items() if arch is not None else ():
        size = f"{name!r} of this model is {n} x {k}"
        if n % MULTIPLE or k % MULTIPLE:
            raise OptionError(f"quantization {form!r} needs sizes in multiples of {MULTIPLE}; {size}")
        if form == "int4" and k % GROUP:
            raise OptionError(f"quantization 'int4' needs inputs in groups of {GROUP}; {size}")
