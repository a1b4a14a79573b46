"""The workloads on which rungs are compared: greedy, end of sequence ignored, no prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rosellm.errors import RoseError


@dataclass(frozen=True)
class Workload:
    """Requests of ``max_new_tokens`` each, ``max_batch_size`` at a time.

    Prompts are ``prompt`` repeated ``prompt_repeats`` times, cycling through those counts; or
    ``prompt_tokens`` random ids. ``form`` names the benchmark that runs it. The defaults are also the
    commands'.
    """

    id: str
    num_requests: int = 16
    max_new_tokens: int = 64
    max_batch_size: int = 8
    form: Literal["scheduler", "streaming"] = "scheduler"
    prompt: str = "Hello"
    prompt_repeats: tuple[int, ...] = (1,)
    prompt_tokens: int | None = None

    @property
    def described(self) -> str:
        """What is served, in a line."""
        length = f"of {self.prompt_tokens} tokens" if self.prompt_tokens else "of one token"
        prompts = length if self.form == "scheduler" else "of text, streamed"
        requests = f"{self.num_requests} requests × {self.max_new_tokens} new tokens"
        return f"{requests}, {self.max_batch_size} at a time, prompts {prompts}"

    def flags(self) -> dict[str, Any]:
        """The command-line options that this workload presets."""
        sizes = {name: value for name, value in vars(self).items() if name not in ("id", "form")}
        return sizes | {"stop_on_eos": False, "prefix_cache": False, "pretok": True}


# Shared by all workloads.
MODEL = {"hf_model_id": "gpt2", "load_format": "dummy"}
DTYPE = "float16"

WORKLOADS: dict[str, Workload] = {
    workload.id: workload
    for workload in (
        Workload("W0", num_requests=1, max_new_tokens=512, max_batch_size=1),
        Workload("W1", num_requests=16, max_new_tokens=256, max_batch_size=8),
        Workload("W2", num_requests=64, max_new_tokens=512, max_batch_size=64),
        Workload("W3", num_requests=256, max_new_tokens=64, max_batch_size=256),
        Workload("W4", 128, 128, max_batch_size=128, form="streaming", prompt_repeats=(1, 4)),
        Workload("W5", 128, 128, max_batch_size=8, form="streaming", prompt_repeats=(1, 4)),
        Workload("W6", num_requests=1024, max_new_tokens=256, max_batch_size=1024, prompt_tokens=128),
        Workload("W7", num_requests=256, max_new_tokens=128, max_batch_size=256, prompt_tokens=512),
    )
}


def get_workload(name: str, form: str) -> Workload:
    """The workload ``name``; the benchmark of ``form`` must be able to run it."""
    mine = [workload.id for workload in WORKLOADS.values() if workload.form == form]
    if name not in WORKLOADS:
        raise RoseError(f"workload {name!r} is unknown; benchmark_{form} runs {', '.join(mine)}")
    workload = WORKLOADS[name]
    if workload.form != form:
        raise RoseError(
            f"workload {name} is run by benchmark_{workload.form}; benchmark_{form} runs {', '.join(mine)}"
        )
    return workload
