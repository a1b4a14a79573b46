"""Make the requests of a workload: prompts of repeated text or random ids, output lengths, sampling."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np

from rosellm.errors import OptionError, PromptError
from rosellm.models.loading import AnyTokenizer
from rosellm.roseinfer.sampling import SamplingParams

Prompts = Sequence[str | list[int]]
OF_PROMPTS, OF_OUTPUTS, OF_PREFIXES, OF_SAMPLING = 1, 2, 3, 4


def make_prompts(options: Namespace, vocab_size: int) -> Prompts:
    """Return one prompt per request: text, or with ``--prompt-tokens`` seeded random token ids.

    For every prompt of ids, the maximum length is drawn and then cut, so that a prompt begins with the same
    ids whatever its length.
    """
    if options.prompt_tokens is None:
        return list(islice(cycle(_texts(options)), options.num_requests))
    random, longest = np.random.default_rng(options.seed), options.prompt_tokens
    shared = np.random.default_rng([options.seed, OF_PREFIXES])
    prefix = shared.integers(vocab_size, size=options.shared_prefix_tokens).tolist()
    lengths = _lengths(options, options.min_prompt_tokens, longest, OF_PROMPTS)
    return [prefix + random.integers(vocab_size, size=longest)[:n].tolist() for n in lengths]


def most_tokens(options: Namespace, tokenizer: AnyTokenizer, n_positions: int) -> int:
    """Return the maximum number of tokens of a request, prompt and output, for which to build the engine.

    n_positions: number of positions of the model.

    With random lengths, this is the longest prompt plus the longest output. No prompt is made, to save
    memory. Raises ``PromptError`` if that exceeds the model's positions.
    """
    if options.prompt_tokens is None:
        longest = max(len(tokenizer.encode(text)) for text in _texts(options))
    else:
        longest = options.prompt_tokens
    prompt, new = options.shared_prefix_tokens + longest, options.max_new_tokens
    if prompt + new > n_positions:
        name = f"{options.workload}: " if options.workload else ""
        raise PromptError(
            f"{name}{prompt} prompt tokens and {new} new ones exceed the model's {n_positions} positions"
        )
    return prompt + new


def _texts(options: Namespace) -> list[str]:
    if options.shared_prefix_tokens:
        raise OptionError("--shared-prefix-tokens needs --prompt-tokens: prompts of random token ids")
    return [options.prompt * n for n in options.prompt_repeats[: options.num_requests]]


def new_tokens(options: Namespace) -> list[int]:
    """Return the number of tokens that each request generates."""
    return _lengths(options, options.min_new_tokens, options.max_new_tokens, OF_OUTPUTS)


def _lengths(options: Namespace, low: int | None, high: int, of: int) -> list[int]:
    """Return each request's length, drawn uniformly from ``low`` to ``high``.

    low: None if all lengths are ``high``.
    of: number of the random stream, so that lengths of prompts and outputs are independent.
    """
    if low is None:
        return [high] * options.num_requests
    if low > high:
        raise OptionError(f"the shortest length is {low}, the longest {high}")
    random = np.random.default_rng([options.seed, of])
    return random.integers(low, high + 1, size=options.num_requests).tolist()


def request_params(options: Namespace) -> list[SamplingParams]:
    """Return each request's sampling parameters: greedy at temperature 0, otherwise with its own seed."""
    seeds = np.random.default_rng([options.seed, OF_SAMPLING]).integers(1 << 62, size=options.num_requests)
    sampled = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    ignore = not options.stop_on_eos
    return [
        SamplingParams(**sampled, max_tokens=n, seed=seed if options.temperature else None, ignore_eos=ignore)
        for n, seed in zip(new_tokens(options), seeds.tolist(), strict=True)
    ]


def encode_prompts(prompts: Prompts, tokenizer: AnyTokenizer) -> list[list[int]]:
    """Return the prompts as token ids; prompts that are token ids already are unchanged."""
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
