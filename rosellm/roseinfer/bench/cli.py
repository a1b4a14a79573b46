"""What the benchmark commands share: options, workload presets, engines made of them, one-line errors."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rosellm.command_line import OneLineParser, is_out_of_memory, whole_number
from rosellm.errors import PromptError, RecipeError, RoseError
from rosellm.models.loading import DTYPES, LOAD_FORMATS, AnyTokenizer, load_parts
from rosellm.models.model import GPT
from rosellm.models.weights import SHIPPED
from rosellm.roseinfer.bench.record import check_writable, write_record
from rosellm.roseinfer.bench.workloads import WORKLOADS, get_workload
from rosellm.roseinfer.cache.budget import kv_blocks_within_memory
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import LADDER, Recipe, get_rung
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import POLICIES, SchedulerConfig

HUB_TIMEOUT_SECONDS = "3"
SPARE_KV_BLOCKS = 8
PROFILED_STEPS = 20
MOST_REQUESTS = MOST_TOKENS = 1 << 20
MOST_ROWS = 1 << 40
DAY_MS = 86_400_000
NOT_IN_RECORDS = ("json", "profile", "workload", "hf_model_id")

Prompts = list[str] | list[list[int]]


def command(body: Callable[[list[str] | None], None]) -> Callable[[list[str] | None], int]:
    """A command's ``main``: what a user can cause is one line on stderr and status 2."""

    def main(argv: list[str] | None = None) -> int:
        os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", HUB_TIMEOUT_SECONDS)
        try:
            body(argv)
        except RoseError as error:
            return _fail(str(error))
        except OSError as error:
            return _fail(str(error))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return _fail("out of memory; ask for a smaller batch, fewer KV blocks or a smaller model")
        except KeyboardInterrupt:
            return _fail("interrupted", status=130)
        return 0

    return main


def _fail(message: str, status: int = 2) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status


def whole_numbers(high: int) -> Callable[[str], tuple[int, ...]]:
    """An argparse type: comma-separated integers from 1 to ``high``."""
    one = whole_number(1, high)
    return lambda text: tuple(map(one, text.split(",")))


