"""What several test files share: small random models, an oracle, where Triton can run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rosellm.ladder.rungs import TritonAppend
from rosellm.models.arch import Arch, Norm
from rosellm.models.attention import CausalAttention
from rosellm.models.model import Transformer
from rosellm.models.rope import Rope
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTERPRETED = pytest.param(
    "cpu",
    id="interpreted",
    marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU here"),
)
ON_GPU = pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)
TRITON_DEVICES = (INTERPRETED, ON_GPU)
LLAMA: dict[str, Any] = {
    "norm": Norm("rms", 1e-6),
    "rope": Rope(),
    "mlp": "swiglu",
    "biases": (),
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_ff": 72,
}
# What changes of ``Arch`` make a model like those of a family.
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA | {"window": 5},
    "qwen2": LLAMA | {"biases": ("qkv",)},
    "qwen3": LLAMA | {"qk_norm": True, "head_dim": 12, "tie_embeddings": False},
}
LARGE = {  # sizes of attention in real models
    "gpt2": {"n_heads": 12, "n_kv_heads": 12, "head_dim": 64, "block_size": 64},
    "gqa": {"n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "block_size": 16},
    "qwen3": {"n_heads": 16, "n_kv_heads": 8, "head_dim": 128, "block_size": 64},
    "odd": {"n_heads": 25, "n_kv_heads": 5, "head_dim": 80, "block_size": 32},
}
BITS = {2: torch.int16, 4: torch.int32}


def bits(x: Tensor) -> Tensor:
    """The bit patterns of ``x`` as integers, so that NaN equals NaN and -0.0 differs from 0.0."""
    return x.view(BITS[x.dtype.itemsize])


def small_config(**changes) -> Arch:
    shape = {"vocab_size": 101, "n_positions": 64, "n_layers": 2, "n_heads": 2, "d_model": 32}
    return Arch(**(shape | changes))


MODERN = FAMILIES["qwen3"] | {"family": "qwen3"}
WINDOWED = FAMILIES["mistral"] | {"n_kv_heads": 1, "family": "mistral"}


def random_model(seed: int, config: Arch | None = None, std: float = 0.3) -> Transformer:
    """An fp32 model on the CPU whose every parameter is random: biases and norms too."""
    gpt = Transformer.allocate(config or small_config(), CPU, torch.float32).initialise(seed, std=std)
    generator = torch.Generator().manual_seed(seed)
    for parameter in gpt.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return gpt


def random_prompts(lengths: list[int], seed: int = 0, vocab_size: int = 101) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]


@torch.inference_mode()
def uncached_logits(gpt: Transformer, tokens: list[int]) -> Tensor:
    """Logits ``[N, V]`` of all positions, the whole sequence computed at once."""
    ids = torch.tensor(tokens, device=gpt.device)
    config = gpt.config
    attention = CausalAttention([len(tokens)], gpt.device, config.scale, config.window)
    hidden = gpt(ids, torch.arange(len(tokens), device=gpt.device), attention)
    return gpt.logits(hidden)


def uncached_greedy(gpt: Transformer, prompt: list[int], n: int) -> list[int]:
    """Greedy tokens, everything computed anew for each of them."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(uncached_logits(gpt, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def small_engine(gpt: Transformer, **options) -> Engine:
    """Small blocks, so that sequences cross their edges; Triton-style appends from the first row on."""
    engine = Engine(gpt, **({"block_size": 8, "max_batch_size": 16} | options))
    if isinstance(engine.step, TritonAppend):
        engine.step.append_from = 1
    return engine


def greedy_sequences(engine: Engine, prompts: list[list[int]], max_tokens: int | list[int]) -> list[Sequence]:
    counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in counts]
    return [engine.make_sequence(prompt, p) for prompt, p in zip(prompts, params, strict=True)]


def decode_all(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    """Decode, in a batch that shrinks as sequences finish, until all are done; their outputs."""
    running = [s for s in sequences if not s.is_finished]
    while running:
        engine.decode(running)
        running = [s for s in running if not s.is_finished]
    return [s.output for s in sequences]


def generate(engine: Engine, prompts: list[list[int]], max_tokens: int | list[int]) -> list[list[int]]:
    """Greedy outputs of one batch; the engine's blocks are all returned."""
    sequences = greedy_sequences(engine, prompts, max_tokens)
    engine.prefill(sequences)
    outputs = decode_all(engine, sequences)
    for sequence in sequences:
        engine.release(sequence)
    engine.check_integrity()
    return outputs


def refusal(main: Callable[[list[str]], int], argv: list[str], capsys: pytest.CaptureFixture) -> str:
    """The one line on stderr by which a command refuses its arguments, with status 2."""
    try:
        status = main(argv)
    except SystemExit as leaving:
        status = leaving.code
    [line] = capsys.readouterr().err.splitlines()
    assert status == 2 and line.startswith("error: ")
    return line
