"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k and v."""

from __future__ import annotations

from rosellm.errors import CheckpointError, describe
from rosellm.models.arch import INT32_MAX, Arch, is_whole
from rosellm.models.families.family import Config, Family, flag, with_window
from rosellm.models.families.llama import read_arch, tensor_names, write_arch

DEFAULTS = {"num_key_value_heads": 32}  # transformers' own


def read(config: Config) -> Arch:
    return windowed(read_arch(DEFAULTS | config, ("qkv",), family="qwen2"), config)


def write(arch: Arch) -> Config:
    return write_arch(arch, "Qwen2", "qwen2", **window_fields(arch))


def windowed(arch: Arch, config: Config) -> Arch:
    """``arch`` with the window that the config has in use; the defaults are transformers' own."""
    if not flag(config, "use_sliding_window"):
        return with_window(arch, None, config.get("layer_types"))
    n_full = config.get("max_window_layers", 28)
    if not is_whole(n_full, 0, INT32_MAX):
        raise CheckpointError(f"max_window_layers is {describe(n_full)}; a whole number is needed")
    return with_window(arch, config.get("sliding_window", 4096), config.get("layer_types"), n_full)


def window_fields(arch: Arch) -> Config:
    """The fields that :func:`windowed` reads."""
    if arch.window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": arch.window, "max_window_layers": 0}


FAMILY = Family(
    model_types=("qwen2",), read=read, write=write, tensors=tensor_names(qkv_bias=True), prefix="model."
)
