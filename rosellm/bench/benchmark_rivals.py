"""Run workloads through rivals: rosellm, transformers or vLLM.

Every rival loads the same weights, gets the same prompts as token ids, all at once, and generates as the
workload says, ignoring end of sequence, with an empty prefix cache; streaming workloads are run this way too.
The clock runs from the call until the token ids of all requests are on the host. Rivals named together share
one process and alternate run by run, so that background load affects all of them; vllm runs only alone.
"""

from __future__ import annotations

import gc
import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

import rosellm
from rosellm.bench import options as shared
from rosellm.bench.job import check_served, make_engine, prepare_run
from rosellm.bench.prompts import encode_prompts, make_prompts, most_tokens, new_tokens, request_params
from rosellm.bench.record import engine_facts, mode_result, new_record, run_figures, write_record
from rosellm.bench.workloads import ALL_WORKLOADS
from rosellm.command_line import command
from rosellm.errors import RoseError
from rosellm.models.arch import Arch
from rosellm.models.families.table import write_arch
from rosellm.models.loading import AnyTokenizer, arch_of, load_parts, resolve_device, resolve_dtype
from rosellm.models.weights import load_model, save_model
from rosellm.roseinfer.recipe import LADDER, get_rung
from rosellm.roseinfer.serving.scheduler import OfflineScheduler

THROUGHPUT = "total_throughput_tok_s"
OVERRIDES = ("num_requests", "max_new_tokens", "max_batch_size", "prompt_tokens")
FIXED: dict[str, Any] = {"seed": 0, "block_size": 64, "num_kv_blocks": None, "deterministic": False}
FIXED |= {"speculation": None, "draft_model": None, "speculative_tokens": None}
FIXED |= {"quantization": None, "kv_cache_dtype": "auto"}


class RivalError(RoseError):
    """A rival that is not installed, cannot run on this machine, or cannot share the process."""


@dataclass(frozen=True)
class Task:
    """The task that a rival is started for.

    checkpoint: a folder with ``config.json`` and ``model.safetensors``.
    options: a benchmark's options, with the sizes of the workload.
    prompts: token ids, one list per request.
    """

    checkpoint: Path
    device: torch.device
    dtype: torch.dtype
    options: Namespace
    prompts: list[list[int]]


@dataclass(frozen=True)
class Rival:
    """An engine with a loaded model.

    generate: runs the task and returns the new token ids of every prompt, in order, on the host.
    facts: version and configuration for the record.
    close: releases the resources that garbage collection does not release.
    """

    generate: Callable[[], list[list[int]]]
    facts: dict[str, Any]
    close: Callable[[], object] = lambda: None


def start_rosellm(task: Task) -> Rival:
    """Start RoseLLM: an engine of the requested rung with ``OfflineScheduler``, as in ``LLM.generate``."""
    gpt = load_model(str(task.checkpoint), task.device, task.dtype)
    rung = get_rung(task.options.rung, task.device)
    longest = max(map(len, task.prompts)) + task.options.max_new_tokens
    engine = make_engine(task.options, rung, gpt, None, longest)
    params = request_params(task.options)

    def generate() -> list[list[int]]:
        prepare_run(engine)
        outputs = OfflineScheduler(engine).run(task.prompts, params)
        check_served(outputs, params)
        return [output.token_ids for output in outputs]

    return Rival(generate, {"rival_version": rosellm.__version__, **engine_facts(engine)})


