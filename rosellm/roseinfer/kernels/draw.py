"""Torch reference for sampling: penalties, temperature, min-p, top-k, top-p, and the draw."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rosellm.roseinfer.cache.token_counts import BARRED
from rosellm.roseinfer.kernels.noise import gumbel_noise
from rosellm.roseinfer.sampling import NOT_FINITE

FLOAT32 = torch.finfo(torch.float32)
MAX_TEMPERATURE = 1e30
Noise = Callable[[Tensor, Tensor, int], Tensor]


def penalised_ref(
    logits: Tensor, entries: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Return the logits after biases and penalties, ``[B, V]`` fp32.

    logits: ``[B, V]``.
    entries: ``[B, V]`` int32, each token's bias, whether it is barred, its count in the output, and whether
        it is in the prompt, as in ``TokenCounts``.
    repetition: ``[B]``; for tokens in prompt or output, positive logits are divided by it, and others are
        multiplied by it (Keskar et al. 2019, "CTRL").
    presence: ``[B]``, subtracted for tokens in the output.
    frequency: ``[B]``, subtracted once for each time that a token is in the output.

    The bias is added first; then the repetition penalty is applied.
    """
    seen = entries & 0x7FFF
    logits, times = logits.float() + (entries >> 16).short().view(torch.float16).float(), seen >> 1
    logits = torch.where((entries & BARRED) > 0, float("-inf"), logits)
    by = repetition[:, None]
    repeated = torch.where(logits > 0, logits / by, logits * by)
    logits = torch.where(seen > 0, repeated, logits)
    return logits - frequency[:, None] * times - torch.where(times > 0, presence[:, None], 0.0)


def allowed_log_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Return log-probabilities ``[B, V]`` after temperature, min-p, top-k and top-p; −inf where excluded.

    logits: ``[B, V]``.
    temperature: ``[B]``.
    top_k: ``[B]``; 0 turns it off.
    top_p: ``[B]``, the share of probability among the tokens that min-p and top-k leave; 1 turns it off.
    min_p: ``[B]``, relative to the highest probability; 0 turns it off.

    The filters are applied in vLLM's order. The most likely token always stays; ties go to the lowest token.
    Subtracting a row's maximum before dividing changes no probability and avoids +inf at small temperatures;
    temperatures beyond float32 are clamped to its largest number.
    """
    below_best = logits.float() - logits.amax(dim=-1, keepdim=True).float()
    scaled = below_best / temperature[:, None].clamp(FLOAT32.tiny, FLOAT32.max)
    scaled = scaled.masked_fill(scaled < min_p[:, None].log(), -math.inf)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)[None, :]
    limit = torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    ordered = ordered.masked_fill(rank >= limit, -math.inf)
    probs = ordered.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    beyond = (mass_before >= top_p[:, None]) & (rank > 0) & (top_p[:, None] < 1)
    ordered = ordered.masked_fill(beyond, -math.inf)
    return torch.empty_like(ordered).scatter_(1, order, ordered).log_softmax(dim=-1)


def draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    noise: Noise = gumbel_noise,
    filtered: bool = True,
) -> Tensor:
    """Sample every row's next token without synchronising with the host: logits ``[B, V]`` → ``[B]`` int32.

    temperature: ``[B]`` float32. At 0 (to which float32 rounds anything below 1e-45), the largest raw logit
        wins; ties go to the lowest token.
    top_k: ``[B]`` int; 0 turns it off.
    top_p: ``[B]`` float32; 1 turns it off.
    min_p: ``[B]`` float32; 0 turns it off.
    seeds: ``[B]`` int64.
    positions: ``[B]`` int, the new token's index in its sequence.
    noise: maps (seeds, positions, V) to ``[B, V]``.
    filtered: False promises that every row has all filters off, so that the vocabulary is not sorted.

    Above temperature 0, the argmax of log-probabilities plus Gumbel noise is a draw (the Gumbel-max trick,
    Gumbel 1954); rows with all filters off use the equivalent argmax of logits plus temperature times noise.
    A row without probabilities (with NaN, with +inf, or all −inf) gives ``NOT_FINITE``.
    """
    best, likeliest = logits.max(dim=-1)
    random = noise(seeds, positions, logits.shape[1])
    amounts = temperature.clamp_max(MAX_TEMPERATURE)[:, None]
    drawn = (amounts * random).add_(logits).argmax(dim=-1)
    has_filter = (top_k > 0) | (top_p < 1) | (min_p > 0)
    if filtered and (logits.is_cuda or has_filter.any()):  # a CPU need not sort in vain
        allowed = allowed_log_probs(logits, temperature, top_k, top_p, min_p).add_(random).argmax(dim=-1)
        drawn = torch.where(has_filter, allowed, drawn)
    return finite_only(best, torch.where(temperature > 0, drawn, likeliest)).int()


def likeliest(logits: Tensor) -> Tensor:
    """Return each row's greedy token, or ``NOT_FINITE``, as :func:`draw` does: ``[B, V]`` → ``[B]`` int32."""
    return finite_only(*logits.max(dim=-1)).int()


def finite_only(best: Tensor, tokens: Tensor) -> Tensor:
    """Return tokens ``[B]``, with ``NOT_FINITE`` where the row's largest logit ``best [B]`` is not finite."""
    return torch.where(best.abs() < math.inf, tokens, NOT_FINITE)
