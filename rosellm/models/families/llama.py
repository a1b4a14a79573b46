"""Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024), from which other families are derived."""

from __future__ import annotations

from dataclasses import replace

from rosellm.models.arch import Arch, Norm
from rosellm.models.families.family import Config, Family, flag

LAYER = {
    "norm_1": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "out": ("self_attn.o_proj",),
    "norm_2": ("post_attention_layernorm",),
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def read_biases(arch: Arch, config: Config) -> Arch:
    return replace(arch, biases=("qkv", "out")) if flag(config, "attention_bias") else arch


def write_biases(arch: Arch) -> Config:
    return {"attention_bias": "qkv" in arch.biases}


FAMILY = Family(
    architecture="LlamaForCausalLM",
    needed={
        "vocab_size": "vocab_size",
        "n_positions": "max_position_embeddings",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "d_model": "hidden_size",
        "d_ff": "intermediate_size",
    },
    optional={
        "n_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "tie_embeddings": "tie_word_embeddings",
    },
    norm=Norm("rms", 1e-6),
    eps="rms_norm_eps",
    only={"hidden_act": ("silu", "swish"), "mlp_bias": (False,)},
    tensors={
        "token_embedding.weight": ("model.embed_tokens.weight",),
        **{
            f"blocks.{{}}.{ours}.{kind}": tuple(f"model.layers.{{}}.{name}.{kind}" for name in theirs)
            for ours, theirs in LAYER.items()
            for kind in ("weight", "bias")
        },
        "norm.weight": ("model.norm.weight",),
        "lm_head.weight": ("lm_head.weight",),
    },
    prefix="model.",
    defaults={"tie_word_embeddings": False},
    parts={"mlp": "swiglu", "biases": ()},
    read_own=read_biases,
    write_own=write_biases,
)
