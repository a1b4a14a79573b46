"""Compiles the best rung's kernels without a GPU: ``compile_step_kernels OUTPUT.json CAPABILITY``, say 90.

The wrappers launch them as ever, for GPT-2's shape, but a stand-in for Triton's driver names the target, and
nothing is run. The output lists ``[kernel, PTX, dependent]`` of the kernels of the rung that is best for a
GPU of that capability; for an H200 also of some ordinary launches. To be started with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.prefill import BLOCK_M, make_tiles
from rosellm.roseinfer.kernels.table import TRITON, TRITON_DEPENDENT, Kernels
from rosellm.roseinfer.recipe import DEPENDENT_LAUNCH_FROM

H200 = 90
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


def launch_around_the_layers(kernels: Kernels) -> None:
    """Embedding, attention of a step and of a prefill, head and advance."""
    state = DeviceState(8, 16, torch.device("cpu"))
    table, cache = empty(VOCAB, WIDTH), empty(4, HEADS, 64, 64)
    kernels.embed(ids=state.tokens, positions=state.positions, tokens=table, places=table)
    q, k_new, v_new = empty(8, 3 * HEADS, 64).split(HEADS, dim=1)
    where = {"block_table": state.table, "positions": state.positions, "scale": 0.125, "tile": 256}
    caches = {"k_cache_layer": cache, "v_cache_layer": cache}
    kernels.append_and_attend(q=q, k_new=k_new, v_new=v_new, **caches, **where)
    where = {"block_table": state.table, "tiles": make_tiles([0], [8], None, BLOCK_M, "cpu"), "scale": 0.125}
    kernels.prefill_attention(q=q, k_new=k_new, v_new=v_new, **caches, **where)
    drawing = {"temperature": state.temperatures, "seeds": state.seeds, "positions": state.positions}
    for sampled in (False, True):
        head = {"hidden": empty(8, WIDTH), "weight": table, "sampled": sampled}
        values, indices = kernels.best_tokens(**head, **drawing)
    for chosen in (values, None):
        kernels.advance(state=state, slots=torch.arange(8), values=chosen, indices=indices)


def main(output: str, capability: int) -> None:
    target = GPUTarget("cuda", capability, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )
    compiled, run = {}, JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled[kernel.hash] = self.__name__, kernel.asm["ptx"], options.get("DEPENDENT", False)
        return kernel

    JITFunction.run = compile_only
    linears = partial(launch_linears, few=(8,))
    if capability == H200:
        launch_norms(TRITON)
        linears = launch_linears
    kernels = TRITON_DEPENDENT if divmod(capability, 10) >= DEPENDENT_LAUNCH_FROM else TRITON
    for launch in (launch_norms, linears, launch_around_the_layers):
        launch(kernels)
    Path(output).write_text(json.dumps(list(compiled.values())))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
