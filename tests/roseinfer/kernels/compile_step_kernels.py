"""Compiles the best rung's kernels without a GPU: ``compile_step_kernels CAPABILITY OUTPUT.json``.

Engines of some models' shapes launch them as in a warm-up, but a stand-in for Triton's driver names the
target, and nothing is run. The output lists ``[kernel, PTX, dependent, bytes of shared memory, pointers]`` of
the kernels of the rung that is best for a GPU of that compute capability; pointers are the names of the
arguments that are pointers or TMA descriptors, in the order of the PTX's parameters. For 8.0 and 10.0 the PTX
is assembled, too. To be started with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rosellm.models.model import Transformer
from rosellm.models.part import Part
from rosellm.models.quantized import ROW_FORMS
from rosellm.roseinfer import assembly
from rosellm.roseinfer.kernels import attention, linear, prefill, prefill_ring, ring
from rosellm.roseinfer.kernels.paged_cache import TRITON_DTYPES
from rosellm.roseinfer.kernels.peer_sums import make_sum_add_norm
from rosellm.roseinfer.kernels.speculation import draft_kernels
from rosellm.roseinfer.kernels.table import TRITON, TRITON_DEPENDENT, Kernels
from rosellm.roseinfer.kernels.verify_attention import verify_attention
from rosellm.roseinfer.layers import products
from rosellm.roseinfer.ranks.peer_memory import PeerMemory
from rosellm.roseinfer.recipe import BEST_RUNG, DEPENDENT_LAUNCH_FROM, LADDER
from rosellm.roseinfer.steps import captured_prefill
from tests.helpers import CPU, FAMILIES, small_config, small_engine
from tests.roseinfer.steps.fake_graphs import FakeGraphs

RUN, MAKE_CUBIN = JITFunction.run, CUDABackend.make_cubin
H200, ADA, ASSEMBLED = 90, 89, (80, 100)
ROWS = {H200: (1, 8, 64), ADA: (8, 256)}  # of many, tiles take the most shared memory
QUANTIZED = {H200: ("fp8", "int8", "int4"), ADA: ("fp8",)}
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}  # bytes a program
MODERN = {"d_model": 1024, "n_heads": 16, "n_kv_heads": 8, "head_dim": 128, "d_ff": 3072}
MODELS = {
    "gpt2": (torch.float16, {"d_model": 768, "n_heads": 12, "d_ff": 3072}),
    "qwen3": (torch.bfloat16, FAMILIES["qwen3"] | MODERN),
    "llama": (torch.bfloat16, FAMILIES["llama"] | MODERN | {"d_model": 2048, "n_heads": 32, "head_dim": 64}),
    "mistral": (torch.bfloat16, FAMILIES["mistral"] | MODERN | {"n_heads": 8, "n_kv_heads": 2}),
}


def launch_all(
    kernels: Kernels,
    dtype: torch.dtype,
    shape: dict[str, Any],
    rows: tuple[int, ...],
    form: str | None = None,
) -> None:
    """The kernels of prefills in whole and in pieces, and of decode steps of those numbers of rows.

    Decode steps also verify drafts, from the text and of a draft model. form: the format of weights; keys and
    values have that of their activations.
    """
    config = small_config(n_layers=2, vocab_size=50257, n_positions=4096, **shape)
    model = Transformer.allocate(config, CPU, dtype, quantization=form)
    sizes = {
        "max_batch_size": max(rows),
        "num_kv_blocks": 4,
        "block_size": 64,
        "kv_cache_dtype": ROW_FORMS[form] if form else "auto",
    }
    drafted = replace(LADDER["speculative"], speculation="draft")
    for recipe, draft in (BEST_RUNG, None), ("speculative", None), (drafted, model):
        engine = small_engine(model, recipe=recipe, draft=draft, kernels=kernels, warm_up=False, **sizes)
        worker = engine.step.worker
        worker.bind.num_sms = 132
        if recipe == BEST_RUNG:
            for run in worker.prompts.warm_ups() + worker.rehearsals(385)[1:]:  # with copied prefixes
                run()
        else:
            worker._num_sms = 132
            dependent = kernels is TRITON_DEPENDENT  # on a CPU, an engine launches them in the ordinary way
            worker.drafting = draft_kernels("triton", dependent, drafted=draft is not None)
            if draft is not None:
                worker.draft.drafting, worker.draft.bind.num_sms = worker.drafting, 132
            worker._attention = partial(verify_attention, dependent=dependent)
        for n in rows if recipe == BEST_RUNG else (8,):
            for run in worker.warm_ups(n):
                run()


def launch_sum(kernels: Kernels, width: int) -> None:
    """The sum over two ranks of two partial sums each, which a GEMM follows."""
    part, address = Part(0, 2), torch.zeros(2, dtype=torch.int64)
    sum_add_norm = make_sum_add_norm(PeerMemory(part, address, address), 64, kernels is TRITON_DEPENDENT)
    x, scale = torch.zeros(8, width, dtype=torch.bfloat16), torch.zeros(width, dtype=torch.bfloat16)
    sum_add_norm(x=x, delta=torch.zeros(2, 8, width), scale=scale, shift=None, eps=1e-5)


def pointers(signature: dict[str, Any]) -> Iterator[str]:
    """The names of the pointers and TMA descriptors, and a tuple's name for each of its own."""
    for name, kind in signature.items():
        if isinstance(kind, (tuple, list)):
            yield from (name for _ in pointers(dict(enumerate(kind))))
        elif kind.startswith(("*", "tensordesc")):
            yield name


