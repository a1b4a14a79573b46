"""Train the shipped models: ``python -m rosellm.rosetrainer.train [--arch qwen3] --output FOLDER``.

A GPT-2 of 5 layers and width 256 (5.1 M parameters), or a Qwen3 of about that size, is trained on the sources
of the Python standard library, with a byte-level BPE of 4,096 tokens trained on the same files. The model
sees the tokens of the training files ``--epochs`` times. With its tests, Python 3.11 has 29 MB of such files,
8.3 M tokens, so that the default 40 epochs see 334 M tokens; without tests, it has about 11 MB, 3 M tokens,
and 40 epochs see 120 M. The record holds the exact count and a digest of the corpus. Batches are windows at
random offsets of the token stream, which stays on the device. The weights with the best validation loss are
kept, stored in 16 bits, loaded back, and scored as stored.

``--draft-of rose-tiny`` makes the draft model for speculative decoding (Leviathan et al. 2023): a model of 2
layers and width 128 (1 M parameters) of the same family, with the same tokenizer, trained to predict what
that model predicts.

``--seed`` fixes weights, offsets and dropout: on one CPU with a fixed number of threads, two runs write
identical files; on CUDA, torch uses its deterministic kernels. Nothing is compiled, so no compiler is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from rosellm.atomic import write_text
from rosellm.command_line import OneLineParser, command
from rosellm.environment import environment
from rosellm.errors import RoseError
from rosellm.models.arch import Arch, Norm
from rosellm.models.checkpoint import SHIPPED_MODELS, checkpoint_folder
from rosellm.models.families.table import write_arch
from rosellm.models.loading import DTYPES, arch_of, load_parts, resolve_device
from rosellm.models.model import Transformer
from rosellm.models.rope import Rope
from rosellm.models.tokenizer import Tokenizer, load_tokenizer
from rosellm.models.weights import load_model, save_model
from rosellm.rosetrainer.bpe import train_tokenizer
from rosellm.rosetrainer.corpus import Corpus, read_corpus
from rosellm.rosetrainer.training import (
    Hyperparameters,
    Score,
    Training,
    agreement,
    complete,
    mean_loss,
    token_stream,
    train,
)

# The full model, the one of --smoke and the draft model, by --arch; each is stored in its own dtype.
ROSE_TINY = Arch(vocab_size=4096, n_positions=512, n_layers=5, n_heads=4, d_model=256, eos_token_ids=(0,))
SMOKE_MODEL = Arch(vocab_size=512, n_positions=64, n_layers=2, n_heads=2, d_model=64, eos_token_ids=(0,))
QWEN3: dict[str, Any] = {
    "norm": Norm("rms", 1e-6), "rope": Rope(), "mlp": "swiglu", "biases": (), "qk_norm": True,
    "eos_token_ids": (0,), "dtype": "bfloat16", "family": "qwen3",
}  # fmt: skip
ROSE_TINY_QWEN3 = Arch(4096, 1024, 5, 6, 256, n_kv_heads=2, head_dim=64, d_ff=768, **QWEN3)
SMOKE_QWEN3 = Arch(512, 64, 2, 4, 64, n_kv_heads=2, head_dim=32, d_ff=128, **QWEN3)
DRAFT = Arch(vocab_size=4096, n_positions=512, n_layers=2, n_heads=2, d_model=128)
DRAFT_QWEN3 = Arch(4096, 1024, 2, 2, 128, n_kv_heads=1, head_dim=64, d_ff=384, **QWEN3)
ARCHS = {"gpt2": (ROSE_TINY, SMOKE_MODEL, DRAFT), "qwen3": (ROSE_TINY_QWEN3, SMOKE_QWEN3, DRAFT_QWEN3)}
SMOKE = Hyperparameters(
    epochs=1.2, batch_size=16, learning_rate=5e-3, warmup_steps=10, dropout=0.0, validate_every=20
)
SMOKE_BYTES = 200_000
HYPERPARAMETERS = asdict(Hyperparameters())  # each is an option of the command
PROMPTS = (
    "def fibonacci(n):",
    "import os\nimport sys\n\n\nclass Cache:\n    def __init__(self",
    "    for i in range(",
)
COMPLETION_TOKENS = 48
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json"}
OUTPUT_FILES = {"config.json", "model.safetensors"} | TOKENIZER_FILES


@dataclass(frozen=True)
class Target:
    """A checkpoint that a draft model is made for.

    name: the checkpoint's name.
    folder: its folder.
    gpt: its model, in fp32.
    tokenizer: its tokenizer.
    """

    name: str
    folder: Path
    gpt: Transformer
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Made:
    """The result of training: everything that the summary and the record contain."""

    config: Arch
    hyper: Hyperparameters
    training: Training
    score: Score
    corpus: dict[str, int | str]
    completions: list[dict[str, str]]
    seconds: dict[str, float]
    draft: dict[str, str | float]


def make_model(
    config: Arch,
    hyper: Hyperparameters,
    corpus: Corpus,
    device: torch.device,
    folder: Path,
    target: Target | None = None,
) -> Made:
    """Train a tokenizer and a model on ``corpus``, write both into ``folder``, and score the written model.

    target: if given, the model is a draft model for this checkpoint, with a copy of its tokenizer.

    Raises ``RoseError`` if the corpus yields fewer tokens than the model's vocabulary has.
    """
    began = time.perf_counter()
    if target is None:
        tokenizer = make_tokenizer(corpus, config.vocab_size, folder)
    else:
        tokenizer = copy_tokenizer(target, folder)
    stream = token_stream(corpus.train, tokenizer, device)
    validation = token_stream(corpus.validation, tokenizer, device)
    tokenized = time.perf_counter()
    gpt = Transformer(config).initialise(hyper.seed).to(device)
    training = train(gpt, stream, validation, hyper, None if target is None else target.gpt)
    trained = time.perf_counter()
    save_model(gpt, folder, DTYPES[config.dtype or "float16"])
    stored = load_model(str(folder), device, torch.float32)
    n_bytes = sum(source.n_bytes for source in corpus.validation)
    score = Score(mean_loss(stored, validation, hyper.batch_size), len(validation) - 1, n_bytes)
    draft: dict[str, str | float] = {}
    if target is not None:
        equal = agreement(stored, target.gpt, validation, hyper.batch_size)
        draft = {"draft_of": target.name, "agreement": equal}
    completions = _completions(stored, load_tokenizer(folder, config))
    ended = time.perf_counter()
    seconds = {"tokenizer": tokenized - began, "training": trained - tokenized, "all": ended - began}
    figures = _statistics(corpus, stream, validation)
    return Made(config, hyper, training, score, figures, completions, seconds, draft)


def make_tokenizer(corpus: Corpus, vocab_size: int, folder: Path) -> Tokenizer:
    """Train a tokenizer, write it into ``folder``, and return it; raise ``RoseError`` if it is too small."""
    tokenizer = train_tokenizer((source.text for source in corpus.train), vocab_size)
    if tokenizer.vocab_size != vocab_size:
        raise RoseError(
            f"the corpus yields {tokenizer.vocab_size} tokens; the model's vocabulary is {vocab_size}"
        )
    tokenizer.save(folder)
    return tokenizer


def copy_tokenizer(target: Target, folder: Path) -> Tokenizer:
    """Copy the tokenizer's files of ``target`` into ``folder``, and return the tokenizer."""
    for name in TOKENIZER_FILES:
        shutil.copyfile(target.folder / name, folder / name)
    return target.tokenizer


