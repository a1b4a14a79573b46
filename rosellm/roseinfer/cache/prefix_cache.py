"""The prefix cache, which reuses KV blocks of earlier prompts for prompts with the same beginning.

Prompts are kept in lexicographic order, so the one with the longest prefix in common with a query is next to
the query's insertion point: a lookup costs O(length x log entries). RadixAttention (arXiv:2312.07104) uses a
radix tree for the same purpose.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence as SequenceOf
from itertools import chain
from operator import itemgetter

from rosellm.roseinfer.cache.kv_blocks import KVBlocks, blocks_for

Tokens = tuple[int, ...]


class PrefixCache:
    """Cached prompts and their reference-counted blocks; the least recently used is evicted first.

    A cached block is never written: a sequence that appends to it shares it with the entry, so ``KVBlocks``
    clones it first (copy on write). alignment: matches are truncated to a multiple of this many tokens.
    """

    def __init__(self, blocks: KVBlocks, alignment: int = 1) -> None:
        self.blocks, self.alignment = blocks, alignment
        self.hits, self.hit_tokens = 0, 0
        self._entries: dict[Tokens, list[int]] = {}  # least recently used first
        self._ordered: list[Tokens] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Mapping[Tokens, list[int]]:
        """The block ids of each cached prompt, least recently used first."""
        return self._entries

    def match(self, tokens: SequenceOf[int]) -> tuple[int, list[int]]:
        """Find the longest cached prefix of ``tokens``; return its length and its block ids.

        The last token is never matched. The caller becomes a holder of the blocks. A last block that holds
        more than was matched is cloned; if no block is free for the clone, even after eviction, only full
        blocks are matched.
        """
        entry, n_common = self._nearest(tuple(tokens))
        n_matched = min(n_common, len(tokens) - 1) // self.alignment * self.alignment
        if n_matched < 1:
            return 0, []
        self._refresh(entry)
        block_ids = self._first_blocks(self._entries[entry], n_matched)
        self.blocks.incref_blocks(block_ids)
        n_matched = self._own_tail(block_ids, n_matched)
        self.hits += n_matched > 0
        self.hit_tokens += n_matched
        return n_matched, block_ids

    def insert(self, tokens: SequenceOf[int], block_ids: list[int]) -> None:
        """Cache the blocks that hold ``tokens``, or refresh an entry that already begins with them."""
        prompt = tuple(tokens)
        entry, n_common = self._nearest(prompt)
        if n_common == len(prompt):
            if prompt:
                self._refresh(entry)
            return
        self._entries[prompt] = self._first_blocks(block_ids, len(prompt))
        self.blocks.cache_blocks(self._entries[prompt])
        insort(self._ordered, prompt)

    def make_room(self, n_blocks: int, written: Iterable[int] = ()) -> None:
        """Evict entries until ``n_blocks`` blocks are free, or eviction would free no more.

        written: blocks about to be appended to; ``n_blocks`` includes the clones of shared ones. If eviction
        frees too few, entries that share ``written`` blocks are evicted too, so that no clone is needed.
        """
        while self.blocks.num_free_blocks() < n_blocks and (entry := self._least_useful()) is not None:
            self._evict(entry)
        if self.blocks.num_free_blocks() < n_blocks:
            partial = {b for b in written if self.blocks.length(b) < self.blocks.block_size}
            self._end_sharing(n_blocks - self.blocks.num_free_blocks(), partial)

    def holdings(self) -> Counter[int]:
        """Return the number of entries that hold each block."""
        return Counter(chain.from_iterable(self._entries.values()))

    def num_evictable(self) -> int:
        """Return the number of blocks that evicting all entries would free."""
        return self.blocks.num_evictable_blocks()

    def clear(self) -> None:
        """Evict all entries."""
        for entry in list(self._entries):
            self._evict(entry)

    def _nearest(self, tokens: Tokens) -> tuple[Tokens, int]:
        """Return the entry with the longest prefix in common with ``tokens``, and that prefix's length."""
        place = bisect_left(self._ordered, tokens)
        beside = self._ordered[max(place - 1, 0) : place + 1]
        found = [(entry, common_prefix(entry, tokens)) for entry in beside]
        return max(found, key=itemgetter(1), default=((), 0))

    def _first_blocks(self, block_ids: list[int], n_tokens: int) -> list[int]:
        return block_ids[: blocks_for(n_tokens, self.blocks.block_size)]

    def _least_useful(self) -> Tokens | None:
        """Return the least recently used entry whose eviction frees a block, or None.

        Holders of a block also hold the blocks before it, so an entry's last block has the fewest holders. If
        several entries end in the same block, any of them may be returned.
        """
        if not self.num_evictable():
            return None
        holders = ((entry, self.blocks.ref_count(ids[-1])) for entry, ids in self._entries.items())
        alone = next((entry for entry, n in holders if n == 1), None)
        return alone if alone is not None else self._a_twin()

    def _a_twin(self) -> Tokens:
        """Return the least recently used entry whose last block is held only by entries that end in it."""
        last = {entry: ids[-1] for entry, ids in self._entries.items()}
        cached = Counter(last.values())
        return next(entry for entry, b in last.items() if self.blocks.ref_count(b) == cached[b])

    def _end_sharing(self, n_blocks: int, written: set[int]) -> None:
        """Evict entries until ``n_blocks`` of the ``written`` blocks are no longer shared."""
        for entry in [entry for entry, ids in self._entries.items() if ids[-1] in written]:
            if n_blocks < 1:
                return
            block_id = self._entries[entry][-1]
            self._evict(entry)
            n_blocks -= self.blocks.ref_count(block_id) == 1

    def _own_tail(self, block_ids: list[int], n_tokens: int) -> int:
        """Clone a last block that holds more tokens, or drop it if none is free; return the match length."""
        n_full = (len(block_ids) - 1) * self.blocks.block_size
        if self.blocks.length(block_ids[-1]) == n_tokens - n_full:
            return n_tokens
        self.make_room(1)
        if self.blocks.num_free_blocks() == 0:
            self.blocks.free_blocks([block_ids.pop()])
            return n_full
        block_ids[-1] = self.blocks.clone_block(block_ids[-1], n_tokens - n_full)
        return n_tokens

    def _refresh(self, entry: Tokens) -> None:
        self._entries[entry] = self._entries.pop(entry)

    def _evict(self, entry: Tokens) -> None:
        del self._ordered[bisect_left(self._ordered, entry)]
        self.blocks.evict_blocks(self._entries.pop(entry))


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return the number of equal leading tokens, by binary search over slices, which Python compares fast."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
