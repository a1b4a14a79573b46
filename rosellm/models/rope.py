"""Rotary position embeddings (Su et al. 2021, RoFormer) and their scalings for longer contexts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rosellm.errors import CheckpointError, describe
from rosellm.models.checks import check, is_number, is_whole

LEAST, MOST = 1e-6, 10**12  # bounds of the numbers in a config
OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
NUMBERS: dict[str, tuple[str, ...]] = {  # the numeric fields of each rope_type
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", *OPTIONAL),
}


@dataclass(frozen=True)
class Rope:
    """The parameters of a rotary embedding, named as in ``config.json``; None means absent.

    rope_type: the scaling: "default" (none), "linear" (Chen et al. 2023), "llama3" (Llama 3.1) or "yarn"
        (Peng et al. 2023).

    At position p, dimensions d and d + D/2 are rotated by ``p * rope_theta ** (-2 d / D)`` radians, before
    scaling.
    """

    rope_theta: float = 10_000.0
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The fields that are not None, as the ``rope_parameters`` of a ``config.json``."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def table(self, n_positions: int, head_dim: int, device: torch.device) -> Tensor:
        """Return the cosines, then the sines, of every position: ``[n_positions, D]`` fp32 on ``device``."""
        frequencies, amplitude = self._frequencies(head_dim)
        angles = torch.arange(n_positions, device=device)[:, None] * frequencies.to(device)
        return torch.cat((angles.cos(), angles.sin()), dim=1) * amplitude

    def _frequencies(self, head_dim: int) -> tuple[Tensor, float]:
        """Return the frequencies ``[D / 2]``, in radians per position, and the factor on cosines and sines.

        The frequencies are computed in fp32, as in training.
        """
        if self.rope_type == "default":
            return 1.0 / self.rope_theta ** (
                torch.arange(0, head_dim, 2, device="cpu").float() / head_dim
            ), 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # here: the import is slow

        config = SimpleNamespace(
            rope_parameters=self.parameters,
            hidden_size=head_dim,
            num_attention_heads=1,
            standardize_rope_params=lambda: None,
        )
        return ROPE_INIT_FUNCTIONS[self.rope_type](config, torch.device("cpu"))


class Rotary(NamedTuple):
    """The inputs with which kernels normalise and rotate q and k.

    cos_sin: ``[P, D]`` fp32, the cosines, then the sines, of every position.
    q_norm, k_norm: weights ``[D]`` of the norms, or None without them.
    eps: the epsilon of the norms.
    """

    cos_sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate x ``[N, H, D]`` by ``cos_sin [N, D]`` in fp32; return the result in the dtype of x."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)  # [N, 1, D / 2]
    first, second = x.float().chunk(2, dim=-1)  # [N, H, D / 2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def read_rope(config: dict[str, Any]) -> Rope:
    """Read ``rope_parameters`` of a ``config.json``, or the older ``rope_theta`` and ``rope_scaling``.

    Raises ``CheckpointError`` for a value that is invalid or not supported.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    fields = {} if config.get(name) is None else config[name]
    check(isinstance(fields, dict), name, fields, "an object")
    if any(isinstance(value, dict) for value in fields.values()):
        raise CheckpointError("rope_parameters differ between kinds of layers; one kind is supported")
    theta = config.get("rope_theta", 10_000.0) if fields.get("rope_theta") is None else fields["rope_theta"]
    if (partial := fields.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1):
        raise CheckpointError(f"partial_rotary_factor {describe(partial)} is not supported; only 1.0 is")
    kind = fields.get("rope_type", fields.get("type", "default"))
    if not isinstance(kind, str) or kind not in NUMBERS:
        raise CheckpointError(f"rope_type {describe(kind)} is not supported; {', '.join(NUMBERS)} are")
    check(is_number(theta, 1, MOST), "rope_theta", theta, f"a number above 1 and at most {MOST:g}")
    found: dict[str, Any] = {
        name: fields.get(name) for name in NUMBERS[kind] if name not in OPTIONAL or fields.get(name)
    }
    for name, value in found.items():
        check(is_number(value, LEAST, MOST), name, value, f"a number above {LEAST:g} and at most {MOST:g}")
    if kind == "llama3":
        low, high = found["low_freq_factor"], found["high_freq_factor"]
        check(low < high, "low_freq_factor", low, f"a number below high_freq_factor {high}")
    if kind == "yarn":
        found["truncate"] = fields.get("truncate", True)
        check(isinstance(found["truncate"], bool), "truncate", found["truncate"], "true or false")
    if kind in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        given = (config.get(name), fields.get(name), config.get("max_position_embeddings"))
        found[name] = next((length for length in given if length is not None), None)
        check(is_whole(found[name], 1, MOST), name, found[name], "a whole number, 1 or more,")
    return Rope(theta, kind, **found)
