"""Mistral (Jiang et al. 2023): Llama with a sliding window."""

from __future__ import annotations

from rosellm.models.arch import Arch, Norm
from rosellm.models.families.family import Config, Family, with_window
from rosellm.models.families.llama import read_arch, tensor_names, write_arch
from rosellm.models.rope import Rope

DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}  # transformers' own


def read(config: Config) -> Arch:
    fields = DEFAULTS | config
    arch = read_arch(fields, family="mistral")
    return with_window(arch, fields["sliding_window"], fields.get("layer_types"))


def write(arch: Arch) -> Config:
    return write_arch(arch, "Mistral", "mistral", sliding_window=arch.window)


def _shape(vocab_size: int, theta: float, window: int | None) -> Arch:
    return Arch(
        vocab_size, 32768, 32, 32, 4096, 8, 128, 14336, Norm("rms", 1e-5), Rope(theta), "swiglu", (),
        window=window, tie_embeddings=False, eos_token_ids=(2,), dtype="bfloat16", family="mistral",
    )  # fmt: skip


FAMILY = Family(
    model_types=("mistral",),
    read=read,
    write=write,
    tensors=tensor_names(),
    prefix="model.",
    shapes={
        "mistralai/Mistral-7B-v0.1": _shape(32000, 10_000.0, 4096),
        "mistralai/Mistral-7B-v0.3": _shape(32768, 1_000_000.0, None),
    },
)
