"""A benchmark command, and its job: the requests and the engine that serves them."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from rosellm.bench import options as shared
from rosellm.bench.prompts import Prompts, encode_prompts, make_prompts, most_tokens, request_params
from rosellm.bench.record import dtype_name, engine_facts, mode_result, new_record, write_record
from rosellm.errors import RecipeError, RoseError
from rosellm.models.checkpoint import draft_for
from rosellm.models.loading import AnyTokenizer, load_draft, resolve_device
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.recipe import LADDER, RECIPES, Recipe, get_rung, speculating
from rosellm.roseinfer.rung import Rung
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.prompts import one_each
from rosellm.roseinfer.tensor_parallel import Load, load_ranks
from rosellm.roseinfer.trial import kv_blocks_within_memory

SPARE_KV_BLOCKS = 8
WARM_UP_TOKENS = 16  # of each request


@dataclass(frozen=True)
class Job:
    """The requests that every run of a benchmark serves, and the engine that serves them.

    params: sampling parameters, shared by all requests or one for each.
    config: limits of the scheduler; None for the defaults.
    """

    engine: Engine
    prompts: Prompts
    params: SamplingParams | list[SamplingParams]
    config: SchedulerConfig | None = None

    def with_at_most(self, new_tokens: int) -> Job:
        """Return the job with requests that generate at most ``new_tokens`` tokens each."""
        params = one_each(self.params, len(self.prompts))
        most = [min(one.max_tokens or new_tokens, new_tokens) for one in params]
        return replace(self, params=[replace(one, max_tokens=n) for one, n in zip(params, most, strict=True)])


Run = Callable[[Job], dict[str, Any]]  # serves all requests once; returns figures for the record


def make_job(
    options: Namespace, gpt: Transformer, tokenizer: AnyTokenizer, build: Callable[..., Engine] = Engine
) -> Job:
    """Build the job that the options describe, and print what will be measured.

    build: constructs the engine.
    """
    longest = most_tokens(options, tokenizer, gpt.config.n_positions)
    prompts, params = make_prompts(options, gpt.config.vocab_size), request_params(options)
    engine = make_engine(options, choose_recipe(options), gpt, tokenizer, longest, build)
    print_header(engine, options)
    given = encode_prompts(prompts, tokenizer) if options.pretok else prompts
    return Job(engine, given, params, scheduler_config(options))


def choose_recipe(options: Namespace) -> str | Rung:
    """Return the recipe that the options choose: a rung's name, or a custom recipe.

    It is ``--rung`` if given, the device's best recipe with ``--paged-attn``, and dense otherwise. The best
    recipe runs eagerly unless ``--cuda-graph`` is given. With ``--all-reduce`` the recipe is a custom one.
    Raises ``RecipeError`` for options that contradict each other.
    """
    recipe: str | Rung
    if options.rung is not None:
        if options.paged_attn or options.cuda_graph:
            raise RecipeError("--rung names a whole recipe: leave out --paged-attn and --cuda-graph")
        recipe = get_rung(options.rung)
    elif not options.paged_attn:
        if options.cuda_graph:
            raise RecipeError(
                "--cuda-graph needs --paged-attn: dense attention has no fixed shapes to capture"
            )
        recipe = "dense"
    else:
        best = get_rung(None, resolve_device(options.device))
        recipe = best if options.cuda_graph else replace(RECIPES[best], runner="eager")
    if options.speculation is not None:
        recipe = speculating(recipe, options.speculation, resolve_device(options.device))
    if options.all_reduce is None:
        return recipe
    if options.tensor_parallel_size == 1:
        raise RecipeError(f"--all-reduce {options.all_reduce} needs a --tensor-parallel-size of 2 or more")
    chosen = LADDER[recipe] if isinstance(recipe, str) else recipe
    chosen.check_ranks(options.tensor_parallel_size)
    assert isinstance(chosen, Recipe)  # no other rung has ranks
    return replace(chosen, all_reduce=options.all_reduce)


def make_engine(
    options: Namespace,
    recipe: str | Rung,
    gpt: Transformer,
    tokenizer: AnyTokenizer | None,
    longest: int,
    build: Callable[..., Engine] = Engine,
) -> Engine:
    """Build an engine whose KV cache is just large enough for the requests.

    recipe: name of a rung, or a custom recipe.
    tokenizer: None if all prompts are token ids.
    longest: maximum number of tokens of a request, prompt and output (``prompts.most_tokens``).
    build: constructs the engine.
    """
    longest = min(longest, gpt.config.n_positions)
    rung = LADDER[recipe] if isinstance(recipe, str) else recipe
    name = draft_for(options.hf_model_id, options.speculation, options.draft_model)
    draft = None if name is None else load_draft(name, gpt, tokenizer, options.load_format)
    shares = rung.has_prefix_cache if options.prefix_cache is None else options.prefix_cache
    return build(
        gpt,
        tokenizer,
        recipe=recipe,
        max_batch_size=options.max_batch_size,
        max_model_len=longest,
        num_kv_blocks=options.num_kv_blocks or kv_blocks_wanted(options, gpt, longest, draft),
        block_size=options.block_size,
        kv_cache_dtype=options.kv_cache_dtype,
        prefix_cache=shares,
        deterministic=options.deterministic,
        speculative_tokens=options.speculative_tokens,
        draft=draft,
    )


def kv_blocks_wanted(
    options: Namespace, gpt: Transformer, longest: int, draft: Transformer | None = None
) -> int:
    """Return the number of KV blocks per layer for the requests, or fewer if memory holds fewer.

    longest: tokens of a request. Blocks are counted for a full batch of such requests, plus spare blocks.
    draft: a model that drafts, with as many blocks; None if there is none.
    """
    concurrency = min(options.max_batch_size, options.num_requests)
    wanted = concurrency * blocks_for(longest, options.block_size) + SPARE_KV_BLOCKS
    sizes = wanted, options.block_size, options.max_batch_size
    form = None if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    return max(1, kv_blocks_within_memory(gpt, *sizes, draft=draft, form=form))


def scheduler_config(options: Namespace) -> SchedulerConfig:
    """Return the scheduler limits that the options set."""
    return SchedulerConfig(
        max_batch_size=options.max_batch_size,
        prefill_max_batch_size=options.prefill_max_batch_size,
        prefill_chunk=options.prefill_chunk,
        admission_policy=options.prefill_admission_policy,
    )


def print_header(engine: Engine, options: Namespace) -> None:
    """Print the model, recipe and requests that will be measured."""
    recipe = engine.rung or " ".join(engine.recipe.as_dict().values())
    n_ranks = engine.group.part.size
    where = engine.device.type + (f" x {n_ranks}" if n_ranks > 1 else "")
    print(f"Model: {options.hf_model_id}, {options.load_format}, {where}, {dtype_name(engine)}")
    print(f"Recipe: {recipe} ({engine.kernels.name} kernels)")
    each = f"{options.max_new_tokens} new tokens each"
    if options.min_new_tokens is not None:
        each = f"{options.min_new_tokens} to {each}"
    print(f"Requests: {options.num_requests}, {each}, {options.max_batch_size} at a time", flush=True)
    if told := shared.departures(options, engine):
        print(f"Not comparable with {options.workload}'s records: {', '.join(told)}", flush=True)


def prepare_run(engine: Engine) -> None:
    """Empty the prefix cache, wait for the device, and reset its memory peak, before a run."""
    if engine.prefix_cache is not None:
        engine.prefix_cache.clear()
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
        torch.cuda.reset_peak_memory_stats(engine.device)


def check_served(outputs: list[RequestOutput], params: SamplingParams | list[SamplingParams]) -> None:
    """Raise ``RoseError`` if a request failed or was cut short, since such a run is no measurement."""
    for number, (output, own) in enumerate(zip(outputs, one_each(params, len(outputs)), strict=True), 1):
        request = f"request {number} of {len(outputs)}"
        if output.finish_reason == "failed":
            raise RoseError(f"{request} failed: {output.error}")
        if output.finish_reason == "length" and len(output.token_ids) < (own.max_tokens or 0):
            raise RoseError(
                f"{request} ended after {len(output.token_ids)} of {own.max_tokens} tokens: there is no room "
                "for more in the model's positions or the KV cache"
            )


@dataclass(frozen=True)
class Benchmark:
    """A command that serves the same requests repeatedly, in one or several modes.

    form: the command's name in workloads and records.
    doc: the docstring of the command's module, which becomes the help.
    add_options: adds the options that only this command has.
    runs: maps each requested mode's name to a function that serves the requests once; raises for incompatible
        options.
    """

    form: str
    doc: str
    add_options: Callable[[ArgumentParser], None]
    runs: Callable[[Namespace], dict[str, Run]]

    def parse_options(self, argv: list[str] | None = None) -> Namespace:
        """Parse this command's options; None reads the command line."""
        parser = shared.command_parser(f"benchmark_{self.form}", self.doc, details=shared.DETAILS)
        shared.add_model_options(parser)
        shared.add_device_options(parser)
        shared.add_serving_options(parser)
        shared.add_run_options(parser)
        shared.add_record_option(parser)
        self.add_options(parser)
        return shared.parse(parser, argv, self.form)

    def measure(
        self,
        options: Namespace,
        gpt: Transformer,
        tokenizer: AnyTokenizer,
        build: Callable[..., Engine] = Engine,
    ) -> dict[str, Any]:
        """Measure, print the summaries, and return the record.

        gpt: the model, which several measurements may share.
        build: constructs the engine.

        The record is written, if requested, before the summaries, so that an error in printing loses no
        measurement.
        """
        runs = self.runs(options)  # raises for incompatible options
        job = make_job(options, gpt, tokenizer, build)
        results = {mode: _repeated(mode, run, job, options) for mode, run in runs.items()}
        facts = shared.request_facts(options) | {"not_comparable": shared.departures(options, job.engine)}
        facts |= engine_facts(job.engine)
        record = new_record(self.form, job.engine.device, **facts, results=results)
        if options.json:
            write_record(options.json, record)
        for result in results.values():
            print_summary(result)
        return record

    def run(self, argv: list[str] | None) -> None:
        """Parse the options, load the model and measure."""
        options = self.parse_options(argv)
        recipe = choose_recipe(options)  # raises before the model is loaded
        source = options.hf_model_id, options.device, options.dtype, options.load_format
        load = Load(*source, quantization=options.quantization)
        loaded = load_ranks(options.tensor_parallel_size, load, recipe, options.deterministic)
        self.measure(options, loaded.model, loaded.tokenizer, loaded.build)


def _repeated(mode: str, run: Run, job: Job, options: Namespace) -> dict[str, Any]:
    for _ in range(options.warmup_runs):
        run(job.with_at_most(WARM_UP_TOKENS))
    return mode_result(mode, options.warmup_runs, [run(job) for _ in range(options.repeat_runs)])


def print_summary(result: dict[str, Any]) -> None:
    """Print the medians, over a mode's measured runs, of all figures, by their names in the record."""
    runs = f"{result['repeat_runs']} runs after {result['warmup_runs']} for warm-up"
    print(f"=== {result['mode']}: medians of {runs} ===")
    for name, median in result["medians"].items():
        print(f"{name:<26}{median:>14.6g}")
    sys.stdout.flush()
