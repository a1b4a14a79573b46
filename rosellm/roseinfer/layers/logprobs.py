"""Logprobs of the chosen and of the most likely tokens, and their delivery to requests."""

from __future__ import annotations

import torch
from torch import Tensor

from rosellm.roseinfer.request import Likely, Sequence
from rosellm.roseinfer.sampling import MOST_LOGPROBS


def likely_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the logprobs and ranks of tokens, and the most likely tokens with theirs, as ``[n, W]`` int32.

    logits: ``[n, V]`` from the model.
    tokens: ``[n]``; negative in a row without a token, whose results are then meaningless.

    The W integers of a row are as follows, where m is ``MOST_LOGPROBS``, or V if that is less:

    ids, 1 + m integers: the given token, then the m most likely tokens in order.
    logprobs, 1 + m integers: the bits of these tokens' logprobs in fp32.
    rank, 1 integer: 1 plus the number of tokens that are more likely than the given one.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    tokens = tokens.long().clamp_min(0)[:, None]
    own = logprobs.gather(1, tokens)
    most, indices = logprobs.topk(min(MOST_LOGPROBS, logits.shape[1]), dim=-1)
    ranks = 1 + (logprobs > own).sum(dim=-1, keepdim=True)
    bits = torch.cat((own, most), dim=1).view(torch.int32)
    return torch.cat((tokens.int(), indices.int(), bits, ranks.int()), dim=1)


def likely_words(vocab_size: int) -> int:
    """Return W, the number of 32-bit integers per row that :func:`likely_tokens` returns."""
    return 2 * (1 + min(MOST_LOGPROBS, vocab_size)) + 1


def likely_of(words: Tensor, sequences: list[Sequence]) -> list[Likely | None]:
    """Decode the result ``[n, W]`` of :func:`likely_tokens`, on the CPU, to each sequence's logprobs.

    The list has None for a sequence that did not request logprobs.
    """
    half = (words.shape[1] - 1) // 2
    tokens, ranks = words[:, :half].tolist(), words[:, -1].tolist()
    logprobs = words[:, half:-1].contiguous().view(torch.float32).tolist()
    found: list[Likely | None] = []
    for sequence, ids, values, rank in zip(sequences, tokens, logprobs, ranks, strict=True):
        n = sequence.params.logprobs
        found.append(None if n is None else _likely(ids, values, rank, n))
    return found


def add_likely(sequences: list[Sequence], likely: list[Likely | None]) -> None:
    """Append the logprobs of the latest tokens to the sequences that requested them."""
    for sequence, own in zip(sequences, likely, strict=True):
        if sequence.logprobs is not None and own is not None:
            sequence.logprobs.append(own)


def _likely(tokens: list[int], logprobs: list[float], rank: int, n: int) -> Likely:
    """Return (token, logprob, rank) of the chosen token, then of the n most likely tokens except that one."""
    most = zip(tokens[1 : 1 + n], logprobs[1 : 1 + n], range(1, n + 1), strict=False)
    return [(tokens[0], logprobs[0], rank), *(one for one in most if one[0] != tokens[0])]
