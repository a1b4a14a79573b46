"""Loading of exhibits: code in ``notebooks/exhibits`` that lost, or that one page needs."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from rosellm.errors import RecipeError

EXHIBITS = Path(__file__).parents[2] / "notebooks" / "exhibits"


def load_exhibit(name: str) -> ModuleType:
    """Return the module ``notebooks/exhibits/NAME.py`` of this checkout, loaded once.

    Raises ``RecipeError`` if there is no such file. A module of a rung must define two
    functions:

    check_serves(config): raises ``RecipeError`` for a model that the exhibit cannot run.
    build_step(model, kernels, **parts): returns a resident step; ``parts`` are the arguments of its
        ``Worker``.
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
