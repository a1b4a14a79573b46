"""A job: requests and the engine that serves them, built from a command's options."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace

from rosellm.bench.options import departures
from rosellm.bench.prompts import (
    Prompts,
    encode_prompts,
    largest_request,
    longest_prompt_of,
    make_prompts,
    new_tokens,
    request_params,
    trace_of,
)
from rosellm.bench.record import dtype_name
from rosellm.errors import PromptError, RecipeError
from rosellm.models.loading import AnyTokenizer, resolve_device
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import LADDER, RECIPES, Recipe, get_rung
from rosellm.roseinfer.rung import Rung
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.prompts import one_each
from rosellm.roseinfer.trial import kv_blocks_within_memory

SPARE_KV_BLOCKS = 8


@dataclass(frozen=True)
class Job:
    """What every run of a benchmark repeats. params: one for all requests, or one each."""

    engine: Engine
    prompts: Prompts
    params: SamplingParams | list[SamplingParams]
    config: SchedulerConfig | None = None

    def shortened(self, num_requests: int, max_tokens: int) -> Job:
        """Return the job with only the first requests, and only the first tokens of each."""
        each = one_each(self.params, len(self.prompts))[:num_requests]
        params = [replace(own, max_tokens=min(own.max_tokens, max_tokens)) for own in each]
        return replace(self, prompts=self.prompts[:num_requests], params=params)


def make_job(
    options: Namespace, gpt: Transformer, tokenizer: AnyTokenizer, build: Callable[..., Engine] = Engine
) -> Job:
    """Build the job that the options describe, and print a header."""
    recipe = choose_recipe(options)
    longest = longest_prompt_of(options, tokenizer)
    check_positions(options, longest, gpt.config.n_positions)
    prompts, params = make_prompts(options, gpt.config.vocab_size), request_params(options)
    engine = make_engine(options, recipe, gpt, tokenizer, longest, build)
    print_header(engine, options)
    given = encode_prompts(prompts, tokenizer) if options.pretok else prompts
    return Job(engine, given, params, scheduler_config(options))


def choose_recipe(options: Namespace) -> str | Rung:
    """Return ``--rung``; without it dense, or with ``--paged-attn`` the device's best recipe.

    That one is eager unless ``--cuda-graph`` is given. With a non-default ``--all-reduce`` the result is a
    custom recipe instead of a rung.
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
    if options.all_reduce == "library":
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
    longest_prompt: int,
    build: Callable[..., Engine] = Engine,
) -> Engine:
    """Build an engine, by ``build``, with a KV cache just large enough for the options."""
    rung = LADDER[recipe] if isinstance(recipe, str) else recipe
    shares = rung.has_prefix_cache if options.prefix_cache is None else options.prefix_cache
    return build(
        gpt,
        tokenizer,
        recipe=recipe,
        max_batch_size=options.max_batch_size,
        max_model_len=longest_request(options, gpt, longest_prompt),
        num_kv_blocks=options.num_kv_blocks or kv_blocks_wanted(options, gpt, longest_prompt),
        block_size=options.block_size,
        prefix_cache=shares,
        deterministic=options.deterministic,
    )


def kv_blocks_wanted(options: Namespace, gpt: Transformer, longest_prompt: int) -> int:
    """Return blocks per layer for the longest requests run together, plus spares, capped by memory."""
    longest = longest_request(options, gpt, longest_prompt)
    concurrency = min(options.max_batch_size, options.num_requests)
    wanted = concurrency * blocks_for(longest, options.block_size) + SPARE_KV_BLOCKS
    return max(1, kv_blocks_within_memory(gpt, wanted, options.block_size, options.max_batch_size))


def longest_request(options: Namespace, gpt: Transformer, longest_prompt: int) -> int:
    """Return the most tokens a request may have, prompt and output; at most the model's positions.

    For random lengths the longest prompt and output are added, since an engine may serve such a request
    later.
    """
    most = longest_prompt + options.max_new_tokens
    if trace_of(options):
        most = sum(largest_request(options, longest_prompt))
    return min(most, gpt.config.n_positions)


def scheduler_config(options: Namespace) -> SchedulerConfig:
    """Return the scheduler limits that the options set."""
    return SchedulerConfig(
        max_batch_size=options.max_batch_size,
        prefill_max_batch_size=options.prefill_max_batch_size,
        prefill_token_budget=options.prefill_token_budget,
        prefill_chunk=options.prefill_chunk,
        admission_policy=options.prefill_admission_policy,
    )


def print_header(engine: Engine, options: Namespace) -> None:
    """Print what is about to be measured."""
    recipe = engine.rung or " ".join(engine.recipe.as_dict().values())
    n_ranks = engine.group.part.size
    where = engine.device.type + (f" x {n_ranks}" if n_ranks > 1 else "")
    print(f"Model: {options.hf_model_id}, {options.load_format}, {where}, {dtype_name(engine)}")
    print(f"Recipe: {recipe} ({engine.kernels.name} kernels)")
    new = sorted(set(new_tokens(options)))
    each = f"{new[0]} to {new[-1]}" if len(new) > 1 else new[0]
    requests = f"{options.num_requests}, {each} new tokens each, {options.max_batch_size} at a time"
    print(f"Requests: {requests}", flush=True)
    if told := departures(options, engine):
        print(f"Not comparable with {options.workload}'s records: {', '.join(told)}", flush=True)


def check_positions(options: Namespace, longest_prompt: int, n_positions: int) -> None:
    """Raise ``PromptError`` if the model has too few positions for one of the requests."""
    prompt, new = largest_request(options, longest_prompt)
    if prompt + new > n_positions:
        name = f"{options.workload}: " if options.workload else ""
        raise PromptError(
            f"{name}{prompt} prompt tokens and {new} new ones exceed the model's {n_positions} positions"
        )
