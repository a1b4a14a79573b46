"""Choose the model, device and size that a recording command measures."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

from rosellm.bench.workloads import LOAD_FORMAT, WORKLOADS, Workload
from rosellm.errors import RoseError
from rosellm.lab.records.sizes import SIZES
from rosellm.models.checkpoint import SHIPPED, SHIPPED_MODELS
from rosellm.models.loading import LOAD_FORMATS, resolve_device


def add_model_options(parser: ArgumentParser) -> None:
    """Add ``--model``, ``--load-format``, ``--device`` and ``--size``, which :func:`settle` completes."""
    add = parser.add_argument
    add("--model", help="shape of the model; default: gpt2, at size small the shipped model")
    add("--load-format", choices=LOAD_FORMATS, help="default: dummy; auto for a shipped model")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda if there is one")
    add("--size", choices=tuple(SIZES), help="default: full on a GPU, small on a CPU")


def settle(arguments: Namespace, workload: Workload) -> Namespace:
    """Fill in what depends on the device and size; at full size the model is the workload's own."""
    arguments.device = resolve_device(arguments.device).type
    size = arguments.size or ("full" if arguments.device == "cuda" else "small")
    arguments.size = SIZES[size]
    if arguments.model is None:
        arguments.model = workload.model if size == "full" else SHIPPED
    if arguments.load_format is None:
        arguments.load_format = "auto" if arguments.model in SHIPPED_MODELS else LOAD_FORMAT
    return arguments


def workloads_named(text: str, known: Mapping[str, Workload] = WORKLOADS) -> list[Workload]:
    """Return the workloads of ``known`` that an option lists, separated by commas.

    Raises ``RoseError`` for an empty list or an unknown name.
    """
    names = list(filter(None, text.split(",")))
    if not names:
        raise RoseError(f"--workloads names none; use {', '.join(known)}")
    if unknown := [name for name in names if name not in known]:
        raise RoseError(f"workload {unknown[0]!r} is unknown; use {', '.join(known)}")
    return [known[name] for name in names]


def place_of(output: Path, model: str, workload: Workload) -> Path:
    """Return the records' folder: ``output`` for the workload's own model, a subfolder for any other."""
    return output if model == workload.model else output / Path(model).name


def folder_of(output: Path, model: str, workload: Workload) -> Path:
    """Create and return :func:`place_of`."""
    folder = place_of(output, model, workload)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
