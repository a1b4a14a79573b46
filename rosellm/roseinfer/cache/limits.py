"""An engine's limits on a request."""

from __future__ import annotations

from dataclasses import dataclass

from rosellm.errors import PromptError, SamplingError, describe
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """An engine's limits on a request, which can be checked without the engine.

    vocab_size: token ids must be below it.
    n_positions: number of positions of the model.
    max_model_len: maximum number of tokens of a request, prompt and output together.
    block_size: number of tokens per KV block.
    num_kv_blocks: number of KV blocks per layer.
    """

    vocab_size: int
    n_positions: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Raise ``PromptError`` or ``SamplingError`` if the request can never run."""
        if not isinstance(params, SamplingParams):
            raise SamplingError(f"params is {describe(params)}; give SamplingParams")
        if params.n > 1:
            raise SamplingError(
                f"n is {describe(params.n)}; only LLM.generate and LLM.chat make several completions"
            )
        _check_token_ids(prompt, self.vocab_size)
        n_prompt = len(prompt)
        if n_prompt + params.max_tokens > self.max_model_len:
            most = "the model's" if self.max_model_len == self.n_positions else "max_model_len's"
            raise PromptError(
                f"{n_prompt} prompt tokens and {describe(params.max_tokens)} new ones exceed {most} "
                f"{self.max_model_len} positions"
            )
        needed = blocks_for(n_prompt + params.max_tokens - 1, self.block_size)
        if needed > self.num_kv_blocks:
            raise PromptError(
                f"the request needs {needed} KV blocks of {self.block_size} tokens "
                f"per layer; the cache has {self.num_kv_blocks}"
            )


def _check_token_ids(prompt: list[int], vocab_size: int) -> None:
    if not isinstance(prompt, list) or not prompt:
        given = "empty" if prompt == [] else type(prompt).__name__
        raise PromptError(f"the prompt is {given}; give at least one token id in a list")
    if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < vocab_size:
        return
    for token in prompt:
        if not isinstance(token, int) or isinstance(token, bool):
            kind = type(token).__name__
            raise PromptError(f"token id {describe(token)} is of type {kind}; it must be an int")
        if not 0 <= token < vocab_size:
            raise PromptError(f"token id {describe(token)} is not in the vocabulary of {vocab_size}")
