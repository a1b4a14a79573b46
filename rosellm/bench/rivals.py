"""Rivals: engines that can serve the same requests, namely RoseLLM and others that are installed.

Every rival loads the same checkpoint, receives and returns token ids, ignores end of sequence, and empties
its prefix cache before each run.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

import rosellm
from rosellm.bench.job import check_served, make_engine, prepare_run
from rosellm.bench.prompts import new_tokens, request_params
from rosellm.bench.record import engine_facts
from rosellm.errors import DeviceError, RoseError
from rosellm.models.weights import load_model
from rosellm.roseinfer.recipe import get_rung
from rosellm.roseinfer.serving.scheduler import OfflineScheduler


class RivalError(RoseError):
    """A rival that is not installed, cannot run on this machine, or cannot share the process."""


@dataclass(frozen=True)
class Task:
    """The task that a rival is started for.

    checkpoint: a folder with ``config.json`` and ``model.safetensors``.
    options: a benchmark's options, with the sizes of the workload.
    prompts: token ids, one list per request.
    """

    checkpoint: Path
    device: torch.device
    dtype: torch.dtype
    options: Namespace
    prompts: list[list[int]]


@dataclass(frozen=True)
class Rival:
    """An engine with a loaded model.

    generate: runs the task and returns the new token ids of every prompt, in order, on the host.
    facts: version and configuration for the record.
    close: releases the resources that garbage collection does not release.
    in_process: whether this process, rather than another, allocates the engine's GPU memory.
    """

    generate: Callable[[], list[list[int]]]
    facts: dict[str, Any]
    close: Callable[[], object] = lambda: None
    in_process: bool = True


def start_rosellm(task: Task) -> Rival:
    """Start RoseLLM: an engine of the requested rung with ``OfflineScheduler``, as in ``LLM.generate``."""
    gpt = load_model(str(task.checkpoint), task.device, task.dtype)
    rung = get_rung(task.options.rung, task.device)
    longest = max(map(len, task.prompts)) + task.options.max_new_tokens
    engine = make_engine(task.options, rung, gpt, None, longest)
    params = request_params(task.options)

    def generate() -> list[list[int]]:
        prepare_run(engine)
        outputs = OfflineScheduler(engine).run(task.prompts, params)
        check_served(outputs)
        return [output.token_ids for output in outputs]

    return Rival(generate, {"rival_version": rosellm.__version__, **engine_facts(engine)})


def start_transformers(task: Task) -> Rival:
    """Start transformers' ``generate``, with static, left-padded batches of at most ``max_batch_size``.

    To ignore end of sequence, it is removed from the generation config; ``min_new_tokens`` would instead
    forbid that token, which the other rivals may choose. Raises ``RivalError`` for sampling or unequal
    output lengths.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    if task.options.temperature:
        raise RivalError("rival transformers cannot give each request of a batch a seed of its own")
    if len(set(new_tokens(task.options))) > 1:
        raise RivalError("rival transformers runs static batches: requests of unequal lengths cannot end")
    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(task.checkpoint, dtype=task.dtype)
    model.to(task.device)
    model.generation_config.eos_token_id = None
    size, padded = task.options.max_batch_size, partial(pad_sequence, batch_first=True, padding_side="left")
    lengths = {"max_new_tokens": task.options.max_new_tokens, "do_sample": False, "pad_token_id": 0}

    def generate() -> list[list[int]]:
        tokens = []
        for i in range(0, len(task.prompts), size):
            rows = [torch.tensor(prompt, device=task.device) for prompt in task.prompts[i : i + size]]
            ids, mask = padded(rows), padded([torch.ones_like(row) for row in rows])
            output = model.generate(ids, attention_mask=mask, **lengths)
            tokens += output[:, ids.shape[1] :].tolist()
        return tokens

    attention = model.config._attn_implementation  # noqa: SLF001 (there is no public name)
    return Rival(generate, {"rival_version": version("transformers"), "attention": attention})


def start_vllm(task: Task) -> Rival:
    """Start vLLM's offline ``LLM.generate`` with its defaults: a separate engine process, CUDA graphs.

    Closing the rival ends the engine process, which would otherwise keep most of the GPU's memory.
    """
    # importing rosellm queries CUDA, after which a forked engine process cannot use it
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm import LLM, SamplingParams

    arguments = {
        "dtype": str(task.dtype).removeprefix("torch."),
        "max_num_seqs": task.options.max_batch_size,
        "enable_prefix_caching": task.options.prefix_cache,
        "skip_tokenizer_init": True,
    }
    llm = LLM(model=str(task.checkpoint), **arguments)
    prompts = [{"prompt_token_ids": prompt} for prompt in task.prompts]
    same = ("temperature", "top_k", "top_p", "seed", "max_tokens")
    params = [
        SamplingParams(**{name: getattr(own, name) for name in same}, ignore_eos=True, detokenize=False)
        for own in request_params(task.options)
    ]

    def generate() -> list[list[int]]:
        if task.options.prefix_cache:
            llm.reset_prefix_cache()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    facts = {"rival_version": version("vllm"), "llm_arguments": arguments}
    return Rival(generate, facts, llm.llm_engine.engine_core.shutdown, in_process=False)


RIVALS: dict[str, Callable[[Task], Rival]] = {
    "vllm": start_vllm,
    "transformers": start_transformers,
    "rosellm": start_rosellm,
}


def check_rivals(names: list[str], device: torch.device) -> None:
    """Raise ``RivalError`` or ``DeviceError`` if a rival cannot run, before anything is loaded."""
    for name in names:
        if find_spec(name) is None:
            raise RivalError(f"rival {name} is not installed; pip install {name}, or leave it out")
    if "vllm" in names and len(names) > 1:
        others = ", ".join(name for name in names if name != "vllm")
        raise RivalError(
            f"vllm takes most of the GPU's memory and cannot take turns; run {others} separately"
        )
    if "vllm" in names and device.type == "cpu":
        raise DeviceError("rival vllm runs on a GPU; use --device cuda")