def start_transformers(task: Task) -> Rival:
    """Start transformers' ``generate``, with static, left-padded batches of at most ``max_batch_size``.

    To ignore end of sequence, it is removed from the generation config; ``min_new_tokens`` would instead
    forbid that token, which the other rivals may choose. Raises ``RivalError`` for sampling or unequal
    output lengths.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    if task.options.temperature:
        raise RivalError("rival transformers cannot give each request of a batch a seed of its own")
    if len(set(new_tokens(task.options))) > 1:
        raise RivalError("rival transformers runs static batches: requests of unequal lengths cannot end")
    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(task.checkpoint, dtype=task.dtype)
    model.to(task.device)
    model.generation_config.eos_token_id = None
    size, padded = task.options.max_batch_size, partial(pad_sequence, batch_first=True, padding_side="left")
    lengths = {"max_new_tokens": task.options.max_new_tokens, "do_sample": False, "pad_token_id": 0}

    def generate() -> list[list[int]]:
        tokens = []
        for i in range(0, len(task.prompts), size):
            rows = [torch.tensor(prompt, device=task.device) for prompt in task.prompts[i : i + size]]
            ids, mask = padded(rows), padded([torch.ones_like(row) for row in rows])
            output = model.generate(ids, attention_mask=mask, **lengths)
            tokens += output[:, ids.shape[1] :].tolist()
        return tokens

    attention = model.config._attn_implementation  # noqa: SLF001 (there is no public name)
    return Rival(generate, {"rival_version": version("transformers"), "attention": attention})


def start_vllm(task: Task) -> Rival:
    """Start vLLM's offline ``LLM.generate`` with its defaults: a separate engine process, CUDA graphs.

    Closing the rival ends the engine process, which would otherwise keep most of the GPU's memory.
    """
    # importing rosellm queries CUDA, after which a forked engine process cannot use it
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm import LLM, SamplingParams

    arguments = {
        "dtype": str(task.dtype).removeprefix("torch."),
        "max_num_seqs": task.options.max_batch_size,
        "enable_prefix_caching": task.options.prefix_cache,
        "skip_tokenizer_init": True,
    }
    llm = LLM(model=str(task.checkpoint), **arguments)
    prompts = [{"prompt_token_ids": prompt} for prompt in task.prompts]
    same = ("temperature", "top_k", "top_p", "seed", "max_tokens")
    params = [
        SamplingParams(**{name: getattr(own, name) for name in same}, ignore_eos=True, detokenize=False)
        for own in request_params(task.options)
    ]

    def generate() -> list[list[int]]:
        if task.options.prefix_cache:
            llm.reset_prefix_cache()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    facts = {"rival_version": version("vllm"), "llm_arguments": arguments}
    return Rival(generate, facts, llm.llm_engine.engine_core.shutdown)


RIVALS: dict[str, Callable[[Task], Rival]] = {
    "vllm": start_vllm,
    "transformers": start_transformers,
    "rosellm": start_rosellm,
}


def check_rivals(names: list[str]) -> None:
    """Raise ``RivalError`` if a rival cannot run, before anything is loaded."""
    for name in names:
        if find_spec(name) is None:
            raise RivalError(f"rival {name} is not installed; pip install {name}, or leave it out")
    if "vllm" in names and len(names) > 1:
        raise RivalError("rival vllm takes most of the GPU's memory: run it without others")


def run_in_turns(rivals: dict[str, Rival], task: Task) -> dict[str, list[dict[str, Any]]]:
    """Run all rivals in alternation; return the figures of each one's measured runs, after its warm-up runs.

    Times are in seconds, throughputs in tokens per second. Raises ``RuntimeError`` if a rival ends a request
    early, which would make it look fast.
    """
    warmup_runs = task.options.warmup_runs
    n_turns = warmup_runs + task.options.repeat_runs
    turns = [{name: _timed_run(rival, task) for name, rival in rivals.items()} for _ in range(n_turns)]
    return {name: [turn[name] for turn in turns[warmup_runs:]] for name in rivals}


def _timed_run(rival: Rival, task: Task) -> dict[str, Any]:
    start = perf_counter()
    tokens = rival.generate()
    total_time = perf_counter() - start
    wanted = new_tokens(task.options)
    if [len(row) for row in tokens] != wanted:
        raise RuntimeError(f"{sum(map(len, tokens))} tokens were generated, {sum(wanted)} were requested")
    return run_figures(tokens, total_time, None)


def measure_workload(task: Task, names: list[str], config: Arch) -> list[dict[str, Any]]:
    """Start the rivals, measure them, close them, and return a record for each, in the order of ``names``."""
    with ExitStack() as cleanup:
        cleanup.callback(
            torch.cuda.empty_cache
        )  # the last of all: the next workload's rivals need the memory
        cleanup.callback(gc.collect)
        rivals: dict[str, Rival] = {}
        for name in names:
            rivals[name] = RIVALS[name](task)
            cleanup.callback(rivals[name].close)
        runs = run_in_turns(rivals, task)
        facts = {name: rival.facts for name, rival in rivals.items()}
        rivals.clear()
    of_all = {
        **shared.request_facts(task.options),
        "device": task.device.type,
        "dtype": str(task.dtype).removeprefix("torch."),
        "model_shape": write_arch(config),
        "max_batch_size": task.options.max_batch_size,
    }
    records = []
    for name in names:
        results = {"offline": mode_result("offline", task.options.warmup_runs, runs[name])}
        own = of_all | facts[name]
        records.append(new_record("rivals", task.device, rival=name, **own, results=results))
    return records


def comparison(records: list[dict[str, Any]]) -> str:
    """Format each rival's median, lowest and highest tokens/s, and its ratio to the first rival."""
    results = {record["rival"]: record["results"]["offline"] for record in records}
    lines, medians = [], [result["medians"][THROUGHPUT] for result in results.values()]
    for (rival, result), median in zip(results.items(), medians, strict=True):
        repeats = [repeat[THROUGHPUT] for repeat in result["repeats"]]
        told = f"{median:.1f} tokens/s ({min(repeats):.1f} to {max(repeats):.1f})"
        lines.append(f"  {rival}: {told}, {median / medians[0]:.2f}x")
    return "\n".join(lines)


