"""Random operations on the block manager: what holders cached is written down beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rosellm.errors import KVCacheExhausted
from rosellm.roseinfer.cache.kv_blocks import KVBlocks, blocks_for
from tests.soak.programs import Driver

LAYERS, MOST_HOLDERS = 2, 5
LAYER_STEP = 1000.0  # a token's key in layer l is token + 1000 l, its value the negative


@dataclass(eq=False)
class Holder:
    """One sequence's blocks, and the tokens that it cached."""

    block_ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class BlockDriver(Driver):
    """``holders`` is the truth: from it follow what is free, shared, held and cached."""

    weights = {
        "start": 3, "append": 8, "prompt": 4, "share": 3, "clone": 2, "release": 4,
        "exhaust": 1, "misuse": 1,
    }  # fmt: skip
    axes = {"block_size": (4, 1, 2), "n_blocks": (12, 6, 2)}

    def open(self, block_size: int, n_blocks: int) -> None:
        self.manager = KVBlocks(LAYERS, 1, 1, block_size, n_blocks, "cpu", torch.float32)
        self.size, self.n_blocks = block_size, n_blocks
        for layer in range(LAYERS):
            self.manager.k_cache[layer] = LAYER_STEP * layer
        self.manager.v_cache.copy_(-self.manager.k_cache)
        self.keys, self.values = (
            cache.numpy()[:, :, 0, :, 0] for cache in (self.manager.k_cache, self.manager.v_cache)
        )  # [L, N_BLOCKS, BLOCK_SIZE], the caches themselves
        self.holders: list[Holder] = []
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
        if sum(self._needs(holder, 1) for holder in rows) > self._n_free():
            self._refused(KVCacheExhausted, lambda: self.manager.append_token_batch(0, lists, keys, -keys))
            return True
        self.manager.append_token_batch(0, lists, keys, -keys)
        for holder, token in zip(rows, tokens, strict=True):
            holder.tokens.append(token)
            self._write(holder, len(holder.tokens) - 1)
        return True

    def prompt(self, a: int, b: int) -> bool:
        """Several tokens for one holder."""
        return bool(self.holders) and self._prompt(self._holder(a), b % (3 * self.size + 1))

    def exhaust(self, a: int, b: int) -> bool:
        """All the free blocks, or one more, for one holder."""
        if not self.holders:
            return False
        holder = self._holder(a)
        return self._prompt(holder, self.size * (self._n_free() + b % 2))

    def share(self, a: int, b: int) -> bool:
        """A new holder of another's first blocks."""
        if not self.holders or len(self.holders) == MOST_HOLDERS:
            return False
        source = self._holder(a)
        n_blocks = b % (len(source.block_ids) + 1)
        twin = Holder(source.block_ids[:n_blocks], source.tokens[: n_blocks * self.size])
        self.manager.incref_blocks(twin.block_ids)
        self.holders.append(twin)
        self.seen["shared blocks"] += n_blocks
        return True

    def clone(self, a: int, b: int) -> bool:
        """A private copy of the first tokens of a last block."""
        holder = self._holder(a) if self.holders else None
        if not holder or not holder.block_ids:
            return False
        n_full = self.size * (len(holder.block_ids) - 1)
        kept = 1 + b % (len(holder.tokens) - n_full)
        if self._n_free() == 0:
            self._refused(KVCacheExhausted, lambda: self.manager.clone_block(holder.block_ids[-1], kept))
            return True
        holder.block_ids[-1] = self.manager.clone_block(holder.block_ids[-1], kept)
        del holder.tokens[n_full + kept :]
        return True

    def release(self, a: int, b: int) -> bool:
        if not self.holders:
            return False
        holder = self.holders.pop(a % len(self.holders))
        self.manager.free_blocks(holder.block_ids)
        return True

    def misuse(self, a: int, b: int) -> bool:
        """Blocks that nobody holds, or fewer than are let go, can be neither shared nor let go."""
        holder = self._holder(a) if self.holders else Holder()
        free = sorted(set(range(self.n_blocks)) - self._held().keys())
        if free:
            with_free = [*holder.block_ids, free[b % len(free)]]
            self._refused(KeyError, lambda: self.manager.incref_blocks(with_free))
            self._refused(KeyError, lambda: self.manager.free_blocks(with_free))
            self._refused(KeyError, lambda: self.manager.length(free[0]))
        if holder.block_ids:
            times = 1 + self._held()[holder.block_ids[0]]
            self._refused(KeyError, lambda: self.manager.free_blocks(holder.block_ids[:1] * times))
        return bool(free or holder.block_ids)

    # What must hold.

    def check(self) -> None:
        self.manager.check_integrity(self._held())
        assert self.manager.num_free_blocks() == self._n_free()
        for holder in self.holders:
            self._check_holder(holder, self.keys[0].tolist())
        assert (self.values == -self.keys).all()
        assert (self.keys[1] == self.keys[0] + LAYER_STEP).all()

    def end(self) -> None:
        while self.holders:
            self.release(0, 0)
        self.check()
        assert self.manager.num_free_blocks() == self.n_blocks

    def _check_holder(self, holder: Holder, found: list[list[float]]) -> None:
        """``found``: the tokens that the blocks hold."""
        length = len(holder.tokens)
        assert len(holder.block_ids) == blocks_for(length, self.size)
        assert self.manager.tokens_reserved(holder.block_ids) == length
        for place, block_id in enumerate(holder.block_ids):
            assert self.manager.length(block_id) == min(self.size, length - place * self.size)
        held = [token for block_id in holder.block_ids for token in found[block_id]]
        assert held[:length] == holder.tokens

    # The model.

    def _holder(self, a: int) -> Holder:
        return self.holders[a % len(self.holders)]

    def _held(self) -> Counter[int]:
        return Counter(block_id for holder in self.holders for block_id in holder.block_ids)

    def _n_free(self) -> int:
        return self.n_blocks - len(self._held())

    def _needs(self, holder: Holder, n_tokens: int) -> int:
        """Blocks for ``n_tokens`` more, the clone of a shared and partly filled last one counted."""
        clone = n_tokens and len(holder.tokens) % self.size and self._held()[holder.block_ids[-1]] > 1
        new = blocks_for(len(holder.tokens) + n_tokens, self.size) - len(holder.block_ids)
        return new + bool(clone)

    def _new_tokens(self, n: int) -> list[int]:
        self.token += n
        return [1 + (self.token + i) % 900 for i in range(n)]

    def _prompt(self, holder: Holder, n_tokens: int) -> bool:
        if self._needs(holder, n_tokens) > self._n_free():
            self._refused(KVCacheExhausted, lambda: self.manager.reserve_prompt(holder.block_ids, n_tokens))
            return True
        tokens = self._new_tokens(n_tokens)
        self.manager.reserve_prompt(holder.block_ids, n_tokens)
        for token in tokens:
            holder.tokens.append(token)
            self._write(holder, len(holder.tokens) - 1)
        return True

    def _write(self, holder: Holder, position: int) -> None:
        """A token of a holder into every layer."""
        block, token = holder.block_ids[position // self.size], holder.tokens[position]
        for layer in range(LAYERS):
            self.keys[layer, block, position % self.size] = token + LAYER_STEP * layer
            self.values[layer, block, position % self.size] = -token - LAYER_STEP * layer

    def _refused(self, error: type[Exception], call: Callable[[], object]) -> None:
        """The call changes nothing, too; ``check`` sees to the rest of the books."""
        before = self._books()
        self.refused(error, call)
        assert self._books() == before

    def _books(self) -> tuple:
        counts = [self.manager.ref_count(b) for b in range(self.n_blocks)]
        lists = [list(holder.block_ids) for holder in self.holders]
        return counts, lists, self.keys.tobytes(), self.values.tobytes()
