"""Exhibits: variants that are slower everywhere, kept beside their notebooks; an engine can load them."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from rosellm.errors import RecipeError

ROLES = {"_persistent_layers_kernel": "layers"}
EXHIBITS = Path(__file__).parents[3] / "notebooks" / "exhibits"


def load_exhibit(name: str) -> ModuleType:
    """Return the module ``notebooks/exhibits/NAME.py`` of this checkout, loaded once.

    Raises ``RecipeError`` if there is no such file.
    """
    qualified = f"rosellm_exhibits_{name}"
    if qualified not in sys.modules:
        path = EXHIBITS / f"{name}.py"
        spec = spec_from_file_location(qualified, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise RecipeError(f"exhibit {name!r} requires a checkout of RoseLLM; there is no file {path}")
        sys.modules[qualified] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[qualified]
