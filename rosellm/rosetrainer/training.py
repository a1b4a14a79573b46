"""The training loop: hyperparameters, batches, optimisation and scoring."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from rosellm.errors import RoseError
from rosellm.models.attention import CausalAttention
from rosellm.models.model import Transformer
from rosellm.models.tokenizer import Tokenizer
from rosellm.rosetrainer.corpus import Source

MOST = {"epochs": 1_000_000, "batch_size": 65_536, "learning_rate": 1_000, "weight_decay": 1_000}


@dataclass(frozen=True)
class Hyperparameters:
    """The settings of training with AdamW (Loshchilov & Hutter 2019).

    epochs: how often the tokens of the training files are seen.
    batch_size: windows per step, of the model's ``n_positions`` tokens each.
    learning_rate: the highest rate, reached after ``warmup_steps`` steps of linear growth; from there, the
        rate decays by a cosine to a tenth.
    weight_decay: for matrices and embeddings only.
    dropout: probability, for the embeddings and the two residual branches of every layer.
    clip_norm: maximum norm of a step's gradient.
    validate_every: steps between two validations.
    seed: fixes weights, windows and dropout.

    Raises ``RoseError`` for a value out of range.
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
                raise RoseError(f"{name} is {getattr(self, name)}; it must be positive and finite")
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise RoseError(f"{name} is {getattr(self, name)}; it must be at most {most}")
        for name in ("warmup_steps", "weight_decay", "seed"):
            if not 0 <= getattr(self, name) < 2**63:
                raise RoseError(f"{name} is {getattr(self, name)}; it must be zero or positive")
        if not 0 <= self.dropout < 1:
            raise RoseError(f"dropout is {self.dropout}; it must be at least 0 and below 1")

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of step ``step``, counted from 0, out of ``steps`` steps."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


@dataclass(frozen=True)
class Score:
    """The loss over a whole text, in which each token but the first is predicted once.

    nats_per_token: the mean loss.
    n_tokens: number of predicted tokens.
    n_bytes: size of the text.
    """

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
    """The result of :func:`train`.

    curve: the points of the loss curve; with a teacher, the training loss is the one that it defines.
    best_step: the step with the lowest validation loss, counted from 1.
    steps: number of steps.
    tokens_seen: number of training tokens, counted each time that they are seen.
    """

    curve: list[dict[str, float]]
    best_step: int
    steps: int
    tokens_seen: int


def token_stream(sources: tuple[Source, ...], tokenizer: Tokenizer, device: torch.device) -> Tensor:
    """Return the token ids of all files, int64 ``[n]``, with end-of-text tokens around and between them."""
    ids = [tokenizer.eos_token_id]
    for file_ids in tokenizer.encode_many([source.text for source in sources], special=False):
        ids.extend(file_ids)
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids, device=device)


def window_logits(gpt: Transformer, windows: Tensor) -> Tensor:
    """Return the logits ``[B T, V]``, in fp32, of all but the first token of windows ``[B, T + 1]``."""
    batch, length = windows.shape[0], windows.shape[1] - 1
    ids = windows[:, :-1].reshape(-1)  # [B T]
    positions = torch.arange(length, device=windows.device).repeat(batch)  # [B T]
    hidden = gpt(ids, positions, CausalAttention([length] * batch, windows.device))  # [B T, C]
    return gpt.logits(hidden).float()


def window_loss(gpt: Transformer, windows: Tensor, teacher: Transformer | None = None) -> Tensor:
    """Return the mean cross-entropy, in nats (fp32), of all but the first token of windows ``[B, T + 1]``.

    teacher: a model in eval mode whose probabilities are the targets (distillation, Hinton et al. 2015,
        arXiv:1503.02531); None means that the tokens are.
    """
    targets = windows[:, 1:].reshape(-1)  # [B T]
    if teacher is not None:
        with torch.no_grad():
            targets = window_logits(teacher, windows).softmax(dim=-1)  # [B T, V]
    return F.cross_entropy(window_logits(gpt, windows), targets)


@torch.no_grad()
def mean_loss(gpt: Transformer, stream: Tensor, batch_size: int) -> float:
    """Return the mean loss, in nats, of all but the first token of ``stream``, in non-overlapping windows.

    batch_size: windows per forward pass. Leaves ``gpt`` in eval mode.
    """
    gpt.eval()
    nats = [
        window_loss(gpt, windows).double() * windows[:, 1:].numel()
        for windows in _windows(stream, gpt.config.n_positions, batch_size)
    ]
    return torch.stack(nats).sum().item() / (len(stream) - 1)


