"""The offline interface, in vLLM's form: ``LLM(model).generate(prompts, sampling_params)``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn, cast

from tqdm import tqdm

from rosellm.errors import RecipeError, RoseError
from rosellm.models.chat import Message, render_chat
from rosellm.models.checkpoint import SHIPPED, checkpoint_folder
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.recipe import Recipe
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.held_interrupt import held_interrupt
from rosellm.roseinfer.serving.prompts import Prompt, as_prompts, each_encoded, each_made, one_each
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.tensor_parallel import load_engine

if TYPE_CHECKING:
    from rosellm.cluster.replicas import Replicas


class LLM:
    """A model that is ready to generate text.

    model: ``rose-tiny``, a local folder or a hub id.
    rung: a name in ``recipe.LADDER``; None means the best rung for the device.
    recipe: any combination of variants, instead of a rung; ``LLM.rung`` is then None.
    tensor_parallel_size: number of GPUs, or of processes on a CPU, that share every layer
        (``tensor_parallel.load_engine``). More than one is supported by the rungs from ``packed_prefill`` on,
        except ``persistent_kernel`` and ``one_pass``.
    data_parallel_size: number of engines that share the prompts, each with ``tensor_parallel_size`` GPUs or
        as many CPU cores (``cluster.replicas.Replicas``). More than one needs the extra ``cluster`` (Ray).
    ray_address: the Ray cluster that runs the engines, "auto" or "host:port". None means the cluster to which
        this process is connected, or else a local one, which ends with the last such ``LLM``.
    device: "auto", "cuda" or "cpu".
    dtype: "float32", "float16", "bfloat16", or "auto": the checkpoint's on a GPU, float32 on a CPU.
    load_format: "auto", or "dummy" for random weights.
    prefix_cache: whether to keep the keys and values of prompts, for prompts with the same beginning in this
        call or a later one.
    prefill_chunk: maximum number of prompt tokens computed between two tokens of running requests, as in
        ``SchedulerConfig``.

    The other options are those of ``Engine``; with several engines, sizes apply to each.
    """

    def __init__(
        self,
        model: str = SHIPPED,
        *,
        rung: str | None = None,
        recipe: Recipe | None = None,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        ray_address: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        load_format: str = "auto",
        max_batch_size: int = 256,
        max_model_len: int | None = None,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        block_size: int = 64,
        prefix_cache: bool = False,
        prefill_chunk: int | None = None,
        deterministic: bool = False,
        warm_up: bool = True,
    ) -> None:
        if rung is not None and recipe is not None:
            raise RecipeError("both a rung and a recipe are given; give one of them")
        config = SchedulerConfig(prefill_chunk=prefill_chunk)
        options: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "load_format": load_format,
            "recipe": rung if recipe is None else recipe,
            "max_batch_size": max_batch_size,
            "max_model_len": max_model_len,
            "num_kv_blocks": num_kv_blocks,
            "gpu_memory_utilization": gpu_memory_utilization,
            "block_size": block_size,
            "prefix_cache": prefix_cache,
            "deterministic": deterministic,
            "warm_up": warm_up,
        }
        self.served: Engine | Replicas  # what a streaming manager uses as its engine
        if type(data_parallel_size) is int and data_parallel_size == 1 and ray_address is None:
            self.served = load_engine(model, tensor_parallel_size=tensor_parallel_size, **options)
        else:
            from rosellm.cluster.replicas import Replicas

            sizes = data_parallel_size, tensor_parallel_size
            self.served = Replicas(model, *sizes, ray_address, config, options)
        self._config = config
        self._folder = None if load_format == "dummy" else checkpoint_folder(model)
        self._lock = Lock()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RoseError("an LLM cannot be copied or pickled; make another one")

    @property
    def rung(self) -> str | None:
        """The rung in use, requested or the best for the device; None for a custom recipe."""
        return self.served.rung

    @property
    def engine(self) -> Engine:
        """The engine in this process; raises ``RoseError`` if replicas run the model."""
        return self.served if isinstance(self.served, Engine) else self.served.engine

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; return the results in the same order.

        prompts: a text, token ids, or an iterable of such prompts. Token ids may be any sequence, array or
            tensor of integers.
        sampling_params: one for all prompts, a list of one per prompt, or None for the defaults.
        use_tqdm: whether to show a progress bar.

        The completions of a prompt are the ``outputs`` of its result, ``SamplingParams.n`` of them, each
        with:

        token_ids, text: the completion.
        logprobs: if requested.
        finish_reason: "stop", "length", or "failed" if no token could be chosen from the model's logits, with
            the reason in ``error``; other completions are unaffected.

        Raises ``PromptError`` or ``SamplingError``, before anything runs, if any request is invalid, and
        ``BusyError`` while a streaming manager owns the engine. Ctrl-C cancels all requests after the current
        step and leaves the engine usable. Calls from other threads wait until this call returns.
        """
        many = as_prompts(prompts)
        params = one_each(SamplingParams() if sampling_params is None else sampling_params, len(many))
        ids = each_encoded(self.served.encode_many, many)
        each = [own.each() for own in params]
        copies = [prompt for prompt, own in zip(ids, each, strict=True) for _ in own]
        if len(copies) > len(ids):  # errors refer to prompt indices, not to copies
            each_made(self.served.limits.check, ids, [own[0] for own in each])
        with self._lock, held_interrupt():
            outputs = iter(self._run(copies, list(chain.from_iterable(each)), use_tqdm))
        return [_grouped(outputs, len(own), prompt) for prompt, own in zip(many, each, strict=True)]

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered by the checkpoint's own chat template.

        messages: ``[{"role": "user", "content": "..."}, ...]``, or a list of such lists.

        Otherwise like :meth:`generate`. Also raises ``CheckpointError`` if the checkpoint has no template.
        """
        several = isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)
        many = cast("list[list[Message]]", messages if several else [messages])
        texts = [render_chat(self._folder, one) for one in many]
        ids = each_encoded(partial(self.served.encode_many, special=False), texts)
        outputs = self.generate(ids, sampling_params, use_tqdm)
        for text, output in zip(texts, outputs, strict=True):
            for completion in output.outputs:
                completion.prompt = text
        return outputs

    def _run(self, ids: list[list[int]], params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        served = self.served
        run = OfflineScheduler(served, self._config).run if isinstance(served, Engine) else served.run
        if not use_tqdm:
            return run(ids, params)
        n_tokens = min(sum(own.max_tokens for own in params), sys.maxsize)
        with tqdm(total=n_tokens, desc="tokens", unit=" tok") as progress:
            return run(ids, params, progress)


def _grouped(outputs: Iterator[RequestOutput], n: int, prompt: str | list[int]) -> RequestOutput:
    """Return the next ``n`` outputs, those of one prompt, as one: the first, with the rest attached to it."""
    first, *others = completions = list(islice(outputs, n))
    first.others = others
    if isinstance(prompt, str):
        for completion in completions:
            completion.prompt = prompt
    return first
