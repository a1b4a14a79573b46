"""Experiments: a name, options with defaults, and a function that measures the record ``NAME.json``."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rosellm.bench.record import check_writable, new_record, write_record
from rosellm.bench.workloads import ALL_WORKLOADS, LOAD_FORMAT, Workload
from rosellm.errors import PromptError, RoseError
from rosellm.lab.records.bench import free_memory, get_parts
from rosellm.lab.records.ledger import tokens_needed
from rosellm.lab.records.parameters import model_path
from rosellm.lab.records.records import FULL_SIZE, RecordError, Results, short_name
from rosellm.lab.records.sizes import SIZES, Size
from rosellm.lab.records.turns import each
from rosellm.models.arch import Arch
from rosellm.models.checkpoint import SHIPPED, SHIPPED_MODELS
from rosellm.models.loading import AnyTokenizer, arch_of, resolve_device
from rosellm.models.model import Transformer
from rosellm.roseinfer.recipe import best_rung

Record = dict[str, Any]
# Entries of the environment that must be equal for all parts of a record. A copy of the package without git
# has no commit, only a version.
OF_MACHINE = ("device_name", "git_commit", "rosellm", "host", "lease")


@dataclass(frozen=True)
class Asked:
    """The settings of one measurement.

    model: name or folder of the model.
    load_format: how its weights are loaded, as in ``LOAD_FORMATS``.
    device: "cuda" or "cpu".
    size: upper limits of the workloads.
    folder: where the record is written.
    options: the experiment's own options, by name.
    """

    model: str
    load_format: str
    device: str
    size: Size
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, option: str) -> Any:
        return self.options[option]

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)

    @property
    def arch(self) -> Arch:
        return arch_of(model_path(self.model), self.load_format)

    @property
    def gpt(self) -> Transformer:
        """The model, loaded at first use."""
        return self._parts[0]

    @property
    def tokenizer(self) -> AnyTokenizer:
        return self._parts[1]

    @property
    def best(self) -> str:
        """The best rung of the device."""
        return best_rung(self.where)

    @property
    def _parts(self) -> tuple[Transformer, AnyTokenizer]:
        return get_parts(self.model, self.device, "auto", self.load_format)

    def workload(self, name: str) -> Workload:
        """Return the workload ``name``, capped to the size."""
        return self.size.of(ALL_WORKLOADS[name])

    def benchmark_options(self, workload: str, *more: object) -> list[str]:
        """Return command-line options that run a benchmark on a workload, capped to the size.

        more: further options, appended as strings.
        """
        given = self.size.options(ALL_WORKLOADS[workload]) | {
            "--hf-model-id": model_path(self.model),
            "--load-format": self.load_format,
            "--device": self.device,
        }
        return [str(text) for text in (*(text for pair in given.items() for text in pair), *more)]

    def record(self, kind: str, **facts: Any) -> Record:
        """Return a record of ``kind`` with these facts, and a description of this machine and software."""
        return new_record(kind, self.where, **facts)


@dataclass(frozen=True)
class Experiment:
    """A measurement that makes the record ``NAME.json``.

    records: yields the record so far after each part that it measures; the last one yielded is complete.
    options: names of command-line options and their defaults.
    model: the model measured by default at full size; None if the shipped model is always used.
    own_folder: whether even the default model's record is in a folder named after the model.
    needs_gpu: whether it cannot run on a CPU.
    workloads: the workloads that it runs, for which the model must have enough positions.
    refuse: raises ``RoseError`` for settings that cannot be measured, before anything is loaded.
    """

    name: str
    records: Callable[[Asked], Iterator[Record]]
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = "gpt2"
    own_folder: bool = False
    needs_gpu: bool = False
    workloads: Sequence[str] = ()
    refuse: Callable[[Asked], object] = lambda _asked: None

    @property
    def label(self) -> str:
        """The name, with "…" for the workload, rung or batch size after a hyphen: ``steps-…``."""
        kind, hyphen, _ = self.name.partition("-")
        return f"{kind}-…" if hyphen else kind

    def asked(self, given: Namespace) -> Asked:
        """Return the settings to measure: the given command-line options, and defaults for the rest."""
        device = resolve_device(given.device).type
        size = SIZES[given.size or ("full" if device == "cuda" else "small")]
        model = SHIPPED if self.model is None else given.model or (self.model if _is_full(size) else SHIPPED)
        load_format = given.load_format or ("auto" if model in SHIPPED_MODELS else LOAD_FORMAT)
        of_folder = model if self.own_folder or self.model not in (None, model) else None
        folder = given.output if of_folder is None else given.output / short_name(of_folder)
        options = {name: getattr(given, name, default) for name, default in self.options.items()}
        return Asked(model, load_format, device, size, folder, options)

    def check(self, asked: Asked) -> None:
        """Raise ``RoseError`` if the experiment cannot be measured with these settings."""
        if self.needs_gpu and asked.device == "cpu":
            raise RoseError(f"{self.name} needs a GPU")
        self.refuse(asked)
        if (needed := self.positions(asked.size)) > (there := asked.arch.n_positions):
            raise PromptError(f"{self.name} needs {needed} positions; the model has {there}")

    def positions(self, size: Size) -> int:
        """Return how many positions the model needs for the workloads at a size."""

        def needed(w: Workload) -> int:
            prompt = w.shared_prefix_tokens + max(w.prompt_repeats) * (w.prompt_tokens or 1)
            new = max(w.max_new_tokens, w.max_new_tokens // 2 + tokens_needed() + 1)
            return prompt + new

        return max((needed(size.of(ALL_WORKLOADS[name])) for name in self.workloads), default=0)

    def run(self, asked: Asked) -> None:
        """Measure, and write the record after each part."""
        asked.folder.mkdir(parents=True, exist_ok=True)
        path = check_writable(asked.folder / f"{self.name}.json")
        for record in self.records(asked):
            write_record(path, record)
        free_memory()


def table(name: str, figures: Callable[[Asked], dict[str, Any]], **options: Any) -> Experiment:
    """Return an experiment whose record contains model, size and ``figures(asked)``.

    options: further fields of :class:`Experiment`.
    """
    return Experiment(name, partial(_whole, name, figures), **options)


def _whole(name: str, figures: Callable[[Asked], dict[str, Any]], asked: Asked) -> Iterator[Record]:
    yield asked.record(name, model=asked.model, size=asked.size.name, figures=figures(asked))


def in_parts(
    asked: Asked,
    begun: Record,
    parts: Mapping[str, Callable[[], Any]],
    told: Callable[[str, Any], str] = lambda _name, _figures: "",
    key: str | None = None,
    order: Callable[[str], Any] = lambda _name: 0,
) -> Iterator[Record]:
    """Measure a record part by part; yield the record so far after each part.

    begun: the record without parts; its kind is also its file's name.
    parts: name → function that measures the part; a part for which it returns None is left out.
    told: returns the line to print after a part, or "" for none.
    key: entry of ``figures`` that contains the parts; None if ``figures`` contains nothing else.
    order: sort key for the names of parts.

    Parts that the file already contains are kept if they were measured under the same conditions. Raises
    ``RecordError`` if parts measured under other conditions would be lost.
    """
    found = kept_parts(asked.folder / f"{begun['kind']}.json", begun, list(parts), key)
    for name in each(begun["kind"], parts):
        figures = parts[name]()
        free_memory()
        if figures is None:
            continue
        found[name] = figures
        ordered = {part: found[part] for part in sorted(found, key=order)}
        yield begun | {"figures": ordered if key is None else begun["figures"] | {key: ordered}}
        if line := told(name, figures):
            print(line, flush=True)


def kept_parts(path: Path, begun: Record, asked: Sequence[str], key: str | None = None) -> dict[str, Any]:
    """Return part → figures of the record at ``path``; {} if it was measured under other conditions.

    begun: the new record, still without parts. Conditions are the same if device, commit, host, lease and all
        facts besides the parts agree.
    asked: the parts to be measured; if empty, any parts may be lost.
    key: entry of ``figures`` that contains the parts; None if ``figures`` contains nothing else.

    Raises ``RecordError`` if conditions differ and the record has parts that are not in ``asked``.
    """
    if not path.is_file():
        return {}
    before, parts = _conditions(Results(path.parent).load(path.stem), key)
    now, _ = _conditions(json.loads(json.dumps(begun)), key)
    differences = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not differences:
        return parts
    if lost := [part for part in parts if asked and part not in asked]:
        raise RecordError(
            f"{path} would lose {', '.join(lost)}, measured with another {' and '.join(differences)}: "
            "measure them too, or choose another --output"
        )
    return {}


def _conditions(record: Record, key: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts of a record that apply to all of its parts, and the parts."""
    environment, figures = record.get("environment", {}), dict(record.get("figures", {}))
    parts = figures if key is None else figures.pop(key, {})
    told = {name: value for name, value in record.items() if name not in ("environment", "figures")}
    told |= {} if key is None else figures
    return told | {name: environment.get(name) for name in OF_MACHINE}, dict(parts)


def _is_full(size: Size) -> bool:
    return size.name == FULL_SIZE
