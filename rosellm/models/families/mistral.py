"""Mistral (Jiang et al. 2023): Llama with a sliding window."""

from __future__ import annotations

from rosellm.models.arch import Arch
from rosellm.models.families.family import Config, Family, with_window
from rosellm.models.families.llama import read_arch, tensor_names, write_arch

DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}  # transformers' own


def read(config: Config) -> Arch:
    fields = DEFAULTS | config
    arch = read_arch(fields, family="mistral")
    return with_window(arch, fields["sliding_window"], fields.get("layer_types"))


def write(arch: Arch) -> Config:
    return write_arch(arch, "Mistral", "mistral", sliding_window=arch.window)


FAMILY = Family(model_types=("mistral",), read=read, write=write, tensors=tensor_names(), prefix="model.")
