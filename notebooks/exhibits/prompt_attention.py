"""Compare our kernel for causal attention over whole prompts with torch's libraries on the same shapes.

For each prompt length, the number of prompts is chosen so that they have ``TOKENS`` tokens together. Our
kernel reads queries, keys and values as slices of one projection, and also stores keys and values into a
paged cache; the libraries read contiguous tensors ``[B, H, T, D]``, and store nothing. Kernels alternate in
turns of several consecutive calls. The record is DIR/MODEL/prompt_attention.json, rewritten after each
length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rosellm.bench.workloads import MODERN_MODEL
from rosellm.errors import OptionError
from rosellm.lab.records.experiment import Asked, Experiment, Record, in_parts
from rosellm.lab.records.records import number
from rosellm.lab.records.turns import in_turns
from rosellm.models.arch import Arch
from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import make_tiles
from rosellm.roseinfer.kernels.table import choose_kernels

NAME = "prompt_attention"
OURS, FLASH, CUDNN = "rosellm", "FlashAttention", "cuDNN"
LIBRARIES = {FLASH: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}
LENGTHS, TOKENS = (2048, 8192, 32768), 32768
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
TURNS, SECONDS = 7, 0.2  # measured turns of each way, seconds of each turn

Way = Callable[[], Tensor]


def ways(arch: Arch, length: int, prompts: int, device: torch.device) -> dict[str, Way]:
    """Return kernel → function that computes attention over the same random prompts as ``[B, T, H, D]``.

    cuDNN is omitted on a CPU.
    """
    heads, dtype = (arch.n_heads, arch.n_kv_heads, arch.n_kv_heads), DTYPES[device.type]
    generator = torch.Generator(device).manual_seed(0)
    shape = (prompts * length, sum(heads), arch.head_dim)
    qkv = torch.randn(shape, dtype=dtype, device=device, generator=generator).split(heads, dim=1)
    apart = [x.unflatten(0, (prompts, length)).transpose(1, 2).contiguous() for x in qkv]
    libraries = LIBRARIES if device.type == "cuda" else {FLASH: LIBRARIES[FLASH]}
    found: dict[str, Way] = {OURS: _ours(arch, qkv, length, prompts)}
    return found | {
        name: partial(_library, backend, arch.scale, *apart) for name, backend in libraries.items()
    }


def _ours(arch: Arch, qkv: tuple[Tensor, ...], length: int, prompts: int) -> Way:
    """Return a function that calls the engine's kernel with a paged cache as large as the prompts.

    qkv: queries, keys and values, each ``[N, heads, D]``.
    """
    q, k, v = qkv
    blocks = -(-length // BLOCK_M)
    table = torch.arange(prompts * blocks, dtype=torch.int32, device=q.device).view(prompts, blocks)
    caches = [k.new_zeros(prompts * blocks, arch.n_kv_heads, BLOCK_M, arch.head_dim) for _ in range(2)]
    tiles = make_tiles([0] * prompts, [length] * prompts, None, BLOCK_M, q.device)
    attend = choose_kernels("auto", "fixed", q.device).prefill_attention
    operands: dict[str, Any] = {"q": q, "k_new": k, "v_new": v, "block_table": table, "tiles": tiles}
    operands |= {"k_cache_layer": caches[0], "v_cache_layer": caches[1], "scale": arch.scale}
    return lambda: attend(**operands).unflatten(0, (prompts, length))


def _library(backend: SDPBackend, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gqa = q.shape[1] > k.shape[1]
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2)


def measure_length(
    arch: Arch, length: int, tokens: int, device: torch.device, turns: int, seconds: float = SECONDS
) -> dict[str, Any]:
    """Time attention over prompts of one length.

    tokens: tokens of all prompts together; at least one prompt is used.
    turns: measurements of each kernel.
    seconds: approximate duration of a turn.

    Returns a dict:
    prompts: number of prompts.
    flop: floating-point operations per call.
    us: kernel → µs per call of each turn.
    largest_difference: library → largest absolute difference between its output and ours.
    """
    prompts = max(1, tokens // length)
    calls = ways(arch, length, prompts, device)
    ours = calls[OURS]().float()
    apart = {name: (calls[name]().float() - ours).abs().max().item() for name in calls if name != OURS}
    times = {name: max(1, round(seconds / _call_s(call, 1, device))) for name, call in calls.items()}
    turn = {name: partial(_call_s, call, times[name], device) for name, call in calls.items()}
    return {
        "prompts": prompts,
        "flop": 4 * arch.n_heads * arch.head_dim * prompts * (length * (length + 1) // 2),
        "us": {name: [s * 1e6 for s in own] for name, own in in_turns(turn, turns).items()},
        "largest_difference": apart,
    }


def _call_s(call: Way, times: int, device: torch.device) -> float:
    """Return the mean seconds of ``times`` consecutive calls on the device."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(times):
        call()
    wait()
    return (time.perf_counter() - start) / times


def tflop_s(measured: Mapping[str, Any]) -> dict[str, float]:
    """Return kernel → TFLOP/s, from the median of its turns.

    measured: the result of :func:`measure_length`.
    """
    return {name: measured["flop"] / median(us) / 1e6 for name, us in measured["us"].items()}


def measure(asked: Asked) -> Iterator[Record]:
    """Measure every prompt length; after each, yield the record so far, then print the result."""
    arch, lengths = asked.arch, asked.size.contexts(*LENGTHS)
    tokens = min(TOKENS, 4 * asked.size.prompt)
    facts: dict[str, Any] = {"model": asked.model, "heads": [arch.n_heads, arch.n_kv_heads, arch.head_dim]}
    facts |= {"tokens": tokens, "dtype": str(DTYPES[asked.device]).removeprefix("torch.")}
    parts = {str(n): partial(measure_length, arch, n, tokens, asked.where, asked["repeats"]) for n in lengths}

    def told(length: str, figures: dict[str, Any]) -> str:
        speeds = " · ".join(f"{name} {number(speed)}" for name, speed in tflop_s(figures).items())
        return f"{figures['prompts']} × {int(length):,}, TFLOP/s: {speeds}"

    yield from in_parts(asked, asked.record(NAME, **facts, figures={}), parts, told, order=int)


def _refuse(asked: Asked) -> None:
    if (window := asked.arch.window) is not None:
        raise OptionError(f"{asked.model} has a window of {window} tokens; prompts are compared without")


EXPERIMENTS = [Experiment(NAME, measure, {"repeats": TURNS}, MODERN_MODEL, own_folder=True, refuse=_refuse)]
