"""An engine's limits on a request, and the sequence of a request within them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rosellm.errors import LongPromptError, PromptError, SamplingError, describe
from rosellm.models.loading import AnyTokenizer
from rosellm.roseinfer.cache.token_counts import MOST_BEGINNINGS
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.text import IncrementalText


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

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a request that the KV cache holds; the last one is never cached."""
        return min(self.max_model_len, self.num_kv_blocks * self.block_size + 1)

    def max_length(self, prompt: list[int], params: SamplingParams) -> int:
        """Return how many tokens, prompt included, a request may have: at most ``longest``."""
        wanted = self.longest if params.max_tokens is None else len(prompt) + params.max_tokens
        return min(wanted, self.longest)

    def truncated(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Return the last ``truncate_prompt_tokens`` tokens of a prompt, or all."""
        most = params.truncate_prompt_tokens
        if most is None or not isinstance(prompt, list):
            return prompt
        return prompt[-(self.longest - 1 if most == -1 else most) :]

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Raise ``PromptError`` or ``SamplingError`` if the request can never run.

        If only the prompt's length is to blame, the error is a ``LongPromptError``.
        """
        if not isinstance(params, SamplingParams):
            raise SamplingError(f"params is {describe(params)}; give SamplingParams")
        params.check()
        if params.n > 1:
            raise SamplingError(
                f"n is {describe(params.n)}; only LLM.generate and LLM.chat make several completions"
            )
        if params.logit_bias or params.allowed_token_ids or params.stop_token_ids:
            self._check_named_tokens(params)
        _check_token_ids(prompt, self.vocab_size)
        if len(prompt) < self.longest:
            return
        if len(prompt) >= self.n_positions:
            reason = f"the model has {self.n_positions} positions"
        elif len(prompt) >= self.max_model_len:
            reason = f"max_model_len is {self.max_model_len}"
        else:
            blocks = f"{self.num_kv_blocks} KV blocks of {self.block_size} tokens"
            reason = f"the cache has {blocks} per layer; raise num_kv_blocks or gpu_memory_utilization"
        raise LongPromptError(f"{len(prompt)} prompt tokens leave no room for a new one: {reason}")

    def _check_named_tokens(self, params: SamplingParams) -> None:
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            beyond = [token for token in getattr(params, name) or () if token >= self.vocab_size]
            if beyond:
                raise SamplingError(
                    f"{name} has token {beyond[0]}, not in the vocabulary of {self.vocab_size}"
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


def new_sequence(
    request_id: int,
    prompt: list[int],
    params: SamplingParams,
    limits: Limits,
    eos_token_ids: tuple[int, ...],
    tokenizer: AnyTokenizer | None,
    replays: bool = False,
) -> Sequence:
    """Validate a request and return its sequence, which has a text if there are stop strings.

    eos_token_ids: the model's end-of-sequence tokens.

    Raises ``PromptError`` or ``SamplingError``.
    """
    if isinstance(params, SamplingParams):
        prompt = limits.truncated(prompt, params)
    limits.check(prompt, params)
    if tokenizer is None and (params.stops or params.bad_words):
        kind = "stop strings" if params.stops else "bad words"
        raise SamplingError(f"{kind} need a tokenizer, and this engine has none")
    params = params.clone()  # the caller may change the original
    length = limits.max_length(prompt, params)
    sequence = Sequence(request_id, prompt, params, eos_token_ids, replays, length)
    if tokenizer is not None and params.stops:
        how = params.stops, params.include_stop_str_in_output, params.skip_special_tokens, params.min_tokens
        sequence.text = IncrementalText(tokenizer, prompt, *how)
    if tokenizer is not None and params.bad_words:
        sequence.bad_words = _tokens_of(params.bad_words, tokenizer, limits.vocab_size)
    return sequence


def _tokens_of(words: Iterable[str], tokenizer: AnyTokenizer, vocab_size: int) -> list[list[int]]:
    """Return the tokens of words that must not occur, as vLLM does.

    After a space, a word counts if it then has another first token and the same number of tokens.
    """
    found: list[list[int]] = []
    for word in words:
        bare, spaced = (tokenizer.encode(space + word.lstrip(" "), special=False) for space in ("", " "))
        if not bare or max(bare + spaced) >= vocab_size:
            raise SamplingError(f"bad_words has {word!r}, which has no tokens in this model's vocabulary")
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    n_beginnings = sum(len(tokens) - 1 for tokens in found)
    if n_beginnings > MOST_BEGINNINGS:
        raise SamplingError(
            f"bad_words has {n_beginnings} tokens besides the last of each word; at most {MOST_BEGINNINGS}"
        )
    return found
