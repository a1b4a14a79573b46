"""Phi-3 (Abdin et al. 2024): Llama with a sliding window, stored with q/k/v and gate/up joined."""

from __future__ import annotations

from dataclasses import replace

from rosellm.errors import CheckpointError
from rosellm.models.arch import Arch, Norm
from rosellm.models.families import llama
from rosellm.models.families.family import Config


def read_window(arch: Arch, config: Config) -> Arch:
    if arch.rope is not None and arch.rope.rope_type != "default":  # its files write "yarn" for longrope
        raise CheckpointError("this family's scaled rotary embeddings (longrope) are not supported")
    return replace(arch, window=config.get("sliding_window"))


FAMILY = replace(
    llama.FAMILY,
    architecture="Phi3ForCausalLM",
    norm=Norm("rms", 1e-5),
    only={"hidden_act": ("silu", "swish")},
    tensors={
        **llama.FAMILY.tensors,
        "blocks.{}.qkv.weight": ("model.layers.{}.self_attn.qkv_proj.weight",),
        "blocks.{}.up.weight": ("model.layers.{}.mlp.gate_up_proj.weight",),
    },
    read_own=read_window,
    write_own=lambda arch: {"sliding_window": arch.window, "pad_token_id": None},
)
