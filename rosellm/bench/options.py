"""The options of the benchmarks; their defaults are those of the dataclasses that they fill."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rosellm.bench.record import check_writable, dtype_name
from rosellm.bench.workloads import ALL_WORKLOADS, DTYPE, LOAD_FORMAT, MODERN_MODEL, Workload, get_workload
from rosellm.command_line import INT32_MAX, ScreenParser, whole_number, whole_numbers
from rosellm.models.checkpoint import SHIPPED
from rosellm.models.loading import DTYPES, LOAD_FORMATS
from rosellm.models.quantized import CODES, KV_DTYPE, QUANTIZATION, WEIGHT_FORMS
from rosellm.roseinfer.engine import MOST_DRAFTS, Engine
from rosellm.roseinfer.recipe import LADDER, PROPOSERS, SPECULATION, recipe_choices
from rosellm.roseinfer.serving.admission import POLICIES, SchedulerConfig
from rosellm.roseinfer.tensor_parallel import MOST_RANKS

MOST_REQUESTS = MOST_TOKENS = 1 << 20
# Groups that only --help-all shows.
DETAILS = ("KV cache", "several GPUs", "drafts", "prompts", "sampling", "scheduler", "arrivals")
NOT_IN_RECORDS = ("json", "output", "workload", "hf_model_id", "preset")
# Options that a workload does not fix; ``departures`` compares rung and dtype separately.
FREE = {
    *("json", "workload", "device", "dtype", "mode", "warmup_runs", "repeat_runs"),
    *("rung", "paged_attn", "cuda_graph", "ttft_limit_ms", "itl_limit_ms"),
}


def command_parser(
    module: str, doc: str, usage: str = "[options]", details: tuple[str, ...] = ()
) -> ScreenParser:
    """Return a parser for ``python -m rosellm.roseinfer.MODULE``.

    doc: the help; its first paragraph, the title, is left out, and its third and later paragraphs are shown
        only by ``--help-all``.
    details: titles of the option groups that only ``--help-all`` shows.
    """
    _title, description, *rest = doc.strip().split("\n\n")
    texts = {"usage": f"%(prog)s {usage}", "description": description, "epilog": " ".join(rest) or None}
    return ScreenParser(details, prog=f"python -m rosellm.roseinfer.{module}", **texts)


def count(default: int | None, low: int = 1, high: int = INT32_MAX) -> dict[str, Any]:
    """Return ``add_argument`` options for a whole number from ``low`` to ``high``."""
    return {"type": whole_number(low, high), "default": default, "metavar": "N"}


def counts(default: tuple[int, ...], high: int) -> dict[str, Any]:
    """Return ``add_argument`` options for comma-separated whole numbers from 1 to ``high``."""
    return {"type": whole_numbers(high), "default": default, "metavar": "N,N"}


def switch(default: bool | None) -> dict[str, Any]:
    """Return ``add_argument`` options for a switch, ``--name`` or ``--no-name``."""
    return {"action": BooleanOptionalAction, "default": default}


def number(what: str, low: float, high: float) -> Callable[[str], float]:
    """Return an argparse type that accepts a number from ``low`` to ``high``.

    what: describes the number in errors, after "is not a number".
    """

    def parse(text: str) -> float:
        with suppress(ValueError):
            if low <= (value := float(text)) <= high:
                return value
        raise ArgumentTypeError(f"{text!r} is not a number {what}")

    return parse


def add_model_options(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--hf-model-id", default=SHIPPED, metavar="MODEL", help="hub id, local folder or the shipped model")
    dummy = "dummy: the model's shape with seeded random weights, no download"
    add("--load-format", choices=LOAD_FORMATS, default="auto", help=dummy)


def add_device_options(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("device").add_argument
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda if available")
    dtype = "default auto: the model's; on a CPU float32"
    add("--dtype", choices=("auto", *DTYPES), default="auto", help=dtype)


def add_common_options(
    parser: ArgumentParser, doc: str | None, run: Callable[[Namespace], None]
) -> Callable[..., object]:
    """Add the options of a benchmark of one model's steps or drafts; return ``parser.add_argument``.

    doc: the benchmark's docstring, whose second paragraph becomes the description.
    run: becomes the parser's default ``run``.
    """
    assert doc is not None
    _title, parser.description = doc.strip().split("\n\n")
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--model", default=SHIPPED, help="hub id, local folder or a shipped model")
    add("--load-format", choices=LOAD_FORMATS, default="auto", help="dummy: random weights, no download")
    add_record_option(parser)
    add_device_options(parser)
    return add


def add_run_options(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("runs").add_argument
    add("--repeat-runs", **count(3), help="measured runs")
    add("--warmup-runs", **count(1, low=0), help="runs before, 16 tokens at most")


def add_record_option(parser: ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")


def add_serving_options(parser: ArgumentParser) -> None:
    """Add the options of a benchmark that serves requests: engine, requests and scheduler."""
    add = parser.add_argument_group("engine").add_argument
    add("--rung", metavar="NAME", help=f"{next(iter(LADDER))} to {next(reversed(LADDER))}")
    add("--paged-attn", action="store_true", help="the best recipe, eager; without it: dense")
    add("--cuda-graph", action="store_true", help="with --paged-attn: the best recipe")
    add("--deterministic", action="store_true", help="bitwise equal logits in any batch; later rungs only")
    add("--quantization", choices=WEIGHT_FORMS, help=QUANTIZATION)
    add = parser.add_argument_group("KV cache").add_argument
    add("--kv-cache-dtype", choices=("auto", *CODES), default="auto", help=KV_DTYPE)
    add("--block-size", **count(64, high=MOST_TOKENS), help="tokens per KV block, a power of two")
    add("--num-kv-blocks", **count(None), help="per layer; default: as the requests need, capped by memory")
    add("--prefix-cache", **switch(None), help="reuse the KV of shared prefixes; default: if the rung can")
    add = parser.add_argument_group("drafts").add_argument
    add("--speculation", choices=PROPOSERS, help=SPECULATION)
    add("--draft-model", metavar="MODEL", help="for draft; default: the shipped model's own")
    add("--speculative-tokens", **count(None, high=MOST_DRAFTS), help="per step and request; default: 7")
    add = parser.add_argument_group("several GPUs").add_argument
    add("--tensor-parallel-size", **count(1, high=MOST_RANKS), help="GPUs that share the model")
    sums = recipe_choices()["all_reduce"]
    add("--all-reduce", choices=sums, help="all-reduce of several GPUs; default: the fastest")
    add = parser.add_argument_group("requests").add_argument
    add("--workload", metavar="ID", help=f"preset; explicit options override it: {', '.join(ALL_WORKLOADS)}")
    add("--num-requests", **count(Workload.num_requests, high=MOST_REQUESTS), help="requests per run")
    add("--max-new-tokens", **count(Workload.max_new_tokens), help="tokens per request")
    add("--prompt", default=Workload.prompt, metavar="TEXT", help="text of every prompt")
    add("--max-batch-size", **count(Workload.max_batch_size), help="requests that run together")
    add("--stop-on-eos", **switch(True), help="end a request at end of sequence")
    add("--pretok", **switch(False), help="tokenize before the clock starts")
    add = parser.add_argument_group("prompts").add_argument
    repeats = "repeats of the text; requests cycle through these counts"
    add("--prompt-repeats", **counts(Workload.prompt_repeats, MOST_TOKENS), help=repeats)
    add(
        "--prompt-tokens",
        **count(Workload.prompt_tokens, high=MOST_TOKENS),
        help="random ids instead of text",
    )
    shortest = "lengths uniform from N to the option without min-; default: all equal"
    add("--min-prompt-tokens", **count(Workload.min_prompt_tokens, high=MOST_TOKENS), help=shortest)
    add("--min-new-tokens", **count(Workload.min_new_tokens), help=shortest)
    shared = "random token ids that all these prompts begin with"
    add("--shared-prefix-tokens", **count(Workload.shared_prefix_tokens, 0, MOST_TOKENS), help=shared)
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=Workload.temperature, metavar="T", help="0: greedy")
    add("--top-k", **count(Workload.top_k, low=0), help="0: all tokens")
    add("--top-p", type=float, default=Workload.top_p, metavar="P", help="1: all tokens")
    add("--seed", **count(0, low=0), help="of random ids, lengths and each request's sampling")
    add, config = parser.add_argument_group("scheduler").add_argument, SchedulerConfig
    add("--prefill-max-batch-size", **count(config.prefill_max_batch_size), help="prompts per iteration")
    chunk = "prompt tokens per iteration while requests decode; default: no limit of its own"
    add("--prefill-chunk", **count(config.prefill_chunk), help=chunk)
    policy = "which waiting requests are admitted: the first, or the shortest that fit"
    add("--prefill-admission-policy", choices=POLICIES, default=config.admission_policy, help=policy)


def parse(parser: ArgumentParser, argv: list[str] | None, form: str) -> Namespace:
    """Parse the options; a workload, if named, replaces their defaults.

    argv: the arguments; None means those of the command line.
    form: the benchmark's name; the workload must be one of its workloads.

    The workload also selects the model and the best rung, unless options choose them. The result's attribute
    ``preset`` holds all options as the workload sets them; it is empty without a workload.
    """
    given, preset = parser.parse_args(argv, Namespace(hf_model_id=None)), {}  # the model is None unless given
    if given.workload is not None:
        workload = get_workload(given.workload, form)
        model = workload.model or MODERN_MODEL
        parser.set_defaults(**workload.flags(), hf_model_id=model, load_format=LOAD_FORMAT)
        preset = vars(parser.parse_args([]))
        if given.hf_model_id is not None:
            parser.set_defaults(load_format="auto")
        if given.rung is None and not given.paged_attn and not given.cuda_graph:
            parser.set_defaults(paged_attn=True, cuda_graph=True)
    options = parser.parse_args(argv)
    if options.json:
        check_writable(options.json)
    options.preset = preset
    return options


def departures(options: Namespace, engine: Engine) -> list[str]:
    """List how a run deviates from its workload; with any deviation it is not comparable with the records."""
    if options.workload is None:
        return []
    model, here = ALL_WORKLOADS[options.workload].model, vars(options) | {"dtype": dtype_name(engine)}
    preset = {name: value for name, value in options.preset.items() if name not in FREE}
    preset["dtype"] = DTYPE if model else engine.config.dtype or DTYPE
    if model is None:
        del preset["hf_model_id"]
    told = [f"{name}={here[name]} for {value}" for name, value in preset.items() if here[name] != value]
    return told if engine.rung or engine.deterministic else [*told, "a recipe that is no rung"]


def request_facts(options: Namespace) -> dict[str, Any]:
    """Return what a record says of the requests: workload, model, and all other options."""
    folder = Path(options.hf_model_id)
    return {
        "workload": options.workload,
        "model": folder.name if folder.is_dir() else options.hf_model_id,
        "load_format": options.load_format,
        "options": {name: value for name, value in vars(options).items() if name not in NOT_IN_RECORDS},
    }
