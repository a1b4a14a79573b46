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
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch

from rosellm.bench import options as shared
from rosellm.bench.job import reset_peak_memory
from rosellm.bench.prompts import encode_prompts, make_prompts, most_tokens, new_tokens
from rosellm.bench.record import check_writable, mode_result, new_record, run_figures, write_record
from rosellm.bench.rivals import RIVALS, Rival, Task, check_rivals
from rosellm.bench.workloads import ALL_WORKLOADS
from rosellm.command_line import command
from rosellm.errors import OptionError
from rosellm.models.arch import Arch
from rosellm.models.families.table import write_arch
from rosellm.models.loading import AnyTokenizer, arch_of, load_parts, resolve_device, resolve_dtype
from rosellm.models.weights import save_model
from rosellm.roseinfer.recipe import LADDER, get_rung

THROUGHPUT = "total_throughput_tok_s"
OVERRIDES = ("num_requests", "max_new_tokens", "max_batch_size", "prompt_tokens")
FIXED = {"seed": 0, "block_size": 64, "num_kv_blocks": None, "deterministic": False}

Run = tuple[list[list[int]], dict[str, Any]]  # a measured run's tokens, and its figures for the record


def run_in_turns(
    rivals: dict[str, Rival], task: Task, warmup_runs: int = 1, repeat_runs: int = 3
) -> dict[str, list[Run]]:
    """Run all rivals in alternation; return the measured runs of each, after its warm-up runs.

    Times are in seconds, throughputs in tokens per second, memory in bytes: the peak allocated on the GPU by
    this process, including other rivals' models, or None if another process allocates it. Raises
    ``RuntimeError`` if a rival ends a request early, which would make it look fast.
    """
    n_turns = warmup_runs + repeat_runs
    turns = [{name: _timed_run(rival, task) for name, rival in rivals.items()} for _ in range(n_turns)]
    return {name: [turn[name] for turn in turns[warmup_runs:]] for name in rivals}


def _timed_run(rival: Rival, task: Task) -> Run:
    if rival.in_process:
        reset_peak_memory(task.device)
    start = perf_counter()
    tokens = rival.generate()
    total_time = perf_counter() - start
    wanted = new_tokens(task.options)
    if [len(row) for row in tokens] != wanted:
        raise RuntimeError(f"{sum(map(len, tokens))} tokens were generated, {sum(wanted)} were requested")
    return tokens, run_figures(tokens, total_time, task.device if rival.in_process else None)


def measure_workload(
    task: Task, names: list[str], config: Arch, warmup_runs: int, repeat_runs: int
) -> list[dict[str, Any]]:
    """Start the rivals, measure them, close them, and return a record for each, in the order of ``names``."""
    with ExitStack() as cleanup:
        cleanup.callback(_free_memory)
        rivals: dict[str, Rival] = {}
        for name in names:
            rivals[name] = RIVALS[name](task)
            cleanup.callback(rivals[name].close)
        runs = run_in_turns(rivals, task, warmup_runs, repeat_runs)
        facts = {name: rival.facts for name, rival in rivals.items()}
        rivals.clear()
    of_all = {
        **shared.request_facts(task.options),
        "form": "offline",
        "workload_form": ALL_WORKLOADS[task.options.workload].form,
        "device": task.device.type,
        "dtype": str(task.dtype).removeprefix("torch."),
        "model_shape": write_arch(config),
        "max_batch_size": task.options.max_batch_size,
    }
    records = []
    for name, mine in runs.items():
        equal = {other: _share_equal(mine, theirs) for other, theirs in runs.items() if other != name}
        result = mode_result("offline", warmup_runs, [figures for _tokens, figures in mine])
        own = facts[name] | {"equal_tokens": equal, "results": {"offline": result}}
        records.append(new_record("rivals", task.device, rival=name, **(of_all | own)))
    return records


def _share_equal(mine: list[Run], theirs: list[Run]) -> float:
    """Return the share of positions at which two rivals' first measured runs have equal tokens."""
    ours, others = (np.array(list(chain.from_iterable(runs[0][0]))) for runs in (mine, theirs))
    return float(np.mean(ours == others))


def _free_memory() -> None:
    """Free the memory of closed rivals before those of the next workload are loaded."""
    gc.collect()
    torch.cuda.empty_cache()


