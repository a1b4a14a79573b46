"""Measure modern models' workloads, the ladder's steps, and ledgers, with the model loaded once.

Records are DIR/MODEL/WORKLOAD.json, steps-WORKLOAD.json and ledgers.json, which keeps its ledgers of the same
commit. A workload that needs more positions than the model has is skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rosellm.bench.benchmark_scheduler import BENCHMARK
from rosellm.bench.prompts import make_prompts, new_tokens
from rosellm.bench.record import new_record, write_record
from rosellm.bench.workloads import LOAD_FORMAT, MODEL_WORKLOADS, MODERN_MODEL, Workload
from rosellm.command_line import OneLineParser, command, whole_number
from rosellm.errors import RoseError, describe
from rosellm.lab.records.earlier import kept_parts
from rosellm.lab.records.floors import Ceiling, prefill_floors_us
from rosellm.lab.records.model_ledgers import workload_ledger
from rosellm.lab.records.records import Results, modern_rivals, one_lease
from rosellm.lab.records.rungs import runnable
from rosellm.lab.records.step_records import ladder_steps
from rosellm.lab.records.step_time import free_memory
from rosellm.models.families.table import read_arch
from rosellm.models.loading import AnyTokenizer, load_parts, resolve_device
from rosellm.models.model import Transformer
from rosellm.roseinfer.recipe import best_rung

RIVAL = "vLLM 0.22.1"
LEDGERS_FILE = "ledgers.json"
BYTES = 2  # per element, in the models' dtype
EFFORT = {"engines": 1, "seconds": 0.2, "turns": 2}  # for the ladder's steps


class Row(NamedTuple):
    """One workload of one model: our median, the rival's, and the floor, in ``unit``; None if unknown."""

    workload: str
    ours: float | None
    rival: float | None
    floor: float | None
    unit: str


def short_name(model: str) -> str:
    """Convert e.g. ``Qwen/Qwen3-0.6B`` to ``Qwen3-0.6B``."""
    return Path(model).name


def recorded_models(results: Results) -> list[str]:
    """Return the models that have records of whole runs."""
    return sorted({path.parent.name for path in results.folder.glob("*/D1.json")})


def table(results: Results, model: str) -> list[Row]:
    """Return a row per workload that has a record or a rival's figure."""
    theirs = modern_rivals(model).get(RIVAL, {})
    rows = (_row(results, model, w, theirs) for w in MODEL_WORKLOADS)
    return [row for row in rows if row.ours is not None or row.rival is not None]


def lease_table(results: Results, model: str) -> list[Row]:
    """Return ``table`` for the session that ran both engines; results: the machine that defines the floor."""
    figures = one_lease(model)
    return [
        Row(name, *figures[name], floor(results, model, name), unit_of(workload))
        for name, workload in MODEL_WORKLOADS.items()
        if name in figures
    ]


def ceiling_of(results: Results) -> Ceiling:
    """Return the device's ceilings from its record ``ceilings``."""
    figures = results.load("ceilings")["figures"]
    return Ceiling(max(figures["read_TB_s"]) * 1e6, max(figures["matmul_TFLOP_s"]) * 1e6)


def floor(results: Results, model: str, name: str) -> float | None:
    """Return the bound of a recorded run in its workload's unit; None without its record and ceilings.

    All requests run together. Each decode step reads the weights and the cached keys and values once, and
    prompts are multiplied, both at the rates in the device's record ``ceilings``.
    """
    path = results.folder / model / f"{name}.json"
    if not path.is_file() or "ceilings" not in results.names():
        return None
    record = json.loads(path.read_text())
    arch, options = read_arch(record["model_shape"]), argparse.Namespace(**record["options"])
    prompts, new = [len(one) for one in make_prompts(options, vocab_size=2)], new_tokens(options)
    ceiling, total = ceiling_of(results), sum(prompts)
    least = prefill_floors_us(arch, len(prompts), total / len(prompts), BYTES, ceiling)
    us = least["GEMM"] + least["head"]
    us += sum(prefill_floors_us(arch, 1, tokens, BYTES, ceiling)["attention"] for tokens in prompts)
    read = sum((n - 1) * prompt + n * (n - 1) / 2 for prompt, n in zip(prompts, new, strict=True))
    weights = (max(new) - 1) * arch.n_step_parameters * BYTES
    us += (weights + read * arch.kv_bytes_per_token(BYTES)) / ceiling.bytes_per_us
    unit = unit_of(MODEL_WORKLOADS[name])
    return us / 1e3 if unit == "ms" else (total if unit == "prompt tok/s" else sum(new)) / us * 1e6


def runs_told(results: Results) -> str:
    """Describe how many measured runs each model has: ``1 of A; 3 of B, C``; a range if they differ."""
    told: dict[str, list[str]] = {}
    for model in recorded_models(results):
        counts = _repeats(results, model)
        told.setdefault(" to ".join(str(n) for n in sorted({min(counts), max(counts)})), []).append(model)
    return "; ".join(f"{count} of {', '.join(models)}" for count, models in sorted(told.items()))


def _repeats(results: Results, model: str) -> list[int]:
    paths = (results.folder / model).glob("*.json")
    runs = [json.loads(path.read_text()) for path in paths if path.stem in MODEL_WORKLOADS]
    return [result["repeat_runs"] for record in runs for result in record["results"].values()]


def _row(results: Results, model: str, name: str, rival: dict) -> Row:
    path = results.folder / model / f"{name}.json"
    ours = figure(json.loads(path.read_text()), MODEL_WORKLOADS[name]) if path.is_file() else None
    least = floor(results, model, name)
    return Row(name, ours, rival.get(name), least, unit_of(MODEL_WORKLOADS[name]))


