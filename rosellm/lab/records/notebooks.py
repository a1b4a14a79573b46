"""Which notebook is about which rung."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rosellm.lab.records.records import RecordError, results_folder
from rosellm.roseinfer.recipe import BEFORE

LONGER_NAMES = {"paged": "paged_attention", "no_mask": "mask_removal"}
LONGER_NAMES |= dict.fromkeys(("full_batch", "identity_pos"), "slot_mapping")
LONGER_NAMES |= dict.fromkeys(("fused_norm", "fused_gelu"), "fused_elementwise")


def notebooks_of(rungs: Iterable[str], folder: Path) -> dict[str, str]:
    """Rung → the notebook of ``folder`` called after it, ``NN_RUNG``; rungs without one are left out.

    Two rungs may share a notebook, which bears the number of the first.
    """
    there = {path.stem.partition("_")[2]: path.stem for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    names = {rung: LONGER_NAMES.get(rung, rung) for rung in rungs}
    return {rung: there[name] for rung, name in names.items() if name in there}


def _committed() -> dict[str, str]:
    try:
        return notebooks_of(BEFORE, results_folder().parent)
    except RecordError:  # the package without its notebooks
        return {}


NOTEBOOKS = _committed()
