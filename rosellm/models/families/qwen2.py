"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k and v."""

from __future__ import annotations

from dataclasses import replace

from rosellm.models.arch import Arch
from rosellm.models.families import llama
from rosellm.models.families.family import Config, with_window


def write_window(arch: Arch) -> Config:
    if arch.window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": arch.window, "max_window_layers": 0}


FAMILY = replace(
    llama.FAMILY,
    architecture="Qwen2ForCausalLM",
    only={"hidden_act": ("silu", "swish")},
    defaults=llama.FAMILY.defaults
    | {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    parts=llama.FAMILY.parts | {"biases": ("qkv",)},
    read_own=with_window,
    write_own=write_window,
)
