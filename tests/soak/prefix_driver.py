"""Random operations on the prefix cache: prompts are matched, kept and evicted while holders come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from os.path import commonprefix

from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.cache.prefix_cache import PrefixCache, Tokens
from tests.soak.block_driver import Holder, HoldersDriver
from tests.soak.programs import one_of

MOST_HOLDERS, LONGEST = 4, 16


class PrefixDriver(HoldersDriver):
    """The cache's entries are read, and must follow from what was done."""

    weights = {
        "serve": 6, "match": 2, "insert": 2, "append": 5, "release": 4, "make_room": 1, "clear": 1,
    }  # fmt: skip
    axes = {"n_blocks": (12, 6, 18), "block_size": (4, 1, 2)}

    def open(self, **options: int) -> None:
        super().open(**options)
        self.cache = PrefixCache(self.blocks)

    # Operations.

    def serve(self, a: int, b: int) -> bool:
        """What an engine does with a prompt: match, make room, compute the rest, keep it."""
        prompt = _prompt(a, b)
        in_use = len({i for holder in self.holders for i in holder.block_ids})
        if len(self.holders) == MOST_HOLDERS or in_use + blocks_for(len(prompt), self.size) > self.n_blocks:
            return False
        holder = self._matched(prompt)
        self.holders.append(holder)
        n_matched = len(holder.tokens)
        self._make_room(blocks_for(len(prompt), self.size) - n_matched // self.size, holder)
        self.blocks.reserve_prompt(holder.block_ids, len(prompt) - n_matched)
        self.write(holder, *prompt[n_matched:])
        self.cache.insert(prompt, holder.block_ids)
        return True

    def match(self, a: int, b: int) -> bool:
        """A match alone: its holder goes on from what was found, if anything was."""
        if len(self.holders) == MOST_HOLDERS:
            return False
        holder = self._matched(_prompt(a, b))
        if holder.tokens:
            self.holders.append(holder)
        return True

    @one_of("holders")
    def insert(self, holder: Holder, b: int) -> None:
        """Keep the first tokens of a holder, whatever it is now."""
        kept = tuple(holder.tokens[: 1 + b % len(holder.tokens)])
        before = self._entries()
        self.cache.insert(kept, holder.block_ids)
        begun_with = [entry for entry in before if entry[: len(kept)] == kept]
        assert len(self.cache) == len(before) + (not begun_with)
        newest = next(reversed(self._entries()))
        assert newest in begun_with if begun_with else newest == kept

    @one_of("holders")
    def append(self, holder: Holder, b: int) -> bool:
        """One token more, where room for it can be made."""
        if len(holder.tokens) == LONGEST:
            return False
        self._make_room(1, holder)
        if self.blocks.num_free_blocks():
            self.blocks.reserve_prompt(holder.block_ids, 1)
            self.write(holder, b % 2)
        return True

    def make_room(self, a: int, b: int) -> None:
        self._make_room(a % (self.n_blocks + 2))

    def clear(self, a: int, b: int) -> bool:
        n_entries = len(self.cache)
        self.cache.clear()
        return n_entries > 0

    # What must hold.

    def check(self) -> None:
        super().check()
        entries = self._entries()
        assert self.cache._ordered == sorted(entries)
        theirs = {block_id for holder in self.holders for block_id in holder.block_ids}
        assert self.cache.num_evictable() == len(set(chain(*entries.values())) - theirs)

    def end(self) -> None:
        super().end()
        self.cache.clear()
        self.check()

    # The model.

    def contents(self) -> Iterator[tuple[list[int], list[int]]]:
        yield from super().contents()
        for entry, block_ids in self._entries().items():
            yield block_ids, list(entry)

    def _entries(self) -> dict[Tokens, list[int]]:
        """What is kept, least recently used first."""
        return dict(self.cache._entries)

    def _matched(self, prompt: list[int]) -> Holder:
        """A holder of the longest prefix that is kept, or of its full blocks where none is free to clone."""
        before, n_free = self._entries(), self.blocks.num_free_blocks()
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
        self.seen["matches cut short"] += n_matched < longest
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


def _prompt(a: int, b: int) -> list[int]:
    """Up to twelve tokens of two kinds, so that many begin alike: the bits of ``a``, then of ``b``."""
    bits = f"{a:08b}{b >> 4:04b}"
    return [int(bit) for bit in bits[: 1 + b % 12]]
