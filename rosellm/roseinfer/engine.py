"""The engine: a model, its KV cache and the decode step of one recipe."""

from __future__ import annotations

import torch

from rosellm.errors import OptionError, PromptError
from rosellm.roseinfer.kernels import Kernels, choose_kernels
from rosellm.roseinfer.kv_append import AppendGate
from rosellm.roseinfer.kv_blocks import KVBlockManager, blocks_for
from rosellm.roseinfer.loading import kv_blocks_within_memory, load_parts
from rosellm.roseinfer.prefill import Prefill
from rosellm.roseinfer.prefix_cache import PrefixCache
from rosellm.roseinfer.recipe import LADDER, Recipe, build_step, get_rung
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import Sampler, SamplingParams
from rosellm.rosetrainer.model import GPT
from rosellm.rosetrainer.weights import SHIPPED


class Engine:
    """Runs sequences one prefill and one decode step at a time; who runs when is the scheduler's business.

    recipe: a rung of ``LADDER`` by name, None for the best, or any ``Recipe``. max_batch_size: sequences that
    decode together at most. num_kv_blocks: blocks a layer; None takes what ``max_batch_size`` full-length
    sequences need, capped by memory. block_size: tokens a block, a power of two. kernels: see
    ``kernels.choose_kernels``. gate: None reads the environment switches of the Triton append. sampler: None
    for the ordinary one.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer=None,
        *,
        recipe: str | Recipe | None = None,
        max_batch_size: int = 256,
        num_kv_blocks: int | None = None,
        block_size: int = 64,
        kernels: str | Kernels = "auto",
        gate: AppendGate | None = None,
        prefix_cache: bool = False,
        sampler: Sampler | None = None,
    ) -> None:
        _check_sizes(max_batch_size, num_kv_blocks, block_size)
        self.model, self.tokenizer, self.config = model, tokenizer, model.config
        self.rung = None if isinstance(recipe, Recipe) else get_rung(recipe)
        self.recipe = recipe if isinstance(recipe, Recipe) else LADDER[self.rung]
        self.max_batch_size, self.block_size = max_batch_size, block_size
        self.max_model_len = self.config.n_positions
        self.gate = gate or AppendGate.from_environment()
        self.kernels = choose_kernels(kernels, self.recipe.launch, model.device)
        self.blocks = KVBlockManager(
            self.config.n_layers,
            self.config.n_kv_heads,
            self.config.head_dim,
            block_size,
            num_kv_blocks or self._default_kv_blocks(),
            model.device,
            model.dtype,
            self.recipe.block_info,
            self.recipe.pool,
        )
        self.prefix_cache = PrefixCache(self.blocks) if prefix_cache else None
        sampler = sampler or Sampler()
        self._prefill = Prefill(model, self.blocks, sampler)
        self._step = build_step(
            self.recipe,
            model=model,
            blocks=self.blocks,
            kernels=self.kernels,
            max_blocks_per_sequence=blocks_for(self.max_model_len, block_size),
            gate=self.gate,
            sampler=sampler,
        )
        self._n_requests = 0

    @classmethod
    def load(
        cls,
        model: str = SHIPPED,
        *,
        device: str = "auto",
        dtype: str = "auto",
        load_format: str = "auto",
        **options,
    ) -> Engine:
        """An engine for what :func:`loading.load_parts` loads. Other options as for the constructor."""
        return cls(*load_parts(model, device, dtype, load_format), **options)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_kv_blocks(self) -> int:
        """Blocks a layer."""
        return self.blocks.max_blocks_per_layer

    def make_sequence(self, prompt: list[int], params: SamplingParams) -> Sequence:
        """A checked request. Raises ``PromptError`` for a prompt that can never run here."""
        _check_token_ids(prompt, self.config.vocab_size)
        self._n_requests += 1
        sequence = Sequence(self._n_requests, prompt, params, self.blocks.num_pools, self.config.eos_token_id)
        if sequence.max_length > self.max_model_len:
            raise PromptError(
                f"{sequence.n_prompt} prompt tokens and {params.max_tokens} new ones exceed the model's "
                f"{self.max_model_len} positions"
            )
        if self.blocks_needed(sequence) > self.num_kv_blocks:
            raise PromptError(
                f"the request needs {self.blocks_needed(sequence)} KV blocks of {self.block_size} tokens "
                f"a layer; the cache has {self.num_kv_blocks}"
            )
        return sequence

    def blocks_needed(self, sequence: Sequence) -> int:
        """Blocks a layer that the sequence may come to hold; its last token is never cached."""
        return blocks_for(sequence.max_length - 1, self.block_size)

    def prefill(self, sequences: list[Sequence]) -> None:
        """Cache new sequences' prompts, less what the prefix cache has of them; commit their first tokens."""
        if self.prefix_cache is not None:
            for sequence in sequences:
                sequence.n_cached, sequence.block_ids = self.prefix_cache.match(sequence.tokens)
            self.prefix_cache.make_room(sum(map(self._blocks_to_prefill, sequences)))
        self._prefill(sequences)
        if self.prefix_cache is not None:
            for sequence in sequences:
                self.prefix_cache.insert(sequence.prompt, sequence.block_ids)

    def decode(self, sequences: list[Sequence]) -> None:
        """One more token for every sequence."""
        if self.prefix_cache is not None:
            self._make_room_to_decode(sequences)
        self._step(sequences)

    def release(self, sequence: Sequence) -> None:
        """Return the blocks of a sequence that is finished or given up."""
        for block_ids in sequence.block_ids:
            self.blocks.free_blocks(block_ids)
            block_ids.clear()

    def check_integrity(self) -> None:
        """Assert that the KV block books are consistent."""
        self.blocks.check_integrity()

    def _blocks_to_prefill(self, sequence: Sequence) -> int:
        """Blocks a layer that caching the rest of the prompt takes, the clone of a shared one counted."""
        return blocks_for(sequence.n_prompt, self.block_size) - sequence.n_cached // self.block_size

    def _make_room_to_decode(self, sequences: list[Sequence]) -> None:
        """Evict for the sequences that need a block: their last one is full, or shared and so cloned.

        They are counted only where there is not a free block for each sequence.
        """
        if self.blocks.num_free_blocks() < len(sequences):
            ref_count, size = self.blocks.ref_count, self.block_size
            self.prefix_cache.make_room(
                sum(s.n_cached % size == 0 or ref_count(s.block_ids[0][-1]) > 1 for s in sequences)
            )

    def _default_kv_blocks(self) -> int:
        wanted = self.max_batch_size * blocks_for(self.max_model_len, self.block_size)
        return kv_blocks_within_memory(self.model, wanted, self.block_size)


def _check_sizes(max_batch_size: int, num_kv_blocks: int | None, block_size: int) -> None:
    counts = {
        "max_batch_size": max_batch_size,
        "num_kv_blocks": 1 if num_kv_blocks is None else num_kv_blocks,
    }
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionError(f"{name} is {value!r}; it must be a whole number, 1 or more")
    if not isinstance(block_size, int) or block_size < 1 or block_size & (block_size - 1):
        raise OptionError(f"block_size is {block_size!r}; it must be a power of two")


def _check_token_ids(prompt: list[int], vocab_size: int) -> None:
    if not isinstance(prompt, list) or not prompt:
        given = "empty" if prompt == [] else type(prompt).__name__
        raise PromptError(f"the prompt is {given}; give at least one token id in a list")
    for token in prompt:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise PromptError(f"token id {token!r} is not in the vocabulary of {vocab_size}")
