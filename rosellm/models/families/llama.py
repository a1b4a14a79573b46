"""Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024) and what shares their architecture."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rosellm.errors import CheckpointError, told
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
from rosellm.models.rope import Linear, Llama3, Rope, Yarn, read_rope

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
ROPE_TYPES = {Linear: "linear", Llama3: "llama3", Yarn: "yarn"}


def read_arch(config: Config, biases: tuple[str, ...] = (), **parts: Any) -> Arch:
    """What Llama and its relatives share: RMSNorm, rotary embeddings, SwiGLU; ``parts`` are their own."""
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act {told(activation)} is not supported; 'silu' is")
    fields = renamed({"tie_word_embeddings": False} | config, NAMES, NEEDED)
    rope = read_rope(config)
    if isinstance(rope.scaling, Yarn) and is_whole(fields["n_positions"], 1, INT32_MAX):
        stretched = int(rope.scaling.original_max_position_embeddings * rope.scaling.factor)
        fields["n_positions"] = max(fields["n_positions"], stretched)
    norm = Norm("rms", config.get(EPS, 1e-6))
    own = {"eos_token_ids": eos_ids(config), "dtype": dtype_of(config), **parts}
    return Arch(**fields, norm=norm, rope=rope, mlp="swiglu", biases=biases, **own)


def write_arch(arch: Arch, name: str, model_type: str, **own: Any) -> Config:
    """The fields that :func:`read_arch` reads; ``own`` are the family's."""
    rope = arch.rope or Rope()
    scaling: Config = {"rope_type": "default"}
    if rope.scaling is not None:
        scaling = asdict(rope.scaling) | {"rope_type": ROPE_TYPES[type(rope.scaling)]}
        if isinstance(rope.scaling, Yarn):
            scaling["attention_factor"] = scaling.pop("amplitude")
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        **{theirs: getattr(arch, ours) for ours, theirs in NAMES.items()},
        EPS: arch.norm.eps,
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": rope.theta} | scaling,
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


def _shape(
    n_layers: int, n_heads: int, d_model: int, d_ff: int, factor: float, tied: bool, head_dim: int
) -> Arch:
    rope = Rope(500_000.0, Llama3(factor, 1.0, 4.0, 8192))
    return Arch(
        128256, 131072, n_layers, n_heads, d_model, 8, head_dim, d_ff, Norm("rms", 1e-5), rope, "swiglu", (),
        tie_embeddings=tied, eos_token_ids=(128001, 128008, 128009), dtype="bfloat16", family="llama",
    )  # fmt: skip


FAMILY = Family(
    model_types=("llama",),
    read=read,
    write=write,
    tensors=tensor_names(qkv_bias=True, out_bias=True),
    prefix="model.",
    shapes={
        "meta-llama/Llama-3.2-1B": _shape(16, 32, 2048, 8192, 32.0, True, 64),
        "meta-llama/Llama-3.2-3B": _shape(28, 24, 3072, 8192, 32.0, True, 128),
        "meta-llama/Llama-3.1-8B": _shape(32, 32, 4096, 14336, 8.0, False, 128),
    },
)
