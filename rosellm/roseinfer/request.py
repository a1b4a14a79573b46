"""A request and its state in the engine."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter

import numpy as np

from rosellm.errors import RoseError
from rosellm.roseinfer.sampling import NO_TOKEN, SamplingParams
from rosellm.roseinfer.text import IncrementalText

Likely = np.ndarray  # ``[W]`` int32, the result of ``likely_tokens`` for one token


@dataclass
class RequestMetrics:
    """The times at which a request and each of its tokens arrived, in ``time.perf_counter`` seconds.

    preemptions: how often the request was preempted.

    Derived times are in seconds, or None if there are too few tokens.
    """

    arrival: float
    token_times: list[float] = field(default_factory=list)
    preemptions: int = 0

    @property
    def ttft(self) -> float | None:
        """The time from the request's arrival to its first token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """The mean time per output token after the first."""
        n = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (n - 1) if n > 1 else None

    @property
    def latency(self) -> float | None:
        """The time from the request's arrival to its last token."""
        return self.token_times[-1] - self.arrival if self.token_times else None

    @property
    def itl(self) -> list[float]:
        """The inter-token latencies: the time between each token and the one before it."""
        return [after - before for before, after in pairwise(self.token_times)]


class Sequence:
    """A prompt and the tokens generated so far, with the KV blocks that hold its cached tokens.

    tokens: prompt and output.
    num_cached_tokens: how many of ``tokens``, from the first, are in the KV cache: between steps, all but the
        last.
    block_ids: its KV blocks.
    max_length: maximum number of tokens, prompt included.
    finish_reason: None while running, then "stop", "length", "cancelled", or "failed" with the reason in
        ``error``.
    stop_reason: the stop string or the one of the request's ``stop_token_ids`` that ended it; None otherwise.
    eos_tokens: the model's end-of-sequence tokens; empty with ``ignore_eos``.
    stop_tokens: all tokens that end the sequence.
    late_tokens: the tokens that ``min_tokens`` bans at first: stop_tokens, and end-of-sequence tokens anyway.
    parent: the first completion of the same prompt, whose prefill this one shares; None for the first.
    n_siblings: number of sequences whose parent this is.
    bad_words: the tokens of each word that must not occur in the output.
    num_cached_prompt_tokens: how many of the prompt's tokens the prefix cache held when it first started.
    seed: determines, together with a token's index, the random numbers of its choice.
    replays: whether, after preemption, the output is decoded again token by token, as it was before;
        otherwise it is prefilled, like the prompt.
    logprobs: one entry per output token, or None unless requested.
    prompt_logprobs: one entry per token of the prompt, None for the first; or None unless requested.
    metrics, text: updated by a scheduler; ``text`` is None without stop strings.
    """

    def __init__(
        self,
        request_id: int,
        prompt: list[int],
        params: SamplingParams,
        eos_token_ids: tuple[int, ...] = (),
        replays: bool = False,
        max_length: int | None = None,
    ) -> None:
        self.request_id, self.params = request_id, params
        self.tokens, self.n_prompt, self.num_cached_tokens = list(prompt), len(prompt), 0
        self.max_length = self.n_prompt + (params.max_tokens or 0) if max_length is None else max_length
        self.block_ids: list[int] = []
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.metrics = RequestMetrics(arrival=perf_counter())
        self.text: IncrementalText | None = None
        self.replays = replays
        self.eos_tokens = () if params.ignore_eos else eos_token_ids
        self.stop_tokens = self.eos_tokens + tuple(params.stop_token_ids or ())
        self.late_tokens = eos_token_ids + tuple(params.stop_token_ids or ())
        self.stop_reason: str | int | None = None
        self.parent: Sequence | None = None
        self.n_siblings = 0
        self.bad_words: list[list[int]] = []
        self.num_cached_prompt_tokens = 0
        self.logprobs: list[Likely] | None = None if params.logprobs is None else []
        asked = params.prompt_logprobs is not None
        self.prompt_logprobs: list[Likely | None] | None = [None] * self.n_prompt if asked else None
        self.seed = secrets.randbits(63) if params.seed is None else params.seed

    @property
    def last_token(self) -> int:
        return self.tokens[-1]

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.n_prompt]

    @property
    def output(self) -> list[int]:
        """The token ids generated so far, including any end-of-sequence token."""
        return self.tokens[self.n_prompt :]

    @property
    def prefill_length(self) -> int:
        """The number of tokens that must be cached before the next token can be chosen."""
        return self.n_prompt if self.replays else len(self.tokens)

    @property
    def n_to_prefill(self) -> int:
        """The number of tokens still to be prefilled."""
        return self.prefill_length - self.num_cached_tokens

    def completes_prefill(self, chunk: int) -> bool:
        """Return whether caching ``chunk`` more tokens completes the prefill."""
        return chunk == self.n_to_prefill

    def share_prefill(self, first: Sequence) -> None:
        """Start once ``first``, which has the same prompt, has cached it; ``first`` may be this sequence."""
        if first is not self:
            self.parent = first
            first.n_siblings += 1

    @property
    def waits_for_parent(self) -> bool:
        """Whether its prompt is about to be cached by the first completion of the same prompt."""
        first = self.parent
        return first is not None and not first.is_finished and first.num_cached_tokens < first.n_prompt

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def commit(self, token: int, num_newly_cached: int) -> bool:
        """Append a sampled token, count ``num_newly_cached`` more tokens as cached, and return True.

        In a replay the token is already known: returns False, or raises ``RoseError`` if the tokens differ.
        """
        tokens = self.tokens  # a local name, since this runs for every token
        self.num_cached_tokens += num_newly_cached
        if self.num_cached_tokens < len(tokens):
            self._check_replayed(token)
            return False
        tokens.append(token)
        if token in self.stop_tokens:
            self.finish_reason = "stop"
            self.stop_reason = None if token in self.eos_tokens else token
        elif len(tokens) == self.max_length:
            self.finish_reason = "length"
        return True

    def commit_all(self, tokens: list[int]) -> int:
        """Commit the tokens of one step until the sequence ends; return how many of them are new.

        A negative token ends the sequence as failed.
        """
        n_new = 0
        for token in tokens:
            if token < 0:
                self.fail(NO_TOKEN)
            else:
                n_new += self.commit(token, 1)
            if self.finish_reason is not None:
                break
        return n_new

    def cut(self, n_tokens: int) -> None:
        """Forget all tokens but the first ``n_tokens``, with which a stop string ended the sequence."""
        del self.tokens[n_tokens:]
        if self.logprobs is not None:
            del self.logprobs[n_tokens - self.n_prompt :]
        self.num_cached_tokens = min(self.num_cached_tokens, n_tokens - 1)

    def resume(self, known: list[int], logprobs: list[Likely] | None) -> None:
        """Append tokens that another engine generated, with their logprobs if requested, to continue."""
        self.tokens += known
        if self.logprobs is not None:
            self.logprobs += logprobs or []
        if self.text is not None:
            for token in known:
                self.text.push(token)

    @property
    def n_without_text(self) -> int:
        """The number of last tokens whose text is left out: 1 if a stop token ended the sequence, or 0."""
        return int(self.finish_reason == "stop" and not self.params.include_stop_str_in_output)

    def follow_text(self, n_new: int = 1) -> int:
        """Push the latest tokens to ``text``, unless their text is left out; a stop string ends the sequence.

        n_new: number of tokens to push. Those after a stop string are forgotten.

        Returns how many tokens are left.
        """
        if self.text is None:
            return n_new
        end = len(self.tokens)
        for n in range(end - n_new, end - self.n_without_text):
            self.text.push(self.tokens[n])
            if self.text.stopped is not None:
                self.cut(n + 1)
                self._note_stop()
                return n_new - (end - n - 1)
        return n_new

    def settle_text(self) -> None:
        """Flush the text held back by an ended sequence; this may complete a stop string."""
        if self.text is None:
            return
        self.text.finish()
        if self.finish_reason == "length":
            self._note_stop()

    def _note_stop(self) -> None:
        if self.text is not None and self.text.stopped is not None:
            self.finish_reason, self.stop_reason, self.error = "stop", self.text.stopped, None

    def cancel(self) -> None:
        """End the sequence as cancelled."""
        self.finish_reason = "cancelled"

    def fail(self, reason: str) -> None:
        """End the sequence as failed, without a further token."""
        self.finish_reason, self.error = "failed", reason

    def _check_replayed(self, token: int) -> None:
        known = self.tokens[self.num_cached_tokens]
        if token != known:
            raise RoseError(
                f"token {self.num_cached_tokens} of request {self.request_id} was {known} but became {token} "
                "when it was decoded again"
            )


def commit_tokens(
    sequences: list[Sequence], tokens: list[int], num_newly_cached: int
) -> tuple[list[Sequence], list[Sequence]]:
    """Commit one token to each sequence, and count ``num_newly_cached`` more of its tokens as cached.

    tokens: one per sequence; negative (``NOT_FINITE``) if no token could be chosen.

    Returns the sequences that received a new token (``sequences`` itself if all did), and the sequences that
    failed.
    """
    got: list[Sequence] = []
    failed: list[Sequence] = []
    for sequence, token in zip(sequences, tokens, strict=True):
        if token < 0:
            sequence.fail(NO_TOKEN)
            failed.append(sequence)
        elif sequence.commit(token, num_newly_cached):
            got.append(sequence)
    return sequences if len(got) == len(sequences) else got, failed