@command
def main(argv: list[str] | None = None) -> None:
    """Check all options, then measure each workload, write its records, and print the comparison."""
    options = parse_options(argv)
    device = resolve_device(options.device)
    check_rivals(options.rival)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    dtype = resolve_dtype(options.dtype, device, arch_of(options.hf_model_id, options.load_format))
    name = str(dtype).removeprefix("torch.")
    gpt, tokenizer = load_parts(options.hf_model_id, "cpu", name, options.load_format)
    with TemporaryDirectory(prefix="rosellm-") as folder:
        save_model(gpt, Path(folder), dtype)
        config = gpt.config
        del gpt
        bare = Task(Path(folder), device, dtype, options, prompts=[])
        for task in [_of_workload(name, bare, config, tokenizer) for name in options.workloads]:
            _measure_and_write(task, config)


def _of_workload(name: str, task: Task, config: Arch, tokenizer: AnyTokenizer) -> Task:
    """Return ``task`` with the sizes and prompts of a workload; raise ``PromptError`` for long prompts."""
    options = workload_options(task.options, name)
    most_tokens(options, tokenizer, config.n_positions)
    prompts = encode_prompts(make_prompts(options, config.vocab_size), tokenizer)
    return replace(task, options=options, prompts=prompts)


def _measure_and_write(task: Task, config: Arch) -> None:
    """Measure one workload, write its records if requested, and print the comparison."""
    options = task.options
    each = f"{options.num_requests} requests, {options.max_new_tokens} new tokens each"
    print(f"{options.workload}: {each}, {options.max_batch_size} at a time", flush=True)
    records = measure_workload(task, options.rival, config)
    for record in records if options.output else ():
        write_record(options.output / f"{options.workload}-{record['rival']}.json", record)
    print(comparison(records), flush=True)


def workload_options(options: Namespace, name: str) -> Namespace:
    """Return the command's options with the sizes of workload ``name``, except for overridden sizes."""
    given = {key: value for key, value in vars(options).items() if key != "workloads"}
    overrides = {key: given[key] for key in OVERRIDES if given[key] is not None}
    return Namespace(**(given | FIXED | {"workload": name} | ALL_WORKLOADS[name].flags() | overrides))


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return an argparse type that accepts comma-separated names of ``known``; repeats count once."""

    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise ArgumentTypeError(f"{unknown[0]!r} is unknown; use {', '.join(known)}")
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
    rung = f"rung of rosellm, {next(iter(LADDER))} to {next(reversed(LADDER))}; default: the best"
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
    get_rung(options.rung)
    return options


if __name__ == "__main__":
    sys.exit(main())
