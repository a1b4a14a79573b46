"""Qwen3 (Yang et al. 2025): Llama with a norm on every head of q and k."""

from __future__ import annotations

from rosellm.models.arch import Arch
from rosellm.models.families.family import Config, Family, check_only
from rosellm.models.families.llama import read_arch, tensor_names, write_arch
from rosellm.models.families.qwen2 import window_fields, windowed

DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128}  # transformers' own


def read(config: Config) -> Arch:
    check_only(config, {"attention_bias": False})
    return windowed(read_arch(DEFAULTS | config, qk_norm=True, family="qwen3"), config)


def write(arch: Arch) -> Config:
    return write_arch(arch, "Qwen3", "qwen3", **window_fields(arch), attention_bias=False)


FAMILY = Family(
    model_types=("qwen3",), read=read, write=write, tensors=tensor_names(qk_norm=True), prefix="model."
)
