"""Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024) and what shares their architecture."""

from __future__ import annotations

from typing import Any

from rosellm.errors import CheckpointError, describe
from rosellm.models.arch import INT32_MAX, Arch, Norm, is_whole
from rosellm.models.families.family import (
    Config,
    Family,
    check_only,
    dtype_of,
    eos_field,
    eos_ids,
    flag,
    renamed,
)
from rosellm.models.rope import Rope, read_rope

NAMES = {
    "vocab_size": "vocab_size",
    "n_positions": "max_position_embeddings",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "tie_embeddings": "tie_word_embeddings",
}
NEEDED = ("vocab_size", "n_positions", "n_layers", "n_heads", "d_model", "d_ff")
EPS = "rms_norm_eps"


def read_arch(config: Config, biases: tuple[str, ...] = (), **parts: Any) -> Arch:
    """Read what Llama and its relatives share: RMSNorm, rotary embeddings, SwiGLU; ``parts``: their own."""
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act {describe(activation)} is not supported; 'silu' is")
    fields = renamed({"tie_word_embeddings": False} | config, NAMES, NEEDED)
    rope = read_rope(config)
    if rope.rope_type == "yarn" and is_whole(fields["n_positions"], 1, INT32_MAX):
        stretched = int(rope.parameters["original_max_position_embeddings"] * rope.parameters["factor"])
        fields["n_positions"] = max(fields["n_positions"], stretched)
    norm = Norm("rms", config.get(EPS, 1e-6))
    own = {"eos_token_ids": eos_ids(config), "dtype": dtype_of(config), **parts}
    return Arch(**fields, norm=norm, rope=rope, mlp="swiglu", biases=biases, **own)


def write_arch(arch: Arch, name: str, model_type: str, **own: Any) -> Config:
    """Write the fields that :func:`read_arch` reads; ``own`` are the family's."""
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        **{theirs: getattr(arch, ours) for ours, theirs in NAMES.items()},
        EPS: arch.norm.eps,
        "hidden_act": "silu",
        "rope_parameters": (arch.rope or Rope()).parameters,
        "eos_token_id": eos_field(arch),
        "bos_token_id": None,
        **own,
    }


def tensor_names(qkv_bias: bool = False, out_bias: bool = False, qk_norm: bool = False) -> dict:
    """Where the weights of Llama and its relatives are in their checkpoints."""
    layer = "model.layers.{}."
    joined = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.o_proj",),
        "up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
        "norm_1": ("input_layernorm",),
        "norm_2": ("post_attention_layernorm",),
    }
    if qk_norm:
        joined |= {"q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)}
    kinds = [(ours, "weight") for ours in joined]
    kinds += [("qkv", "bias")] * qkv_bias + [("out", "bias")] * out_bias
    return {
        "token_embedding.weight": ("model.embed_tokens.weight",),
        **{
            f"blocks.{{}}.{ours}.{kind}": tuple(f"{layer}{theirs}.{kind}" for theirs in joined[ours])
            for ours, kind in kinds
        },
        "norm.weight": ("model.norm.weight",),
        "lm_head.weight": ("lm_head.weight",),
    }


def read(config: Config) -> Arch:
    check_only(config, {"mlp_bias": False})
    biases = ("qkv", "out") if flag(config, "attention_bias") else ()
    return read_arch(config, biases, family="llama")


def write(arch: Arch) -> Config:
    return write_arch(arch, "Llama", "llama", attention_bias="qkv" in arch.biases, mlp_bias=False)


FAMILY = Family(
    model_types=("llama",),
    read=read,
    write=write,
    tensors=tensor_names(qkv_bias=True, out_bias=True),
    prefix="model.",
)
