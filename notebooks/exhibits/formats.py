"""Weights of 8 bits: rounded models, planted outliers, and what the bytes promise."""

from __future__ import annotations

from copy import deepcopy
from statistics import median

import torch
from torch import Tensor

from rosellm.bench.formats import log_probabilities, set_digits
from rosellm.bench.workloads import MODEL_WORKLOADS
from rosellm.lab.records.records import Results
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.models.model import Transformer
from rosellm.models.quantized import (
    CODES,
    LARGEST,
    QuantizedProjection,
    QuantizedWeight,
    empty_weight,
    nearest,
)
from rosellm.models.tokenizer import Tokenizer
from rosellm.rosetrainer.corpus import read_corpus
from rosellm.rosetrainer.training import token_stream

SHAPES = {
    name: KNOWN_SHAPES[f"{owner}/{name}"]
    for owner, name in (
        ("Qwen", "Qwen3-0.6B"),
        ("meta-llama", "Llama-3.2-1B"),
        ("meta-llama", "Llama-3.1-8B"),
    )
}
DECODED = "D1", "D8", "D64"  # workloads of 1, 8 and 64 requests
LENGTH = 128  # tokens of a window


def held_out(tokenizer: Tokenizer, device: torch.device, count: int) -> list[Tensor]:
    """``count`` windows of text on which the shipped models were not trained, one token longer than read."""
    stream = token_stream(read_corpus().validation, tokenizer, device)
    return [stream[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(count)]


def quantized(weight: Tensor, form: str, per: str = "output") -> QuantizedWeight:
    """A weight in 8 bits, with one scale per output or, per "tensor", the largest of these for all."""
    found = empty_weight(*weight.shape, form, weight.device).copy_(weight)
    if per == "tensor":
        found.scales.fill_(weight.abs().max().item() / LARGEST[CODES[form]])
        found.codes.copy_(nearest(weight / found.scales[:, None], CODES[form]))
    return found


def rounded(model: Transformer, form: str, per: str = "output", digits: int | None = None) -> Transformer:
    """A copy of a model whose layers have weights of 8 bits; ``digits`` as in ``QuantizedProjection``."""
    copy = deepcopy(model)
    for block in copy.blocks:
        for name in copy.config.shapes:
            plain = getattr(block, name)
            weight = quantized(plain.weight.data, form, per)
            setattr(block, name, QuantizedProjection(weight, plain.bias))
    set_digits(copy, digits)
    return copy


@torch.inference_mode()
def millinats(exact: Transformer, other: Transformer, windows: list[Tensor]) -> float:
    """The mean KL divergence of the next token's distribution, in thousandths of a nat."""
    total = 0.0
    for window in windows:
        wanted, found = log_probabilities(exact, window), log_probabilities(other, window)
        total += (wanted.exp() * (wanted - found)).sum(-1).mean().item()
    return 1000 * total / len(windows)


def with_large_outputs(model: Transformer, factor: float) -> Transformer:
    """The same function, with one output of v ``factor`` times as large in each layer.

    The inputs of ``out`` that it becomes are divided by as much.
    """
    copy, c = deepcopy(model), model.config
    for block in copy.blocks:
        row = (c.n_heads + c.n_kv_heads) * c.head_dim  # of the first KV head
        block.qkv.weight.data[row] *= factor
        if block.qkv.bias is not None:
            block.qkv.bias.data[row] *= factor
        block.out.weight.data[:, : c.group * c.head_dim : c.head_dim] /= factor
    return copy


def with_large_inputs(model: Transformer, factor: float, channel: int = 3) -> Transformer:
    """The same function, with one channel of every norm's result ``factor`` times as large."""
    copy = deepcopy(model)
    for block in copy.blocks:
        for norm, after in ((block.norm_1, block.qkv), (block.norm_2, block.up)):
            norm.weight.data[channel] *= factor
            if isinstance(norm, torch.nn.LayerNorm):
                norm.bias.data[channel] *= factor
            after.weight.data[:, channel] /= factor
    return copy


def step_bytes(name: str, workload: str, bits: int) -> float:
    """What a mean decode step of a workload reads: weights of layers in ``bits`` bits, the rest in 16."""
    arch, load = SHAPES[name], MODEL_WORKLOADS[workload]
    matrices = arch.n_layers * sum(n * k for n, k in arch.shapes.values())
    cached = load.max_batch_size * load.mean_context * arch.kv_bytes_per_token(2)
    return matrices * bits / 8 + 2 * (arch.n_step_parameters - matrices) + cached


def promised(name: str, workload: str) -> float:
    """How many times as fast steps are, if they take as long as their bytes do."""
    return step_bytes(name, workload, 16) / step_bytes(name, workload, 8)


def gains(results: Results, name: str, workload: str) -> list[float]:
    """Tokens per second with fp8 and with int8 weights, times those with 16 bits."""
    seconds = results.by_model("formats")[name]["figures"]["seconds"][workload]
    return [median(seconds["none"]) / median(seconds[form]) for form in ("fp8", "int8")]
