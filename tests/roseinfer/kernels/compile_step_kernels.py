"""Compiles the best rung's kernels without a GPU: ``compile_step_kernels CAPABILITY OUTPUT.json``.

The wrappers launch them as ever, for the shapes of some models, but a stand-in for Triton's driver names the
target, and nothing is run. The output lists ``[kernel, PTX, dependent, bytes of shared memory]`` of the
kernels of the rung that is best for a GPU of that compute capability; for an H200 also of some ordinary
launches. For 8.0 and 10.0 the PTX is assembled, too. To be started with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rosellm.models.rope import Rotary
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels import attention, linear, prefill
from rosellm.roseinfer.kernels.attention_plan import variant_for, whole_rows
from rosellm.roseinfer.kernels.few_rows import NormPrologue
from rosellm.roseinfer.kernels.paged_cache import TRITON_DTYPES
from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import make_tiles
from rosellm.roseinfer.kernels.table import TRITON, TRITON_DEPENDENT, Kernels
from rosellm.roseinfer.recipe import DEPENDENT_LAUNCH_FROM

RUN, MAKE_CUBIN = JITFunction.run, CUDABackend.make_cubin
H200, ADA, ASSEMBLED = 90, 89, (80, 100)
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}  # bytes a program
VOCAB = 50257
Launch = Callable[[Kernels], None]


@dataclass(frozen=True)
class Sizes:
    """A model's parts, as kernels see them; norms: of the heads of q and k."""

    dtype: torch.dtype
    width: int
    wide: int
    heads: int
    kv_heads: int
    head_dim: int
    rms: bool = False
    activation: str = "gelu"
    rotary: bool = False
    norms: bool = False
    window: int | None = None

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype)

    @property
    def qkv(self) -> tuple[torch.Tensor, ...]:
        """q, k and v of 8 rows, slices of one projection."""
        counts = self.heads, self.kv_heads, self.kv_heads
        return self.empty(8, sum(counts), self.head_dim).split(counts, dim=1)

    @property
    def rotary_of_heads(self) -> Rotary | None:
        weights = [self.empty(self.head_dim) if self.norms else None] * 2
        return Rotary(torch.empty(64, self.head_dim), *weights, eps=1e-6) if self.rotary else None

    @property
    def where(self) -> dict[str, Any]:
        """A layer's cache, and how attention scores its keys."""
        cache = self.empty(4, self.kv_heads, 64, self.head_dim)
        caches = {"k_cache_layer": cache, "v_cache_layer": cache}
        return caches | {"scale": 0.125, "window": self.window}


GPT2 = Sizes(torch.float16, 768, 3072, 12, 12, 64)
MODERN = Sizes(torch.bfloat16, 1024, 3072, 16, 8, 128, True, "swiglu", True)
MODELS = {
    "gpt2": GPT2,
    "llama": replace(MODERN, width=2048, wide=8192, heads=32, head_dim=64),
    "mistral": replace(MODERN, heads=8, kv_heads=2, window=4096),
    "qwen3": replace(MODERN, norms=True),
}


def launch_norms(kernels: Kernels, sizes: Sizes) -> None:
    x, vector = sizes.empty(8, sizes.width), sizes.empty(sizes.width)
    affine = {"scale": vector, "shift": None if sizes.rms else vector, "eps": 1e-5}
    kernels.add_norm(x=x, **affine)
    delta = torch.empty(4, 8, sizes.width)
    kernels.add_norm(x=x, delta=delta, bias=None if sizes.rms else vector, **affine)


def launch_linears(kernels: Kernels, sizes: Sizes, few: tuple[int, ...] = (1, 8, 16)) -> None:
    n = sizes.wide * (2 if sizes.activation == "swiglu" else 1)
    up, down = sizes.empty(n, sizes.width), sizes.empty(sizes.width, sizes.wide)
    bias, vector = (None, None) if sizes.rms else (sizes.empty(n), sizes.empty(sizes.width))
    norm = NormPrologue(sizes.empty(sizes.width), 1e-5, None if sizes.rms else torch.empty(n))
    activated = {"weight": up, "bias": bias, "activation": sizes.activation}
    for rows in few:
        x = sizes.empty(rows, sizes.width)
        kernels.few_rows_linear(x=x, norm=norm, **activated)
        hidden = sizes.empty(rows, sizes.wide)
        kernels.few_rows_linear(x=hidden, weight=down, bias=vector, residual=x)
    kernels.some_rows_linear(x=sizes.empty(64, sizes.width), **activated)
    kernels.some_rows_linear(x=sizes.empty(64, sizes.wide), weight=down, parts=4)


def launch_large_tiles(kernels: Kernels, sizes: Sizes) -> None:
    """What takes the most shared memory: products of many rows."""
    square, width = sizes.empty(sizes.width, sizes.width), sizes.width
    kernels.some_rows_linear(x=sizes.empty(256, width), weight=square, bias=sizes.empty(width))
    state = DeviceState(256, 16, torch.device("cpu"))
    drawing = {"temperature": state.temperatures, "seeds": state.seeds, "positions": state.positions}
    head = {"hidden": sizes.empty(256, width), "weight": sizes.empty(VOCAB, width)}
    kernels.best_tokens(**head, sampled=False, **drawing)
    kernels.filtered_tiles(**head, state=state)