@torch.inference_mode()
def compiled_for(capability: int) -> list[tuple[str, str, bool, int, list[str]]]:
    """Each capability is a device of its own to Triton, which keeps a device's kernels."""
    target = GPUTarget("cuda", capability, 32)
    current = {"device": lambda: capability, "stream": lambda device: 0, "target": lambda: target}
    driver.set_active(SimpleNamespace(**{f"get_current_{what}": get for what, get in current.items()}))
    compiled = {}

    def compile_only(self, *args, grid, warmup, **options):
        kernel = RUN(self, *args, grid=grid, warmup=True, **options)
        dependent = bool(options.get("DEPENDENT", False))
        named = self.__name__, kernel.asm["ptx"], dependent, kernel.metadata.shared
        compiled[kernel.hash] = *named, list(pointers(kernel.src.signature))
        return kernel

    JITFunction.run = compile_only
    CUDABackend.make_cubin = MAKE_CUBIN if capability in ASSEMBLED else lambda *_arguments: b""
    linear.shared_memory = lambda device: SHARED_MEMORY[capability]
    ring.runs_on = lambda *_arguments: capability == H200
    attention.dot_dtype = prefill.dot_dtype = lambda x: TRITON_DTYPES[x.dtype]
    products.scaled_product = lambda x, projection: torch.zeros(len(x), len(projection.weight), dtype=x.dtype)
    assembly.graphs_on, assembly.room_of = lambda device: FakeGraphs(), lambda *_arguments: 16
    captured_prefill.CAPTURED_TOKENS = prefill_ring.FEW_TOKENS = 384
    kernels = TRITON_DEPENDENT if divmod(capability, 10) >= DEPENDENT_LAUNCH_FROM else TRITON
    for family in MODELS if capability == H200 else ("gpt2", "qwen3"):
        launch_all(kernels, *MODELS[family], rows=ROWS.get(capability, (8,)))
    launch_sum(kernels, MODERN["d_model"])
    for form in QUANTIZED.get(capability, ()):
        launch_all(kernels, *MODELS["qwen3"], rows=ROWS[capability], form=form)
    return list(compiled.values())


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(compiled_for(int(sys.argv[1]))))
