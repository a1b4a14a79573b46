"""Functions that find a checkpoint's folder and read its ``config.json``."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from textwrap import shorten

from rosellm.errors import CheckpointError, describe
from rosellm.models.arch import Arch
from rosellm.models.families.family import eos_ids
from rosellm.models.families.table import read_arch

SHIPPED = "rose-tiny"
SHIPPED_MODELS = (SHIPPED, "rose-tiny-qwen3")  # folders in ``rosellm/assets``
WAYS_OUT = f"use '{SHIPPED}', a local folder, or load_format='dummy'"
CHECKPOINT_FILES = ["*.json", "*.txt", "*.jinja", "*.safetensors"]
OTHER_COPIES = ["*/*", "consolidated*"]  # copies of the weights in other formats
MOST_CHARACTERS = 300  # characters of the hub client's message that an error quotes


def checkpoint_folder(model: str) -> Path:
    """Return the folder of ``model``: a shipped model's name, a folder, or a hub id.

    The files of a hub id are downloaded if needed. Raises ``CheckpointError`` if there is no such model.
    """
    if model in SHIPPED_MODELS:
        return Path(str(files("rosellm") / "assets" / model))
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=CHECKPOINT_FILES, ignore_patterns=OTHER_COPIES))
    except Exception as error:  # the client raises OSErrors, ValueErrors and those of its HTTP library
        raise CheckpointError(
            f"model {describe(model)} is neither a local folder nor available from the hub; {WAYS_OUT} "
            f"({shorten(describe(error), MOST_CHARACTERS)})"
        ) from None  # the client's traceback of a hundred lines says no more


def load_config(folder: Path) -> Arch:
    """Return the ``Arch`` of the checkpoint in ``folder``; raise ``CheckpointError`` if there is none.

    Its end-of-sequence ids are those of ``generation_config.json``, if that file has any.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json")
    arch = read_arch(_read_object(folder / "config.json"))
    generation = folder / "generation_config.json"
    ids = eos_ids(_read_object(generation)) if generation.is_file() else ()
    return replace(arch, eos_token_ids=ids or arch.eos_token_ids)


def _read_object(path: Path) -> dict:
    """Return the JSON object in a file; raise ``CheckpointError`` if it cannot be read."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return fields
