"""The families by ``model_type``, and the models whose shapes are known."""

from __future__ import annotations

import json
from importlib.resources import files

from rosellm.errors import CheckpointError, describe
from rosellm.models.arch import Arch
from rosellm.models.families import gpt2, llama, mistral, phi3, qwen2, qwen3
from rosellm.models.families.family import Config, Family

_FILES = (gpt2, llama, mistral, phi3, qwen2, qwen3)
FAMILIES: dict[str, Family] = {kind: file.FAMILY for file in _FILES for kind in file.FAMILY.model_types}


def read_arch(config: Config) -> Arch:
    """From the fields of a Hugging Face ``config.json``. Raises ``CheckpointError``."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"model_type {describe(kind)} is not supported; {', '.join(FAMILIES)} are")
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            "the checkpoint is quantised (config.json has a quantization_config); "
            "float32, float16, bfloat16 and float64 weights are supported"
        )
    return FAMILIES[kind].read(config)


def write_arch(arch: Arch) -> Config:
    """The fields of a ``config.json`` that :func:`read_arch` and ``transformers`` read."""
    return FAMILIES[arch.family].write(arch)


_KNOWN = json.loads((files("rosellm") / "assets" / "known_shapes.json").read_text(encoding="utf-8"))
KNOWN_SHAPES: dict[str, Arch] = {name: read_arch(fields) for name, fields in _KNOWN.items()}