def milliseconds(text: str) -> float:
    """An argparse type: a duration of 0 to a day."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= DAY_MS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of milliseconds, 0 or more and at most {DAY_MS}, a day"
        )
    return value


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("device")
    group.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="default: %(default)s (cuda if there is one)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="default: %(default)s (float16 on cuda, float32 on cpu)",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--hf-model-id",
        default=SHIPPED,
        metavar="MODEL",
        help="hub id, local folder or the shipped model; default: %(default)s",
    )
    group.add_argument(
        "--load-format",
        choices=LOAD_FORMATS,
        default="auto",
        help="dummy: the model's shape with seeded random weights, no download; default: %(default)s",
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--rung",
        metavar="NAME",
        help=f"rung of the ladder, wins over the two flags below: {', '.join(LADDER)}",
    )
    group.add_argument(
        "--paged-attn", action="store_true", help="the best recipe with the eager runner; without it: dense"
    )
    group.add_argument("--cuda-graph", action="store_true", help="with --paged-attn: the best recipe")
    group.add_argument(
        "--block-size",
        type=whole_number(1, MOST_TOKENS),
        default=64,
        help="tokens a KV block, a power of two; default: %(default)s",
    )
    group.add_argument(
        "--num-kv-blocks",
        type=whole_number(1),
        help="KV blocks a layer; default: what --max-batch-size requests need, capped by memory",
    )
    group.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV of shared prompt prefixes; default: on",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="a request's logits are bitwise the same whatever shares its batch; on the late rungs",
    )


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests (greedy)")
    group.add_argument(
        "--workload", metavar="ID", help=f"preset of these options, explicit ones win: {', '.join(WORKLOADS)}"
    )
    group.add_argument(
        "--num-requests", type=whole_number(1, MOST_REQUESTS), default=16, help="default: %(default)s"
    )
    group.add_argument(
        "--max-new-tokens", type=whole_number(1), default=64, help="tokens a request; default: %(default)s"
    )
    group.add_argument("--prompt", default="Hello", help="text of every prompt; default: %(default)s")
    group.add_argument(
        "--prompt-repeats",
        type=whole_numbers(MOST_TOKENS),
        default=(1,),
        metavar="N,N",
        help="requests repeat the text N times, in turn; default: 1",
    )
    group.add_argument(
        "--prompt-tokens",
        type=whole_number(1, MOST_TOKENS),
        metavar="N",
        help="prompts of N seeded random token ids instead of text",
    )
    group.add_argument(
        "--seed", type=whole_number(0), default=0, help="of --prompt-tokens; default: %(default)s"
    )
    group.add_argument(
        "--stop-on-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end a request at end of sequence; default: on",
    )
    group.add_argument(
        "--pretok",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="tokenize before the clock starts; default: off",
    )


def add_scheduler_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scheduler")
    group.add_argument(
        "--max-batch-size",
        type=whole_number(1),
        default=8,
        help="requests that run together; default: %(default)s",
    )
    group.add_argument(
        "--prefill-max-batch-size",
        type=whole_number(1),
        default=256,
        help="prompts an iteration; default: %(default)s",
    )
    group.add_argument(
        "--prefill-token-budget",
        type=whole_number(1),
        default=16384,
        help="prompt tokens an iteration; default: %(default)s",
    )
    group.add_argument(
        "--prefill-admission-policy", choices=POLICIES, default="fifo", help="default: %(default)s"
    )


def add_measuring_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--warmup-runs",
        type=whole_number(0),
        default=1,
        help="whole runs before the measured ones; default: %(default)s",
    )
    group.add_argument(
        "--repeat-runs", type=whole_number(1), default=3, help="measured runs; default: %(default)s"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    group.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help=f"write a Chrome trace of one more run, of about {PROFILED_STEPS} decode steps",
    )


def benchmark_parser(name: str, doc: str) -> OneLineParser:
    """The options that both benchmarks of whole runs share; the help begins with ``doc`` less its title."""
    parser = OneLineParser(prog=f"python -m rosellm.roseinfer.{name}", description=doc.partition("\n\n")[2])
    add_model_arguments(parser)
    add_device_arguments(parser)
    add_engine_arguments(parser)
    add_request_arguments(parser)
    add_scheduler_arguments(parser)
    add_measuring_arguments(parser)
    return parser


def benchmark_command(
    parse_options: Callable[[list[str] | None], argparse.Namespace],
    measure: Callable[[argparse.Namespace, GPT, AnyTokenizer], dict[str, Any]],
) -> Callable[[list[str] | None], int]:
    """A ``main`` that parses, loads, measures, and writes the record if it was asked for."""

    @command
    def main(argv: list[str] | None = None) -> None:
        options = parse_options(argv)
        choose_recipe(options)  # a wrong choice is told before the model is loaded
        parts = load_parts(options.hf_model_id, options.device, options.dtype, options.load_format)
        record = measure(options, *parts)
        if options.json:
            write_record(options.json, record)

    return main


def parse(parser: argparse.ArgumentParser, argv: list[str] | None, form: str) -> argparse.Namespace:
    """Options in which the workload of ``form``, if one is named, takes the place of the defaults."""
    early = OneLineParser(add_help=False)
    early.add_argument("--workload")
    name = early.parse_known_args(argv)[0].workload
    if name is not None:
        parser.set_defaults(**get_workload(name, form).flags())
    options = parser.parse_args(argv)
    for path in filter(None, (options.json, options.profile)):
        check_writable(path)
    if not options.prompt:
        raise PromptError("--prompt is empty; give it at least one character")
    return options


def choose_recipe(options: argparse.Namespace) -> str | Recipe:
    """``--rung``; else dense without a flag, the best recipe with the eager runner, or the best recipe."""
    if options.rung is not None:
        return get_rung(options.rung)
    if options.cuda_graph and not options.paged_attn:
        raise RecipeError("--cuda-graph needs --paged-attn: dense attention has no fixed shapes to capture")
    if not options.paged_attn:
        return "dense"
    best = get_rung(None)
    return best if options.cuda_graph else replace(LADDER[best], runner="eager")


def make_engine(
    options: argparse.Namespace, recipe: str | Recipe, gpt: GPT, tokenizer: AnyTokenizer, longest_prompt: int
) -> Engine:
    """An engine with a KV cache just large enough for what the options ask."""
    return Engine(
        gpt,
        tokenizer,
        recipe=recipe,
        max_batch_size=options.max_batch_size,
        num_kv_blocks=options.num_kv_blocks or kv_blocks_wanted(options, gpt, longest_prompt),
        block_size=options.block_size,
        prefix_cache=options.prefix_cache,
        deterministic=options.deterministic,
    )


def kv_blocks_wanted(options: argparse.Namespace, gpt: GPT, longest_prompt: int) -> int:
    """Blocks a layer for as many longest requests as run together, and a few to spare; within memory."""
    longest = min(longest_prompt + options.max_new_tokens, gpt.config.n_positions)
    concurrency = min(options.max_batch_size, options.num_requests)
    wanted = concurrency * blocks_for(longest, options.block_size) + SPARE_KV_BLOCKS
    return kv_blocks_within_memory(gpt, wanted, options.block_size)


def make_prompts(options: argparse.Namespace, vocab_size: int) -> Prompts:
    """One prompt a request: text, or with ``--prompt-tokens`` random token ids from the seed."""
    if options.prompt_tokens is not None:
        shape = (options.num_requests, options.prompt_tokens)
        return np.random.default_rng(options.seed).integers(vocab_size, size=shape).tolist()
    texts = [options.prompt * n for n in options.prompt_repeats]
    return [texts[i % len(texts)] for i in range(options.num_requests)]


def encode_prompts(prompts: Prompts, tokenizer: AnyTokenizer) -> list[list[int]]:
    """Token ids; prompts that are token ids already are left as they are."""
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def greedy_params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=options.max_new_tokens, ignore_eos=not options.stop_on_eos
    )


def scheduler_config(options: argparse.Namespace) -> SchedulerConfig:
    return SchedulerConfig(
        max_batch_size=options.max_batch_size,
        prefill_max_batch_size=options.prefill_max_batch_size,
        prefill_token_budget=options.prefill_token_budget,
        admission_policy=options.prefill_admission_policy,
    )


def request_facts(options: argparse.Namespace) -> dict[str, Any]:
    """For the record: model, workload, which of its presets were overridden, every option but paths."""
    given = {name: value for name, value in vars(options).items() if name not in NOT_IN_RECORDS}
    preset = WORKLOADS[options.workload].flags() if options.workload else {}
    return {
        "workload": options.workload,
        "workload_overrides": {name: given[name] for name, value in preset.items() if given[name] != value},
        "model": Path(options.hf_model_id).name
        if Path(options.hf_model_id).is_dir()
        else options.hf_model_id,
        "load_format": options.load_format,
        "options": given,
    }


def set_up(
    options: argparse.Namespace, gpt: GPT, tokenizer: AnyTokenizer
) -> tuple[Engine, Prompts, SamplingParams, SchedulerConfig]:
    """What the options ask for; says in a few lines what is about to be measured."""
    recipe = choose_recipe(options)
    prompts = make_prompts(options, gpt.config.vocab_size)
    encoded = encode_prompts(prompts, tokenizer)
    engine = make_engine(options, recipe, gpt, tokenizer, max(map(len, encoded)))
    print_run_header(engine, options)
    engine.warm_up()
    given = encoded if options.pretok else prompts
    return engine, given, greedy_params(options), scheduler_config(options)


def prepare_run(engine: Engine) -> None:
    """Every run starts with an empty prefix cache, an idle device and its own memory peak."""
    if engine.prefix_cache is not None:
        engine.prefix_cache.clear()
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
        torch.cuda.reset_peak_memory_stats(engine.device)


def peak_memory(engine: Engine) -> int | None:
    """Most bytes allocated on the GPU since :func:`prepare_run`; None on a CPU."""
    return torch.cuda.max_memory_allocated(engine.device) if engine.device.type == "cuda" else None


def print_run_header(engine: Engine, options: argparse.Namespace) -> None:
    """What is about to be measured."""
    recipe = engine.rung or " ".join(engine.recipe.as_dict().values())
    facts = (
        f"Model: {options.hf_model_id}",
        options.load_format,
        engine.device.type,
        str(engine.model.dtype).removeprefix("torch."),
    )
    print(", ".join(facts))
    print(f"Recipe: {recipe} ({engine.kernels.name} kernels)")
    requests = f"{options.num_requests}, {options.max_new_tokens} new tokens each"
    print(f"Requests: {requests}, {options.max_batch_size} at a time", flush=True)