def launch_prefill(kernels: Kernels, sizes: Sizes, all_pieces: SequenceOf[list[int] | None]) -> None:
    q, k_new, v_new = sizes.qkv
    state, rotary = DeviceState(8, 16, torch.device("cpu")), sizes.rotary_of_heads
    if rotary is not None:
        kernels.position_heads(q=q, k=k_new, positions=state.positions, rotary=rotary)
    if sizes.activation == "swiglu":
        kernels.silu_mul(x=sizes.empty(8, 2 * sizes.wide))
    for pieces in all_pieces:
        kernels.prefill_attention(
            q=q,
            k_new=k_new,
            v_new=v_new,
            block_table=state.table,
            tiles=make_tiles([0], [8], None, BLOCK_M, "cpu", pieces),
            **sizes.where,
        )


def launch_attention(kernels: Kernels, sizes: Sizes, contexts: tuple[int, ...] = (300, 1000)) -> None:
    """Of a decode step: rows that stay whole, and rows that are cut."""
    state = DeviceState(8, 16, torch.device("cpu"))
    q, k_new, v_new = sizes.qkv
    new = {"q": q, "k_new": k_new, "v_new": v_new, "rotary": sizes.rotary_of_heads}
    shape = {"group": sizes.heads // sizes.kv_heads, "head_dim": sizes.head_dim}
    for context in contexts:
        for choose in (whole_rows, variant_for):
            variant = choose(8, sizes.kv_heads, context, 132, **shape)
            plan = kernels.plan_attention(state.positions, variant, sizes.window)
            step = {"block_table": state.table, "positions": state.positions, "plan": plan}
            kernels.append_and_attend(**new, **step, **sizes.where)


def launch_around_the_layers(kernels: Kernels, sizes: Sizes) -> None:
    """Embedding, head and advance."""
    state, table = DeviceState(8, 16, torch.device("cpu")), sizes.empty(VOCAB, sizes.width)
    places = None if sizes.rotary else table
    kernels.embed(ids=state.tokens, positions=state.positions, tokens=table, places=places)
    drawing = {"temperature": state.temperatures, "seeds": state.seeds, "positions": state.positions}
    for sampled in (False, True):
        head = {"hidden": sizes.empty(8, sizes.width), "weight": table, "sampled": sampled}
        values, indices = kernels.best_tokens(**head, **drawing)
    for counts in (None, torch.empty(8, VOCAB, dtype=torch.int32)):
        tiles = kernels.filtered_tiles(hidden=head["hidden"], weight=table, state=state, counts=counts)
        kernels.choose_filtered(tiles=tiles, state=state)
    kernels.count_tokens(state=state, table=counts)
    for chosen in (values, None):
        kernels.advance(state=state, slots=torch.arange(8), values=chosen, indices=indices)


def launches_for(capability: int) -> list[Launch]:
    """For an H200 more variants."""
    on_h200 = capability == H200
    everything: list[Launch] = [
        partial(launch, sizes=sizes)
        for sizes in (GPT2, MODELS["qwen3"])
        for launch in (launch_norms, launch_around_the_layers)
    ]
    whole_and_cut = {sizes: (None, [2]) for sizes in MODELS.values()}
    for sizes, pieces in (whole_and_cut if on_h200 else {GPT2: (None,), MODELS["qwen3"]: ([2],)}).items():
        everything += [
            partial(launch_attention, sizes=sizes, contexts=(300, 4000) if on_h200 else (300, 1000)),
            partial(launch_linears, sizes=sizes, few=(1, 8, 16) if on_h200 else (8,)),
            partial(launch_prefill, sizes=sizes, all_pieces=pieces),
        ]
    if capability == ADA:
        everything += [partial(launch_large_tiles, sizes=sizes) for sizes in (GPT2, MODELS["qwen3"])]
    if on_h200:
        everything.append(lambda _: launch_norms(TRITON, GPT2))
    return everything


def compiled_for(capability: int) -> list[tuple[str, str, bool, int]]:
    """Each capability is a device of its own to Triton, which keeps a device's kernels."""
    target = GPUTarget("cuda", capability, 32)
    current = {"device": lambda: capability, "stream": lambda device: 0, "target": lambda: target}
    driver.set_active(SimpleNamespace(**{f"get_current_{what}": get for what, get in current.items()}))
    compiled = {}

    def compile_only(self, *args, grid, warmup, **options):
        kernel = RUN(self, *args, grid=grid, warmup=True, **options)
        dependent = bool(options.get("DEPENDENT", False))
        compiled[kernel.hash] = self.__name__, kernel.asm["ptx"], dependent, kernel.metadata.shared
        return kernel

    JITFunction.run = compile_only
    CUDABackend.make_cubin = MAKE_CUBIN if capability in ASSEMBLED else lambda *_arguments: b""
    linear.shared_memory = lambda device: SHARED_MEMORY[capability]
    attention.dot_dtype = prefill.dot_dtype = lambda q: TRITON_DTYPES[q.dtype]
    kernels = TRITON_DEPENDENT if divmod(capability, 10) >= DEPENDENT_LAUNCH_FROM else TRITON
    for launch in launches_for(capability):
        launch(kernels)
    return list(compiled.values())


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(compiled_for(int(sys.argv[1]))))
