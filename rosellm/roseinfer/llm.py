"""The offline interface in the field's usual shape: ``LLM(model).generate(prompts, sampling_params)``."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from rosellm.errors import PromptError, RecipeError
from rosellm.models.weights import SHIPPED
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.recipe import Recipe
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, one_each

Prompt = str | list[int]


class LLM:
    """A model, ready to generate.

    model: ``rose-tiny``, a local folder or a hub id. rung: a name of ``recipe.LADDER``; None is the device's
    best. recipe: any combination of variants in place of a rung; ``LLM.rung`` is None then. device: "auto",
    "cuda" or "cpu". dtype: "auto", "float32", "float16" or "bfloat16". load_format: "auto", or "dummy" for
    random weights. The sizes and ``deterministic`` are those of ``Engine``.
    """

    def __init__(
        self,
        model: str = SHIPPED,
        *,
        rung: str | None = None,
        recipe: Recipe | None = None,
        device: str = "auto",
        dtype: str = "auto",
        load_format: str = "auto",
        max_batch_size: int = 256,
        num_kv_blocks: int | None = None,
        block_size: int = 64,
        deterministic: bool = False,
    ) -> None:
        if rung is not None and recipe is not None:
            raise RecipeError("both a rung and a recipe are given; give one of them")
        self.engine = Engine.load(
            model,
            device=device,
            dtype=dtype,
            load_format=load_format,
            recipe=rung if recipe is None else recipe,
            max_batch_size=max_batch_size,
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            deterministic=deterministic,
        )

    @property
    def rung(self) -> str | None:
        """The rung that runs: the one asked for, or the device's best; None for a recipe of one's own."""
        return self.engine.rung

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, each text or a list of token ids; results in their order.

        sampling_params: one for all, one each, or None for the defaults. All is checked before anything
        runs: raises ``PromptError`` or ``SamplingError``. A result's completion is its ``outputs[0]``, with
        ``token_ids``, ``text`` and ``finish_reason``: "stop", "length", or "failed" where the model's logits
        gave no token, with the reason in ``error``; the others' completions do not suffer from that.
        """
        many = _as_many(prompts)
        params = one_each(SamplingParams() if sampling_params is None else sampling_params, len(many))
        ids = [self.engine.encode(prompt) for prompt in many]
        with tqdm(total=len(many), desc="prompts", disable=not use_tqdm) as progress:
            outputs = OfflineScheduler(self.engine).run(ids, params, progress)
        for prompt, output in zip(many, outputs, strict=True):
            output.prompt = prompt if isinstance(prompt, str) else None
        return outputs


def _as_many(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list):
        raise PromptError(f"prompts is {prompts!r}; give text, a list of token ids, or a list of these")
    if prompts and all(_is_token_id(item) for item in prompts):
        return [prompts]
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, (str, list)):
            raise PromptError(f"prompt {index} is {prompt!r}; give text or a list of token ids")
    return prompts


def _is_token_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
