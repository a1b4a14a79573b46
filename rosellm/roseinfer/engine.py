"""The engine: a model, its KV cache, and the step of one recipe."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NoReturn

import torch

from rosellm.errors import OptionError, PromptError, RecipeError, RoseError, describe
from rosellm.models.arch import Arch
from rosellm.models.checkpoint import SHIPPED
from rosellm.models.loading import AnyTokenizer, load_draft, load_parts
from rosellm.models.model import Transformer
from rosellm.models.quantized import CODES, check_fp8
from rosellm.roseinfer.assembly import build_cache, build_step
from rosellm.roseinfer.cache.budget import BlockBudget
from rosellm.roseinfer.cache.gpu_memory import GPUMemory
from rosellm.roseinfer.cache.kv_blocks import KVBlocks, blocks_for
from rosellm.roseinfer.cache.layer_blocks import KVBlockManager
from rosellm.roseinfer.cache.limits import Limits, new_sequence
from rosellm.roseinfer.cache.prefix_cache import PrefixCache
from rosellm.roseinfer.kernels.compile_ahead import begin_hashing, compile_ahead
from rosellm.roseinfer.kernels.table import Kernels, choose_kernels
from rosellm.roseinfer.layers.batch_invariant import ALIGNMENT
from rosellm.roseinfer.owned import Owned
from rosellm.roseinfer.ranks.group import ALONE, Group
from rosellm.roseinfer.recipe import LADDER, Recipe, check_launch, get_rung
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.rung import Rung
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.steps.captured_prefill import CAPTURED_TOKENS
from rosellm.roseinfer.steps.step import Step
from rosellm.roseinfer.trial import CPU_KV_BYTES, PREFILL_TOKENS, kv_blocks_within_memory, working_bytes
from rosellm.roseinfer.tuning import tune_or_load

__all__ = ["Engine", "KVBlockManager"]
LARGEST_SIZE = 2**31 - 1  # device counters are int32
DRAFTS, MOST_DRAFTS = 7, 16


class Engine(Owned):
    """A model with a KV cache, and the step that prefills and decodes the sequences that a scheduler chooses.

    A step on the device may deliver its tokens later: it is begun by :meth:`begin_prefill` or
    :meth:`begin_decode`, and collected by ``engine.step.collect``. :meth:`prefill` and :meth:`decode` do
    both.

    recipe: the name of a rung of ``LADDER``, or any ``Recipe``; None means the best rung for the device.
    max_batch_size: maximum number of sequences that decode together.
    max_model_len: maximum number of tokens of a request, prompt and output together; None means the model's
        number of positions, or as many as memory has room for.
    num_kv_blocks: number of KV blocks per layer; None means enough for ``max_batch_size`` full-length
        sequences, but no more than memory allows.
    gpu_memory_utilization: the fraction of a GPU's memory for everything that the engine holds. If this may
        limit the cache, the memory used outside the cache is measured by trial runs (:mod:`trial`).
    block_size: number of tokens per block, a power of two.
    kv_cache_dtype: "fp8" or "int8" quantises keys and values to 8 bits, with one scale per token and head
        (``quantized.QuantizedHeads``); "auto" keeps them in the model's dtype.
    kernels: "auto", "triton", "torch" or a ``Kernels``.
    prefix_cache: whether to keep the keys and values of prompts for later prompts with the same beginning.
    deterministic: whether a request's logits and tokens are bitwise the same whatever other requests share
        its batch or the cache (``batch_invariant``). Prompts are then cut only at multiples of
        ``prefill_alignment`` tokens.
    warm_up: whether to capture, at construction, every CUDA graph that these options allow, so that no
        request waits for a capture. False captures each graph at its first use. No effect on a CPU.
    speculative_tokens: maximum number of tokens that a step drafts per sequence, if the recipe speculates;
        None means ``DRAFTS``.
    draft: the model that drafts, if the recipe's ``speculation`` is "draft": it has the same vocabulary.
    tune: whether to tune the GEMMs of decode steps for this model and GPU before the graphs are captured, in
        less than two minutes, unless an earlier process has done it (:mod:`tuning`).
    group: the ranks that run the engine together, each with its part of the model (:mod:`tensor_parallel`).

    Public attributes:

    step, blocks: the step, and the KV cache.
    budget: counts the free and reserved blocks.
    kv_form: the format of quantised keys and values, or None.
    prefix_cache: the ``PrefixCache``, or None.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: AnyTokenizer | None = None,
        *,
        recipe: str | Rung | None = None,
        max_batch_size: int = 256,
        max_model_len: int | None = None,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        block_size: int = 64,
        kv_cache_dtype: str = "auto",
        kernels: str | Kernels = "auto",
        prefix_cache: bool = False,
        deterministic: bool = False,
        warm_up: bool = True,
        tune: bool = False,
        speculative_tokens: int | None = None,
        draft: Transformer | None = None,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        _check_sizes(max_batch_size, num_kv_blocks, block_size)
        _check_share(gpu_memory_utilization)
        _check_switches(prefix_cache=prefix_cache, deterministic=deterministic, warm_up=warm_up, tune=tune)
        self.model, self.tokenizer, self.config, self.group = model, tokenizer, model.whole, group
        self.rung, self.recipe = _choose_recipe(recipe, model.device)
        check_launch(self.recipe, model.device)
        self.recipe.check_serves(model.config)
        if model.quantization is not None:
            _check_quantized(self.recipe)
        if prefix_cache and not self.recipe.has_prefix_cache:
            raise OptionError(f"rung {self.rung!r} has no prefix cache; resident_step and later ones do")
        if deterministic:
            self.recipe = self.recipe.invariant()
        self.recipe.check_ranks(group.part.size)
        self.deterministic = self.recipe.numerics == "invariant"
        self.kv_form = _check_kv_form(kv_cache_dtype, self.recipe, self.deterministic, model.device)
        self.speculative_tokens = _drafts_of(speculative_tokens, self.recipe.speculation)
        self.max_batch_size, self.block_size = max_batch_size, block_size
        self.max_model_len = _model_len(max_model_len, self.config)
        self._may_shorten = max_model_len is None
        self.draft = _check_draft(draft, self.recipe.speculation, self.config, self.max_model_len)
        self._warms, self._is_compiled = warm_up, False
        self.kernels = choose_kernels(kernels, self.recipe.launch, model.device)
        if self.rung is not None and isinstance(self.recipe, Recipe):
            self.recipe = self.recipe.on_ranks(group.part.size, model.device, self.kernels.name)
        self._stream = torch.cuda.current_stream(model.device) if model.device.type == "cuda" else None
        n_blocks = num_kv_blocks or self._default_kv_blocks(gpu_memory_utilization)
        self.blocks = self._cache_of(n_blocks)
        self.prefill_alignment = ALIGNMENT if self.deterministic else 1
        can_share = self.recipe.has_prefix_cache
        self._shared = PrefixCache(self.blocks, self.prefill_alignment) if can_share else None
        self.prefix_cache = self._shared if prefix_cache else None
        self.step = self._step_on(self.blocks)
        sizes = self.max_model_len, block_size, self.num_kv_blocks
        self.limits = Limits(self.config.vocab_size, self.config.n_positions, *sizes)
        per_step = 1 + self.speculative_tokens
        self.budget = BlockBudget(self.blocks, self._shared, self.step.run_ahead, per_step)
        self._n_warmed = 0
        if tune:
            tune_or_load(self.step, model)
        if warm_up:
            self.warm_up()
        self._n_requests = 0
        self._holders: set[Sequence] = set()

    @classmethod
    def load(
        cls,
        model: str = SHIPPED,
        *,
        device: str = "auto",
        dtype: str = "auto",
        load_format: str = "auto",
        tokenizer: str | None = None,
        quantization: str | None = None,
        calibration: str | list[str] | None = None,
        draft_model: str | None = None,
        **options: Any,
    ) -> Engine:
        """Load a model with :func:`loading.load_parts`, and build an engine on it.

        quantization, calibration: the format of the weights, and texts for it, as in ``load_parts``.
        draft_model: the model that drafts, a shipped model's name, a folder or a hub id; None for none.
        options: options of the constructor.
        """
        begin_hashing()
        given = model, device, dtype, load_format
        gpt, tokens = load_parts(
            *given, tokenizer=tokenizer, quantization=quantization, calibration=calibration
        )
        if draft_model is not None:
            options |= {"draft": load_draft(draft_model, gpt, tokens, load_format)}
        return cls(gpt, tokens, **options)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def selected(self) -> AbstractContextManager[object]:
        """Return a context in which the GPU and the stream are current on which the engine was made."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @property
    def num_kv_blocks(self) -> int:
        """The number of KV blocks per layer."""
        return self.blocks.max_blocks_per_layer

    @property
    def late_captures(self) -> int:
        """The number of CUDA graphs captured since the latest warm-up, for which requests had to wait."""
        return self.step.n_captured - self._n_warmed

    def warm_up(self, rows: int | None = None) -> None:
        """Compile the kernels and capture the CUDA graphs of all decode steps and prefills, in every mode.

        rows: if given, warm up only the decode steps of that many sequences.

        Progress bars on stderr show compilations and captures that take longer than a second.
        """
        self.step.warm_up(rows, self._rehearsed_tokens, self._is_compiled)
        self._n_warmed = self.step.n_captured

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RoseError("an engine cannot be copied or pickled; make another one")

    def make_sequence(self, prompt: list[int], params: SamplingParams) -> Sequence:
        """Validate a request and return its sequence.

        prompt: token ids.

        With stop strings, the sequence's text is decoded token by token. Raises ``PromptError`` or
        ``SamplingError`` for a request that this engine can never run.
        """
        self._n_requests += 1
        eos, tokenizer = self.config.eos_token_ids, self.tokenizer
        return new_sequence(
            self._n_requests, prompt, params, self.limits, eos, tokenizer, replays=self.deterministic
        )

    def encode(self, prompt: str | list[int], special: bool = True) -> list[int]:
        """Return the token ids of a prompt; a list of token ids is returned unchanged.

        special: whether to add the special tokens that the checkpoint's tokenizer adds to every text.

        Raises ``PromptError`` for a text that cannot be encoded.
        """
        return self.encode_many([prompt], special)[0]

    def encode_many(self, prompts: SequenceOf[str | list[int]], special: bool = True) -> list[list[int]]:
        """Return the token ids of each prompt, as :meth:`encode` does; texts are tokenized on all cores."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts and self.tokenizer is None:
            raise PromptError("a prompt of text needs a tokenizer, and this engine has none")
        encoded = iter(self.tokenizer.encode_many(texts, special) if self.tokenizer is not None else [])
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    def begin_prefill(self, sequences: list[Sequence], counts: list[int] | None = None) -> list[Sequence]:
        """Begin caching at most ``counts[i]`` more tokens of sequence i; None means all that remain.

        Returns the sequences that are fully cached afterwards: each receives its next token when the step is
        collected, and may then decode. Tokens of a new sequence that the prefix cache holds are not
        recomputed.
        """
        self.match_prefixes(sequences)
        rests = [s.n_to_prefill for s in sequences]
        chunks = rests if counts is None else list(map(min, counts, rests))
        self._check_chunks(sequences, chunks)
        whole = [s for s, chunk in zip(sequences, chunks, strict=True) if s.completes_prefill(chunk)]
        if self._shared:
            self.budget.make_room_to_prefill(sequences, chunks)
        self._holders.update(sequences)
        self.step.begin_prefill(sequences, chunks)
        if self._shared is not None:
            for sequence in whole:
                if self.prefix_cache is not None or sequence.n_siblings:
                    self._shared.insert(sequence.prompt, sequence.block_ids)
        return whole

    def begin_decode(self, sequences: list[Sequence]) -> int:
        """Begin a step that gives every sequence its next token; return the number of rows that it advances.

        A step that runs ahead omits sequences whose last token is already in flight; if that applies to all
        sequences, nothing runs. A list that is passed again must not have been modified in between.
        """
        if self._shared:
            self.budget.make_room_to_decode(sequences)
        return self.step.begin_decode(sequences)

    def prefill(self, sequences: list[Sequence]) -> None:
        """Cache the rest of the sequences' tokens and commit the next ones; wait for all begun steps."""
        self.begin_prefill(sequences)
        self._finish()

    def decode(self, sequences: list[Sequence]) -> None:
        """Generate and commit the next token of every sequence, or several; wait for all begun steps."""
        self.begin_decode(sequences)
        self._finish()

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of an ended or abandoned sequence, which receives no further token.

        If there is a prefix cache, its tokens stay cached, so that a prompt that continues them reuses them;
        not in deterministic mode, where only prefilled tokens may be reused, nor with a draft model, which
        does not cache the tokens of plain steps.
        """
        self.step.release(sequence)
        is_valid = sequence.n_output > 0 and sequence.finish_reason != "failed"
        if self.prefix_cache is not None and is_valid and not self.deterministic and self.draft is None:
            cached = sequence.tokens[: sequence.num_cached_tokens]
            self.prefix_cache.insert(cached, sequence.block_ids)
        self._holders.discard(sequence)
        sequence.num_cached_tokens = 0
        self.blocks.free_blocks(sequence.block_ids)
        sequence.block_ids.clear()

    def disown(self, scheduler: object) -> None:
        super().disown(scheduler)
        if self._shared is not None and self.prefix_cache is None:
            self._shared.clear()  # prompts of several completions, which have all ended

    def match_prefixes(self, sequences: list[Sequence]) -> None:
        """Give each sequence without blocks the cached blocks of its longest cached prefix."""
        if not self._shared:
            return
        for sequence in sequences:
            if not sequence.block_ids and sequence.prompt_logprobs is None:
                known = sequence.tokens[: sequence.prefill_length]
                sequence.num_cached_tokens, sequence.block_ids = self._shared.match(known)
                if not sequence.n_output:
                    sequence.num_cached_prompt_tokens = sequence.num_cached_tokens
                self._holders.add(sequence)

    def check_integrity(self) -> None:
        """Assert that every KV block is either free or counts its holders correctly.

        Holders are the sequences that were prefilled and not yet released, and the prefix cache.
        """
        held = Counter(chain.from_iterable(s.block_ids for s in self._holders))
        if self._shared is not None:
            held += self._shared.holdings()
        self.blocks.check_integrity(held)

    def _check_chunks(self, sequences: list[Sequence], chunks: list[int]) -> None:
        for sequence, chunk in zip(sequences, chunks, strict=True):
            end = sequence.num_cached_tokens + chunk
            if end % self.prefill_alignment and not sequence.completes_prefill(chunk):
                raise OptionError(
                    f"a chunk ends at token {end}; in deterministic mode one must end at a multiple of "
                    f"{self.prefill_alignment}, or at the prompt's end"
                )

    @property
    def _most_prefill_tokens(self) -> int:
        return min(PREFILL_TOKENS, self.max_batch_size * self.max_model_len)

    def _cache_of(self, n_blocks: int) -> KVBlocks:
        return build_cache(self.recipe, self.model, self.block_size, n_blocks, self.kv_form)

    def _step_on(self, blocks: KVBlocks) -> Step:
        sizes = self.max_batch_size, self.max_model_len
        given = self.recipe, self.model, blocks, self.kernels, *sizes, self.group
        return build_step(*given, self.speculative_tokens, self.draft)

    @torch.inference_mode()
    def _working_bytes(self) -> int:
        """Measure the bytes that steps use besides the cache, by trial runs with a cache of one block."""
        memory, rows = GPUMemory(self.device, self.group.least), None if self._warms else self.max_batch_size
        if self.device.type == "cuda":
            step = self._step_on(self._cache_of(1))
            compile_ahead(step.warm_ups(rows) + step.rehearsals(self._rehearsed_tokens))
            self._is_compiled = self._warms
            del step
        return working_bytes(
            lambda: self._step_on(self._cache_of(1)), self._most_prefill_tokens, memory, rows
        )

    @property
    def _rehearsed_tokens(self) -> int:
        """The size of the smallest prefill without a graph, or of the largest prefill if that is smaller."""
        return min(self._most_prefill_tokens, CAPTURED_TOKENS + 1)

    def _finish(self) -> None:
        for _ in self.step.collect():
            pass

    def _default_kv_blocks(self, utilization: float) -> int:
        """Return the default number of KV blocks per layer.

        utilization: the fraction of the GPU's memory for everything that the engine holds.

        If not even one request of ``max_model_len`` tokens fits, shortens ``max_model_len`` with a warning if
        it is the model's, and raises ``OptionError`` if it was given.
        """
        one = blocks_for(self.max_model_len, self.block_size)
        wanted, size = self.max_batch_size * one, self.block_size
        measure = self._working_bytes if isinstance(self.recipe, Recipe) else None  # trials use inert inputs
        sizes = wanted, size, self.max_batch_size
        given = *sizes, utilization, measure, self.group.least, self.draft, self.kv_form
        there = kv_blocks_within_memory(self.model, *given)
        if there >= one:
            return there
        limit = f"{CPU_KV_BYTES >> 30} GiB" if self.device.type == "cpu" else f"{utilization:.0%} of the GPU"
        if not there:
            raise OptionError(f"the KV cache has no room for even one block of {size} tokens within {limit}")
        room = f"within {limit}, the KV cache has room for {there * size} tokens of the model's"
        if not self._may_shorten:
            raise OptionError(f"max_model_len is {self.max_model_len}; {room}: use at most {there * size}")
        warnings.warn(f"max_model_len is {there * size}: {room} {self.max_model_len}", stacklevel=2)
        self.max_model_len = there * size
        return there


def _choose_recipe(recipe: str | Rung | None, device: torch.device) -> tuple[str | None, Rung]:
    """Return the name of the rung, or None for a custom recipe, and the recipe."""
    if isinstance(recipe, Rung):
        return None, recipe
    rung = get_rung(recipe, device)
    return rung, LADDER[rung]


def _check_sizes(max_batch_size: int, num_kv_blocks: int | None, block_size: int) -> None:
    counts = {
        "max_batch_size": max_batch_size,
        "num_kv_blocks": 1 if num_kv_blocks is None else num_kv_blocks,
        "block_size": block_size,
    }
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_SIZE:
            kind = "a power of two" if name == "block_size" else "a whole number"
            raise OptionError(
                f"{name} is {describe(value)}; it must be {kind}, 1 or more, at most {LARGEST_SIZE}"
            )
    if block_size & (block_size - 1):
        raise OptionError(f"block_size is {block_size}; it must be a power of two")


def _check_quantized(recipe: Rung) -> None:
    if recipe.exhibit != "none":
        raise RecipeError("exhibits read weights of 16 or 32 bits; leave out quantization")


def _check_kv_form(dtype: str, recipe: Rung, deterministic: bool, device: torch.device) -> str | None:
    """Return the format of quantised keys and values, or None; raise an error if they cannot be quantised."""
    if isinstance(dtype, str) and dtype == "auto":
        return None
    if not isinstance(dtype, str) or dtype not in CODES:
        known = ", ".join(map(repr, ("auto", *CODES)))
        raise OptionError(f"kv_cache_dtype {describe(dtype)} is unknown; use {known}")
    if not isinstance(recipe, Recipe) or recipe.exhibit != "none":
        raise RecipeError(
            "this rung keeps keys and values in the model's dtype; use fused_append or a later rung that is "
            "no exhibit, or leave out kv_cache_dtype"
        )
    if deterministic:
        raise OptionError(
            "deterministic=True needs keys and values in the model's dtype; leave out kv_cache_dtype"
        )
    check_fp8(dtype, device, "kv_cache_dtype")
    return dtype


def _drafts_of(wanted: int | None, speculation: str) -> int:
    """Return the maximum number of draft tokens per sequence; raise ``OptionError`` for an invalid one."""
    if wanted is None:
        return 0 if speculation == "none" else DRAFTS
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not 1 <= wanted <= MOST_DRAFTS:
        raise OptionError(
            f"speculative_tokens is {describe(wanted)}; it must be a whole number from 1 to {MOST_DRAFTS}"
        )
    if speculation == "none":
        raise OptionError(f"speculative_tokens is {wanted}, but nothing drafts; add speculation='ngram'")
    return wanted


def _check_draft(
    draft: Transformer | None, speculation: str, config: Arch, max_model_len: int
) -> Transformer | None:
    """Return the model that drafts; raise ``OptionError`` if it cannot, or if one is missing or not used."""
    if (draft is not None) != (speculation == "draft"):
        raise OptionError("speculation='draft' and a draft model go together; give both or neither")
    if draft is None:
        return None
    if draft.config.vocab_size != config.vocab_size:
        raise OptionError(
            f"the draft model has a vocabulary of {draft.config.vocab_size} tokens, the model one of "
            f"{config.vocab_size}; they must be the same"
        )
    if draft.config.n_positions < max_model_len:
        raise OptionError(
            f"the draft model has {draft.config.n_positions} positions; max_model_len is {max_model_len}: "
            f"use at most {draft.config.n_positions}"
        )
    return draft


def _check_share(value: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
        raise OptionError(
            f"gpu_memory_utilization is {describe(value)}; it must be a number above 0 and at most 1"
        )


def _check_switches(**switches: bool) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise OptionError(f"{name} is {describe(value)}; use True or False")


def _model_len(wanted: int | None, config: Arch) -> int:
    if wanted is None:
        return config.n_positions
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not 1 <= wanted <= config.n_positions:
        raise OptionError(
            f"max_model_len is {describe(wanted)}; it must be a whole number from 1 to the model's "
            f"{config.n_positions} positions"
        )
    return wanted
