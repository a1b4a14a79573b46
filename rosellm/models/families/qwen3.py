"""Qwen3 (Yang et al. 2025): Llama with a norm on every head of q and k."""

from __future__ import annotations

from dataclasses import replace

from rosellm.models.families import llama, qwen2

FAMILY = replace(
    qwen2.FAMILY,
    architecture="Qwen3ForCausalLM",
    only={"hidden_act": ("silu", "swish"), "attention_bias": (False,)},
    defaults=qwen2.FAMILY.defaults | {"head_dim": 128},
    parts=llama.FAMILY.parts | {"qk_norm": True},
)
