"""Random operations on KV blocks and their prefix cache: what holders cached is written down beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from os.path import commonprefix

import numpy as np
import torch

from rosellm.errors import KVCacheExhausted
from rosellm.roseinfer.cache.kv_blocks import KVBlocks, blocks_for
from rosellm.roseinfer.cache.prefix_cache import PrefixCache, Tokens
from tests.soak.programs import Driver, one_of

LAYERS, MOST_HOLDERS, LONGEST = 2, 5, 16
LAYER_STEPS = np.arange(LAYERS) * 1000.0  # a token's key in layer l is token + 1000 l, its value the negative


@dataclass(eq=False)
class Holder:
    """One sequence's blocks, and the tokens that it cached."""

    block_ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class BlockDriver(Driver):
    """``holders`` and the cache's entries are the truth: from them follow what is free, held and cached."""

    weights = {
        "start": 1, "serve": 6, "match": 2, "insert": 2, "append": 8, "prompt": 3, "share": 2, "exhaust": 1,
        "release": 6, "make_room": 1, "clear": 1, "misuse": 1,
    }  # fmt: skip
    axes = {"block_size": (4, 1, 2), "n_blocks": (12, 6, 2, 18)}

    def open(self, block_size: int, n_blocks: int) -> None:
        self.blocks = KVBlocks(LAYERS, 1, 1, block_size, n_blocks, "cpu", torch.float32)
        caches = self.blocks.k_cache, self.blocks.v_cache
        self.keys, self.values = (cache.numpy()[:, :, 0, :, 0] for cache in caches)  # [L, N_BLOCKS, BLOCK]
        self.keys += LAYER_STEPS[:, None, None]
        self.values -= self.keys
        self.size, self.n_blocks = block_size, n_blocks
        self.cache = PrefixCache(self.blocks)
        self.holders: list[Holder] = []

    # Operations.

    def start(self, a: int, b: int) -> bool:
        return self._join(Holder())

    def serve(self, a: int, b: int) -> bool:
        """What an engine does with a prompt: match, make room, compute the rest, keep it."""
        prompt = _prompt(a, b)
        in_use = {block_id for holder in self.holders for block_id in holder.block_ids}
        if len(in_use) + blocks_for(len(prompt), self.size) > self.n_blocks:
            return False
        if len(self.holders) == MOST_HOLDERS:
            return False
        holder = self._matched(prompt)
        self._join(holder)
        n_matched = len(holder.tokens)
        self._make_room(blocks_for(len(prompt), self.size) - n_matched // self.size, holder)
        self._reserve(holder, prompt[n_matched:])
        self.cache.insert(prompt, holder.block_ids)
        return True

    def match(self, a: int, b: int) -> bool:
        """A match alone: its holder goes on from what was found, if anything was."""
        return len(self.holders) < MOST_HOLDERS and self._join(self._matched(_prompt(a, b)))

    @one_of("holders")
    def insert(self, holder: Holder, b: int) -> bool:
        """Keep the first tokens of a holder, whatever it is now."""
        if not holder.tokens:
            return False
        kept = tuple(holder.tokens[: 1 + b % len(holder.tokens)])
        before = self._entries()
        self.cache.insert(kept, holder.block_ids)
        begun_with = [entry for entry in before if entry[: len(kept)] == kept]
        replaced = [] if begun_with else [entry for entry in before if kept[: len(entry)] == entry]
        assert len(self.cache) == len(before) + (not begun_with) - len(replaced)
        newest = next(reversed(self._entries()))
        assert newest in begun_with if begun_with else newest == kept
        return True

    def append(self, a: int, b: int) -> bool:
        """One token for some holders at once; where ``a`` is even, room is made first."""
        rows = [holder for place, holder in enumerate(self.holders) if b >> place & 1]
        if not rows or max(len(holder.tokens) for holder in rows) >= LONGEST:
            return False
        if a % 2 == 0:
            self._make_room(1, rows[0])
        tokens = [1 + (a + place) % 2 for place in range(len(rows))]
        keys = torch.tensor(tokens).float()[:, None, None]
        n_needed = sum(self._needs(holder, 1) for holder in rows)
        lists = [holder.block_ids for holder in rows]
        if self._has_room(n_needed, lambda: self.blocks.append_token_batch(0, lists, keys, -keys)):
            for holder, token in zip(rows, tokens, strict=True):
                self._write(holder, [token])
        return True

    @one_of("holders")
    def prompt(self, holder: Holder, b: int) -> None:
        """Several tokens for one holder."""
        self._reserve(holder, [1 + b % 2] * (b % (3 * self.size + 1)))

    @one_of("holders")
    def exhaust(self, holder: Holder, b: int) -> None:
        """All the free blocks, or one more, for one holder."""
        self._reserve(holder, [1] * (self.size * (self._n_free() + b % 2)))

    @one_of("holders")
    def share(self, source: Holder, b: int) -> bool:
        """A new holder of another's first blocks."""
        n_blocks = b % (len(source.block_ids) + 1)
        twin = Holder(source.block_ids[:n_blocks], source.tokens[: n_blocks * self.size])
        if not self._join(twin):
            return False
        self.blocks.incref_blocks(twin.block_ids)
        self.seen["shared blocks"] += n_blocks
        return True

    @one_of("holders")
    def release(self, holder: Holder, b: int) -> None:
        self.holders.remove(holder)
        self.blocks.free_blocks(holder.block_ids)

    def make_room(self, a: int, b: int) -> None:
        self._make_room(a % (self.n_blocks + 2))

    def clear(self, a: int, b: int) -> None:
        self.cache.clear()

    def misuse(self, a: int, b: int) -> bool:
        """Blocks that nobody holds, or fewer than are let go, can be neither shared nor let go."""
        holder = self.holders[a % len(self.holders)] if self.holders else Holder()
        free = sorted(set(range(self.n_blocks)) - self._held().keys())
        if free:
            with_free = [*holder.block_ids, free[b % len(free)]]
            self._refused(KeyError, lambda: self.blocks.incref_blocks(with_free))
            self._refused(KeyError, lambda: self.blocks.free_blocks(with_free))
            self._refused(KeyError, lambda: self.blocks.length(free[0]))
        if holder.block_ids:
            first = holder.block_ids[:1]
            times = 1 + sum(
                first[0] in one.block_ids for one in self.holders
            )  # those of the cache do not count
            self._refused(KeyError, lambda: self.blocks.free_blocks(first * times))
        return bool(free or holder.block_ids)

    # What must hold.

    def check(self) -> None:
        self.blocks.check_integrity(self._held())
        assert self.blocks.num_free_blocks() == self._n_free()
        assert (self.values == -self.keys).all()
        assert (self.keys[1] == self.keys[0] + LAYER_STEPS[1]).all()
        found = self.keys[0].tolist()
        for block_ids, tokens in self._contents():
            cached = [token for block_id in block_ids for token in found[block_id]]
            assert cached[: len(tokens)] == tokens
        for holder in self.holders:
            length = len(holder.tokens)
            assert len(holder.block_ids) == blocks_for(length, self.size)
            assert self.blocks.tokens_reserved(holder.block_ids) == length
        entries = self._entries()
        assert self.cache._ordered == sorted(entries)
        theirs = {block_id for holder in self.holders for block_id in holder.block_ids}
        assert self.cache.num_evictable() == len(set(chain(*entries.values())) - theirs)

    def end(self) -> None:
        while self.holders:
            self.release(0, 0)
        self.check()
        self.cache.clear()
        self.check()

    # The model.

    def _join(self, holder: Holder) -> bool:
        if len(self.holders) < MOST_HOLDERS:
            self.holders.append(holder)
            return True
        return False

    def _contents(self) -> Iterator[tuple[list[int], list[int]]]:
        """Who holds blocks: block ids, and the tokens in them."""
        yield from ((holder.block_ids, holder.tokens) for holder in self.holders)
        yield from ((block_ids, list(entry)) for entry, block_ids in self._entries().items())

    def _entries(self) -> dict[Tokens, list[int]]:
        """What is kept, least recently used first."""
        return dict(self.cache.entries)

    def _held(self) -> Counter[int]:
        """How often each block is held."""
        return Counter(chain.from_iterable(block_ids for block_ids, _ in self._contents()))

    def _n_free(self) -> int:
        return self.n_blocks - len(self._held())

    def _needs(self, holder: Holder, n_tokens: int) -> int:
        """Blocks for ``n_tokens`` more, the clone of a shared and partly filled last one counted."""
        clone = n_tokens and len(holder.tokens) % self.size and self._held()[holder.block_ids[-1]] > 1
        new = blocks_for(len(holder.tokens) + n_tokens, self.size) - len(holder.block_ids)
        return new + bool(clone)

    def _reserve(self, holder: Holder, tokens: list[int]) -> None:
        n_needed = self._needs(holder, len(tokens))
        if self._has_room(n_needed, lambda: self.blocks.reserve_prompt(holder.block_ids, len(tokens))):
            self._write(holder, tokens)

    def _write(self, holder: Holder, tokens: list[int]) -> None:
        """Into slots that are reserved."""
        for token in tokens:
            place = holder.block_ids[len(holder.tokens) // self.size], len(holder.tokens) % self.size
            self.keys[:, *place] = token + LAYER_STEPS
            self.values[:, *place] = -token - LAYER_STEPS
            holder.tokens.append(token)

    def _matched(self, prompt: list[int]) -> Holder:
        """A holder of the longest prefix that is kept, or of its full blocks where none is free to clone."""
        before, n_free = self._entries(), self._n_free()
        hits, hit_tokens = self.cache.hits, self.cache.hit_tokens
        common = {entry: len(commonprefix([entry, tuple(prompt)])) for entry in before}
        longest = min(max(common.values(), default=0), len(prompt) - 1)
        n_matched, block_ids = self.cache.match(prompt)
        full = longest // self.size * self.size
        assert n_matched == longest or (n_free == 0 and n_matched == full)
        assert self.cache.hits == hits + (n_matched > 0) and self.cache.hit_tokens == hit_tokens + n_matched
        if longest and n_free:  # else it may have been evicted for the clone
            assert common[next(reversed(self._entries()))] >= longest  # used, so the last to go
        self.seen["matched tokens"] += n_matched
        return Holder(block_ids, prompt[:n_matched])

    def _make_room(self, n_blocks: int, writer: Holder | None = None) -> None:
        """The least recently used go first of those that free something, and no more of them than must."""
        before = self._entries()
        written = writer.block_ids[-1:] if writer else []
        is_partial = writer and len(writer.tokens) % self.size
        kept = self._kept(dict(before), n_blocks, written if is_partial else [])
        self.cache.make_room(n_blocks, written)
        assert list(self._entries().items()) == list(kept.items())
        self.seen["evictions"] += len(before) - len(kept)

    def _kept(self, entries: dict[Tokens, list[int]], n_blocks: int, written: list[int]) -> dict:
        """What of the entries is left, from what each of them holds."""
        theirs = [i for holder in self.holders for i in holder.block_ids]
        while n_blocks > self.n_blocks - len(held := Counter(chain(theirs, *entries.values()))):
            frees = [e for e, ids in entries.items() if any(held[i] == 1 for i in ids)]
            some_day = [e for e, ids in entries.items() if not set(theirs).issuperset(ids)]
            share = [e for e, ids in entries.items() if not set(written).isdisjoint(ids)]
            if not (frees or some_day or share):
                break
            del entries[(frees or some_day or share)[0]]
        return entries

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


def _prompt(a: int, b: int) -> list[int]:
    """Up to twelve tokens of two kinds, so that many begin alike: the bits of ``a``, then of ``b``."""
    bits = f"{a:08b}{b >> 4:04b}"
    return [1 + int(bit) for bit in bits[: 1 + b % 12]]
