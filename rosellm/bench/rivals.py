"""Engines that can serve the same requests: this one, and others if installed.

A rival is built from a :class:`Task`, then run repeatedly on the same prompts: token ids in, token ids out,
ignoring end of sequence. Prefix caches are emptied before each run. All rivals load the same checkpoint.
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
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

import rosellm
from rosellm.bench.job import kv_blocks_wanted, longest_request
from rosellm.bench.prompts import new_tokens, request_params
from rosellm.bench.record import engine_facts
from rosellm.bench.runs import check_served
from rosellm.errors import DeviceError, RoseError
from rosellm.models.weights import load_model
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.serving.scheduler import OfflineScheduler


class RivalError(RoseError):
    """A rival that is not installed, cannot run on this machine, or cannot share the process."""


@dataclass(frozen=True)
class Task:
    """The task a rival is set up for.

    checkpoint: a folder with ``config.json`` and ``model.safetensors``. options: those of a benchmark, with
    the workload's sizes. prompts: token ids, one list per request.
    """

    checkpoint: Path
    device: torch.device
    dtype: torch.dtype
    options: Namespace
    prompts: list[list[int]]


class Rival(Protocol):
    """An engine with a loaded model. ``in_process``: whether this process holds its memory."""

    in_process: bool

    def __init__(self, task: Task) -> None: ...

    def generate(self) -> list[list[int]]:
        """Return the new token ids of every prompt, in order, on the host."""

    def facts(self) -> dict[str, Any]:
        """Return version and configuration for the record."""

    def close(self) -> None:
        """Release what garbage collection does not; does nothing by default."""


class Rosellm(Rival):
    """RoseLLM: ``OfflineScheduler``, which ``LLM.generate`` uses, on an engine of the requested rung."""

    in_process = True

    def __init__(self, task: Task) -> None:
        options, self.prompts = task.options, task.prompts
        gpt = load_model(str(task.checkpoint), task.device, task.dtype)
        longest = max(map(len, task.prompts))
        blocks = kv_blocks_wanted(options, gpt, longest)
        sizes = {"max_batch_size": options.max_batch_size, "block_size": options.block_size}
        self.params = request_params(options)
        most = longest_request(options, gpt, longest)
        sizes |= {"num_kv_blocks": blocks, "max_model_len": most, "prefix_cache": options.prefix_cache}
        self.engine = Engine(gpt, recipe=options.rung, **sizes)

    def generate(self) -> list[list[int]]:
        if self.engine.prefix_cache is not None:
            self.engine.prefix_cache.clear()
        outputs = OfflineScheduler(self.engine).run(self.prompts, self.params)
        check_served(outputs)
        return [output.token_ids for output in outputs]

    def facts(self) -> dict[str, Any]:
        return {"rival_version": rosellm.__version__, **engine_facts(self.engine)}


class Transformers(Rival):
    """transformers' ``generate``: static, left-padded batches of at most ``max_batch_size`` prompts.

    End of sequence is removed from the generation config: ``min_new_tokens`` would forbid that token, which
    the other rivals may choose.
    """

    in_process = True

    def __init__(self, task: Task) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.prompts, self.options = task.prompts, task.options
        if task.options.temperature:
            raise RivalError("rival transformers cannot give each request of a batch a seed of its own")
        if len(set(new_tokens(task.options))) > 1:
            raise RivalError("rival transformers runs static batches: requests of unequal lengths cannot end")
        model: Any = AutoModelForCausalLM.from_pretrained(task.checkpoint, dtype=task.dtype)
        self.model = model.to(task.device)
        self.model.generation_config.eos_token_id = None

    def generate(self) -> list[list[int]]:
        size = self.options.max_batch_size
        batches = [self.prompts[i : i + size] for i in range(0, len(self.prompts), size)]
        return [tokens for batch in batches for tokens in self._generate_batch(batch)]

    def _generate_batch(self, prompts: list[list[int]]) -> list[list[int]]:
        rows = [torch.tensor(prompt, device=self.model.device) for prompt in prompts]
        padded = partial(pad_sequence, batch_first=True, padding_side="left")
        ids, mask = padded(rows), padded([torch.ones_like(row) for row in rows])
        n_new = self.options.max_new_tokens
        output = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=n_new, do_sample=False, pad_token_id=0
        )
        return output[:, ids.shape[1] :].tolist()

    def facts(self) -> dict[str, Any]:
        attention = self.model.config._attn_implementation  # noqa: SLF001
        return {"rival_version": version("transformers"), "attention": attention}


class VLLM(Rival):
    """vLLM's offline ``LLM.generate`` with its defaults: a separate engine process, CUDA graphs."""

    in_process = False

    def __init__(self, task: Task) -> None:
        # importing rosellm queries CUDA, after which a forked engine process cannot use it
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        from vllm import LLM, SamplingParams

        self.arguments = {
            "dtype": str(task.dtype).removeprefix("torch."),
            "max_num_seqs": task.options.max_batch_size,
            "enable_prefix_caching": task.options.prefix_cache,
            "skip_tokenizer_init": True,
        }
        self.llm = LLM(model=str(task.checkpoint), **self.arguments)
        self.prompts = [{"prompt_token_ids": prompt} for prompt in task.prompts]
        self.params = [
            SamplingParams(
                temperature=own.temperature,
                top_k=own.top_k,
                top_p=own.top_p,
                seed=own.seed,
                max_tokens=own.max_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for own in request_params(task.options)
        ]

    def generate(self) -> list[list[int]]:
        if self.arguments["enable_prefix_caching"]:
            self.llm.reset_prefix_cache()
        outputs = self.llm.generate(self.prompts, self.params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def facts(self) -> dict[str, Any]:
        return {"rival_version": version("vllm"), "llm_arguments": self.arguments}

    def close(self) -> None:
        """End the engine process, which otherwise keeps most of the GPU's memory."""
        self.llm.llm_engine.engine_core.shutdown()


RIVALS: dict[str, Callable[[Task], Rival]] = {"vllm": VLLM, "transformers": Transformers, "rosellm": Rosellm}


def check_rivals(names: list[str], device: torch.device) -> None:
    """Raise ``RivalError`` or ``DeviceError`` if a rival cannot run, before anything is loaded."""
    for name in names:
        if find_spec(name) is None:
            raise RivalError(f"rival {name} is not installed; pip install {name}, or leave it out")
    if "vllm" in names:
        if len(names) > 1:
            others = ", ".join(name for name in names if name != "vllm")
            raise RivalError(
                f"vllm takes most of the GPU's memory and cannot take turns; run {others} separately"
            )
        if device.type == "cpu":
            raise DeviceError("rival vllm runs on a GPU; use --device cuda")
