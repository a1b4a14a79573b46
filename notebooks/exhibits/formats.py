"""Weights, keys and values of fewer bits: rounded ones, planted outliers, and what the bytes promise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from statistics import median

import torch
from torch import Tensor

from rosellm.bench.formats import log_probabilities, set_digits
from rosellm.bench.workloads import MODEL_WORKLOADS, Workload
from rosellm.lab.figures.charts import Chart
from rosellm.lab.figures.lines import step_lines
from rosellm.lab.records.records import Results, read_us
from rosellm.models.attention import in_window, masked_attention
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.models.model import Transformer
from rosellm.models.quantized import (
    CODES,
    LARGEST,
    WEIGHT_FORMS,
    QuantizedProjection,
    QuantizedWeight,
    bytes_per_weight,
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
STEPS = "none", "fp8", "int4"  # formats of steps in the chart
LENGTH = 128  # tokens of a window
Rounding = Callable[[Tensor], Tensor]


def held_out(tokenizer: Tokenizer, device: torch.device, count: int) -> list[Tensor]:
    """``count`` windows of text on which the shipped models were not trained, one token longer than read."""
    stream = token_stream(read_corpus().validation, tokenizer, device)
    return [stream[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(count)]


def quantized(weight: Tensor, form: str, per: str = "output") -> QuantizedWeight:
    """A quantised weight; of 8 bits, with one scale per output or, per "tensor", the largest of these."""
    found = empty_weight(*weight.shape, form, weight.device, weight.dtype).copy_(weight)
    if per == "tensor":
        found.scales.fill_(weight.abs().max().item() / LARGEST[CODES[form]])
        found.codes.copy_(nearest(weight / found.scales[:, None], CODES[form]))
    return found


def rounded(model: Transformer, form: str, per: str = "output", digits: int | None = None) -> Transformer:
    """A copy of a model whose layers have quantised weights; ``digits`` as in ``QuantizedProjection``."""
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


def with_large_keys(model: Transformer, factor: float, channel: int = 3) -> Transformer:
    """The same function, with one channel of all keys ``factor`` times as large, and of queries as small.

    A rotation turns two channels into each other, which both become larger.
    """
    copy, c = deepcopy(model), model.config
    channels = [channel] if c.rope is None else [channel, channel + c.head_dim // 2]
    for block in copy.blocks:
        heads = [*[1 / factor] * c.n_heads, *[factor] * c.n_kv_heads]
        if block.q_norm is not None and block.k_norm is not None:
            block.q_norm.weight.data[channels] /= factor
            block.k_norm.weight.data[channels] *= factor
            continue
        for head, times in enumerate(heads):
            rows = [head * c.head_dim + one for one in channels]
            block.qkv.weight.data[rows] *= times
            if block.qkv.bias is not None:
                block.qkv.bias.data[rows] *= times
    return copy


# The dimensions of keys ``[N, H_kv, D]`` that share a scale.
SHARED = {"tensor": (0, 1, 2), "head": (0, 2), "token": (1, 2), "token and head": (2,)}


def rounding(form: str, per: str | None) -> Rounding:
    """A function that rounds keys or values to codes; ``per`` is a key of ``SHARED``, or None for scale 1."""
    dtype = CODES[form]

    def rounded_to(x: Tensor) -> Tensor:
        scale = torch.ones(()) if per is None else x.abs().amax(SHARED[per], keepdim=True) / LARGEST[dtype]
        codes = nearest((x / scale).clamp(-LARGEST[dtype], LARGEST[dtype]), dtype).to(dtype)
        return codes.float() * scale

    return rounded_to


class ChunkedAttention:
    """An ``Attend`` for a prompt in chunks, whose cached keys and values are rounded.

    round_new: whether a chunk attends to its own keys and values as they will be read from the cache.
    """

    def __init__(self, model: Transformer, rounded_to: Rounding, round_new: bool = True) -> None:
        self.config, self.rounded_to, self.round_new = model.config, rounded_to, round_new
        self.cached: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        held = self.rounded_to(k), self.rounded_to(v)
        new = held if self.round_new else (k, v)
        before = self.cached.get(layer, (k[:0], v[:0]))
        n_cached, n_new = len(before[0]), len(k)
        keys, values = (torch.cat(pair).transpose(0, 1)[None] for pair in zip(before, new, strict=True))
        self.cached[layer] = (torch.cat((before[0], held[0])), torch.cat((before[1], held[1])))
        place = torch.arange(n_cached + n_new, device=k.device)
        mask = in_window(place[n_cached:, None], place[None, :], self.config.window)
        attended = masked_attention(q.transpose(0, 1)[None], keys, values, mask, scale=self.config.scale)
        return attended[0].transpose(0, 1)


@torch.inference_mode()
def last_logits(model: Transformer, ids: Tensor, chunk: int, attend: ChunkedAttention) -> Tensor:
    """The logits after a prompt that is read ``chunk`` tokens at a time."""
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        hidden = model(part, torch.arange(start, start + len(part), device=ids.device), attend)
    return model.logits(hidden[-1:])[0]


@torch.inference_mode()
def millinats_of_heads(exact: Transformer, windows: list[Tensor], rounded_to: Rounding) -> float:
    """As :func:`millinats`, of exact weights with rounded keys and values."""
    total = 0.0
    for window in windows:
        ids, places = window[:-1], torch.arange(len(window) - 1, device=window.device)
        hidden = exact(ids, places, ChunkedAttention(exact, rounded_to))
        wanted, found = log_probabilities(exact, window), exact.logits(hidden).log_softmax(-1)
        total += (wanted.exp() * (wanted - found)).sum(-1).mean().item()
    return 1000 * total / len(windows)


def step_bytes(name: str, load: Workload, form: str | None) -> float:
    """What a mean step of a workload reads: layers in a format, the head in 8 bits, keys and values in 16.

    Without a format, all has 16 bits.
    """
    arch = SHAPES[name]
    layers, head = arch.n_layers * sum(n * k for n, k in arch.shapes.values()), arch.vocab_size * arch.d_model
    cached = load.max_batch_size * load.mean_context * arch.kv_bytes_per_token(2)
    wide = 2 * arch.n_step_parameters + cached
    return wide if form is None else wide - head - layers * (2 - bytes_per_weight(form, torch.bfloat16))


def promised(name: str, workload: str, form: str = "fp8") -> float:
    """How many times as fast steps are, if they take as long as their bytes do."""
    load = MODEL_WORKLOADS[workload]
    return step_bytes(name, load, None) / step_bytes(name, load, form)


def equal_steps(results: Results, name: str) -> dict[str, dict[int, tuple[float, float]]]:
    """GB and µs of a mean step, by format ("none" has 16 bits) and number of sequences, all of one length."""
    record = results.by_model("formats_steps")[name]
    new, found = record["new_tokens"], {}
    for form in ("none", *WEIGHT_FORMS):
        seconds = {int(rows): median(own[form]) for rows, own in record["figures"]["seconds"].items()}
        loads = {n: Workload("", n, new, n, prompt_tokens=record["prompt_tokens"]) for n in seconds}
        n_bytes = {n: step_bytes(name, loads[n], None if form == "none" else form) for n in seconds}
        found[form] = {n: (n_bytes[n] / 1e9, 1e6 * seconds[n] / new) for n in seconds}
    return found


def on_the_floor(results: Results, name: str, counts: Sequence[int]) -> Chart:
    """Steps of 4, 8 and 16 bits, a line for each number of sequences, above the time to read their bytes."""
    steps = equal_steps(results, name)
    places = sorted(steps[form][n][0] for form in STEPS for n in counts)
    lines = {}
    for n in counts:
        us = dict(steps[form][n] for form in STEPS)
        lines[f"{n} sequence{'s' * (n > 1)}"] = [us.get(place) for place in places]
    floor = {"time to read": [read_us(results, 1e9 * place) for place in places]}
    title = f"A step of {name} with 4, 8 (fp8) and 16 bits"
    chart = step_lines(places, lines, "GB per step", "µs", title=title, log_y=True, floors=floor)
    ticks = [0, 4, 8, 12, 16]
    chart.update_xaxes(tickvals=ticks, ticktext=ticks, rangemode="tozero")
    return chart.update_traces(connectgaps=True)


def pays_up_to(results: Results, name: str, form: str) -> int:
    """The largest recorded number of sequences up to which every step is faster than with 16 bits, or 0."""
    steps = equal_steps(results, name)
    slower = [n for n, (_, us) in steps[form].items() if us >= steps["none"][n][1]]
    return max((n for n in steps[form] if n < min(slower, default=math.inf)), default=0)


def kv_bytes(name: str, is_quantized: bool) -> int:
    """The bytes of a cached token in all layers, scales included."""
    arch = SHAPES[name]
    one_byte = arch.kv_bytes_per_token(1)
    return one_byte + 4 * one_byte // arch.head_dim if is_quantized else 2 * one_byte


def promised_with_heads(results: Results, name: str, workload: str, weights: str | None = "fp8") -> float:
    """How many times as fast a whole run is with weights of a format and fp8 keys and values.

    Its prompts are read at the recorded speed of PRE, and its steps take as long as their bytes do.
    """
    load, figures = MODEL_WORKLOADS[workload], results.by_model("formats")[name]["figures"]
    new = ((load.min_new_tokens or load.max_new_tokens) + load.max_new_tokens) / 2
    prompt = ((load.min_prompt_tokens or load.prompt_tokens or 0) + (load.prompt_tokens or 0)) / 2
    seconds = []
    for form, is_quantized in ((None, False), (weights, True)):
        speed = figures["tokens"]["PRE"] / median(figures["seconds"]["PRE"][form or "none"])
        cached = load.max_batch_size * load.mean_context
        saved = kv_bytes(name, False) - kv_bytes(name, is_quantized)
        n_bytes = step_bytes(name, load, form) - cached * saved
        seconds.append(load.num_requests * prompt / speed + new * read_us(results, n_bytes) / 1e6)
    return seconds[0] / seconds[1]


def gain_with_heads(results: Results, name: str, workload: str, form: str = "fp8+kv-fp8") -> float:
    """Tokens per second with fp8 weights, keys and values, or those of another format, times 16 bits."""
    seconds = results.by_model("formats_kv")[name]["figures"]["seconds"][workload]
    return median(seconds["none"]) / median(seconds[form])


def gains(results: Results, name: str, workload: str) -> list[float]:
    """Tokens per second with weights of each of ``WEIGHT_FORMS``, times those with 16 bits."""
    seconds = results.by_model("formats")[name]["figures"]["seconds"][workload]
    return [median(seconds["none"]) / median(seconds[form]) for form in WEIGHT_FORMS]
