"""Qwen3 (Yang et al. 2025): Llama with a norm on every head of q and k."""

from __future__ import annotations

from rosellm.models.arch import Arch, Norm
from rosellm.models.families.family import Config, Family, check_only
from rosellm.models.families.llama import read_arch, tensor_names, write_arch
from rosellm.models.families.qwen2 import window_fields, windowed
from rosellm.models.rope import Rope

DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128}  # transformers' own


def read(config: Config) -> Arch:
    check_only(config, {"attention_bias": False})
    return windowed(read_arch(DEFAULTS | config, qk_norm=True, family="qwen3"), config)


def write(arch: Arch) -> Config:
    return write_arch(arch, "Qwen3", "qwen3", **window_fields(arch), attention_bias=False)


def _shape(n_layers: int, n_heads: int, d_model: int, d_ff: int, tied: bool) -> Arch:
    return Arch(
        151936, 40960, n_layers, n_heads, d_model, 8, 128, d_ff, Norm("rms", 1e-6), Rope(1_000_000.0),
        "swiglu", (), qk_norm=True, tie_embeddings=tied, eos_token_ids=(151645, 151643), dtype="bfloat16",
        family="qwen3",
    )  # fmt: skip


FAMILY = Family(
    model_types=("qwen3",),
    read=read,
    write=write,
    tensors=tensor_names(qk_norm=True),
    prefix="model.",
    shapes={
        "Qwen/Qwen3-0.6B": _shape(28, 16, 1024, 3072, True),
        "Qwen/Qwen3-1.7B": _shape(28, 16, 2048, 6144, True),
        "Qwen/Qwen3-4B": _shape(36, 32, 2560, 9728, True),
        "Qwen/Qwen3-8B": _shape(36, 32, 4096, 12288, False),
    },
)
