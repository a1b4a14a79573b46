"""Logprobs of the chosen and of the most likely tokens, and their delivery to requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosellm.roseinfer.kernels.likely import likely_words
from rosellm.roseinfer.request import Sequence

ROWS_AT_ONCE = 64


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
        own = self.sequence.prompt_logprobs
        assert own is not None
        own[self.first : self.first + len(words)] = words


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


def add_likely(sequences: list[Sequence], words: np.ndarray) -> None:
    """Append the result ``[n, W]`` of ``likely_tokens`` for the latest tokens to their sequences."""
    for sequence, own in zip(sequences, words, strict=True):
        assert sequence.logprobs is not None
        sequence.logprobs.append(own)
