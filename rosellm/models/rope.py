"""Rotary position embeddings (Su et al. 2021, RoFormer), and the scalings that stretch them.

D head size. Frequencies are computed in fp64 and tabulated in fp32 once per model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rosellm.errors import CheckpointError, told

LEAST, MOST = 1e-6, 1e12  # of any number that a scaling is made of


@dataclass(frozen=True)
class Linear:
    """All positions divided by ``factor`` (Chen et al. 2023, position interpolation)."""

    factor: float

    def __call__(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / self.factor

    amplitude = 1.0


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's: long wavelengths divided by ``factor``, short ones kept, those in between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __call__(self, frequencies: Tensor, theta: float) -> Tensor:
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept * frequencies + (1 - kept) * frequencies / self.factor

    amplitude = 1.0


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023): interpolation by wavelength; sines and cosines times ``amplitude``."""

    factor: float
    original_max_position_embeddings: int
    amplitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __call__(self, frequencies: Tensor, theta: float) -> Tensor:
        low, high = (self._dimension(turns, len(frequencies), theta) for turns in self._turns)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
        place = torch.arange(len(frequencies), dtype=torch.float64)
        interpolated = ((place - low) / max(high - low, 0.001)).clamp(0, 1)
        return interpolated * frequencies / self.factor + (1 - interpolated) * frequencies

    @property
    def _turns(self) -> tuple[float, float]:
        return self.beta_fast, self.beta_slow

    def _dimension(self, turns: float, half: int, theta: float) -> float:
        """The dimension that turns that often over the original context."""
        return (
            half * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)
        )


Scaling = Linear | Llama3 | Yarn


@dataclass(frozen=True)
class Rope:
    """Dimension pair (d, d + D/2) of position p is turned by ``p * theta ** (-2 d / D)``, or as scaled."""

    theta: float = 10_000.0
    scaling: Scaling | None = None

    def table(self, n_positions: int, head_dim: int, device: torch.device) -> Tensor:
        """Cosines, then sines, of every position: ``[n_positions, D]`` fp32."""
        powers = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        frequencies = self.theta**-powers  # [D / 2]
        if self.scaling is not None:
            frequencies = self.scaling(frequencies, self.theta)
        # The angles are rounded to fp32 like those of the models' own code.
        angles = torch.arange(n_positions, device=device)[:, None] * frequencies.float().to(device)
        amplitude = 1.0 if self.scaling is None else self.scaling.amplitude
        return torch.cat((angles.cos(), angles.sin()), dim=1) * amplitude


class Rotary(NamedTuple):
    """What positions a layer's q and k: angles ``[P, D]`` fp32, and the norms' weights ``[D]``, if any."""

    cos_sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x ``[N, H, D]`` turned by ``cos_sin`` ``[N, D]``, in fp32, → x's dtype."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)  # [N, 1, D / 2]
    first, second = x.float().chunk(2, dim=-1)  # [N, H, D / 2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def read_rope(config: dict[str, Any]) -> Rope:
    """From a ``config.json``: ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``.

    Raises ``CheckpointError``.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    fields = {} if config.get(name) is None else config[name]
    if not isinstance(fields, dict):
        raise CheckpointError(f"{name} is {told(fields)}; an object is needed")
    if any(isinstance(value, dict) for value in fields.values()):
        raise CheckpointError("rope_parameters differ between kinds of layers; one kind is supported")
    theta = _number(fields, "rope_theta", config.get("rope_theta", 10_000.0), above=1.0)
    if (partial := fields.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1):
        raise CheckpointError(f"partial_rotary_factor {told(partial)} is not supported; only 1.0 is")
    kind = fields.get("rope_type", fields.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise CheckpointError(f"rope_type {told(kind)} is not supported; {', '.join(_SCALINGS)} are")
    return Rope(theta, _SCALINGS[kind](fields, config))


def _read_nothing(fields: dict[str, Any], config: dict[str, Any]) -> None:
    return None


def _read_linear(fields: dict[str, Any], config: dict[str, Any]) -> Linear:
    return Linear(_number(fields, "factor"))


def _read_llama3(fields: dict[str, Any], config: dict[str, Any]) -> Llama3:
    low, high = _number(fields, "low_freq_factor"), _number(fields, "high_freq_factor")
    if low >= high:
        raise CheckpointError(f"low_freq_factor {low} is not below high_freq_factor {high}")
    return Llama3(_number(fields, "factor"), low, high, _original(fields, config))


def _read_yarn(fields: dict[str, Any], config: dict[str, Any]) -> Yarn:
    factor = _number(fields, "factor")
    amplitude = _yarn_amplitude(fields, factor)
    fast, slow = _number(fields, "beta_fast", 32.0), _number(fields, "beta_slow", 1.0)
    if not isinstance(truncate := fields.get("truncate", True), bool):
        raise CheckpointError(f"truncate is {told(truncate)} in the rope parameters; true or false is needed")
    return Yarn(factor, _original(fields, config), amplitude, fast, slow, truncate)


def _yarn_amplitude(fields: dict[str, Any], factor: float) -> float:
    if fields.get("attention_factor") is not None:
        return _number(fields, "attention_factor")
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return _mscale(factor, _number(fields, "mscale")) / _mscale(factor, _number(fields, "mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _original(fields: dict[str, Any], config: dict[str, Any]) -> int:
    """The context that the model was trained on before it was scaled; the outer field comes first."""
    name = "original_max_position_embeddings"
    given = (config.get(name), fields.get(name), config.get("max_position_embeddings"))
    length = _number({name: next((value for value in given if value is not None), None)}, name)
    if length != int(length):
        raise CheckpointError(f"{name} is {told(length)} in the rope parameters; a whole number is needed")
    return int(length)


def _number(fields: dict[str, Any], name: str, default: Any = None, above: float = LEAST) -> float:
    value = default if fields.get(name) is None else fields[name]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not above < value <= MOST:
        needed = f"a number above {above:g} and at most {MOST:g} is needed"
        raise CheckpointError(f"{name} is {told(value)} in the rope parameters; {needed}")
    return value


_SCALINGS: dict[str, Any] = {
    "default": _read_nothing,
    "linear": _read_linear,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}
