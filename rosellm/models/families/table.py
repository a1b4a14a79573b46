"""Tables of the families by ``model_type``, and of models whose ``Arch`` is known without a download."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

from rosellm.errors import CheckpointError, describe
from rosellm.models.arch import Arch
from rosellm.models.compressed import stored_format
from rosellm.models.families import gpt2, llama, mistral, phi3, qwen2, qwen3
from rosellm.models.families.family import Config, Family

FAMILIES: dict[str, Family] = {
    "gpt2": gpt2.FAMILY,
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "phi3": phi3.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
}


def read_arch(config: Config) -> Arch:
    """Return the ``Arch`` of a Hugging Face ``config.json``; raise ``CheckpointError`` if not supported."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"model_type {describe(kind)} is not supported; {', '.join(FAMILIES)} are")
    arch = FAMILIES[kind].read(config)
    form = stored_format(config)
    if form is not None and FAMILIES[kind].transposed:
        raise CheckpointError(f"quantised checkpoints of model_type {kind!r} are not supported")
    return arch if form is None else replace(arch, quantization=form)


def write_arch(arch: Arch) -> Config:
    """Return the fields of a ``config.json`` that :func:`read_arch` and ``transformers`` understand."""
    return FAMILIES[arch.family].write(arch)


_KNOWN = json.loads((files("rosellm") / "assets" / "known_shapes.json").read_text(encoding="utf-8"))
KNOWN_SHAPES: dict[str, Arch] = {name: read_arch(fields) for name, fields in _KNOWN.items()}
