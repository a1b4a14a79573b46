"""Random operations on the block manager: what holders cached is written down beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from rosellm.errors import KVCacheExhausted
from rosellm.roseinfer.cache.kv_blocks import KVBlocks, blocks_for
from tests.soak.programs import Driver, one_of

LAYERS, MOST_HOLDERS = 2, 5
LAYER_STEPS = np.arange(LAYERS) * 1000.0  # a token's key in layer l is token + 1000 l, its value the negative


@dataclass(eq=False)
class Holder:
    """One sequence's blocks, and the tokens that it cached."""

    block_ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class HoldersDriver(Driver):
    """``holders`` is the truth: from it follows what is held, and what is cached in every layer."""

    def open(self, block_size: int, n_blocks: int) -> None:
        self.blocks = KVBlocks(LAYERS, 1, 1, block_size, n_blocks, "cpu", torch.float32)
        caches = self.blocks.k_cache, self.blocks.v_cache
        self.keys, self.values = (cache.numpy()[:, :, 0, :, 0] for cache in caches)  # [L, N_BLOCKS, BLOCK]
        self.keys += LAYER_STEPS[:, None, None]
        self.values -= self.keys
        self.size, self.n_blocks = block_size, n_blocks
        self.holders: list[Holder] = []

    @one_of("holders")
    def release(self, holder: Holder, b: int) -> None:
        self.holders.remove(holder)
        self.blocks.free_blocks(holder.block_ids)

    def check(self) -> None:
        self.blocks.check_integrity(self.held())
        assert (self.values == -self.keys).all()
        assert (self.keys[1] == self.keys[0] + LAYER_STEPS[1]).all()
        found = self.keys[0].tolist()
        for block_ids, tokens in self.contents():
            cached = [token for block_id in block_ids for token in found[block_id]]
            assert cached[: len(tokens)] == tokens
        for holder in self.holders:
            length = len(holder.tokens)
            assert len(holder.block_ids) == blocks_for(length, self.size)
            assert self.blocks.tokens_reserved(holder.block_ids) == length
            for place, block_id in enumerate(holder.block_ids):
                assert self.blocks.length(block_id) == min(self.size, length - place * self.size)

    def end(self) -> None:
        while self.holders:
            self.release(0, 0)
        self.check()

    def contents(self) -> Iterator[tuple[list[int], list[int]]]:
        """Who holds blocks: block ids, and the tokens in them."""
        return ((holder.block_ids, holder.tokens) for holder in self.holders)

    def held(self) -> Counter[int]:
        """How often each block is held."""
        return Counter(chain.from_iterable(block_ids for block_ids, _ in self.contents()))

    def write(self, holder: Holder, *tokens: int) -> None:
        """Into slots that are reserved."""
        for token in tokens:
            place = holder.block_ids[len(holder.tokens) // self.size], len(holder.tokens) % self.size
            self.keys[:, *place] = token + LAYER_STEPS
            self.values[:, *place] = -token - LAYER_STEPS
            holder.tokens.append(token)


class BlockDriver(HoldersDriver):
    """What is free and shared follows from the holders, too."""

    weights = {
        "start": 3, "append": 8, "prompt": 4, "share": 3, "clone": 2, "release": 4,
        "exhaust": 1, "misuse": 1,
    }  # fmt: skip
    axes = {"block_size": (4, 1, 2), "n_blocks": (12, 6, 2)}

    def open(self, **options: int) -> None:
        super().open(**options)
        self.token = 0

    # Operations.

    def start(self, a: int, b: int) -> bool:
        if len(self.holders) == MOST_HOLDERS:
            return False
        self.holders.append(Holder())
        return True

    def append(self, a: int, b: int) -> bool:
        """One token for some holders at once."""
        rows = [holder for place, holder in enumerate(self.holders) if b >> place & 1]
        if not rows:
            return False
        tokens = self._new_tokens(len(rows))
        lists, keys = [holder.block_ids for holder in rows], torch.tensor(tokens).float()[:, None, None]
        n_needed = sum(self._needs(holder, 1) for holder in rows)
        if self._has_room(n_needed, lambda: self.blocks.append_token_batch(0, lists, keys, -keys)):
            for holder, token in zip(rows, tokens, strict=True):
                self.write(holder, token)
        return True

    @one_of("holders")
    def prompt(self, holder: Holder, b: int) -> None:
        """Several tokens for one holder."""
        self._prompt(holder, b % (3 * self.size + 1))

    @one_of("holders")
    def exhaust(self, holder: Holder, b: int) -> None:
        """All the free blocks, or one more, for one holder."""
        self._prompt(holder, self.size * (self._n_free() + b % 2))

    @one_of("holders")
    def share(self, source: Holder, b: int) -> bool:
        """A new holder of another's first blocks."""
        if len(self.holders) == MOST_HOLDERS:
            return False
        n_blocks = b % (len(source.block_ids) + 1)
        twin = Holder(source.block_ids[:n_blocks], source.tokens[: n_blocks * self.size])
        self.blocks.incref_blocks(twin.block_ids)
        self.holders.append(twin)
        self.seen["shared blocks"] += n_blocks
        return True

    @one_of("holders")
    def clone(self, holder: Holder, b: int) -> bool:
        """A private copy of the first tokens of a last block."""
        if not holder.block_ids:
            return False
        n_full = self.size * (len(holder.block_ids) - 1)
        kept = 1 + b % (len(holder.tokens) - n_full)

        def clone() -> None:
            holder.block_ids[-1] = self.blocks.clone_block(holder.block_ids[-1], kept)

        if self._has_room(1, clone):
            del holder.tokens[n_full + kept :]
        return True

    def misuse(self, a: int, b: int) -> bool:
        """Blocks that nobody holds, or fewer than are let go, can be neither shared nor let go."""
        holder = self.holders[a % len(self.holders)] if self.holders else Holder()
        free = sorted(set(range(self.n_blocks)) - self.held().keys())
        if free:
            with_free = [*holder.block_ids, free[b % len(free)]]
            self._refused(KeyError, lambda: self.blocks.incref_blocks(with_free))
            self._refused(KeyError, lambda: self.blocks.free_blocks(with_free))
            self._refused(KeyError, lambda: self.blocks.length(free[0]))
        if holder.block_ids:
            times = 1 + self.held()[holder.block_ids[0]]
            self._refused(KeyError, lambda: self.blocks.free_blocks(holder.block_ids[:1] * times))
        return bool(free or holder.block_ids)

    def check(self) -> None:
        super().check()
        assert self.blocks.num_free_blocks() == self._n_free()

    # The model.

    def _n_free(self) -> int:
        return self.n_blocks - len(self.held())

    def _needs(self, holder: Holder, n_tokens: int) -> int:
        """Blocks for ``n_tokens`` more, the clone of a shared and partly filled last one counted."""
        clone = n_tokens and len(holder.tokens) % self.size and self.held()[holder.block_ids[-1]] > 1
        new = blocks_for(len(holder.tokens) + n_tokens, self.size) - len(holder.block_ids)
        return new + bool(clone)

    def _new_tokens(self, n: int) -> list[int]:
        self.token += n
        return [1 + (self.token + i) % 900 for i in range(n)]

    def _prompt(self, holder: Holder, n_tokens: int) -> None:
        n_needed = self._needs(holder, n_tokens)
        if self._has_room(n_needed, lambda: self.blocks.reserve_prompt(holder.block_ids, n_tokens)):
            self.write(holder, *self._new_tokens(n_tokens))

    def _has_room(self, n_needed: int, call: Callable[[], object]) -> bool:
        """Whether the call, which takes so many blocks, does so; it raises ``KVCacheExhausted`` otherwise."""
        if n_needed > self._n_free():
            self._refused(KVCacheExhausted, call)
            return False
        call()
        return True

    def _refused(self, error: type[Exception], call: Callable[[], object]) -> None:
        """The call changes nothing, too; ``check`` sees to the rest of the books."""
        before = self._books()
        self.refused(error, call)
        assert self._books() == before

    def _books(self) -> tuple:
        counts = [self.blocks.ref_count(b) for b in range(self.n_blocks)]
        lists = [list(holder.block_ids) for holder in self.holders]
        return counts, lists, self.keys.tobytes(), self.values.tobytes()
