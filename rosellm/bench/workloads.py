"""The workloads for comparing rungs. End of sequence is ignored; decoding is greedy by default."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from rosellm.errors import RoseError


@dataclass(frozen=True)
class Workload:
    """A set of requests; the defaults are also those of the commands.

    max_new_tokens: output tokens of a request.
    max_batch_size: maximum number of requests that run together.
    form: the benchmark that runs the workload.
    prompt: text of every prompt.
    prompt_repeats: how often a prompt repeats the text; requests cycle through these counts.
    prompt_tokens: number of random token ids that replace the text; None for text.
    min_new_tokens, min_prompt_tokens: lower bounds of uniformly drawn lengths; None for equal lengths.
    shared_prefix_tokens: number of further token ids that begin all prompts.
    model: the model whose shape is measured; None for any model, in its own dtype.
    """

    id: str
    num_requests: int = 16
    max_new_tokens: int = 64
    max_batch_size: int = 8
    form: Literal["scheduler", "streaming"] = "scheduler"
    prompt: str = "Hello"
    prompt_repeats: tuple[int, ...] = (1,)
    prompt_tokens: int | None = None
    min_new_tokens: int | None = None
    min_prompt_tokens: int | None = None
    shared_prefix_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    prefix_cache: bool = False
    model: str | None = "gpt2"

    @property
    def described(self) -> str:
        """A one-line description of the requests."""
        length = "of one token"
        if self.prompt_tokens is not None and self.prompt_tokens > 1:
            length = f"of {_span(self.min_prompt_tokens, self.prompt_tokens)} tokens"
        if self.shared_prefix_tokens:
            length += f" after {self.shared_prefix_tokens} shared"
        prompts = length if self.form == "scheduler" else "of text, streamed"
        new = _span(self.min_new_tokens, self.max_new_tokens)
        requests = f"{self.num_requests} request{'s' * (self.num_requests > 1)} × {new} new tokens"
        return f"{requests}, {self.max_batch_size} at a time, prompts {prompts}{self._sampling}"

    @property
    def mean_context(self) -> float:
        """Mean number of cached tokens of a running request, over all its decode steps."""
        new = range(self.min_new_tokens or self.max_new_tokens, self.max_new_tokens + 1)
        mean_new = sum(n * n for n in new) / sum(new) / 2  # a request of n new tokens takes n steps
        if self.prompt_tokens is None:  # the prompt is one token of GPT-2, repeated
            return sum(self.prompt_repeats) / len(self.prompt_repeats) + mean_new
        shortest = self.min_prompt_tokens or self.prompt_tokens
        return self.shared_prefix_tokens + (shortest + self.prompt_tokens) / 2 + mean_new

    @property
    def _sampling(self) -> str:
        filters = [f"top-k {self.top_k}"] * bool(self.top_k) + [f"top-p {self.top_p}"] * (self.top_p < 1)
        return ", ".join(["", f"temperature {self.temperature}", *filters]) if self.temperature else ""

    def flags(self) -> dict[str, Any]:
        """Return the command-line options that this workload presets."""
        sizes = {name: value for name, value in vars(self).items() if name not in ("id", "form", "model")}
        return sizes | {"stop_on_eos": False, "pretok": True}


def _span(low: int | None, high: int) -> str:
    return str(high) if low is None else f"{low} to {high}"


# The dtype of workloads with a fixed model; other workloads use the model's own dtype.
DTYPE = "float16"
LOAD_FORMAT = "dummy"
MODERN_MODEL = "Qwen/Qwen3-0.6B"  # default of the workloads without a fixed model

_UNEQUAL = Workload("W8", 512, 512, 256, prompt_tokens=512, min_new_tokens=16, min_prompt_tokens=16)


def _by_id(*workloads: Workload) -> dict[str, Workload]:
    return {workload.id: workload for workload in workloads}


WORKLOADS = _by_id(
    Workload("W0", num_requests=1, max_new_tokens=512, max_batch_size=1),
    Workload("W1", num_requests=16, max_new_tokens=256, max_batch_size=8),
    Workload("W2", num_requests=64, max_new_tokens=512, max_batch_size=64),
    Workload("W3", num_requests=256, max_new_tokens=64, max_batch_size=256),
    Workload("W4", 128, 128, max_batch_size=128, form="streaming", prompt_repeats=(1, 4)),
    Workload("W5", 128, 128, max_batch_size=8, form="streaming", prompt_repeats=(1, 4)),
    Workload("W6", num_requests=1024, max_new_tokens=256, max_batch_size=1024, prompt_tokens=128),
    Workload("W7", num_requests=256, max_new_tokens=128, max_batch_size=256, prompt_tokens=512),
    _UNEQUAL,
    replace(_UNEQUAL, id="W9", temperature=0.6),
    replace(_UNEQUAL, id="W10", temperature=0.8, top_k=50, top_p=0.9),
    Workload("PFX", 512, 64, 256, prompt_tokens=32, shared_prefix_tokens=512, prefix_cache=True),
)

# For any model with enough positions, in its own dtype.
MODEL_WORKLOADS = _by_id(
    Workload("D1", 1, 512, max_batch_size=1, prompt_tokens=1, model=None),
    Workload("D8", 8, 256, max_batch_size=8, prompt_tokens=64, model=None),
    Workload("D64", 64, 512, max_batch_size=64, prompt_tokens=1, model=None),
    Workload("P512", 256, 128, max_batch_size=256, prompt_tokens=512, model=None),
    Workload(
        "MIX", 256, 1024, 256, prompt_tokens=1024, min_new_tokens=100, min_prompt_tokens=100, model=None
    ),
    Workload("L8K", 16, 256, max_batch_size=16, prompt_tokens=8192, model=None),
    Workload("L32K", 1, 256, max_batch_size=1, prompt_tokens=32000, model=None),
    Workload("PRE", 64, 1, max_batch_size=64, prompt_tokens=2048, model=None),
    Workload("TTFT64", 1, 1, max_batch_size=1, prompt_tokens=64, model=None),
    Workload("TTFT1K", 1, 1, max_batch_size=1, prompt_tokens=1024, model=None),
)
ALL_WORKLOADS = WORKLOADS | MODEL_WORKLOADS


def get_workload(name: str, form: str) -> Workload:
    """Return the workload ``name``; raise ``RoseError`` unless the benchmark ``form`` runs it."""
    workload = ALL_WORKLOADS.get(name)
    if workload is None or workload.form != form:
        mine = ", ".join(workload.id for workload in ALL_WORKLOADS.values() if workload.form == form)
        told = "is unknown" if workload is None else f"is run by benchmark_{workload.form}"
        raise RoseError(f"workload {name!r} {told}; benchmark_{form} runs {mine}")
    return workload