def comparison(records: Iterable[dict[str, Any]]) -> list[str]:
    """Format per record the median, lowest and highest tokens/s, and the ratio to the first rival."""
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
    """Check all options, then measure each workload, write its records, and print the comparison."""
    options = parse_options(argv)
    device = resolve_device(options.device)
    check_rivals(options.rival, device)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        check_writable(options.output / "record.json")
    dtype = resolve_dtype(options.dtype, device, arch_of(options.hf_model_id, options.load_format))
    name = str(dtype).removeprefix("torch.")
    gpt, tokenizer = load_parts(options.hf_model_id, "cpu", name, options.load_format)
    records: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="rosellm-") as folder:
        save_model(gpt, Path(folder), dtype)
        config = gpt.config
        del gpt
        bare = Task(Path(folder), device, dtype, options, prompts=[])
        for task in [_of_workload(name, bare, config, tokenizer) for name in options.workloads]:
            records += _measure_and_write(task, config)
    print("\n".join(comparison(records)))


def _of_workload(name: str, task: Task, config: Arch, tokenizer: AnyTokenizer) -> Task:
    """Return ``task`` with the sizes and prompts of a workload; raise ``PromptError`` for long prompts."""
    options = workload_options(task.options, name)
    most_tokens(options, tokenizer, config.n_positions)
    prompts = encode_prompts(make_prompts(options, config.vocab_size), tokenizer)
    return replace(task, options=options, prompts=prompts)


def _measure_and_write(task: Task, config: Arch) -> list[dict[str, Any]]:
    """Measure one workload, write its records if requested, and return them."""
    options = task.options
    each = f"{options.num_requests} requests, {options.max_new_tokens} new tokens each"
    rivals = ", ".join(options.rival)
    print(f"{options.workload}: {each}, {options.max_batch_size} at a time, by {rivals}", flush=True)
    records = measure_workload(task, options.rival, config, options.warmup_runs, options.repeat_runs)
    for record in records if options.output else ():
        write_record(options.output / f"{options.workload}-{record['rival']}.json", record)
    return records


def workload_options(options: Namespace, name: str) -> Namespace:
    """Return the command's options with the sizes of workload ``name``, except for overridden sizes."""
    given = {key: value for key, value in vars(options).items() if key != "workloads"}
    overrides = {key: given[key] for key in OVERRIDES if given[key] is not None}
    return Namespace(**(given | FIXED | {"workload": name} | ALL_WORKLOADS[name].flags() | overrides))


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return an argparse type that accepts comma-separated names of ``known``, without repeats."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ArgumentTypeError(f"{unknown[0]!r} is unknown; use {', '.join(known)}")
        if len(set(names)) < len(names):
            raise ArgumentTypeError(f"{text!r} repeats a name")
        return names

    return parse


def parse_options(argv: list[str] | None = None) -> Namespace:
    """Parse this command's options; None reads the command line."""
    usage = "\n    --rival NAME,NAME --workloads ID,ID [options]"
    parser = shared.command_parser("benchmark_rivals", __doc__, usage)
    who = f"what to run; the first is the baseline of the comparison: {', '.join(RIVALS)}"
    names: dict[str, Any] = {"required": True, "metavar": "NAME,NAME"}
    parser.add_argument("--rival", type=_names(RIVALS), **names, help=who)
    parser.add_argument("--workloads", type=_names(ALL_WORKLOADS), **names, help=", ".join(ALL_WORKLOADS))
    rung = f"rung of rosellm; default: the best; {', '.join(LADDER)}"
    parser.add_argument("--rung", metavar="NAME", help=rung)
    folder = "write WORKLOAD-RIVAL.json here; created if missing"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=folder)
    shared.add_model_options(parser)
    shared.add_device_options(parser)
    group = parser.add_argument_group("sizes that override those of every workload")
    for name in OVERRIDES:
        group.add_argument(f"--{name.replace('_', '-')}", **shared.count(None, high=shared.MOST_REQUESTS))
    shared.add_run_options(parser)
    options = parser.parse_args(argv)
    if options.rung is not None and "rosellm" not in options.rival:
        raise OptionError("--rung applies to rival rosellm, which is not selected")
    get_rung(options.rung)
    return options


if __name__ == "__main__":
    sys.exit(main())
