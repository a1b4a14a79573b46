"""Read the committed records: measurements of a device, figures of other engines, and lower bounds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import rosellm
from rosellm.bench.workloads import WORKLOADS, Workload
from rosellm.errors import RoseError
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.roseinfer.recipe import LADDER

REFERENCE = "nvidia-h200"  # the device that README.md and the notebooks' text describe
RIVALS_FILE = "rivals-h200.json"
LEASE_OURS, LEASE_RIVAL = "rosellm ab671af", "vLLM 0.26.0"
LEASE_MODELS = {"Llama-3.2-1B": "llama-1b", "Llama-3.1-8B": "llama-8b"}  # others by their own names
BYTES_FP16 = 2
FULL_SIZE = "full"  # also if a record has no size
SHORT_NAMES = {"decode_tok_s": "decode_throughput_tok_s", "total_tok_s": "total_throughput_tok_s"}


class RecordError(RoseError):
    """A record, a figure or a folder of records does not exist or cannot be read."""

    why = "no such record"  # for readers of a table from which it is missing


class UnlikeError(RecordError):
    """The model or size of a record differs from that of the record it would be compared with."""

    def __init__(self, where: str, differences: Iterable[str]) -> None:
        self.why = f"recorded with {' and '.join(differences)}"
        super().__init__(f"{where} was {self.why}")


def number(value: float | None) -> str:
    """Format a figure.

    Integers, 0, and values of at least 100 are shown whole with thousands separators, other values with three
    significant digits; None and NaN become "–".
    """
    if value is None or math.isnan(value):
        return "–"
    if isinstance(value, int) or abs(value) >= 99.95 or value == 0:
        return f"{value:,.0f}".replace("-", "−")
    decimals = 2 - math.floor(math.log10(float(f"{abs(value):.2e}")))
    return (f"{value:.{decimals}f}" if decimals < 6 else f"{value:.3g}").replace("-", "−")


def short_name(model: str) -> str:
    """Convert e.g. ``Qwen/Qwen3-0.6B`` to ``Qwen3-0.6B``."""
    return Path(model).name


def recorded_models(results: Results) -> list[str]:
    """Return the names of the modern models for which whole runs are recorded."""
    return sorted({path.parent.name for path in results.folder.glob("*/D1.json")})


def signed(share: float, decimals: int = 1) -> str:
    """Format a fraction as a signed percentage: ``+2.5%``, ``−4.4%``; without a sign if it rounds to zero."""
    told = f"{share:+.{decimals}%}".replace("-", "−")
    return told if told.strip("+−0.%") else told[1:]


def percent_change(before: float, after: float) -> str:
    """Format the relative change from ``before`` to ``after``: ``+2.6 %``, ``−5.4 %``.

    Raises RecordError if ``before`` is 0.
    """
    if not before:
        raise RecordError("a change in percent needs a figure other than 0 to start from")
    return f"{(after / before - 1) * 100:+.1f} %".replace("-", "−")


def results_folder() -> Path:
    """Return the folder ``notebooks/results``, of the checkout that contains the package if there is one.

    Otherwise it is ``results`` or ``notebooks/results`` in the working folder. Raises RecordError if there is
    none.
    """
    checkout = Path(rosellm.__file__).resolve().parent.parent
    tried = [checkout / "notebooks" / "results", Path("results"), Path("notebooks/results")]
    for folder in tried:
        if folder.is_dir():
            return folder
    raise RecordError("there is no folder notebooks/results beside the package or in the working folder")


@dataclass(frozen=True)
class Results:
    """The records of one device: JSON files named ``<workload>-<rung>.json`` or after their contents.

    folder: contains the files.
    like: records of another device to compare with; None for none. A record that has the same name there must
        have the same model and size to be loaded.
    """

    folder: Path
    like: Results | None = None

    def names(self) -> list[str]:
        """Return the names of all records, in alphabetical order."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def load(self, name: str) -> dict[str, Any]:
        """Return the whole record ``name``, such as ``kv_append``.

        Raises RecordError, listing the existing records, if there is none, and UnlikeError if its model or
        size differs from those of the same record of ``like``.
        """
        path = self._path(name)
        if self.like is not None and name in self.like.names():
            differences = _differences(_facts(path), _facts(self.like._path(name)))  # noqa: SLF001
            if differences:
                raise UnlikeError(f"{name} of {self.folder.name}", differences)
        return _read(path)

    def figures(self, name: str, *keys: str) -> Any:
        """Return the entry of a record's figures at nested ``keys``; raise RecordError if it is missing."""
        found = self.load(name)["figures"]
        for key in keys:
            if key not in found:
                raise RecordError(f"{name} of {self.folder.name} has no {key!r}: it has {_listed(found)}")
            found = found[key]
        return found

    def row(self, name: str, *keys: str, **facts: Any) -> dict[str, Any]:
        """Return the first row of a record's table whose columns have the values ``facts``.

        keys: nested keys of the table in the record's figures; without any, it is the record's ``rows``.

        Raises RecordError if there is no such row.
        """
        rows = self.figures(name, *keys) if keys else self.load(name)["rows"]
        for row in rows:
            if all(row.get(key) == value for key, value in facts.items()):
                return row
        raise RecordError(f"{name} of {self.folder.name} has no row of {facts}")

    def _path(self, name: str) -> Path:
        path = self.folder / f"{name}.json"
        if not path.is_file():
            raise RecordError(f"{self.folder.name} has no record {name!r}: there are {_listed(self.names())}")
        return path

    def by_model(self, name: str) -> dict[str, dict[str, Any]]:
        """Return model → its record ``name``, from the folders of models and from this folder.

        If both have a record of the same model, this folder's is returned.
        """
        paths = [*sorted(self.folder.glob(f"*/{name}.json")), *self.folder.glob(f"{name}.json")]
        records = [Results(path.parent).load(name) for path in paths]
        return {Path(record["model"]).name: record for record in records}

    def record(self, workload: str, rung: str) -> dict[str, Any]:
        """Return the whole record of a workload's run on a rung.

        Raises RecordError, listing the rungs measured on the workload, if there is none.
        """
        rungs = self.rungs(workload)
        if rung not in rungs:
            raise RecordError(f"{self.folder.name} has no {workload} of {rung!r}: there are {_listed(rungs)}")
        return self.load(f"{workload}-{rung}")

    def rungs(self, workload: str) -> list[str]:
        """Return the rungs measured on a workload, in the ladder's order.

        Records of ``benchmark_rivals`` are skipped, and so are runs whose options differ from the workload's
        in anything but the dtype.
        """
        runs = [path.stem for path in sorted(self.folder.glob(f"{workload}-*.json")) if _is_run(_facts(path))]
        place = {rung: i for i, rung in enumerate(LADDER)}
        found = [name.removeprefix(f"{workload}-") for name in runs]
        return sorted(found, key=lambda rung: place.get(rung, len(place)))

    def value(self, workload: str, rung: str, figure: str = "total_tok_s") -> float:
        """Return the median of one figure over the repeats of a run.

        figure: ``decode_tok_s`` and ``total_tok_s`` are the throughputs of decode steps and of the whole run.

        Raises RecordError, listing the existing figures, if there is none of this name.
        """
        return _figure(self._result(workload, rung)["medians"], figure)

    def repeats(self, workload: str, rung: str, figure: str = "total_tok_s") -> list[float]:
        """Return every repeat's value of one figure, in the order measured."""
        return [_figure(repeat, figure) for repeat in self._result(workload, rung)["repeats"]]

    def values(self, workload: str, figure: str = "total_tok_s") -> dict[str, float]:
        """Return rung → median of one figure, for all rungs measured on a workload."""
        return {rung: self.value(workload, rung, figure) for rung in self.rungs(workload)}

    @property
    def device_name(self) -> str:
        """The driver's name for the device: ``NVIDIA H200``."""
        return self._environment(None)["device_name"]

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU; a CPU's records have models in fp32."""
        return self._environment(None).get("device_memory_bytes") is not None

    def environment_line(self, name: str | None = None) -> str:
        """Describe in one line where and when a record was measured.

        name: the record; None for the newest of this device.
        """
        env = self._environment(name)
        versions = [f"{key} {env[key]}" for key in ("driver", "torch", "triton") if env.get(key)]
        return " · ".join([env["device_name"], *versions, env["time_utc"][:10]])

    def _result(self, workload: str, rung: str) -> dict[str, Any]:
        results = self.record(workload, rung)["results"]
        return results["streaming" if "streaming" in results else "online"]

    def _environment(self, name: str | None) -> dict[str, Any]:
        wanted = self.names() if name is None else [name]
        known = [env for env in (_facts(self._path(one))["environment"] for one in wanted) if env]
        if not known:
            raise RecordError(f"no record of {self.folder.name} tells its environment: {_listed(wanted)}")
        return max(known, key=lambda env: env.get("time_utc", ""))


