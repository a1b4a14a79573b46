"""Weights of 4 bits whose codes are chosen for their inputs in a given text (GPTQ: Frantar et al. 2023).

The codes of an output are chosen one input after another. Each makes up for the errors of those before it, as
far as their inputs are correlated; inputs with large mean squares come first.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rosellm.errors import OptionError, describe
from rosellm.models.attention import CausalAttention
from rosellm.models.model import Transformer
from rosellm.models.quantized import GROUP, GroupedWeight, codes_of_4_bits, full, group_scales
from rosellm.models.tokenizer import Tokenizer
from rosellm.models.weights import check_memory

WINDOW = 512  # tokens, at most
DAMPING = 0.1  # of the mean square of all inputs, added to that of each


def windows_of(texts: Any, tokenizer: Tokenizer, length: int) -> list[Tensor]:
    """Return the token ids of a text or a list of texts, in windows of at most ``WINDOW`` and ``length``.

    Raises ``OptionError`` if there are none.
    """
    several = [texts] if isinstance(texts, str) else texts
    if not isinstance(several, (list, tuple)) or not all(isinstance(text, str) for text in several):
        raise OptionError(f"calibration is {describe(texts)}; give a text or a list of texts")
    wholes = [torch.tensor(ids, device="cpu") for ids in tokenizer.encode_many(several) if ids]
    if not wholes:
        raise OptionError("calibration has no text")
    return [window for whole in wholes for window in whole.split(min(WINDOW, length))]


@torch.no_grad()
def calibrated(plain: Transformer, windows: list[Tensor], device: torch.device) -> Transformer:
    """Return a model on ``device`` with the layers of ``plain`` in "int4".

    plain: a model on any device; its layers are copied to ``device`` one at a time, and run there.
    windows: token ids, each window a sequence of its own.

    Raises ``CheckpointError`` if the model exceeds the memory of ``device``, and ``OptionError`` if a window
    has a token that the model lacks, or gives activations that are not finite.
    """
    if (token := max(int(ids.max()) for ids in windows)) >= plain.whole.vocab_size:
        raise OptionError(f"calibration has token {token}; the model has {plain.whole.vocab_size:,} tokens")
    check_memory(plain.whole, device, plain.dtype, "int4")
    model = Transformer.allocate(plain.whole, device, plain.dtype, quantization="int4")
    theirs, config = plain.own_parameters, model.config
    for name, weight in model.own_parameters.items():
        if not isinstance(weight, GroupedWeight):
            weight.copy_(full(theirs[name]))
    hidden, attends = [], []
    for ids in windows:
        positions = torch.arange(len(ids), device=device)
        hidden.append(model.embedded(ids.to(device), positions))
        causal = CausalAttention([len(ids)], device, config.scale, config.window)
        attends.append(model.positioned(positions, causal))
    for quantised, held in zip(model.blocks, plain.blocks, strict=True):
        block = deepcopy(held).to(device)
        squares = {
            name: torch.zeros(k, k, dtype=torch.float32, device=device)
            for name, (_, k) in config.shapes.items()
        }
        for name, total in squares.items():
            getattr(block, name).register_forward_pre_hook(partial(_add_squares, total))
        hidden = [block(x, attend) for x, attend in zip(hidden, attends, strict=True)]
        for name, total in squares.items():
            if not total.isfinite().all():
                raise OptionError(f"calibration gives activations that are not finite in {plain.dtype}")
            calibrate(getattr(quantised, name).weight, getattr(block, name).weight, total)
    return model


def _add_squares(total: Tensor, _: nn.Module, inputs: tuple[Tensor]) -> None:
    wide = inputs[0].float()
    total.addmm_(wide.t(), wide)


def calibrate(quantised: GroupedWeight, weight: Tensor, squares: Tensor) -> None:
    """Quantise a weight so that its outputs change least.

    quantised: the weight to be written.
    weight: ``[N, K]``.
    squares: ``[K, K]`` fp32, the sum of x^T x over all inputs x ``[1, K]``.

    If e ``[1, K]`` are the errors of an output's weights, and S the squares, the squared errors of the output
    sum to e S e^T. If S = L L^T, with L lower triangular, that is the sum of the squares of e L, and (e L)[i]
    depends only on e[i] and later errors. So codes are chosen from the last to the first, each so that
    (e L)[i] is nearest to 0.
    """
    importance = squares.diag().unflatten(0, (-1, GROUP))
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = group_scales(groups, quantised.scales.dtype, importance)[:, :, 0]
    order = squares.diag().argsort()
    damped = squares[order][:, order]
    least = torch.finfo(torch.float32).tiny  # for inputs that are all 0
    damped.diagonal().add_(DAMPING * damped.diagonal().mean()).clamp_min_(least)
    lower = torch.linalg.cholesky(damped)
    lower /= lower.diag()
    wide, steps = weight.float().t()[order], scales.repeat_interleave(GROUP, 1).t()[order]  # [K, N]
    codes, errors = torch.empty_like(wide), torch.zeros_like(wide)
    for start in reversed(range(0, len(wide), GROUP)):  # GEMMs for all but GROUP inputs
        own, later = slice(start, start + GROUP), slice(start + GROUP, None)
        wanted = wide[own] + lower[later, own].t() @ errors[later]
        for i in reversed(range(start, start + GROUP)):
            codes[i] = codes_of_4_bits(wanted[i - start] + lower[own, i] @ errors[own], steps[i])
            errors[i] = wide[i] - codes[i] * steps[i]
    quantised.store(codes[order.argsort()].t(), scales)
