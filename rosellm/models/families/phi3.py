"""Phi-3 (Abdin et al. 2024): Llama with a sliding window, stored with q/k/v and gate/up joined."""

from __future__ import annotations

from rosellm.errors import CheckpointError
from rosellm.models.arch import Arch
from rosellm.models.families.family import Config, Family
from rosellm.models.families.llama import EPS, read_arch, tensor_names, write_arch

JOINED = {
    "blocks.{}.qkv.weight": ("model.layers.{}.self_attn.qkv_proj.weight",),
    "blocks.{}.up.weight": ("model.layers.{}.mlp.gate_up_proj.weight",),
}


def read(config: Config) -> Arch:
    arch = read_arch({EPS: 1e-5} | config, window=config.get("sliding_window"), family="phi3")
    if arch.rope is not None and arch.rope.rope_type != "default":  # what its files call yarn is longrope
        raise CheckpointError("this family's scaled rotary embeddings (longrope) are not supported")
    return arch


def write(arch: Arch) -> Config:
    return write_arch(arch, "Phi3", "phi3", sliding_window=arch.window, pad_token_id=None)


FAMILY = Family(
    model_types=("phi3",), read=read, write=write, tensors=tensor_names() | JOINED, prefix="model."
)
