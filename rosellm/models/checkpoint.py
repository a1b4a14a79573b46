"""Functions that find a checkpoint's folder and read its ``config.json``."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from textwrap import shorten
from typing import Any

from rosellm.errors import CheckpointError, OptionError, describe
from rosellm.models.arch import Arch
from rosellm.models.families.family import eos_ids
from rosellm.models.families.table import read_arch

SHIPPED = "rose-tiny"
SHIPPED_MODELS = (SHIPPED, "rose-tiny-qwen3")  # folders in ``rosellm/assets``
DRAFT_OF = {model: f"{model}-draft" for model in SHIPPED_MODELS}  # their draft models, in the same place
SHIPPED_DRAFTS = tuple(DRAFT_OF.values())
WAYS_OUT = f"use '{SHIPPED}', a local folder, or load_format='dummy'"
CHECKPOINT_FILES = ["*.json", "*.txt", "*.jinja", "*.model", "*.safetensors"]
OTHER_COPIES = ["*/*", "consolidated*"]  # copies of the weights in other formats
# Fields of ``generation_config.json`` and the sampling parameters that they set.
SAMPLING_DEFAULTS = {
    name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
} | {"max_new_tokens": "max_tokens"}
MOST_CHARACTERS = 300  # characters of the hub client's message that an error quotes


def checkpoint_folder(
    model: str, revision: str | None = None, cache: str | None = None, token: str | None = None
) -> Path:
    """Return the folder of ``model``: a shipped model's name, a folder, or a hub id.

    revision, cache, token: the hub's branch, tag or commit, the folder for downloads, and the access token;
        None means the hub client's defaults.

    The files of a hub id are downloaded if needed. Raises ``CheckpointError`` if there is no such model.
    """
    if model in SHIPPED_MODELS + SHIPPED_DRAFTS:
        return Path(str(files("rosellm") / "assets" / model))
    local = os.path.expanduser(model)
    if os.path.isdir(local):
        return Path(local)
    if os.path.exists(local) or not _may_be_hub_id(model):
        kind = "a file, not a folder" if os.path.exists(local) else "no folder on this machine"
        raise CheckpointError(f"model {describe(model)} is {kind}; {WAYS_OUT}")
    from huggingface_hub import snapshot_download

    given = {"revision": revision, "cache_dir": cache, "token": token}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    options |= {"allow_patterns": CHECKPOINT_FILES, "ignore_patterns": OTHER_COPIES}
    try:
        return Path(snapshot_download(model, **options))
    except Exception as error:  # the client raises OSErrors, ValueErrors and those of its HTTP library
        raise CheckpointError(
            f"model {describe(model)} {_reason(error)} ({shorten(describe(error), MOST_CHARACTERS)})"
        ) from None  # the client's traceback of a hundred lines says no more


def draft_for(model: str, speculation: str | None, draft_model: str | None) -> str | None:
    """Return the name of the model that drafts; raise ``OptionError`` if it is missing, or has no use."""
    if speculation != "draft":
        if draft_model is not None:
            raise OptionError(f"draft_model is {describe(draft_model)}; it needs speculation='draft'")
        return None
    if draft_model is None and model not in DRAFT_OF:
        raise OptionError("speculation='draft' needs a draft_model, a smaller model with the same tokens")
    return DRAFT_OF[model] if draft_model is None else draft_model


def _may_be_hub_id(model: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


def _reason(error: BaseException) -> str:
    """Describe why the hub's client failed, and what helps."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    kinds = {type(cause).__name__ for cause in causes}
    answers = [getattr(getattr(cause, "response", None), "status_code", None) for cause in causes]
    status = next((answer for answer in answers if answer is not None), None)
    if "GatedRepoError" in kinds:
        return "is gated: accept its licence on the hub, then log in (`hf auth login`) or set HF_TOKEN"
    if "RevisionNotFoundError" in kinds:
        return "has no such revision on the hub"
    if status in (401, 404) or "RepositoryNotFoundError" in kinds:
        return (
            f"is neither a local folder nor a public model of the hub; {WAYS_OUT}, or log in if it is private"
        )
    if status is not None and status >= 400:
        return f"could not be downloaded: the hub answered {status}; try again later, or {WAYS_OUT}"
    return f"is neither a local folder nor available from the hub; {WAYS_OUT}"


def load_config(folder: Path) -> Arch:
    """Return the ``Arch`` of the checkpoint in ``folder``; raise ``CheckpointError`` if there is none.

    Its end-of-sequence ids are those of ``generation_config.json``, if that file has any.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json{_instead(folder)}")
    arch = read_arch(_read_object(folder / "config.json"))
    generation = folder / "generation_config.json"
    ids = eos_ids(_read_object(generation)) if generation.is_file() else ()
    return replace(arch, eos_token_ids=ids or arch.eos_token_ids)


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling parameters that ``generation_config.json`` in ``folder`` sets, by name."""
    path = folder / "generation_config.json"
    fields = _read_object(path) if path.is_file() else {}
    return {ours: fields[name] for name, ours in SAMPLING_DEFAULTS.items() if fields.get(name) is not None}


def _instead(folder: Path) -> str:
    """Describe what a folder without ``config.json`` holds, if that helps."""
    if (folder / "adapter_config.json").is_file():
        return ": it is a LoRA adapter; merge it into its base model first (peft's merge_and_unload)"
    if any(folder.glob("*.gguf")):
        return ": it holds GGUF files; use the model's safetensors checkpoint"
    below = sorted(path.parent.name for path in folder.glob("*/config.json"))
    return f", but these folders in it do: {', '.join(below[:5])}" if below else ""


def _read_object(path: Path) -> dict:
    """Return the JSON object in a file; raise ``CheckpointError`` if it cannot be read."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return fields