def unit_of(workload: Workload) -> str:
    """Return a workload's unit: TTFT in ms, or prompt tokens or new tokens per second."""
    if workload.max_new_tokens > 1:
        return "tok/s"
    return "ms" if workload.num_requests == 1 else "prompt tok/s"


def figure(record: dict[str, Any], workload: Workload) -> float:
    """Return the median over a record's repeats, in the workload's unit."""
    (result,) = record["results"].values()
    medians, unit = result["medians"], unit_of(workload)
    if unit == "ms":
        return medians["ttft_p50_s"] * 1e3
    if unit == "tok/s":
        return medians["total_throughput_tok_s"]
    return workload.num_requests * (workload.prompt_tokens or 1) / medians["total_time_s"]


def measure(
    arguments: argparse.Namespace, names: Iterable[str], ladder: Iterable[str], ledgers: Sequence[str]
) -> None:
    """Record the workloads ``names``, the steps of every rung at ``ladder``'s sizes, then ``ledgers``.

    Raises ``RecordError``, before measuring, if the record of ledgers would lose others.
    """
    folder = arguments.output / short_name(arguments.model)
    begun = _ledgers_record(arguments.model, resolve_device(arguments.device), {})
    kept = kept_parts(folder / LEDGERS_FILE, begun, ledgers)
    gpt, tokenizer = load_parts(arguments.model, arguments.device, "auto", arguments.load_format)
    folder.mkdir(parents=True, exist_ok=True)
    measure_runs(arguments, names, gpt, tokenizer, folder)
    for name in ladder:
        figures = ladder_steps(gpt, runnable(gpt.device, gpt.config), MODEL_WORKLOADS[name], **EFFORT)
        record = new_record(f"steps-{name}", gpt.device, model=arguments.model, figures=figures)
        write_record(folder / f"steps-{name}.json", record)
    measure_ledgers(arguments.model, ledgers, gpt, folder, kept)


def measure_ledgers(
    model: str, names: Iterable[str], gpt: Transformer, folder: Path, kept: dict[str, Any]
) -> None:
    """Account for each workload on the best rung; rewrite the record, including ``kept``, after each one.

    A failure is printed at once, and the others follow. Raises ``RoseError`` at the end if any failed.
    """
    rung, figures, failed = best_rung(gpt.device), dict(kept), []
    for name in names:
        try:
            ledger = workload_ledger(gpt, rung, MODEL_WORKLOADS[name])
        except Exception as error:  # kernel, profiler or memory errors need not affect the other ledgers
            failed.append(name)
            print(f"{name}: no ledger: {describe(error).splitlines()[0]}", flush=True)
        else:
            figures[name] = ledger.as_dict()
            write_record(folder / LEDGERS_FILE, _ledgers_record(model, gpt.device, figures))
            print(f"{name}: {ledger.step_us:,.0f} µs. {ledger.cross_check}", flush=True)
        free_memory()
    if failed:
        raise RoseError(f"no ledger of {', '.join(failed)}; the lines above say why")


def _ledgers_record(model: str, device: torch.device, figures: dict[str, Any]) -> dict[str, Any]:
    ordered = {name: figures[name] for name in MODEL_WORKLOADS if name in figures}
    return new_record("ledgers", device, model=model, figures=ordered)


def measure_runs(
    arguments: argparse.Namespace,
    names: Iterable[str],
    gpt: Transformer,
    tokenizer: AnyTokenizer,
    folder: Path,
) -> None:
    """Record whole runs of each workload."""
    for name in names:
        workload = MODEL_WORKLOADS[name]
        longest = (workload.prompt_tokens or 1) + workload.max_new_tokens
        if longest > gpt.config.n_positions:
            print(f"{name}: left out, the model has {gpt.config.n_positions} positions of {longest}")
            continue
        given = ["--workload", name, "--hf-model-id", arguments.model, "--load-format", arguments.load_format]
        sizes = ["--mode", "offline", "--device", arguments.device, "--repeat-runs", str(arguments.repeats)]
        record = BENCHMARK.measure(BENCHMARK.parse_options([*given, *sizes]), gpt, tokenizer)
        write_record(folder / f"{name}.json", record)
        print(f"{name}: {figure(record, workload):.1f} {unit_of(workload)}", flush=True)
        free_memory()


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m rosellm.lab.records.model_runs", description=__doc__)
    add = parser.add_argument
    add("--model", default=MODERN_MODEL, help="hub id, local folder or shipped model")
    add("--load-format", choices=("auto", "dummy"), default=LOAD_FORMAT, help="dummy: random weights")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda if available")
    add("--workloads", default=",".join(MODEL_WORKLOADS), metavar="ID,ID", help="workloads to run")
    add("--ladder", default="", metavar="ID,ID", help="workloads at whose size every rung's step is timed")
    add("--ledgers", default="", metavar="ID,ID", help="workloads to take ledgers of")
    add("--repeats", type=whole_number(1), default=3, metavar="N", help="measured runs of each workload")
    add("--output", type=Path, default=Path("build/records"), metavar="DIR", help="folder of the records")
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Check the names, then measure."""
    arguments = _parser().parse_args(argv)
    asked = [
        list(filter(None, text.split(",")))
        for text in (arguments.workloads, arguments.ladder, arguments.ledgers)
    ]
    if unknown := [name for name in chain(*asked) if name not in MODEL_WORKLOADS]:
        raise RoseError(f"workload {unknown[0]!r} is unknown; use {', '.join(MODEL_WORKLOADS)}")
    measure(arguments, *asked)


if __name__ == "__main__":
    sys.exit(main())
