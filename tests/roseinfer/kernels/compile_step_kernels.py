"""Compiles the best rung's kernels without a GPU: ``compile_step_kernels OUTPUT.json``.

The wrappers launch them as ever, for GPT-2's shape, but a stand-in for Triton's driver names the target, and
nothing is run. The output lists, by compute capability, ``[kernel, PTX, dependent, bytes of shared memory]``
of the kernels of the rung that is best for such a GPU; for an H200 also of some ordinary launches. For 8.0
and 10.0 the PTX is assembled, too. To be started with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels import linear
from rosellm.roseinfer.kernels.prefill import BLOCK_M, make_tiles
from rosellm.roseinfer.kernels.table import TRITON, TRITON_DEPENDENT, Kernels
from rosellm.roseinfer.recipe import DEPENDENT_LAUNCH_FROM

RUN, MAKE_CUBIN = JITFunction.run, CUDABackend.make_cubin
H200, ADA, ASSEMBLED = 90, 89, (80, 100)
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}  # bytes a program
WIDTH, WIDE, HEADS, VOCAB = 768, 3072, 12, 50257


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float16)


def launch_norms(kernels: Kernels) -> None:
    x, vector = empty(8, WIDTH), empty(WIDTH)
    affine = {"scale": vector, "shift": vector, "eps": 1e-5}
    kernels.add_norm(x=x, **affine)
    kernels.add_norm(x=x, delta=torch.empty(4, 8, WIDTH), bias=vector, **affine)


def launch_linears(kernels: Kernels, few: tuple[int, ...] = (1, 8, 16)) -> None:
    up, down, vector = empty(WIDE, WIDTH), empty(WIDTH, WIDE), empty(WIDTH)
    biased = {"weight": up, "bias": empty(WIDE), "gelu": True}
    for rows in few:
        x = empty(rows, WIDTH)
        kernels.few_rows_linear(x=x, **biased, column_sums=torch.empty(WIDE), eps=1e-5)
    kernels.few_rows_linear(x=empty(rows, WIDE), weight=down, bias=vector, residual=x)
    kernels.some_rows_linear(x=empty(64, WIDTH), **biased)
    kernels.some_rows_linear(x=empty(64, WIDE), weight=down, parts=4)


def launch_large_tiles(kernels: Kernels) -> None:
    """What takes the most shared memory: products of many rows."""
    kernels.some_rows_linear(x=empty(256, WIDTH), weight=empty(WIDTH, WIDTH), bias=empty(WIDTH))
    state = DeviceState(256, 16, torch.device("cpu"))
    drawing = {"temperature": state.temperatures, "seeds": state.seeds, "positions": state.positions}
    kernels.best_tokens(hidden=empty(256, WIDTH), weight=empty(VOCAB, WIDTH), sampled=False, **drawing)


def launch_prefill(kernels: Kernels) -> None:
    q, k_new, v_new = empty(8, 3 * HEADS, 64).split(HEADS, dim=1)
    cache, table = empty(4, HEADS, 64, 64), DeviceState(8, 16, torch.device("cpu")).table
    kernels.prefill_attention(
        q=q,
        k_new=k_new,
        v_new=v_new,
        k_cache_layer=cache,
        v_cache_layer=cache,
        block_table=table,
        tiles=make_tiles([0], [8], None, BLOCK_M, "cpu"),
        scale=0.125,
    )


def launch_around_the_layers(kernels: Kernels) -> None:
    """Embedding, attention of a step, head and advance."""
    state = DeviceState(8, 16, torch.device("cpu"))
    table, cache = empty(VOCAB, WIDTH), empty(4, HEADS, 64, 64)
    kernels.embed(ids=state.tokens, positions=state.positions, tokens=table, places=table)
    q, k_new, v_new = empty(8, 3 * HEADS, 64).split(HEADS, dim=1)
    where = {"block_table": state.table, "positions": state.positions, "scale": 0.125, "tile": 256}
    caches = {"k_cache_layer": cache, "v_cache_layer": cache}
    kernels.append_and_attend(q=q, k_new=k_new, v_new=v_new, **caches, **where)
    drawing = {"temperature": state.temperatures, "seeds": state.seeds, "positions": state.positions}
    for sampled in (False, True):
        head = {"hidden": empty(8, WIDTH), "weight": table, "sampled": sampled}
        values, indices = kernels.best_tokens(**head, **drawing)
    for chosen in (values, None):
        kernels.advance(state=state, slots=torch.arange(8), values=chosen, indices=indices)


def launches_for(capability: int) -> list[Callable[[Kernels], None]]:
    everything = [launch_norms, partial(launch_linears, few=(8,)), launch_prefill, launch_around_the_layers]
    if capability == ADA:
        everything.append(launch_large_tiles)
    if capability == H200:
        everything += [launch_linears, lambda _: launch_norms(TRITON)]
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
    kernels = TRITON_DEPENDENT if divmod(capability, 10) >= DEPENDENT_LAUNCH_FROM else TRITON
    for launch in launches_for(capability):
        launch(kernels)
    return list(compiled.values())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({one: compiled_for(one) for one in SHARED_MEMORY}))
