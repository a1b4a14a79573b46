"""Makes the shipped model: ``python -m rosellm.rosetrainer.train --output FOLDER [--json RECORD]``.

A GPT-2 of 5 layers and width 256 (5.1 M parameters) is trained on the sources of the Python standard library,
with a byte-level BPE of 4,096 tokens trained on the same files. The tokens seen are ``--epochs`` times those
of the training files: Python 3.11 with its tests has 29 MB of them, 8.3 M tokens, so the default 40 epochs
see 334 M tokens; an installation without tests has about 11 MB, 3 M tokens, and sees 120 M. The record holds
the exact count and a digest of the corpus. Batches are windows at random offsets of the token stream, which
stays on the device; the weights with the best validation loss are kept, stored as fp16, loaded back, and
scored as stored.

``--seed`` fixes weights, offsets and dropout: on one CPU, with one number of threads, two runs write equal
bytes; on CUDA torch is asked for its deterministic kernels. Nothing is compiled, so no compiler is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from rosellm.errors import DeviceError, RoseError
from rosellm.rosetrainer.attention import CausalAttention
from rosellm.rosetrainer.config import ModelConfig
from rosellm.rosetrainer.corpus import Corpus, Source, read_corpus
from rosellm.rosetrainer.model import GPT
from rosellm.rosetrainer.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from rosellm.rosetrainer.weights import load_model, save_model

ROSE_TINY = ModelConfig(vocab_size=4096, n_positions=512, n_layers=5, n_heads=4, d_model=256, eos_token_id=0)
SMOKE_MODEL = ModelConfig(vocab_size=512, n_positions=64, n_layers=2, n_heads=2, d_model=64, eos_token_id=0)
SMOKE_BYTES = 200_000
PROMPTS = (
    "def fibonacci(n):",
    "import os\nimport sys\n\n\nclass Cache:\n    def __init__(self",
    "    for i in range(",
)
COMPLETION_TOKENS = 48
OUTPUT_FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@dataclass(frozen=True)
class Hyperparameters:
    """AdamW (Loshchilov & Hutter 2019) with linear warm-up, then a cosine to a tenth of ``learning_rate``.

    A step sees ``batch_size`` windows of the model's ``n_positions`` tokens; ``dropout`` acts on the
    embeddings and on the two residual branches of every layer.
    """

    epochs: float = 40.0
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    weight_decay: float = 0.1
    dropout: float = 0.1
    clip_norm: float = 1.0
    validate_every: int = 250
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "learning_rate", "clip_norm", "validate_every"):
            if not 0 < getattr(self, name) < math.inf:
                raise RoseError(f"{name} is {getattr(self, name)}; a positive number is needed")
        for name in ("warmup_steps", "weight_decay", "seed"):
            if not 0 <= getattr(self, name) < 2**63:
                raise RoseError(f"{name} is {getattr(self, name)}; zero or a positive number is needed")
        if not 0 <= self.dropout < 1:
            raise RoseError(f"dropout is {self.dropout}; it must be at least 0 and below 1")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of ``step`` out of ``steps``, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


SMOKE = Hyperparameters(
    epochs=1.2, batch_size=16, learning_rate=5e-3, warmup_steps=10, dropout=0.0, validate_every=20
)


@dataclass(frozen=True)
class Score:
    """The loss over a whole text, each of its tokens predicted once."""

    nats_per_token: float
    n_tokens: int
    n_bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float:
        return self.nats_per_token * self.n_tokens / math.log(2) / self.n_bytes

    def fields(self) -> dict[str, float]:
        return asdict(self) | {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


@dataclass(frozen=True)
class Training:
    """What :func:`train` hands back: the curve's points and the tokens it saw."""

    curve: list[dict[str, float]]
    best_step: int
    steps: int
    tokens_seen: int


def token_stream(sources: tuple[Source, ...], tokenizer: Tokenizer, device: torch.device) -> Tensor:
    """int64 ``[n]``: an end-of-text, then every file followed by one."""
    ids = [tokenizer.eos_token_id]
    for file_ids in tokenizer.encode_many([source.text for source in sources]):
        ids.extend(file_ids)
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids, device=device)


