"""Random operations on the block manager: what holders cached is written down beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from rosellm.errors import KVCacheExhausted
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager, blocks_for
from tests.soak.programs import Driver

LAYERS, MOST_HOLDERS = 2, 5
LAYER_STEP = 1000.0  # a token's key in layer l is token + 1000 l, its value the negative


@dataclass(eq=False)
class Holder:
    """One sequence's blocks in one pool, and the tokens that it cached."""

    pool: int
    block_ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class BlockDriver(Driver):
    """``holders`` is the truth: from it follow what is free, shared, held and cached."""

    weights = {
        "start": 3, "append": 8, "append_to_cache": 1, "prompt": 4, "share": 3, "clone": 2, "release": 4,
        "exhaust": 1, "misuse": 1,
    }  # fmt: skip
    axes = {
        "block_info": ("slots", "tuple"),
        "pool": ("per_layer", "shared"),
        "block_size": (4, 1, 2),
        "n_blocks": (12, 6, 2),
    }

    def open(self, block_info: str, pool: str, block_size: int, n_blocks: int) -> None:
        shape = (LAYERS, 1, 1, block_size, n_blocks, "cpu", torch.float32)
        self.manager = KVBlockManager(*shape, block_info=block_info, pool=pool)
        self.size, self.n_blocks = block_size, n_blocks
        self.layers = [
            [layer for layer in range(LAYERS) if self.manager.pool_of[layer] == pool]
            for pool in range(self.manager.num_pools)
        ]
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
        self.holders.append(Holder(a % self.manager.num_pools))
        return True

    def append(self, a: int, b: int) -> bool:
        """One token for some holders of a pool at once."""
        return self._append(a, b, self._reserve_and_write)

    def append_to_cache(self, a: int, b: int) -> bool:
        """The same by the method that writes the cache, too; it is for pools of one layer."""
        if self.manager.num_pools < LAYERS:
            return False
        return self._append(a, b, self._append_batch)

    def prompt(self, a: int, b: int) -> bool:
        """Several tokens for one holder."""
        return bool(self.holders) and self._prompt(self._holder(a), b % (3 * self.size + 1))

    def exhaust(self, a: int, b: int) -> bool:
        """All the free blocks of a pool, or one more, for one holder."""
        if not self.holders:
            return False
        holder = self._holder(a)
        return self._prompt(holder, self.size * (self._n_free(holder.pool) + b % 2))

    def share(self, a: int, b: int) -> bool:
        """A new holder of another's first blocks."""
        if not self.holders or len(self.holders) == MOST_HOLDERS:
            return False
        source = self._holder(a)
        n_blocks = b % (len(source.block_ids) + 1)
        twin = Holder(source.pool, source.block_ids[:n_blocks], source.tokens[: n_blocks * self.size])
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
        if self._n_free(holder.pool) == 0:
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
        holder = self._holder(a) if self.holders else Holder(0)
        free = sorted(set(self._ids(holder.pool)) - self._held().keys())
        if free:
            with_free = [*holder.block_ids, free[b % len(free)]]
            self._refused(KeyError, lambda: self.manager.incref_blocks(with_free))
            self._refused(KeyError, lambda: self.manager.free_blocks(with_free))
            self._refused(KeyError, lambda: self.manager.info(free[0]))
        if holder.block_ids:
            times = 1 + self._held()[holder.block_ids[0]]
            self._refused(KeyError, lambda: self.manager.free_blocks(holder.block_ids[:1] * times))
        return bool(free or holder.block_ids)

    # What must hold.

    def check(self) -> None:
        self.manager.check_integrity(self._held())
        for pool in range(self.manager.num_pools):
            assert self.manager.num_free_blocks(pool) == self._n_free(pool)
        found = [(self.keys[layers[0]] - LAYER_STEP * layers[0]).tolist() for layers in self.layers]
        for holder in self.holders:
            self._check_holder(holder, found[holder.pool])
        assert (self.values == -self.keys).all()
        if self.manager.num_pools < LAYERS:
            assert (self.keys[1] == self.keys[0] + LAYER_STEP).all()

    def end(self) -> None:
        while self.holders:
            self.release(0, 0)
        self.check()
        assert sum(map(self.manager.num_free_blocks, range(self.manager.num_pools))) == (
            self.manager.num_pools * self.n_blocks
        )

    def _check_holder(self, holder: Holder, found: list[list[float]]) -> None:
        """``found``: the tokens that the blocks of its pool hold."""
        first, length = holder.pool * self.n_blocks, len(holder.tokens)
        assert len(holder.block_ids) == blocks_for(length, self.size)
        assert self.manager.tokens_reserved(holder.block_ids) == length
        for place, block_id in enumerate(holder.block_ids):
            info, start = self.manager.info(block_id), place * self.size
            wanted = holder.pool, block_id - first, start, min(self.size, length - start)
            assert (info.layer, info.block_index, info.start, info.length) == wanted
        held = [token for block_id in holder.block_ids for token in found[block_id - first]]
        assert held[:length] == holder.tokens

    # The model.

    def _holder(self, a: int) -> Holder:
        return self.holders[a % len(self.holders)]

    def _ids(self, pool: int) -> range:
        return range(pool * self.n_blocks, (pool + 1) * self.n_blocks)

    def _held(self) -> Counter[int]:
        return Counter(block_id for holder in self.holders for block_id in holder.block_ids)

    def _n_free(self, pool: int) -> int:
        return self.n_blocks - len({b for h in self.holders if h.pool == pool for b in h.block_ids})

    def _needs(self, holder: Holder, n_tokens: int) -> int:
        """Blocks for ``n_tokens`` more, the clone of a shared and partly filled last one counted."""
        clone = n_tokens and len(holder.tokens) % self.size and self._held()[holder.block_ids[-1]] > 1
        new = blocks_for(len(holder.tokens) + n_tokens, self.size) - len(holder.block_ids)
        return new + bool(clone)

    def _new_tokens(self, n: int) -> list[int]:
        self.token += n
        return [1 + (self.token + i) % 900 for i in range(n)]

    def _prompt(self, holder: Holder, n_tokens: int) -> bool:
        if self._needs(holder, n_tokens) > self._n_free(holder.pool):
            self._refused(
                KVCacheExhausted, lambda: self.manager.reserve_prompt(holder.pool, holder.block_ids, n_tokens)
            )
            return True
        tokens = self._new_tokens(n_tokens)
        self.manager.reserve_prompt(holder.pool, holder.block_ids, n_tokens)
        for position, token in enumerate(tokens, start=len(holder.tokens)):
            block_index = holder.block_ids[position // self.size] - holder.pool * self.n_blocks
            self._write(holder.pool, block_index, position % self.size, token)
        holder.tokens += tokens
        return True

    def _append(self, a: int, b: int, append: Callable) -> bool:
        here = [h for h in self.holders if h.pool == a % self.manager.num_pools]
        rows = [holder for place, holder in enumerate(here) if b >> place & 1]
        if not rows:
            return False
        tokens = self._new_tokens(len(rows))
        if sum(self._needs(holder, 1) for holder in rows) > self._n_free(rows[0].pool):
            self._refused(KVCacheExhausted, lambda: append(rows, tokens))
            return True
        append(rows, tokens)
        for holder, token in zip(rows, tokens, strict=True):
            holder.tokens.append(token)
        return True

    def _reserve_and_write(self, rows: list[Holder], tokens: list[int]) -> None:
        slots = self.manager.reserve_tokens(rows[0].pool, [holder.block_ids for holder in rows])
        for block_index, pos, token in zip(*slots, tokens, strict=True):
            self._write(rows[0].pool, block_index, pos, token)

    def _append_batch(self, rows: list[Holder], tokens: list[int]) -> None:
        layer = rows[0].pool
        keys = torch.tensor(tokens)[:, None, None] + LAYER_STEP * layer
        self.manager.append_token_batch(layer, [holder.block_ids for holder in rows], keys, -keys)

    def _write(self, pool: int, block_index: int, pos: int, token: int) -> None:
        for layer in self.layers[pool]:
            self.keys[layer, block_index, pos] = token + LAYER_STEP * layer
            self.values[layer, block_index, pos] = -token - LAYER_STEP * layer

    def _refused(self, error: type[Exception], call: Callable[[], object]) -> None:
        """The call changes nothing, too; ``check`` sees to the rest of the books."""
        before = self._books()
        self.refused(error, call)
        assert self._books() == before

    def _books(self) -> tuple:
        counts = [self.manager.ref_count(b) for pool in range(len(self.layers)) for b in self._ids(pool)]
        lists = [list(holder.block_ids) for holder in self.holders]
        return counts, lists, self.keys.tobytes(), self.values.tobytes()
