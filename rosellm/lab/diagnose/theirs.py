"""The same checkpoint as a model of transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rosellm.errors import CheckpointError
from rosellm.models.checkpoint import checkpoint_folder
from rosellm.models.model import Transformer
from rosellm.models.weights import save_model


def load_transformers(name: str, load_format: str, ours: Transformer) -> Any:
    """The same checkpoint as a model of transformers, in the device and dtype of ``ours``.

    Random weights are those of ``ours``. Raises ``CheckpointError`` if transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if load_format == "dummy" else checkpoint_folder(name)
        if load_format == "dummy":
            save_model(ours, folder, ours.dtype)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=ours.dtype)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"transformers cannot load {name!r}: {error}") from error
        return model.to(ours.device)
