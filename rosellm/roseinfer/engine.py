"""The engine: a model, its KV cache and the decode step of one recipe."""

from __future__ import annotations

import torch

from rosellm.errors import CheckpointError, DeviceError, PromptError
from rosellm.roseinfer.kernels import Kernels, choose_kernels
from rosellm.roseinfer.kv_append import AppendGate
from rosellm.roseinfer.kv_blocks import KVBlockManager, blocks_for
from rosellm.roseinfer.prefill import Prefill
from rosellm.roseinfer.prefix_cache import PrefixCache
from rosellm.roseinfer.recipe import LADDER, Recipe, build_step, get_rung
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import Sampler, SamplingParams
from rosellm.rosetrainer.model import GPT
from rosellm.rosetrainer.tokenizer import load_dummy_tokenizer, load_tokenizer
from rosellm.rosetrainer.weights import SHIPPED, checkpoint_folder, dummy_model, load_model

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CPU_KV_BYTES = 2 << 30
GPU_KV_SHARE = 0.6


def resolve_device(name: str) -> torch.device:
    """``auto``, ``cuda`` or ``cpu`` → a device that is here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cuda", "cpu"):
        raise DeviceError(f"device {name!r} is unknown; use 'auto', 'cuda' or 'cpu'")
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device 'cuda' is not available here; use --device cpu")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is float16 on a GPU and float32 on a CPU; or a dtype by name."""
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise DeviceError(f"dtype {name!r} is unknown; use 'auto', {', '.join(map(repr, DTYPES))}")
    return DTYPES[name]


class Engine:
    """Runs sequences one prefill and one decode step at a time; who runs when is the scheduler's business.

    recipe: a rung of ``LADDER`` by name, None for the best, or any ``Recipe``. max_batch_size: sequences that decode together at most.
    num_kv_blocks: blocks a layer; None takes what ``max_batch_size`` full-length sequences need, capped by memory. block_size: tokens a
    block, a power of two. kernels: see ``kernels.choose_kernels``. gate: None reads the environment switches of the Triton append.
    sampler: None for the ordinary one.
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
        cls, model: str = SHIPPED, *, device: str = "auto", dtype: str = "auto", load_format: str = "auto", **options
    ) -> Engine:
        """An engine for a checkpoint by name (``rose-tiny``, a folder, a hub id) or, with ``load_format="dummy"``, its shape with
        random weights. Other options as for the constructor."""
        if load_format not in ("auto", "dummy"):
            raise CheckpointError(f"load_format {load_format!r} is unknown; use 'auto' or 'dummy'")
        where = resolve_device(device)
        kind = resolve_dtype(dtype, where)
        if load_format == "dummy":
            gpt = dummy_model(model, where, kind)
            return cls(gpt, load_dummy_tokenizer(gpt.config.vocab_size), **options)
        gpt = load_model(model, where, kind)
        return cls(gpt, load_tokenizer(checkpoint_folder(model), gpt.config), **options)

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
        sequence = Sequence(self._n_requests, prompt, params, self.config.n_layers, self.config.eos_token_id)
        if sequence.max_length > self.max_model_len:
            raise PromptError(
                f"{sequence.n_prompt} prompt tokens and {params.max_tokens} new ones exceed the model's "
                f"{self.max_model_len} positions"
            )
        if self.blocks_needed(sequence) > self.num_kv_blocks:
            raise PromptError(
                f"the request needs {self.blocks_needed(sequence)} KV blocks of {self.block_size} tokens a layer; "
                f"the cache has {self.num_kv_blocks}"
            )
        return sequence

    def blocks_needed(self, sequence: Sequence) -> int:
        """Blocks a layer that the sequence may come to hold; its last token is never cached."""
        return blocks_for(sequence.max_length - 1, self.block_size)

    def prefill(self, sequences: list[Sequence]) -> None:
        """Cache the prompts of new sequences, what the prefix cache holds excepted, and commit their first tokens."""
        if self.prefix_cache is not None:
            for sequence in sequences:
                sequence.n_cached, sequence.block_ids = self.prefix_cache.match(sequence.tokens)
            self.prefix_cache.make_room(sum(blocks_for(s.n_prompt, self.block_size) for s in sequences))
        self._prefill(sequences)
        if self.prefix_cache is not None:
            for sequence in sequences:
                self.prefix_cache.insert(sequence.prompt, sequence.block_ids)

    def decode(self, sequences: list[Sequence]) -> None:
        """One more token for every sequence."""
        if self.prefix_cache is not None:
            self.prefix_cache.make_room(len(sequences))
        self._step(sequences)

    def release(self, sequence: Sequence) -> None:
        """Return the blocks of a sequence that is finished or given up."""
        for block_ids in sequence.block_ids:
            self.blocks.free_blocks(block_ids)
            block_ids.clear()

    def check_integrity(self) -> None:
        """Assert that the KV block books are consistent."""
        self.blocks.check_integrity()

    def _default_kv_blocks(self) -> int:
        wanted = self.max_batch_size * blocks_for(self.max_model_len, self.block_size)
        budget = CPU_KV_BYTES
        if self.device.type == "cuda":
            budget = int(GPU_KV_SHARE * torch.cuda.mem_get_info(self.device)[0])
        block_bytes = self.block_size * self.config.kv_bytes_per_token(self.model.dtype.itemsize)
        return max(1, min(wanted, budget // block_bytes))


def _check_sizes(max_batch_size: int, num_kv_blocks: int | None, block_size: int) -> None:
    for name, value in (("max_batch_size", max_batch_size), ("num_kv_blocks", 1 if num_kv_blocks is None else num_kv_blocks)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DeviceError(f"{name} is {value!r}; it must be a whole number, 1 or more")
    if not isinstance(block_size, int) or block_size < 1 or block_size & (block_size - 1):
        raise DeviceError(f"block_size is {block_size!r}; it must be a power of two")


def _check_token_ids(prompt: list[int], vocab_size: int) -> None:
    if not isinstance(prompt, list) or not prompt:
        raise PromptError(f"the prompt is {'empty' if prompt == [] else type(prompt).__name__}; give at least one token id in a list")
    for token in prompt:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise PromptError(f"token id {token!r} is not in the vocabulary of {vocab_size}")
