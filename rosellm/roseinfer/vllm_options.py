"""Options of vLLM's ``LLM`` and server that ours take under another name, or only with a neutral value."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from rosellm.errors import OptionError, PromptError, UnknownModelError, describe

SAME_AS = {
    "max_num_seqs": "max_batch_size",
    "enable_prefix_caching": "prefix_cache",
    "num_gpu_blocks_override": "num_kv_blocks",
}
# How each method of vLLM's ``speculative_config`` is called here; without a method, a model drafts.
PROPOSERS = {"ngram": "ngram", "draft_model": "draft"}
DRAFTING = {"method", "model", "num_speculative_tokens"}
NO_REMOTE_CODE = "code from checkpoints is never run"
# Values without effect, and why others are refused. No values: all have none, since they tune vLLM's inside.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False,), NO_REMOTE_CODE),
    "enable_lora": ((False, None), "LoRA adapters are not supported; merge them into the model"),
    "speculative_config": ((None,), 'use {"method": "ngram" or "draft_model", "num_speculative_tokens": N}'),
    "pipeline_parallel_size": ((1,), "use tensor_parallel_size or data_parallel_size"),
    "tokenizer_mode": (("auto", "hf"), "tokenizers are read by transformers"),
    "skip_tokenizer_init": ((False,), "the tokenizer is always loaded"),
    "runner": (("auto", "generate"), "only text generation is supported"),
    "task": (("auto", "generate", None), "only text generation is supported"),
    "convert": (("auto", "none"), "only text generation is supported"),
    "model_impl": (("auto", "vllm"), "every model has our own implementation"),
    "hf_overrides": ((None, {}), "edit the checkpoint's config.json"),
    "cpu_offload_gb": ((0, 0.0), "weights are held on the device"),
    "enable_sleep_mode": ((False,), "an engine cannot sleep"),
    "tokenizer_revision": ((None,), "give tokenizer= a folder"),
    "code_revision": ((None,), NO_REMOTE_CODE),
    "scheduling_policy": (("fcfs",), "requests start in order of arrival"),
    "limit_mm_per_prompt": ((None, {}), "only text is supported"),
    "logits_processors": ((None, []), "use logit_bias, allowed_token_ids or bad_words"),
} | dict.fromkeys(
    (
        "swap_space", "disable_log_stats", "disable_custom_all_reduce", "enable_chunked_prefill",
        "max_seq_len_to_capture", "served_model_name", "distributed_executor_backend", "compilation_config",
        "max_lora_rank", "max_loras", "max_logprobs", "use_v2_block_manager", "disable_async_output_proc",
        "worker_use_ray", "long_prefill_token_threshold", "allowed_local_media_path", "async_scheduling",
    ),
    ((), ""),
)  # fmt: skip


# Arguments of ``generate`` and ``chat``, and why values that are neither empty nor zeros are refused.
ARGUMENTS = {
    "lora_request": "LoRA adapters are not supported; merge them into the model",
    "priority": "requests start in order of arrival",
    "tokenization_kwargs": "tokenise the prompt with get_tokenizer(), and give the token ids",
}

NO_STRUCTURE = "structured outputs are not supported"
# Fields of a request to a server, their values without effect, and why others are refused.
NEUTRAL_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (({"type": "text"},), NO_STRUCTURE),
    "tool_choice": (("none", "auto"), "the model cannot be made to call a tool"),
    "function_call": (("none", "auto"), "use tools"),
    "functions": (([],), "use tools"),
    "suffix": (("",), "a completion has no end given"),
    "best_of": ((1,), "use n"),
    "use_beam_search": ((False,), "beam search is not supported"),
    "prompt_embeds": ((), "a prompt is text or token ids"),
    "chat_template": ((), "the model's own template is used"),
} | dict.fromkeys(
    ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"), ((), NO_STRUCTURE)
)
FIELD_TYPES = {"stream": bool, "echo": bool, "stream_options": dict, "model": str}


def check_fields(body: dict[str, Any], model: str) -> None:
    """Raise an error if the body of a request to the server of ``model`` has a field that we do not support.

    It is ``UnknownModelError`` for another model's name, and otherwise ``PromptError``.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, (values, reason) in NEUTRAL_FIELDS.items():
        if name in given and given[name] not in values:
            raise PromptError(f"{name} is {describe(given[name])}: {reason}")
    if given.get("stream") and (given.get("echo") or "prompt_logprobs" in given):
        raise PromptError("echo and prompt_logprobs are not streamed")
    for name, kind in FIELD_TYPES.items():
        if not isinstance(given.get(name, kind()), kind):
            raise PromptError(f"{name} is {describe(given[name])}; give a JSON value of type {kind.__name__}")
    if given.get("model", model) != model:
        raise UnknownModelError(f"model {describe(given['model'])} is not served; {model!r} is")
    if given.get("top_logprobs") and not given.get("logprobs"):
        raise PromptError("top_logprobs is given without logprobs: true")


def check_arguments(**given: Any) -> None:
    """Raise ``OptionError`` if an argument of ``generate`` or ``chat`` has a value that we do not support."""
    for name, value in given.items():
        if any(value) if isinstance(value, (list, tuple, dict)) else value:
            raise OptionError(f"{name} is {describe(value)}: {ARGUMENTS[name]}")


def _speculation(config: Any) -> dict[str, Any]:
    """Return the options of ours for vLLM's ``speculative_config``, or none if they cannot express it."""
    if not isinstance(config, dict) or not set(config) <= DRAFTING:
        return {}
    method = config.get("method", "draft_model" if "model" in config else None)
    if method not in PROPOSERS or ("model" in config) != (method == "draft_model"):
        return {}
    options = {"speculation": PROPOSERS[method], "draft_model": config.get("model")}
    return options | {"speculative_tokens": config.get("num_speculative_tokens")}


def translated(given: dict[str, Any], ours: set[str]) -> dict[str, Any]:
    """Return the options of ours that vLLM's options ``given`` stand for.

    ours: names of ours, for the suggestion in an error.

    Raises ``OptionError`` for an unknown option, or a value that we do not support.
    """
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in SAME_AS:
            options |= {} if value is None else {SAME_AS[name]: value}  # None is vLLM's default
        elif name == "speculative_config" and (own := _speculation(value)):
            options |= own
        elif name in NEUTRAL:
            values, reason = NEUTRAL[name]
            if values and value not in values:
                raise OptionError(f"{name} is {describe(value)}: {reason}")
        else:
            close = get_close_matches(name, [*ours, *SAME_AS, *NEUTRAL], n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; use {', '.join(sorted(ours))}"
            raise OptionError(f"LLM has no option {name!r}{hint}")
    return options
