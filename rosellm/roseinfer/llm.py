"""The offline interface, in vLLM's form: ``LLM(model).generate(prompts, sampling_params)``."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from itertools import accumulate, chain, islice
from random import Random
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from tqdm import tqdm

from rosellm.errors import (
    CheckpointError,
    LongPromptError,
    OptionError,
    PromptError,
    RecipeError,
    RoseError,
    describe,
)
from rosellm.models.chat import NO_VARIABLES, Message, hf_tokenizer, render_chat
from rosellm.models.checkpoint import SHIPPED, checkpoint_folder, draft_for, sampling_defaults
from rosellm.roseinfer.cache.limits import Limits
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.recipe import Recipe
from rosellm.roseinfer.request import RequestMetrics
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.held_interrupt import held_interrupt
from rosellm.roseinfer.serving.prompts import Prompt, as_prompts, each_encoded, each_made, one_each
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager
from rosellm.roseinfer.tensor_parallel import load_engine
from rosellm.roseinfer.vllm_options import check_arguments, translated

if TYPE_CHECKING:
    from rosellm.cluster.replicas import Replicas


@contextmanager
def without_autocast() -> Iterator[None]:
    """Turn off autocast, which would change the dtypes in which an engine computes."""
    with ExitStack() as off:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                off.enter_context(torch.autocast(kind, enabled=False))
        yield


class LLM:
    """A model that is ready to generate text.

    model: ``rose-tiny``, a local folder or a hub id.
    rung: a name in ``recipe.LADDER``; None means the best rung for the device.
    recipe: any combination of variants, instead of a rung; ``LLM.rung`` is then None.
    tensor_parallel_size: number of GPUs, or of processes on a CPU, that share every layer
        (``tensor_parallel.load_engine``). More than one is supported by the rungs from ``fused_append`` on,
        except ``persistent_kernel``, ``one_pass`` and ``speculative``.
    data_parallel_size: number of engines that share the prompts, each with ``tensor_parallel_size`` GPUs or
        as many CPU cores (``cluster.replicas.Replicas``). More than one needs the extra ``cluster`` (Ray).
    ray_address: the Ray cluster that runs the engines, "auto" or "host:port". None means the cluster to which
        this process is connected, or else a local one, which ends with the last such ``LLM``.
    device: "auto", "cuda" or "cpu".
    dtype: "float32", "float16", "bfloat16", a dtype of torch, or "auto": the checkpoint's on a GPU, float32
        on a CPU.
    load_format: "auto" or "safetensors", or "dummy" for random weights.
    prefix_cache: whether to keep the keys and values of prompts, for prompts with the same beginning in this
        call or a later one.
    prefill_chunk: maximum number of prompt tokens computed between two tokens of running requests, as in
        ``SchedulerConfig``.
    max_num_batched_tokens: maximum number of prompt tokens per scheduler iteration.
    warm_up, enforce_eager: by default every CUDA graph is captured at construction; ``warm_up=False``, or
        ``enforce_eager=True``, captures each at its first use.
    quantization: "fp8" or "int8" quantises the weights of all layers to 8 bits as they are loaded, with one
        scale per output (:mod:`quantized`); "int4" to 4 bits, with one scale per output and 128 inputs. The
        head, and an embedding tied to it, become int8. Tokens then differ from those of the checkpoint's own
        weights.
    calibration: a text, or a list of texts, of tens of thousands of tokens: "int4" then rounds weights so
        that outputs for such texts change least (:mod:`calibration`). The CPU's memory must hold the weights
        in ``dtype``; the device holds those of one layer beside the quantised model.
    kv_cache_dtype: "fp8" or "int8" quantises keys and values to 8 bits, with one scale per token and head, so
        that about twice as many tokens fit in the cache; "auto" does not.
    speculation: "ngram" drafts further tokens of each sequence from its own text, and verifies them in the
        same step; in float32 the tokens are those of single steps. "draft" lets a smaller model draft them.
        None decodes one token per step.
    draft_model: the smaller model, for "draft": a folder or hub id of a model with the same tokens. Shipped
        models have one of their own.
    speculative_tokens: maximum number of tokens drafted per step and sequence, 1 to 16; None means 7.
    seed: seeds the requests that have no seed, so that the same calls give the same tokens; None gives each
        a fresh seed.
    tokenizer: a folder or hub id with the tokenizer to use instead of the checkpoint's own.
    revision, download_dir, hf_token: the hub's branch, tag or commit, the folder for downloads, and the
        access token.
    generation_config: "auto" takes the sampling defaults of the checkpoint's ``generation_config.json``;
        "vllm" takes those of ``SamplingParams``.
    options: options of vLLM under its own names (``vllm_options``).

    The other options are those of ``Engine``; with several engines, sizes apply to each.
    """

    @without_autocast()
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
        dtype: str | torch.dtype = "auto",
        load_format: str = "auto",
        max_batch_size: int = 256,
        max_model_len: int | None = None,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        block_size: int = 64,
        prefix_cache: bool = False,
        prefill_chunk: int | None = None,
        max_num_batched_tokens: int | None = None,
        deterministic: bool = False,
        warm_up: bool = True,
        tune: bool = False,
        quantization: str | None = None,
        calibration: str | list[str] | None = None,
        kv_cache_dtype: str = "auto",
        speculation: str | None = None,
        draft_model: str | None = None,
        speculative_tokens: int | None = None,
        enforce_eager: bool = False,
        seed: int | None = None,
        tokenizer: str | None = None,
        revision: str | None = None,
        download_dir: str | None = None,
        hf_token: str | None = None,
        generation_config: str = "auto",
        **options: Any,
    ) -> None:
        if rung is not None and recipe is not None:
            raise RecipeError("both a rung and a recipe are given; give one of them")
        if generation_config not in ("auto", "vllm"):
            raise OptionError(f"generation_config is {describe(generation_config)}; use 'auto' or 'vllm'")
        load_format = "auto" if load_format == "safetensors" else load_format
        budget: dict[str, Any] = (
            {} if max_num_batched_tokens is None else {"prefill_token_budget": max_num_batched_tokens}
        )
        config = SchedulerConfig(prefill_chunk=prefill_chunk, **budget)
        if speculation == "draft":
            draft_model = draft_for(model, speculation, draft_model)
        if load_format != "dummy" and (revision or download_dir or hf_token):
            if draft_model is not None:
                draft_model = str(checkpoint_folder(draft_model, None, download_dir, hf_token))
            model = str(checkpoint_folder(model, revision, download_dir, hf_token))
        own: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "load_format": load_format,
            "tokenizer": tokenizer,
            "recipe": rung if recipe is None else recipe,
            "max_batch_size": max_batch_size,
            "max_model_len": max_model_len,
            "num_kv_blocks": num_kv_blocks,
            "gpu_memory_utilization": gpu_memory_utilization,
            "block_size": block_size,
            "prefix_cache": prefix_cache,
            "deterministic": deterministic,
            "warm_up": warm_up and not enforce_eager,
            "tune": tune,
            "quantization": quantization,
            "calibration": calibration,
            "kv_cache_dtype": kv_cache_dtype,
            "speculation": speculation,
            "draft_model": draft_model,
            "speculative_tokens": speculative_tokens,
        }
        theirs = translated(options, set(signature(LLM).parameters))
        if speculation is not None and "speculation" in theirs:
            raise OptionError("both speculation and speculative_config are given; give one of them")
        own |= theirs
        self.served: Engine | Replicas  # what a streaming manager uses as its engine
        if type(data_parallel_size) is int and data_parallel_size == 1 and ray_address is None:
            self.served = load_engine(model, tensor_parallel_size=tensor_parallel_size, **own)
        else:
            from rosellm.cluster.replicas import Replicas

            sizes = data_parallel_size, tensor_parallel_size
            self.served = Replicas(model, *sizes, ray_address, config, own)
        self._config, self._seeds = config, None if seed is None else Random(seed)
        self._folder = None if load_format == "dummy" else checkpoint_folder(model)
        self._tokenizer_folder = self._folder if tokenizer is None else checkpoint_folder(tokenizer)
        folder = self._folder if generation_config == "auto" else None
        self._defaults = SamplingParams(**{} if folder is None else sampling_defaults(folder))
        self._lock, self._managing, self._n_managed = Lock(), Lock(), 0
        self._manager: StreamingManager | None = None

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

    @property
    def llm_engine(self) -> LLM:
        """This object, for programs that look for vLLM's ``llm_engine.model_config.max_model_len``."""
        return self

    @property
    def model_config(self) -> Limits:
        """The limits on requests, among them ``max_model_len``."""
        return self.served.limits

    def get_tokenizer(self) -> Any:
        """Return the tokenizer as an object of transformers; raise ``CheckpointError`` if there is none."""
        if self._tokenizer_folder is None:
            raise CheckpointError("a dummy tokenizer has no form of transformers; load a checkpoint")
        return hf_tokenizer(self._tokenizer_folder)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that give none: those of ``generation_config.json``."""
        return self._defaults.clone()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: list[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; return the results in the same order.

        prompts: a text, token ids, or an iterable of such prompts. Token ids may be any sequence, array or
            tensor of integers. A prompt may also be a dictionary with "prompt" or "prompt_token_ids".
        sampling_params: one for all prompts, a list of one per prompt, or None for
            :meth:`get_default_sampling_params`.
        use_tqdm: whether to show a progress bar.
        lora_request, priority, tokenization_kwargs: taken without effect: None, zeros and {}.

        The completions of a prompt are the ``outputs`` of its result, ``SamplingParams.n`` of them, each
        with:

        token_ids, text: the completion.
        logprobs: if requested.
        finish_reason: "stop", "length", or "failed" with the reason in ``error``: no token could be chosen
            from the model's logits, or the prompt leaves no room for one. Other completions are unaffected.

        Raises ``PromptError`` or ``SamplingError``, before anything runs, if any request is invalid, or if no
        prompt leaves room for a token, and ``BusyError`` while a streaming manager owns the engine. Ctrl-C
        cancels all requests after the current step and leaves the engine usable. Calls from other threads
        wait until this call returns.
        """
        check_arguments(lora_request=lora_request, priority=priority, tokenization_kwargs=tokenization_kwargs)
        many, texts = as_prompts(prompts)
        ids = each_encoded(self.served.encode_many, many)
        self._warn_of_two_beginnings(many, ids)
        return self._complete(texts, ids, sampling_params, use_tqdm)

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered by the checkpoint's own chat template.

        messages: ``[{"role": "user", "content": "..."}, ...]``, or a list of such lists; see ``render_chat``.
        chat_template: a template to use instead.
        add_generation_prompt: whether to append the header of the model's answer.
        continue_final_message: whether the last message is the beginning of the answer; set
            ``add_generation_prompt=False`` with it.
        tools: the tools that the template describes to the model.
        chat_template_kwargs: values of the template's own variables, such as ``enable_thinking``.

        Otherwise like :meth:`generate`. Also raises ``CheckpointError`` if the checkpoint has no template.
        """
        check_arguments(lora_request=lora_request)
        several = isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)
        many = cast("list[list[Message]]", messages if several else [messages])
        given = {"tools": tools, "chat_template": chat_template}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        options |= {"continue_final_message": continue_final_message}
        texts, ids = self.encode_chats(many, add_generation_prompt, chat_template_kwargs, **options)
        return self._complete(texts, ids, sampling_params, use_tqdm)

    def encode_chats(
        self,
        conversations: list[list[Message]],
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[list[str], list[list[int]]]:
        """Return conversations as rendered by ``render_chat``, and as token ids; raise its errors."""
        own, folder = chat_template_kwargs or {}, self._tokenizer_folder
        if not isinstance(own, dict):
            raise PromptError(f"chat_template_kwargs is {describe(own)}; give a dictionary")
        if wrong := NO_VARIABLES & own.keys():
            raise PromptError(f"chat_template_kwargs has {min(wrong)!r}, which is no variable of a template")
        options |= {"add_generation_prompt": add_generation_prompt} | own
        texts = [render_chat(folder, one, **options) for one in conversations]
        return texts, each_encoded(partial(self.served.encode_many, special=False), texts)

    async def generate_async(
        self, prompt: str | list[int], sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """Complete one prompt like :meth:`generate`, in a coroutine; many calls run as one batch.

        Cancelling the task cancels the request. While such calls run, :meth:`generate` raises ``BusyError``.
        To read text as it arrives, use a ``StreamingManager``.
        """
        params = self._seeded(self._defaults if sampling_params is None else sampling_params)
        with self._managed() as manager:
            calls = [manager.complete(prompt, own) for own in params.each()]
            output = _grouped(iter(await asyncio.gather(*calls)), len(calls))
        for completion in output.outputs:
            completion.prompt = prompt if isinstance(prompt, str) else None
        return output

    @contextmanager
    def _managed(self) -> Iterator[StreamingManager]:
        """Lend the streaming manager of asynchronous calls, which lives while any of them runs."""
        with self._managing:
            if not self._n_managed:
                self._manager = StreamingManager(self.served, self._config)
            self._n_managed += 1
            manager = self._manager
        assert manager is not None
        try:
            yield manager
        finally:
            with self._managing:
                self._n_managed -= 1
                if not self._n_managed:
                    manager.close()

    @without_autocast()
    def _complete(
        self,
        prompts: Sequence[Any],
        ids: list[list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Complete prompts, given as token ids; ``prompts`` has the texts that the outputs show."""
        self.served.check_process()
        params = one_each(self._defaults if sampling_params is None else sampling_params, len(prompts))
        params = [self._seeded(own) for own in params]
        ids = [self.served.limits.truncated(own, one) for own, one in zip(ids, params, strict=True)]
        too_long = self._too_long(ids, params)
        each = [[] if i in too_long else own.each() for i, own in enumerate(params)]
        copies = [prompt for prompt, own in zip(ids, each, strict=True) for _ in own]
        places = accumulate(map(len, each), initial=0)
        firsts = [place for place, own in zip(places, each, strict=False) for _ in own]
        with self._lock, held_interrupt():
            outputs = iter(self._run(copies, list(chain.from_iterable(each)), firsts, use_tqdm))
        grouped = [
            _grouped(
                (_failed(ids[i], too_long[i]) for _ in range(own.n)) if i in too_long else outputs, own.n
            )
            for i, own in enumerate(params)
        ]
        for prompt, output in zip(prompts, grouped, strict=True):
            for completion in output.outputs:
                completion.prompt = prompt if isinstance(prompt, str) else None
        return grouped

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        if self._seeds is None or params.seed is not None or params.is_greedy:
            return params
        own = params.clone()
        own.seed = self._seeds.getrandbits(62)
        return own

    def _too_long(self, ids: list[list[int]], params: list[SamplingParams]) -> dict[int, LongPromptError]:
        """Return the errors of the prompts that are too long, by index; raise all other errors.

        If all prompts are too long, raises the first one's error.
        """

        def error_of(prompt: list[int], own: SamplingParams) -> LongPromptError | None:
            try:
                self.served.limits.check(prompt, own.each()[0])
            except LongPromptError as error:
                return error
            return None

        found = enumerate(each_made(error_of, ids, params))
        errors = {index: error for index, error in found if error is not None}
        if errors and len(errors) == len(ids):
            raise errors[0]
        for index, error in errors.items():
            warnings.warn(f"prompt {index} is not completed: {error}", stacklevel=4)
        return errors

    def _warn_of_two_beginnings(self, prompts: Sequence[str | list[int]], ids: list[list[int]]) -> None:
        bos = getattr(self.served.tokenizer, "bos_token_id", None)
        doubled = [i for i, p in enumerate(prompts) if isinstance(p, str) and ids[i][:2] == [bos, bos]]
        if bos is not None and doubled:
            warnings.warn(
                f"prompt {doubled[0]} begins with two beginning-of-sequence tokens: the text has one, and "
                "the tokenizer adds one; use LLM.chat, or leave it out of the text",
                stacklevel=3,
            )

    def _run(
        self, ids: list[list[int]], params: list[SamplingParams], firsts: list[int], use_tqdm: bool
    ) -> list[RequestOutput]:
        served = self.served
        run = OfflineScheduler(served, self._config).run if isinstance(served, Engine) else served.run
        if not use_tqdm:
            return run(ids, params, None, firsts)
        limits = served.limits
        n_tokens = sum(limits.max_length(p, own) - len(p) for p, own in zip(ids, params, strict=True))
        with tqdm(total=n_tokens, desc="tokens", unit=" tok") as progress:
            return run(ids, params, progress, firsts)


def _failed(prompt: list[int], error: LongPromptError) -> RequestOutput:
    """Return the output of a request that never ran."""
    metrics = RequestMetrics(arrival=perf_counter())
    return RequestOutput(0, prompt, [], "failed", metrics, "", error=str(error))


def _grouped(outputs: Iterator[RequestOutput], n: int) -> RequestOutput:
    """Return the next ``n`` outputs, those of one prompt, as one: the first, with the rest attached to it."""
    first, *others = completions = list(islice(outputs, n))
    first.others = others
    for index, completion in enumerate(completions):
        completion.index = index
    return first
