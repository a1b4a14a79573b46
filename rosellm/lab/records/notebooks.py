"""The acts of the course, and the notebook of each rung."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rosellm.lab.records.records import RecordError, results_folder
from rosellm.roseinfer.recipe import BEFORE


class Act(NamedTuple):
    """A part of the course.

    name: its title.
    about: its subject, one sentence.
    numbers: the numbers of its notebooks.
    """

    name: str
    about: str
    numbers: tuple[str, ...]


ACTS = (
    Act(
        "From zero",
        "An engine in plain torch; then where a decode step's time goes, rung by rung.",
        ("44", "00"),
    ),
    Act(
        "Act I: feed the GPU",
        "At first it waits for Python most of the time; at the end it runs on its own.",
        ("01", "02", "03", "04", "05", "09", "10", "13"),
    ),
    Act(
        "Act II: give it less to do",
        "Fewer kernels, smaller ones, launched before their inputs are there.",
        ("14", "15", "16", "18", "19", "21", "22"),
    ),
    Act(
        "Modern models",
        "Qwen3 and Llama 3, long and unequal contexts, fewer bytes.",
        ("26", "27", "28", "30", "40", "41"),
    ),
    Act(
        "Serving",
        "Determinism, failures, sampling, the first request, load, shared prompts, speculation.",
        ("23", "24", "31", "32", "33", "38", "39"),
    ),
    Act("More GPUs", "Sharing a model, replicas, planning.", ("35", "36", "37")),
    Act("Your turn", "Write a kernel; find out why your own loop is slow.", ("25", "29")),
)

TO_THE_KERNEL = "no_mask", "triton_append", "full_batch", "identity_pos"
KEPT = "mutable_block_info", "resident_tables", "one_table"
LONGER_NAMES = {"paged": "paged_attention", "one_pass": "arrivals"}
LONGER_NAMES |= dict.fromkeys(TO_THE_KERNEL, "what_the_kernel_knows")
LONGER_NAMES |= dict.fromkeys(KEPT, "what_python_keeps")
LONGER_NAMES |= dict.fromkeys(("fused_norm", "fused_gelu"), "fused_elementwise")
LONGER_NAMES |= dict.fromkeys(("small_gemm", "dependent_launch"), "weights_in_flight")


def notebooks_of(rungs: Iterable[str], folder: Path) -> dict[str, str]:
    """Return rung → name of its notebook in ``folder``: ``NN_RUNG``, or ``NN_`` with one of ``LONGER_NAMES``.

    Rungs without a notebook are omitted; two rungs may share a notebook.
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
