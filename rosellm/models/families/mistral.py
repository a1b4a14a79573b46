"""Mistral (Jiang et al. 2023): Llama with a sliding window."""

from __future__ import annotations

from dataclasses import replace

from rosellm.models.arch import Arch
from rosellm.models.families import llama
from rosellm.models.families.family import Config, with_window


def read_window(arch: Arch, config: Config) -> Arch:
    return with_window(arch, config | {"use_sliding_window": True, "max_window_layers": 0})


FAMILY = replace(
    llama.FAMILY,
    architecture="MistralForCausalLM",
    only={"hidden_act": ("silu", "swish")},
    defaults=llama.FAMILY.defaults | {"num_key_value_heads": 8, "sliding_window": 4096},
    read_own=read_window,
    write_own=lambda arch: {"sliding_window": arch.window},
)
