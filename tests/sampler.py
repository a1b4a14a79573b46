"""The specification of sampling: logits → tokens, each row by its own request's settings."""

from __future__ import annotations

import torch
from torch import Tensor

from rosellm.roseinfer.cache.token_counts import seen_tokens
from rosellm.roseinfer.kernels.draw import Noise, draw, finite_only, penalised_ref
from rosellm.roseinfer.kernels.noise import gumbel_noise
from rosellm.roseinfer.request import Sequence


class Sampler:
    """Chooses next tokens: an argmax for greedy rows, a draw with the request's own noise for the others.

    noise: :func:`noise.gumbel_noise` or its Triton version.
    """

    def __init__(self, noise: Noise = gumbel_noise) -> None:
        self.noise = noise

    def __call__(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        """Return B token ids for logits ``[B, V]``; ``NOT_FINITE`` for a row without probabilities."""
        penalised = [row for row, s in enumerate(sequences) if s.params.is_penalised]
        if penalised:
            logits = logits.float().index_copy(0, *self._penalise(logits, penalised, sequences))
        tokens = finite_only(*logits.max(dim=-1))
        sampled = [row for row, s in enumerate(sequences) if not s.params.is_greedy]
        if sampled:
            tokens[sampled] = self._draw(logits[sampled], [sequences[row] for row in sampled]).long()
        return tokens.tolist()

    def _penalise(self, logits: Tensor, rows: list[int], sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Return the rows as a tensor, and their logits after penalties."""
        device, own = logits.device, [sequences[row] for row in rows]
        seen = counts_of(own, logits.shape[1], device)
        params = [s.params for s in own]
        by = [[p.repetition, p.presence_penalty, p.frequency_penalty] for p in params]
        index = torch.tensor(rows, device=device)
        return index, penalised_ref(logits[index], seen, *torch.tensor(by, device=device).T)

    def _draw(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        params = [s.params for s in sequences]
        reals = torch.tensor([[float(p.temperature), p.top_p, p.min_p] for p in params])
        integers = torch.tensor(
            [[p.top_k for p in params], [s.seed for s in sequences], [len(s.tokens) for s in sequences]]
        )
        temperature, top_p, min_p = reals.to(logits.device).T
        top_k, seeds, positions = integers.to(logits.device)
        return draw(logits, temperature, top_k, top_p, min_p, seeds, positions, self.noise)


def counts_of(sequences: list[Sequence], vocab_size: int, device: torch.device) -> Tensor:
    """Return the counts of all tokens that each sequence has seen, ``[B, V]`` int32 (``TokenCounts``)."""
    counts = torch.zeros(len(sequences), vocab_size, dtype=torch.int32)
    for row, sequence in zip(counts.numpy(), sequences, strict=True):
        tokens, numbers = seen_tokens(sequence, len(sequence.tokens))
        row[tokens] = numbers
    return counts.to(device)
