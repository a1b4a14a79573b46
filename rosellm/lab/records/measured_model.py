"""Which model a command that makes records measures, on which device and at what size."""

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
    """``--model``, ``--load-format``, ``--device`` and ``--size``, which :func:`settle` completes."""
    add = parser.add_argument
    add("--model", help="shape of the model; default: gpt2, of a small size the shipped one")
    add("--load-format", choices=LOAD_FORMATS, help="default: dummy, of a shipped model auto")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda if there is one")
    add("--size", choices=tuple(SIZES), help="default: full on a GPU, small on a CPU")


def settle(arguments: Namespace, workload: Workload) -> Namespace:
    """Choose what depends on the device, and the model, ``workload``'s own, by the size."""
    arguments.device = resolve_device(arguments.device).type
    size = arguments.size or ("full" if arguments.device == "cuda" else "small")
    arguments.size = SIZES[size]
    if arguments.model is None:
        arguments.model = workload.model if size == "full" else SHIPPED
    if arguments.load_format is None:
        arguments.load_format = "auto" if arguments.model in SHIPPED_MODELS else LOAD_FORMAT
    return arguments


def workloads_named(text: str, known: Mapping[str, Workload] = WORKLOADS) -> list[Workload]:
    """Those of ``known`` that an option lists, separated by commas.

    Raises ``RoseError`` for none or an unknown one.
    """
    names = list(filter(None, text.split(",")))
    if not names:
        raise RoseError(f"--workloads names none; use {', '.join(known)}")
    if unknown := [name for name in names if name not in known]:
        raise RoseError(f"workload {unknown[0]!r} is unknown; use {', '.join(known)}")
    return [known[name] for name in names]


def place_of(output: Path, model: str, workload: Workload) -> Path:
    """Where its records go: ``output`` for the workload's own model, a folder in it for any other."""
    return output if model == workload.model else output / Path(model).name


def folder_of(output: Path, model: str, workload: Workload) -> Path:
    """:func:`place_of`, made."""
    folder = place_of(output, model, workload)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