def window_loss(gpt: GPT, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats (fp32) of windows ``[B, T + 1]``: every token but the first is predicted."""
    batch, length = windows.shape[0], windows.shape[1] - 1
    ids = windows[:, :-1].reshape(-1)  # [B T]
    targets = windows[:, 1:].reshape(-1)  # [B T]
    positions = torch.arange(length, device=windows.device).repeat(batch)  # [B T]
    hidden = gpt(ids, positions, CausalAttention([length] * batch, windows.device))  # [B T, C]
    return F.cross_entropy(gpt.logits(hidden).float(), targets)


@torch.no_grad()
def mean_loss(gpt: GPT, stream: Tensor, batch_size: int) -> float:
    """Nats per token of ``stream`` after its first token, in windows that do not overlap.

    ``gpt`` is left in eval mode.
    """
    gpt.eval()
    length = gpt.config.n_positions
    n_targets = len(stream) - 1
    n_full = n_targets // length
    starts = torch.arange(n_full, device=stream.device)[:, None] * length
    full = stream[starts + torch.arange(length + 1, device=stream.device)]  # [n_full, T + 1]
    batches = [*full.split(batch_size), stream[None, n_full * length :]]
    nats = [
        window_loss(gpt, windows).double() * windows[:, 1:].numel()
        for windows in batches
        if windows[:, 1:].numel()
    ]
    return (sum(nats) / n_targets).item()


def train(gpt: GPT, stream: Tensor, validation: Tensor, hyper: Hyperparameters) -> Training:
    """Train ``gpt`` in place and leave it with its best validation weights; streams int64 on its device."""
    length = gpt.config.n_positions
    if len(stream) <= length or len(validation) < 2:
        raise RoseError(
            f"the corpus has {len(stream)} training and {len(validation)} validation tokens; "
            f"more than {length} and at least 2 are needed"
        )
    steps = math.ceil(hyper.epochs * len(stream) / (hyper.batch_size * length))
    torch.manual_seed(hyper.seed)
    add_dropout(gpt, hyper.dropout)
    optimizer = _optimizer(gpt, hyper)
    curve, best = [], math.inf
    bar = tqdm(
        _batches(stream, length, hyper, steps), total=steps, desc="train", unit="step", file=sys.stderr
    )
    for step, windows in enumerate(bar):
        loss = _update(gpt, windows, optimizer, hyper, hyper.rate(step, steps))
        if step % hyper.validate_every and step + 1 < steps:
            continue
        with _autocast(stream.device):
            score = mean_loss(gpt, validation, hyper.batch_size)
        if not math.isfinite(score):
            raise RoseError(
                f"the loss is not finite at step {step + 1}; lower the learning rate {hyper.learning_rate}"
            )
        curve.append({"step": step + 1, "train_loss": loss.item(), "validation_loss": score})
        bar.set_postfix(train=f"{loss.item():.3f}", validation=f"{score:.3f}")
        if score < best:
            best, best_step = score, step + 1
            weights = {name: tensor.detach().clone() for name, tensor in gpt.state_dict().items()}
    gpt.load_state_dict(weights)
    return Training(curve, best_step, steps, steps * hyper.batch_size * length)


def add_dropout(gpt: GPT, p: float) -> None:
    """Make ``gpt`` drop activations in training mode: of the embeddings and both branches of each layer."""

    def drop(module: torch.nn.Module, _inputs: tuple, output: Tensor) -> Tensor:
        return F.dropout(output, p, training=module.training)

    outputs = [module for block in gpt.blocks for module in (block.out, block.down)]
    for module in (gpt.token_embedding, gpt.position_embedding, *outputs):
        module.register_forward_hook(drop)


@torch.no_grad()
def complete(gpt: GPT, tokenizer: Tokenizer, prompt: str, n_tokens: int) -> str:
    """The greedy continuation of ``prompt``, recomputed from its start for each token."""
    prompt_ids = tokenizer.encode(prompt)
    ids = list(prompt_ids)
    for _ in range(min(n_tokens, gpt.config.n_positions - len(ids))):
        positions = torch.arange(len(ids), device=gpt.device)
        hidden = gpt(torch.tensor(ids, device=gpt.device), positions, CausalAttention([len(ids)], gpt.device))
        ids.append(gpt.logits(hidden[-1:]).argmax().item())
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[len(prompt_ids) :])


def _batches(stream: Tensor, length: int, hyper: Hyperparameters, steps: int) -> Iterator[Tensor]:
    """Windows ``[B, T + 1]`` at random offsets, drawn on the CPU so that every device sees the same ones."""
    generator = torch.Generator().manual_seed(hyper.seed)
    span = torch.arange(length + 1, device=stream.device)
    for _ in range(steps):
        starts = torch.randint(len(stream) - length, (hyper.batch_size, 1), generator=generator)
        yield stream[starts.to(stream.device, non_blocking=True) + span]


def _update(
    gpt: GPT,
    windows: Tensor,
    optimizer: torch.optim.Optimizer,
    hyper: Hyperparameters,
    rate: float,
) -> Tensor:
    gpt.train()
    for group in optimizer.param_groups:
        group["lr"] = rate
    with _autocast(windows.device):
        loss = window_loss(gpt, windows)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(gpt.parameters(), hyper.clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def _optimizer(gpt: GPT, hyper: Hyperparameters) -> torch.optim.AdamW:
    """AdamW that decays matrices and embeddings only."""
    matrices = [parameter for parameter in gpt.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in gpt.parameters() if parameter.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": hyper.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=hyper.learning_rate, betas=(0.9, 0.95), fused=gpt.device.type == "cuda"
    )


def _autocast(device: torch.device) -> torch.autocast:
    """bf16 on CUDA; the CPU computes in fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@dataclass(frozen=True)
class Made:
    """A finished run: what the summary and the record tell."""

    config: ModelConfig
    hyper: Hyperparameters
    training: Training
    score: Score
    corpus: dict[str, int | str]
    completions: list[dict[str, str]]
    seconds: dict[str, float]


def make_model(
    config: ModelConfig,
    hyper: Hyperparameters,
    corpus: Corpus,
    device: torch.device,
    folder: Path,
) -> Made:
    """Train tokenizer and model on ``corpus``, write both into ``folder``, and score what was written."""
    began = time.perf_counter()
    tokenizer = train_tokenizer((source.text for source in corpus.train), config.vocab_size)
    if tokenizer.vocab_size != config.vocab_size:
        raise RoseError(
            f"the corpus yields {tokenizer.vocab_size} tokens; the model's vocabulary is {config.vocab_size}"
        )
    stream = token_stream(corpus.train, tokenizer, device)
    validation = token_stream(corpus.validation, tokenizer, device)
    tokenized = time.perf_counter()
    gpt = GPT(config).initialise(hyper.seed).to(device)
    training = train(gpt, stream, validation, hyper)
    trained = time.perf_counter()
    tokenizer.save(folder)
    save_model(gpt, folder)
    stored = load_model(str(folder), device, torch.float32)
    n_bytes = sum(source.n_bytes for source in corpus.validation)
    score = Score(mean_loss(stored, validation, hyper.batch_size), len(validation) - 1, n_bytes)
    reloaded = load_tokenizer(folder, config)
    completions = [
        {"prompt": prompt, "completion": complete(stored, reloaded, prompt, COMPLETION_TOKENS)}
        for prompt in PROMPTS
    ]
    seconds = {
        "tokenizer": tokenized - began,
        "training": trained - tokenized,
        "all": time.perf_counter() - began,
    }
    return Made(config, hyper, training, score, _statistics(corpus, stream, validation), completions, seconds)


def _statistics(corpus: Corpus, stream: Tensor, validation: Tensor) -> dict[str, int | str]:
    sides = {"train": (corpus.train, stream), "validation": (corpus.validation, validation)}
    figures: dict[str, int | str] = {"sha256": corpus.digest()}
    for side, (sources, ids) in sides.items():
        n_bytes = sum(source.n_bytes for source in sources)
        figures |= {f"{side}_files": len(sources), f"{side}_bytes": n_bytes, f"{side}_tokens": len(ids)}
    return figures


def environment(device: torch.device) -> dict[str, str]:
    """Where and when a run was made."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    return {
        "device": name,
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
        "python": platform.python_version(),
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def record(made: Made, device: torch.device) -> dict[str, object]:
    """The run as one JSON object (the checkpoint's figures and the environment)."""
    return {
        "kind": "training",
        "model": made.config.to_hf() | {"n_parameters": made.config.n_parameters},
        "hyperparameters": asdict(made.hyper),
        "corpus": made.corpus,
        "steps": made.training.steps,
        "tokens_seen": made.training.tokens_seen,
        "best_step": made.training.best_step,
        "curve": made.training.curve,
        "validation": made.score.fields(),
        "completions": made.completions,
        "seconds": made.seconds,
        "environment": environment(device),
    }


def summary(made: Made) -> str:
    """The lines that the command prints at its end."""
    rows = {
        "Parameters": f"{made.config.n_parameters:,}",
        "Tokens seen": f"{made.training.tokens_seen:,} in {made.training.steps:,} steps",
        "Best step": f"{made.training.best_step:,}",
        "Validation loss": f"{made.score.nats_per_token:.4f} nats/token",
        "Perplexity": f"{made.score.perplexity:.3f}",
        "Bits per byte": f"{made.score.bits_per_byte:.4f}",
        "Seconds": f"{made.seconds['all']:.1f} (training {made.seconds['training']:.1f})",
    }
    lines = ["=== training summary ===", *(f"{name}: {value}" for name, value in rows.items())]
    for completion in made.completions:
        lines += ["--- greedy completion ---", completion["prompt"] + completion["completion"]]
    return "\n".join(lines)


def pick_device(name: str) -> torch.device:
    """``auto``, ``cuda`` or ``cpu`` as a torch device; ``auto`` is CUDA where there is one."""
    if name not in ("auto", "cuda", "cpu"):
        raise DeviceError(f"device {name!r} is unknown; use auto, cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device 'cuda' is not available here; use auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


@contextmanager
def replacing_folder(output: Path) -> Iterator[Path]:
    """A new folder beside ``output`` that takes its place on success and vanishes on failure.

    What was at ``output`` must be a checkpoint of this command, empty or absent; else a RoseError.
    """
    target = output.absolute()
    if target.exists() and not target.is_dir():
        raise RoseError(f"output {str(output)!r} is not a folder")
    strangers = {path.name for path in target.glob("*")} - OUTPUT_FILES
    if strangers:
        raise RoseError(
            f"output {str(output)!r} holds {min(strangers)!r}, no file of a checkpoint; name another folder"
        )
    fresh, old = (target.with_name(f".{target.name}.{kind}-{os.getpid()}") for kind in ("new", "old"))
    try:
        fresh.mkdir(parents=True)
        yield fresh
        if target.exists():
            target.rename(old)
        fresh.rename(target)
    except OSError as error:
        raise RoseError(f"output {str(output)!r} cannot be written: {error.strerror or error}") from error
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)


def write_json(path: Path, value: dict[str, object]) -> None:
    """Write ``value`` at ``path`` in one rename."""
    fresh = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        fresh.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise RoseError(f"record {str(path)!r} cannot be written: {error.strerror or error}") from error


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rosellm.rosetrainer.train",
        description="Train the model that ships with RoseLLM on the Python standard library's sources.",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("build/rose-tiny"), help="folder of the checkpoint"
    )
    parser.add_argument("--json", type=Path, help="file of the training record")
    parser.add_argument(
        "--corpus", type=Path, help="folder of Python sources (default: the standard library)"
    )
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model on a little text: seconds on a CPU"
    )
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--warmup-steps", type=int)
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--validate-every", type=int, help="steps between validations")
    parser.add_argument("--seed", type=int)
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace) -> str:
    """Make the checkpoint that ``arguments`` ask for; returns the summary."""
    device = pick_device(arguments.device)
    if arguments.json and (arguments.json.is_dir() or not arguments.json.absolute().parent.is_dir()):
        raise RoseError(f"record {str(arguments.json)!r} is not a file name in an existing folder")
    hyper = SMOKE if arguments.smoke else Hyperparameters()
    given = {
        name: value for name, value in vars(arguments).items() if name in asdict(hyper) and value is not None
    }
    hyper = replace(hyper, **given)
    corpus = read_corpus(arguments.corpus)
    if arguments.smoke:
        corpus = corpus.subset(SMOKE_BYTES)
    with replacing_folder(arguments.output) as folder:
        config = SMOKE_MODEL if arguments.smoke else ROSE_TINY
        made = make_model(config, hyper, corpus, device, folder)
    if arguments.json:
        write_json(arguments.json, record(made, device))
    return summary(made)


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(arguments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        print(run(parsed))
    except RoseError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
