"""Run workloads through rivals: rosellm, transformers or vLLM.

Every rival gets the same prompts as token ids, all at once, and generates as the workload says, ignoring end
of sequence; streaming workloads are run this way too. The clock runs from the call until the token ids of all
requests are on the host. Rivals named together load the same weights into one process and alternate run by
run, so that background load affects all of them; vllm runs only alone.
"""

from __future__ import annotations

import gc
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch

from rosellm.bench import options as bench_options
from rosellm.bench.job import check_positions
from rosellm.bench.prompts import encode_prompts, make_prompts, new_tokens
from rosellm.bench.record import check_writable, new_record, write_record
from rosellm.bench.rivals import RIVALS, Rival, Task, check_rivals
from rosellm.bench.runs import mode_result, peak_memory, reset_peak_memory, run_figures
from rosellm.bench.workloads import ALL_WORKLOADS
from rosellm.command_line import OneLineParser, command
from rosellm.errors import OptionError, RoseError
from rosellm.models.arch import Arch
from rosellm.models.families.table import write_arch
from rosellm.models.loading import AnyTokenizer, arch_of, load_parts, resolve_device, resolve_dtype
from rosellm.models.weights import save_model
from rosellm.roseinfer.recipe import LADDER, get_rung

THROUGHPUT = "total_throughput_tok_s"
OVERRIDES = ("num_requests", "max_new_tokens", "max_batch_size", "prompt_tokens")


@dataclass(frozen=True)
class TimedRun:
    """One measured run: its tokens, and its figures for the record."""

    tokens: list[list[int]]
    figures: dict[str, Any]


def run_in_turns(
    rivals: dict[str, Rival], task: Task, warmup_runs: int = 1, repeat_runs: int = 3
) -> dict[str, list[TimedRun]]:
    """Run every rival once, then again, and so on, after warm-up runs; return the measured runs of each.

    Times are in seconds, throughputs in tokens per second, memory in bytes: the peak allocated on the GPU by
    this process, other rivals' models included, or None if another process allocates it.
    """
    for _ in range(warmup_runs):
        for rival in rivals.values():
            rival.generate()
    runs: dict[str, list[TimedRun]] = {name: [] for name in rivals}
    for _ in range(repeat_runs):
        for name, rival in rivals.items():
            runs[name].append(_timed_run(rival, task))
    return runs


def _timed_run(rival: Rival, task: Task) -> TimedRun:
    if rival.in_process:
        reset_peak_memory(task.device)
    start = perf_counter()
    tokens = rival.generate()
    total_time = perf_counter() - start
    _check_complete(tokens, task)
    peak = peak_memory(task.device) if rival.in_process else None
    return TimedRun(tokens, run_figures(tokens, total_time, peak))


def _check_complete(tokens: list[list[int]], task: Task) -> None:
    """Raise ``RuntimeError`` if a rival ended a request early, which would make it look fast."""
    wanted = new_tokens(task.options)
    if [len(row) for row in tokens] != wanted:
        raise RuntimeError(f"{sum(map(len, tokens))} tokens were generated, {sum(wanted)} were requested")


def measure_workload(
    task: Task, names: list[str], config: Arch, warmup_runs: int, repeat_runs: int
) -> dict[str, dict[str, Any]]:
    """Return one record per rival, in the order of ``names``; the rivals are closed afterwards."""
    with ExitStack() as cleanup:
        cleanup.callback(_free_memory)
        rivals: dict[str, Rival] = {}
        for name in names:
            rivals[name] = RIVALS[name](task)
            cleanup.callback(rivals[name].close)
        runs = run_in_turns(rivals, task, warmup_runs, repeat_runs)
        facts = {name: _facts(task, config) | rival.facts() for name, rival in rivals.items()}
        rivals.clear()
    records = {}
    for name, mine in runs.items():
        result = mode_result("offline", warmup_runs, [run.figures for run in mine])
        equal = {other: _share_equal(mine, theirs) for other, theirs in runs.items() if other != name}
        records[name] = new_record(
            "rivals", task.device, rival=name, **facts[name], equal_tokens=equal, results={"offline": result}
        )
    return records


def _facts(task: Task, config: Arch) -> dict[str, Any]:
    """Return the facts shared by all rivals."""
    return {
        **bench_options.request_facts(task.options),
        "form": "offline",
        "workload_form": ALL_WORKLOADS[task.options.workload].form,
        "device": task.device.type,
        "dtype": str(task.dtype).removeprefix("torch."),
        "model_shape": write_arch(config),
        "max_batch_size": task.options.max_batch_size,
    }


def _share_equal(mine: list[TimedRun], theirs: list[TimedRun]) -> float:
    """Return the share of equal tokens, position by position, in two rivals' first measured runs."""
    ours, others = (list(chain.from_iterable(runs[0].tokens)) for runs in (mine, theirs))
    return float(np.mean(np.array(ours) == np.array(others)))


def _free_memory() -> None:
    """Free one workload's rivals before the next ones are loaded."""
    gc.collect()
    torch.cuda.empty_cache()


