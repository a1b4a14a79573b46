"""The requests of a workload: prompts of repeated text or random ids, output lengths and sampling."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import numpy as np

from rosellm.bench.arrivals import Arrival
from rosellm.errors import OptionError
from rosellm.models.loading import AnyTokenizer
from rosellm.roseinfer.sampling import SamplingParams

Prompts = Sequence[str | list[int]]
OF_PROMPTS, OF_OUTPUTS, OF_PREFIXES, OF_SAMPLING = 1, 2, 3, 4


def make_prompts(options: Namespace, vocab_size: int) -> Prompts:
    """Return one prompt per request: text, or with ``--prompt-tokens`` seeded random token ids."""
    if options.prompt_tokens is not None:
        return _random_prompts(options, vocab_size)
    if options.shared_prefix_tokens:
        raise OptionError("--shared-prefix-tokens needs --prompt-tokens: prompts of random token ids")
    texts = _texts(options)
    return [texts[i % len(texts)] for i in range(options.num_requests)]


def _random_prompts(options: Namespace, vocab_size: int) -> list[list[int]]:
    """Draw the longest length for every prompt, so that its beginning is the same at any length."""
    random, longest = np.random.default_rng(options.seed), options.prompt_tokens
    shared = np.random.default_rng([options.seed, OF_PREFIXES])
    prefix = shared.integers(vocab_size, size=options.shared_prefix_tokens).tolist()
    lengths = _own_lengths(options)
    return [prefix + random.integers(vocab_size, size=longest)[:n].tolist() for n in lengths]


def _texts(options: Namespace) -> list[str]:
    return [options.prompt * n for n in options.prompt_repeats[: options.num_requests]]


def longest_prompt_of(options: Namespace, tokenizer: AnyTokenizer) -> int:
    """Return the longest prompt's tokens without drawing the random ids, which take memory."""
    if options.prompt_tokens is None:
        return max(map(len, encode_prompts(_texts(options), tokenizer)))
    return options.shared_prefix_tokens + max(_own_lengths(options))


def largest_request(options: Namespace, longest_text: int) -> tuple[int, int]:
    """Return prompt and new tokens of the request with the largest sum of both.

    longest_text: tokens of the longest text prompt; text prompts all count as that long.
    """
    if options.prompt_tokens is None:
        return longest_text, max(new_tokens(options))
    prompts = [options.shared_prefix_tokens + n for n in _own_lengths(options)]
    return max(zip(prompts, new_tokens(options), strict=True), key=sum)


def _own_lengths(options: Namespace) -> list[int]:
    """Return the tokens of each prompt of random ids, without the shared prefix."""
    return _lengths(options, "prompt_tokens", options.min_prompt_tokens, options.prompt_tokens, OF_PROMPTS)


def new_tokens(options: Namespace) -> list[int]:
    """Return how many tokens each request generates."""
    return _lengths(options, "new_tokens", options.min_new_tokens, options.max_new_tokens, OF_OUTPUTS)


def _lengths(options: Namespace, field: str, low: int | None, high: int, of: int) -> list[int]:
    """Return each request's length: ``field`` of a trace, or uniform from ``low`` to ``high``.

    low: None if all are ``high``. of: the random stream, so that lengths of prompts and outputs are
    independent.
    """
    if trace := trace_of(options):
        return [getattr(arrival, field) for arrival in trace]
    if low is None:
        return [high] * options.num_requests
    if low > high:
        raise OptionError(f"the shortest length is {low}, the longest {high}")
    random = np.random.default_rng([options.seed, of])
    return random.integers(low, high + 1, size=options.num_requests).tolist()


def request_params(options: Namespace) -> list[SamplingParams]:
    """Return each request's sampling: greedy at temperature 0, otherwise with its own seed."""
    seeds = np.random.default_rng([options.seed, OF_SAMPLING]).integers(1 << 62, size=options.num_requests)
    sampled = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    ignore = not options.stop_on_eos
    return [
        SamplingParams(**sampled, max_tokens=n, seed=seed if options.temperature else None, ignore_eos=ignore)
        for n, seed in zip(new_tokens(options), seeds.tolist(), strict=True)
    ]


def trace_of(options: Namespace) -> list[Arrival] | None:
    """Return the arrivals of ``--trace``, an option of the streaming benchmark only, or None."""
    return vars(options).get("trace")


def encode_prompts(prompts: Prompts, tokenizer: AnyTokenizer) -> list[list[int]]:
    """Return token ids; prompts that are token ids already are unchanged."""
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