def load_target(model: str, device: torch.device, arch: str | None) -> Target:
    """Load the checkpoint that a draft model is made for.

    model: a shipped model's name or a folder.
    arch: the family that it must have; None means any in ``ARCHS``.

    Raises ``RoseError`` if there is no such checkpoint, its family is not the one required, or its tokenizer
    is missing or does not fit its vocabulary.
    """
    if model not in SHIPPED_MODELS and not Path(model).is_dir():
        raise RoseError(f"draft-of {model!r} is neither a folder nor one of {', '.join(SHIPPED_MODELS)}")
    folder, family = checkpoint_folder(model).resolve(), arch_of(model).family
    if family not in ARCHS:
        raise RoseError(f"draft-of {model!r} is a {family} model; draft models are {' or '.join(ARCHS)}")
    if arch not in (None, family):
        raise RoseError(f"draft-of {model!r} is a {family} model, which contradicts --arch {arch}")
    if lacking := [name for name in sorted(TOKENIZER_FILES) if not (folder / name).is_file()]:
        raise RoseError(f"draft-of {model!r} has no {lacking[0]}")
    gpt, tokenizer = load_parts(model, device.type, "float32")
    if tokenizer.vocab_size != gpt.config.vocab_size:
        raise RoseError(
            f"draft-of {model!r} has a tokenizer of {tokenizer.vocab_size} tokens; "
            f"its model's vocabulary is {gpt.config.vocab_size}"
        )
    return Target(folder.name, folder, gpt, tokenizer)


