"""The prompts of a workload: repeated text, or random token ids."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import numpy as np

from rosellm.models.loading import AnyTokenizer

Prompts = Sequence[str | list[int]]


def make_prompts(options: Namespace, vocab_size: int) -> Prompts:
    """One prompt per request: text, or with ``--prompt-tokens`` seeded random token ids."""
    if options.prompt_tokens is not None:
        shape = (options.num_requests, options.prompt_tokens)
        return np.random.default_rng(options.seed).integers(vocab_size, size=shape).tolist()
    texts = [options.prompt * n for n in options.prompt_repeats]
    return [texts[i % len(texts)] for i in range(options.num_requests)]


def encode_prompts(prompts: Prompts, tokenizer: AnyTokenizer) -> list[list[int]]:
    """Token ids; prompts given as token ids are returned as they are."""
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