@torch.no_grad()
def agreement(gpt: Transformer, teacher: Transformer, stream: Tensor, batch_size: int) -> float:
    """Return the share of all but the first token of ``stream`` for which both models predict the same token.

    The prediction is the most likely token, given the windows of :func:`mean_loss`. Leaves both models in
    eval mode.
    """
    gpt.eval()
    teacher.eval()
    equal = [
        (window_logits(gpt, windows).argmax(-1) == window_logits(teacher, windows).argmax(-1)).sum()
        for windows in _windows(stream, gpt.config.n_positions, batch_size)
    ]
    return torch.stack(equal).sum().item() / (len(stream) - 1)


def _windows(stream: Tensor, length: int, batch_size: int) -> list[Tensor]:
    """Split ``stream`` into windows ``[B, T + 1]`` that overlap by one token; the last may be shorter."""
    n_full = (len(stream) - 1) // length
    starts = torch.arange(n_full, device=stream.device)[:, None] * length
    full = stream[starts + torch.arange(length + 1, device=stream.device)]  # [n_full, T + 1]
    batches = [*full.split(batch_size), stream[None, n_full * length :]]
    return [windows for windows in batches if windows[:, 1:].numel()]


def train(
    gpt: Transformer,
    stream: Tensor,
    validation: Tensor,
    hyper: Hyperparameters,
    teacher: Transformer | None = None,
) -> Training:
    """Train ``gpt`` in place, and leave it with the weights that had the lowest validation loss.

    stream, validation: tokens ``[n]`` int64, on the model's device.
    teacher: as in :func:`window_loss`, on the same device; validation does not use it.

    Raises ``RoseError`` if either stream is too short or the loss is not finite.
    """
    length = gpt.config.n_positions
    if len(stream) <= length or len(validation) < 2:
        raise RoseError(
            f"the corpus has {len(stream)} training and {len(validation)} validation tokens; "
            f"more than {length} and at least 2 are required"
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
        loss = _update(gpt, windows, optimizer, hyper, hyper.rate(step, steps), teacher)
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


def add_dropout(gpt: Transformer, p: float) -> None:
    """Add dropout, active in training mode, to the embeddings and both branches of each layer of ``gpt``."""

    def drop(module: torch.nn.Module, _inputs: tuple, output: Tensor) -> Tensor:
        return F.dropout(output, p, training=module.training)

    for name, module in gpt.named_modules():
        if name.endswith(("_embedding", ".out", ".down")):
            module.register_forward_hook(drop)


@torch.no_grad()
def complete(gpt: Transformer, tokenizer: Tokenizer, prompt: str, n_tokens: int) -> str:
    """Return the greedy continuation of ``prompt``: at most ``n_tokens`` tokens, and none after end-of-text.

    The whole sequence is recomputed for each token.
    """
    prompt_ids = tokenizer.encode(prompt)
    ids = list(prompt_ids)
    for _ in range(min(n_tokens, gpt.config.n_positions - len(ids))):
        positions = torch.arange(len(ids), device=gpt.device)
        hidden = gpt(torch.tensor(ids, device=gpt.device), positions, CausalAttention([len(ids)], gpt.device))
        ids.append(int(gpt.logits(hidden[-1:]).argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[len(prompt_ids) :])


def _batches(stream: Tensor, length: int, hyper: Hyperparameters, steps: int) -> Iterator[Tensor]:
    """Yield windows ``[B, T + 1]`` at random offsets, drawn on the CPU to be equal on all devices."""
    generator = torch.Generator().manual_seed(hyper.seed)
    span = torch.arange(length + 1, device=stream.device)
    for _ in range(steps):
        starts = torch.randint(len(stream) - length, (hyper.batch_size, 1), generator=generator)
        yield stream[starts.to(stream.device, non_blocking=True) + span]


def _update(
    gpt: Transformer,
    windows: Tensor,
    optimizer: torch.optim.Optimizer,
    hyper: Hyperparameters,
    rate: float,
    teacher: Transformer | None,
) -> Tensor:
    gpt.train()
    for group in optimizer.param_groups:
        group["lr"] = rate
    with _autocast(windows.device):
        loss = window_loss(gpt, windows, teacher)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(gpt.parameters(), hyper.clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def _optimizer(gpt: Transformer, hyper: Hyperparameters) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices and embeddings only."""
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
    """Return an autocast context to bf16 on CUDA, and one without effect on a CPU, which computes in fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
