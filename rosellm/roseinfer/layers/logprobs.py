"""Logprobs of the chosen and of the most likely tokens, and their delivery to requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosellm.roseinfer.kernels.likely import likely_words
from rosellm.roseinfer.request import Likely, Sequence

ROWS_AT_ONCE = 64


def likely_of(words: np.ndarray, wanted: list[int | None]) -> list[Likely | None]:
    """Decode the result ``[n, W]`` of :func:`likely_tokens` to the logprobs of each row.

    wanted: for each row, how many most likely tokens to keep; None for none at all, not even the given token.
    """
    half, most = (words.shape[1] - 1) // 2, 1 + max((n for n in wanted if n is not None), default=0)
    tokens, ranks = words[:, :most].tolist(), words[:, -1].tolist()
    logprobs = words[:, half : half + most].copy().view(np.float32).tolist()
    found: list[Likely | None] = []
    for n, ids, values, rank in zip(wanted, tokens, logprobs, ranks, strict=True):
        found.append(None if n is None else _likely(ids, values, rank, n))
    return found


class PromptTokens(NamedTuple):
    """Tokens of a prompt whose logprobs are requested, and where a prefill predicts them.

    first: position of the first token in the sequence.
    rows: for each token, the row of the prefill's hidden states from which it is predicted ``[n]``.
    tokens: the tokens ``[n]``.
    """

    sequence: Sequence
    first: int
    rows: np.ndarray
    tokens: np.ndarray

    @property
    def wishes(self) -> tuple[np.ndarray, np.ndarray, int]:
        """The last arguments of :func:`likely_prompt_tokens`."""
        most = self.sequence.params.prompt_logprobs
        assert most is not None
        return self.rows, self.tokens, most

    @classmethod
    def asked(cls, sequences: list[Sequence], starts: list[int], counts: list[int]) -> list[PromptTokens]:
        """Return those of a prefill of packed chunks.

        starts, counts: numbers of cached and of new tokens of each sequence.
        """
        found, offset = [], 0
        for sequence, start, count in zip(sequences, starts, counts, strict=True):
            n = min(count, sequence.n_prompt - 1 - start)  # the last token predicts the output
            if sequence.prompt_logprobs is not None and n > 0:
                tokens = np.array(sequence.tokens[start + 1 : start + 1 + n])
                found.append(cls(sequence, start + 1, np.arange(offset, offset + n), tokens))
            offset += count
        return found

    def give(self, words: np.ndarray) -> None:
        """Give the sequence the logprobs in a result of :func:`likely_prompt_tokens`."""
        own, n = self.sequence, len(self.tokens)
        assert own.prompt_logprobs is not None
        own.prompt_logprobs[self.first : self.first + n] = likely_of(words, [own.params.prompt_logprobs] * n)


def likely_prompt_tokens(
    logits: Callable[[Tensor], Tensor],
    store: Callable[..., None],
    hidden: Tensor,
    rows: np.ndarray,
    tokens: np.ndarray,
    wanted: int,
) -> np.ndarray:
    """Return :func:`likely.likely_tokens` of tokens that hidden states predict, ``[n, W]``.

    logits: maps hidden states ``[m, C]`` to logits ``[m, V]``; m is at most ``ROWS_AT_ONCE``.
    store: ``kernels.store_likely``.
    hidden: ``[N, C]``. rows: for each token, its row of ``hidden``, ``[n]``. tokens: ``[n]``.
    wanted: how many most likely tokens are found beside each token.
    """
    found = []
    where, given = (torch.from_numpy(array).to(hidden.device) for array in (rows, tokens))
    for part, own in zip(where.split(ROWS_AT_ONCE), given.split(ROWS_AT_ONCE), strict=True):
        wide, slots = logits(hidden[part]).float(), torch.arange(len(own), device=hidden.device)
        ring = torch.zeros(1, len(own), likely_words(wide.shape[1]), dtype=torch.int32, device=hidden.device)
        places = {"slots": slots, "rounds": torch.ones_like(own), "wanted": torch.full_like(slots, wanted)}
        store(logits=wide, tokens=own, **places, ring=ring)
        found.append(ring[0])
    return torch.cat(found).cpu().numpy()


def add_likely(sequences: list[Sequence], likely: list[Likely | None]) -> None:
    """Append the logprobs of the latest tokens to the sequences that requested them."""
    for sequence, own in zip(sequences, likely, strict=True):
        if sequence.logprobs is not None and own is not None:
            sequence.logprobs.append(own)


def _likely(tokens: list[int], logprobs: list[float], rank: int, n: int) -> Likely:
    """Return (token, logprob, rank) of the chosen token, then of the n most likely tokens except that one."""
    most = zip(tokens[1 : 1 + n], logprobs[1 : 1 + n], range(1, n + 1), strict=False)
    return [(tokens[0], logprobs[0], rank), *(one for one in most if one[0] != tokens[0])]