def draft_arch(target: Arch, smoke: bool) -> Arch:
    """Return the architecture of a draft model for ``target``, with its vocabulary and positions.

    smoke: whether to return that of ``--smoke``, which has few positions.
    """
    _, tiny, draft = ARCHS[target.family]
    n_positions = min(tiny.n_positions, target.n_positions) if smoke else target.n_positions
    return replace(
        tiny if smoke else draft,
        vocab_size=target.vocab_size,
        n_positions=n_positions,
        eos_token_ids=target.eos_token_ids,
    )


def _completions(gpt: Transformer, tokenizer: Tokenizer) -> list[dict[str, str]]:
    return [
        {"prompt": prompt, "completion": complete(gpt, tokenizer, prompt, COMPLETION_TOKENS)}
        for prompt in PROMPTS
    ]


def _statistics(corpus: Corpus, stream: Tensor, validation: Tensor) -> dict[str, int | str]:
    sides = {"train": (corpus.train, stream), "validation": (corpus.validation, validation)}
    figures: dict[str, int | str] = {"sha256": corpus.digest()}
    for side, (sources, ids) in sides.items():
        n_bytes = sum(source.n_bytes for source in sources)
        figures |= {f"{side}_files": len(sources), f"{side}_bytes": n_bytes, f"{side}_tokens": len(ids)}
    return figures


def record(made: Made, device: torch.device) -> dict[str, object]:
    """Return the training record as a JSON object: the figures of the training, and the environment."""
    where = environment(device)
    return {
        "kind": "training",
        "model": write_arch(made.config) | {"n_parameters": made.config.n_parameters},
        "hyperparameters": asdict(made.hyper),
        "corpus": made.corpus,
        "steps": made.training.steps,
        "tokens_seen": made.training.tokens_seen,
        "best_step": made.training.best_step,
        "curve": made.training.curve,
        "validation": made.score.fields(),
        **made.draft,
        "completions": made.completions,
        "seconds": made.seconds,
        "environment": {"device": where["device_name"], "tokenizers": tokenizers.__version__, **where},
    }


def summary(made: Made) -> str:
    """Return the summary that the command prints at the end."""
    rows = {
        "Parameters": f"{made.config.n_parameters:,}",
        "Tokens seen": f"{made.training.tokens_seen:,} in {made.training.steps:,} steps",
        "Best step": f"{made.training.best_step:,}",
        "Validation loss": f"{made.score.nats_per_token:.4f} nats/token",
        "Perplexity": f"{made.score.perplexity:.3f}",
        "Bits per byte": f"{made.score.bits_per_byte:.4f}",
        **({"Agreement": f"{made.draft['agreement']:.4f}"} if made.draft else {}),
        "Seconds": f"{made.seconds['all']:.1f} (training {made.seconds['training']:.1f})",
    }
    lines = ["=== training summary ===", *(f"{name}: {value}" for name, value in rows.items())]
    for completion in made.completions:
        lines += ["--- greedy completion ---", completion["prompt"] + completion["completion"]]
    return "\n".join(lines)


