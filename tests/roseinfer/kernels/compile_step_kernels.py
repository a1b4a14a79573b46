"""Compiles the kernels of a decode step for an H200, without a GPU: ``compile_step_kernels OUTPUT.json``.

The wrappers launch them as ever, for GPT-2's shape, but a stand-in for Triton's driver names the target, and
nothing is run. The output lists ``[kernel, PTX, dependent]``: all kernels of dependent launches, some of
ordinary ones. To be started with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.table import TRITON, TRITON_DEPENDENT, Kernels

WIDTH, WIDE, HEADS, VOCAB = 768, 3072, 12, 50257


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float16)


def launch_norms(kernels: Kernels) -> None:
    x, vector = empty(8, WIDTH), empty(WIDTH)
    affine = {"scale": vector, "shift": vector, "eps": 1e-5}
    kernels.add_norm(x=x, **affine)
    kernels.add_norm(x=x, delta=torch.empty(4, 8, WIDTH), bias=vector, **affine)


def launch_linears(kernels: Kernels) -> None:
    up, down, vector = empty(WIDE, WIDTH), empty(WIDTH, WIDE), empty(WIDTH)
    biased = {"weight": up, "bias": empty(WIDE), "gelu": True}
    for rows in (1, 8, 16):
        x = empty(rows, WIDTH)
        kernels.few_rows_linear(x=x, **biased, column_sums=torch.empty(WIDE), eps=1e-5)
    kernels.few_rows_linear(x=empty(16, WIDE), weight=down, bias=vector, residual=x)
    kernels.some_rows_linear(x=empty(64, WIDTH), **biased)
    kernels.some_rows_linear(x=empty(64, WIDE), weight=down, parts=4)


def launch_around_the_layers(kernels: Kernels) -> None:
    """Embedding, attention, head and advance, which read the device's state."""
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


def main(output: str) -> None:
    target = GPUTarget("cuda", 90, 32)
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
        compiled[kernel.hash] = self.__name__, kernel.asm["ptx"], options["DEPENDENT"]
        return kernel

    JITFunction.run = compile_only
    launch_norms(TRITON)
    for launch in (launch_norms, launch_linears, launch_around_the_layers):
        launch(TRITON_DEPENDENT)
    Path(output).write_text(json.dumps(list(compiled.values())))


if __name__ == "__main__":
    main(sys.argv[1])
