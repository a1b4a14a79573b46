"""GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

from rosellm.models.arch import PROJECTIONS, Norm
from rosellm.models.families.family import Family

LAYER = {
    "norm_1": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm_2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
FAMILY = Family(
    architecture="GPT2LMHeadModel",
    needed={
        "vocab_size": "vocab_size",
        "n_positions": "n_positions",
        "n_layers": "n_layer",
        "n_heads": "n_head",
        "d_model": "n_embd",
    },
    optional={"d_ff": "n_inner", "tie_embeddings": "tie_word_embeddings"},
    norm=Norm("layer", 1e-5),
    eps="layer_norm_epsilon",
    only={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
    },
    tensors={
        "token_embedding.weight": ("transformer.wte.weight",),
        "position_embedding.weight": ("transformer.wpe.weight",),
        **{
            f"blocks.{{}}.{ours}.{kind}": (f"transformer.h.{{}}.{theirs}.{kind}",)
            for ours, theirs in LAYER.items()
            for kind in ("weight", "bias")
        },
        "norm.weight": ("transformer.ln_f.weight",),
        "norm.bias": ("transformer.ln_f.bias",),
        "lm_head.weight": ("lm_head.weight",),
    },
    prefix="transformer.",
    transposed=frozenset(f"blocks.{{}}.{name}.weight" for name in PROJECTIONS),
    is_rotary=False,
)