@contextmanager
def replacing_folder(output: Path) -> Iterator[Path]:
    """Yield a new folder next to ``output`` that replaces it on success and is removed on failure.

    Raises ``RoseError`` if ``output`` exists and is neither an empty folder nor a checkpoint of this command,
    or if it cannot be written.
    """
    target = output.resolve()
    if target.exists() and not target.is_dir():
        raise RoseError(f"output {str(output)!r} is not a folder")
    strangers = {path.name for path in target.glob("*")} - OUTPUT_FILES
    if strangers:
        raise RoseError(
            f"output {str(output)!r} holds {min(strangers)!r}, not part of a checkpoint; use another folder"
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
    """Write ``value`` to ``path`` atomically, or raise ``RoseError``."""
    try:
        write_text(path, json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise RoseError(f"record {str(path)!r} cannot be written: {error.strerror or error}") from error


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m rosellm.rosetrainer.train",
        description="Train the model that ships with RoseLLM on the Python standard library's sources.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="checkpoint folder to write (default: build/rose-tiny, with --draft-of build/MODEL-draft)",
    )
    parser.add_argument("--json", type=Path, help="training record to write")
    parser.add_argument(
        "--corpus", type=Path, help="folder of Python sources (default: the standard library)"
    )
    parser.add_argument("--arch", choices=ARCHS, help="gpt2 (default): rose-tiny; qwen3: rose-tiny-qwen3")
    parser.add_argument(
        "--draft-of", metavar="MODEL", help="train a draft model for this shipped model or folder"
    )
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument(
        "--smoke", action="store_true", help="train a tiny model on little text, which takes seconds on a CPU"
    )
    for name, default in HYPERPARAMETERS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=argparse.SUPPRESS,
            help=f"default: {default}, with --smoke {getattr(SMOKE, name)}",
        )
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace) -> str:
    """Train the checkpoint that ``arguments`` describe, write it, and return the summary."""
    device = resolve_device(arguments.device)
    if arguments.json and (arguments.json.is_dir() or not arguments.json.absolute().parent.is_dir()):
        raise RoseError(f"record {str(arguments.json)!r} is not a file name in an existing folder")
    given = {name: value for name, value in vars(arguments).items() if name in HYPERPARAMETERS}
    hyper = replace(SMOKE if arguments.smoke else Hyperparameters(), **given)
    corpus = read_corpus(arguments.corpus)
    if arguments.smoke:
        corpus = corpus.subset(SMOKE_BYTES)
    target = None if arguments.draft_of is None else load_target(arguments.draft_of, device, arguments.arch)
    output = arguments.output or Path("build", f"{target.name}-draft" if target else "rose-tiny")
    if target and output.resolve() == target.folder:
        raise RoseError(f"output {str(output)!r} is the checkpoint of --draft-of; use another folder")
    small = arguments.smoke
    config = draft_arch(target.gpt.config, small) if target else ARCHS[arguments.arch or "gpt2"][small]
    with replacing_folder(output) as folder:
        made = make_model(config, hyper, corpus, device, folder, target)
    if arguments.json:
        write_json(arguments.json, record(made, device))
    return summary(made)


def _main(argv: list[str] | None) -> None:
    arguments = parse(argv)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic: Any = torch.utils.deterministic  # torch's type stubs declare it as a plain module
    deterministic.fill_uninitialized_memory = False
    print(run(arguments))


main = command(_main, out_of_memory="a smaller batch")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # removes temporary folders
    sys.exit(main())
