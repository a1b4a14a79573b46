"""Load the same checkpoint as a transformers model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rosellm.errors import CheckpointError
from rosellm.models.checkpoint import checkpoint_folder
from rosellm.models.model import Transformer
from rosellm.models.weights import save_model


def load_transformers(name: str, load_format: str, ours: Transformer) -> Any:
    """Load the same checkpoint as a transformers model, on the device and in the dtype of ``ours``.

    Dummy weights are copied from ``ours``. Raises ``CheckpointError`` if transformers cannot load it.
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