def comparison(records: Iterable[dict[str, Any]]) -> list[str]:
    """Format median, lowest and highest tokens/s per record, and the ratio to the first rival."""
    lines = [f"{'':4} {'rival':14} {'tokens/s':>11} {'lowest':>11} {'highest':>11} {'ratio':>7}"]
    first: dict[str, float] = {}
    for record in records:
        result = record["results"]["offline"]
        median = result["medians"][THROUGHPUT]
        ratio = median / first.setdefault(record["workload"], median)
        repeats = [repeat[THROUGHPUT] for repeat in result["repeats"]]
        figures = f"{median:11.1f} {min(repeats):11.1f} {max(repeats):11.1f} {ratio:6.2f}x"
        lines.append(f"{record['workload']:4} {record['rival']:14} {figures}")
    return lines


@command
def main(argv: list[str] | None = None) -> None:
    """Check all options, then measure each workload and print the comparison."""
    options = parse_options(argv)
    device = resolve_device(options.device)
    check_rivals(options.rival, device)
    if options.output:
        _make_folder(options.output)
    dtype = resolve_dtype(options.dtype, device, arch_of(options.hf_model_id, options.load_format))
    gpt, tokenizer = load_parts(
        options.hf_model_id, "cpu", str(dtype).removeprefix("torch."), options.load_format
    )
    records: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="rosellm-") as folder:
        save_model(gpt, Path(folder), dtype)
        config = gpt.config
        del gpt
        bare = Task(Path(folder), device, dtype, options, prompts=[])
        tasks = [_of_workload(name, bare, config, tokenizer) for name in options.workloads]
        for task in tasks:
            records += _measure_and_write(task, options, config)
    print("\n".join(comparison(records)))


def _of_workload(name: str, task: Task, config: Arch, tokenizer: AnyTokenizer) -> Task:
    """Return ``task`` with a workload's sizes and prompts; raise ``PromptError`` if they are too long."""
    options = workload_options(task.options, name)
    prompts = encode_prompts(make_prompts(options, config.vocab_size), tokenizer)
    longest = max(map(len, prompts))
    check_positions(options, longest, config.n_positions)
    return replace(task, options=options, prompts=prompts)


def _measure_and_write(task: Task, options: Namespace, config: Arch) -> Iterable[dict[str, Any]]:
    """Return a workload's records, writing them as soon as it is measured."""
    sizes = task.options
    print(
        f"{sizes.workload}: {sizes.num_requests} requests, {sizes.max_new_tokens} new tokens each, "
        f"{sizes.max_batch_size} at a time, by {', '.join(options.rival)}",
        flush=True,
    )
    records = measure_workload(task, options.rival, config, options.warmup_runs, options.repeat_runs)
    if options.output:
        for name, record in records.items():
            write_record(options.output / f"{sizes.workload}-{name}.json", record)
    return records.values()


def workload_options(options: Namespace, name: str) -> Namespace:
    """Return the command's options with the sizes of workload ``name``, except overridden ones."""
    given = {key: value for key, value in vars(options).items() if key not in ("output", "workloads")}
    overrides = {key: given[key] for key in OVERRIDES if given[key] is not None}
    fixed = {"workload": name, "seed": 0, "block_size": 64}
    return Namespace(**(given | fixed | ALL_WORKLOADS[name].flags() | overrides))


def parse_options(argv: list[str] | None = None) -> Namespace:
    """Parse this command's options; None reads the command line."""
    options = _parser().parse_args(argv)
    if options.rung is not None and "rosellm" not in options.rival:
        raise OptionError("--rung applies to rival rosellm, which is not selected")
    get_rung(options.rung)
    return options


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RoseError(f"cannot write records to {folder}: {error.strerror}") from error
    check_writable(folder / "record.json")


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argparse type: comma-separated names, each one of ``known``, without repeats."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ArgumentTypeError(f"{unknown[0]!r} is unknown; use {', '.join(known)}")
        if len(set(names)) < len(names):
            raise ArgumentTypeError(f"{text!r} repeats a name")
        return names

    return parse


def _parser() -> OneLineParser:
    usage = "\n    --rival NAME,NAME --workloads ID,ID [options]"
    parser = bench_options.command_parser("benchmark_rivals", __doc__, usage)
    add = parser.add_argument
    who = f"what to run; the first is the baseline of the comparison: {', '.join(RIVALS)}"
    add("--rival", type=_names(RIVALS), required=True, metavar="NAME,NAME", help=who)
    add(
        "--workloads",
        type=_names(ALL_WORKLOADS),
        required=True,
        metavar="ID,ID",
        help=", ".join(ALL_WORKLOADS),
    )
    add("--rung", metavar="NAME", help=f"rung of rosellm; default: the best; {', '.join(LADDER)}")
    add("--output", type=Path, metavar="FOLDER", help="write WORKLOAD-RIVAL.json here; created if missing")
    bench_options.add_model_options(parser)
    bench_options.add_device_options(parser)
    group = parser.add_argument_group("sizes that override those of every workload")
    most = bench_options.MOST_REQUESTS
    for name in OVERRIDES:
        group.add_argument(f"--{name.replace('_', '-')}", **bench_options.count(None, high=most))
    bench_options.add_run_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
