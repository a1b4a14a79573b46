"""Logprobs of the chosen and of the most likely tokens, and their delivery to requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.roseinfer.request import Likely, Sequence
from rosellm.roseinfer.sampling import MOST_LOGPROBS

ROWS_AT_ONCE = 64
TILE = 128


def likely_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the logprobs and ranks of tokens, and the most likely tokens with theirs, as ``[n, W]`` int32.

    logits: ``[n, V]`` from the model.
    tokens: ``[n]``; negative in a row without a token, whose results are then meaningless.

    The W integers of a row are as follows, where m is ``MOST_LOGPROBS``, or V if that is less:

    ids, 1 + m integers: the given token, then the m most likely tokens in order.
    logprobs, 1 + m integers: the bits of these tokens' logprobs in fp32.
    rank, 1 integer: 1 plus the number of tokens that are more likely than the given one.
    """
    logits, tokens = logits.float(), tokens.long().clamp_min(0)[:, None]
    own = logits.gather(1, tokens)
    most, indices = largest(logits, min(MOST_LOGPROBS, logits.shape[1]))
    ranks = 1 + (logits > own).sum(dim=-1, keepdim=True)
    logprobs = torch.cat((own, most), dim=1) - logits.logsumexp(dim=-1, keepdim=True)
    bits = logprobs.view(torch.int32)
    return torch.cat((tokens.int(), indices.int(), bits, ranks.int()), dim=1)


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each row, in order, and their tokens, as ``logits.topk(k)`` does.

    A large vocabulary is divided into tiles: the k largest logits are in the k tiles with the largest maxima.
    ``topk`` of the whole row would take several times as long on a GPU.
    """
    n, size = logits.shape
    if size < 4 * k * TILE:
        return logits.topk(k, dim=-1)
    tiles = F.pad(logits, (0, -size % TILE), value=-math.inf).view(n, -1, TILE)
    chosen = tiles.amax(dim=-1).topk(k, dim=-1).indices  # [n, k]
    candidates = tiles.gather(1, chosen[:, :, None].expand(-1, -1, TILE)).view(n, -1)
    most, places = candidates.topk(k, dim=-1)
    return most, chosen.gather(1, places // TILE) * TILE + places % TILE


def likely_words(vocab_size: int) -> int:
    """Return W, the number of 32-bit integers per row that :func:`likely_tokens` returns."""
    return 2 * (1 + min(MOST_LOGPROBS, vocab_size)) + 1


def likely_of(words: Tensor, wanted: list[int | None]) -> list[Likely | None]:
    """Decode the result ``[n, W]`` of :func:`likely_tokens`, on the CPU, to the logprobs of each row.

    wanted: for each row, how many most likely tokens to keep; None for none at all, not even the given token.
    """
    half = (words.shape[1] - 1) // 2
    tokens, ranks = words[:, :half].tolist(), words[:, -1].tolist()
    logprobs = words[:, half:-1].contiguous().view(torch.float32).tolist()
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

    def give(self, words: Tensor) -> None:
        """Give the sequence the logprobs in a result of :func:`likely_prompt_tokens`."""
        own, n = self.sequence, len(self.tokens)
        assert own.prompt_logprobs is not None
        own.prompt_logprobs[self.first : self.first + n] = likely_of(words, [own.params.prompt_logprobs] * n)


def likely_prompt_tokens(
    logits: Callable[[Tensor], Tensor], hidden: Tensor, rows: np.ndarray, tokens: np.ndarray
) -> Tensor:
    """Return :func:`likely_tokens` of tokens that hidden states predict, ``[n, W]`` on the CPU.

    logits: maps hidden states ``[m, C]`` to logits ``[m, V]``; m is at most ``ROWS_AT_ONCE``.
    hidden: ``[N, C]``. rows: for each token, its row of ``hidden``, ``[n]``. tokens: ``[n]``.
    """
    where, given = (torch.from_numpy(array).to(hidden.device) for array in (rows, tokens))
    parts = zip(where.split(ROWS_AT_ONCE), given.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([likely_tokens(logits(hidden[part]), own) for part, own in parts]).cpu()


def add_likely(sequences: list[Sequence], likely: list[Likely | None]) -> None:
    """Append the logprobs of the latest tokens to the sequences that requested them."""
    for sequence, own in zip(sequences, likely, strict=True):
        if sequence.logprobs is not None and own is not None:
            sequence.logprobs.append(own)


def _likely(tokens: list[int], logprobs: list[float], rank: int, n: int) -> Likely:
    """Return (token, logprob, rank) of the chosen token, then of the n most likely tokens except that one."""
    most = zip(tokens[1 : 1 + n], logprobs[1 : 1 + n], range(1, n + 1), strict=False)
    return [(tokens[0], logprobs[0], rank), *(one for one in most if one[0] != tokens[0])]