def _is_run(facts: dict[str, Any]) -> bool:
    """Return whether a record is of this engine, with the workload's options, apart from the dtype."""
    departures = facts["not_comparable"] or []
    return facts["kind"] != "rivals" and all(one.startswith("dtype=") for one in departures)


def _differences(facts: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """Describe how model and size differ from those of another record; a missing model equals any model."""
    found, (model, other) = [], (one["model"] for one in (facts, others))
    if model != other and None not in (model, other):
        is_named = isinstance(model, str) and isinstance(other, str)
        found.append(f"another model ({model}, not {other})" if is_named else "another model")
    size, usual = (one["size"] or FULL_SIZE for one in (facts, others))
    if size != usual:
        found.append(f"another size ({size}, not {usual})")
    return found


def _facts(path: Path) -> dict[str, Any]:
    """Return a record's environment, kind, model, size and departures from its workload.

    They are cached until the file changes.
    """
    return _read_facts(path, path.stat().st_mtime_ns)


@cache
def _read_facts(path: Path, _modified_ns: int) -> dict[str, Any]:
    record = _read(path)
    return {name: record.get(name) for name in ("environment", "kind", "model", "size", "not_comparable")}


def find(device: str = REFERENCE, folder: Path | None = None) -> Results:
    """Return the records of a device.

    device: name of its folder.
    folder: contains the devices' folders; None for :func:`results_folder`.

    Raises RecordError if there is no such folder.
    """
    folder = folder or results_folder()
    devices = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if device not in devices:
        raise RecordError(f"no records of device {device!r}: there are {_listed(devices)}")
    return Results(folder / device)


def rivals(workload: str | None = None) -> dict[str, dict[str, float]]:
    """Return engine's name → workload → completion tokens per second of other engines on the reference GPU.

    workload: return only engines measured on it; None for all.

    The entry ``form`` of an engine in ``RIVALS_FILE`` defines what its figures mean.
    """
    file = _rivals_file()
    known = {
        one["name"]: {id: one[key] for id in WORKLOADS for key in (id, f"{id}_batch8") if key in one}
        for one in file["rivals"]
    }
    for name in known.keys() & file["mixed"].keys():  # "W10 temperature 0.8, top-k 50, top-p 0.9": 22642
        theirs = {told.partition(" ")[0]: value for told, value in file["mixed"][name].items()}
        known[name] |= {id: theirs[id] for id in WORKLOADS if id in theirs}
    return {name: values for name, values in known.items() if workload is None or workload in values}


def modern_rivals(model: str) -> dict[str, dict[str, float]]:
    """Return engine's name → workload → figure of other engines on a modern model's shape.

    The figures come from other sessions than our own.
    """
    return _rivals_file()["modern_models"]["models"].get(model, {})


def one_lease(model: str) -> dict[str, tuple[float | None, float | None]]:
    """Return workload → figures of this engine and of ``LEASE_RIVAL``, both measured in one session.

    A figure is in the workload's unit, or None if it was not measured.
    """
    figures = _rivals_file()["one_lease_2026_11_26"]["figures"]
    found = figures[LEASE_MODELS.get(model, model.lower())]
    return {workload: (one[LEASE_OURS], one[LEASE_RIVAL]) for workload, one in found.items()}


def ceilings() -> dict[str, Any]:
    """Return the measured limits of the reference GPU, such as copy bandwidth and time per graph node."""
    return _rivals_file()["ceilings"]


def read_us(results: Results, n_bytes: float) -> float:
    """Return the µs to read ``n_bytes`` at the highest rate in the device's record ``ceilings``."""
    return n_bytes / (max(results.load("ceilings")["figures"]["read_TB_s"]) * 1e6)


def floor_us(results: Results, workload: str) -> float:
    """Return a lower bound on a workload's decode step in µs: the time to read GPT-2 small's weights and K/V.

    Each is read once, in fp16; the position table is not counted. A sequence has its prompt and half of its
    new tokens cached; if lengths are unequal, sequences are weighted by the number of their decode steps.
    """
    one = _workload(workload)
    shape = KNOWN_SHAPES["gpt2"]
    weights = shape.n_step_parameters * BYTES_FP16
    cached = one.max_batch_size * one.mean_context * shape.kv_bytes_per_token(BYTES_FP16)
    return read_us(results, weights + cached)


def floor_tok_s(results: Results, workload: str) -> float:
    """Return the tokens per second if every decode step took :func:`floor_us`."""
    return _workload(workload).max_batch_size / floor_us(results, workload) * 1e6


def _workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise RecordError(f"workload {name!r} is unknown: there are {_listed(WORKLOADS)}")
    return WORKLOADS[name]


def _rivals_file() -> dict[str, Any]:
    return _read(results_folder() / RIVALS_FILE)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"cannot read {path.name} in {path.parent.name}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise RecordError(f"{path.name} in {path.parent.name} is not JSON: {error}") from None


def _figure(figures: dict[str, Any], name: str) -> float:
    full_name = SHORT_NAMES.get(name, name)
    if full_name not in figures:
        raise RecordError(f"no figure is called {name!r}: there are {_listed(figures)}")
    return figures[full_name]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
