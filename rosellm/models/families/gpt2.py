"""GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

from rosellm.errors import CheckpointError, describe
from rosellm.models.arch import Arch, Norm
from rosellm.models.families.family import Config, Family, check_only, dtype_of, eos_field, eos_ids, renamed

# ``transformers.GPT2Config`` is not used to read them: it checks no ranges, fills in the 124 M model's sizes,
# and takes half a second to import.
NAMES = {
    "vocab_size": "vocab_size",
    "n_positions": "n_positions",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "d_model": "n_embd",
    "d_ff": "n_inner",
    "tie_embeddings": "tie_word_embeddings",
}
NEEDED = ("vocab_size", "n_positions", "n_layers", "n_heads", "d_model")
EPS = "layer_norm_epsilon"
# Attention options, and the only value of each that is supported.
FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
}


def read(config: Config) -> Arch:
    activation = config.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        raise CheckpointError(f"activation_function {describe(activation)} is not supported; 'gelu_new' is")
    check_only(config, FIXED)
    fields = renamed(config, NAMES, NEEDED)
    norm = Norm("layer", config.get(EPS, 1e-5))
    return Arch(**fields, norm=norm, eos_token_ids=eos_ids(config), dtype=dtype_of(config))


def write(arch: Arch) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(arch, ours) for ours, theirs in NAMES.items()},
        EPS: arch.norm.eps,
        "eos_token_id": eos_field(arch),
        "n_ctx": arch.n_positions,
        "activation_function": "gelu_new",
        "bos_token_id": arch.eos_token_ids[0] if arch.eos_token_ids else None,
    }


_LAYER = {
    "norm_1": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm_2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_TENSORS = {
    "token_embedding.weight": ("transformer.wte.weight",),
    "position_embedding.weight": ("transformer.wpe.weight",),
    **{
        f"blocks.{{}}.{ours}.{kind}": (f"transformer.h.{{}}.{theirs}.{kind}",)
        for ours, theirs in _LAYER.items()
        for kind in ("weight", "bias")
    },
    "norm.weight": ("transformer.ln_f.weight",),
    "norm.bias": ("transformer.ln_f.bias",),
    "lm_head.weight": ("lm_head.weight",),
}


FAMILY = Family(
    model_types=("gpt2",),
    read=read,
    write=write,
    tensors=_TENSORS,
    prefix="transformer.",
    transposed=frozenset(f"blocks.{{}}.{name}.weight" for name in ("qkv", "out", "up", "down")),
)
