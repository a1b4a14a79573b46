"""The prefix cache, which reuses KV blocks of earlier requests for prompts with the same beginning.

Token sequences are kept in lexicographic order, so the one that shares the longest prefix with a query is
next to the query's insertion point, and a lookup takes time O(length x log entries). RadixAttention
(arXiv:2312.07104) uses a radix tree for the same purpose.
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
    """Cached token sequences and their reference-counted blocks; the least recently used is evicted first.

    A sequence is a prompt or, once a request has ended, its prompt and answer.

    A cached block is never written: a sequence that would append to it shares it with the cache entry, so
    ``KVBlocks`` clones it first (copy on write).

    alignment: matches are truncated to a multiple of this number of tokens.
    hits, hit_tokens: number of successful matches, and of the tokens that they matched.
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
        """The block ids of each cached sequence, least recently used first."""
        return self._entries

    def look_up(self, tokens: SequenceOf[int]) -> tuple[int, list[int]]:
        """Return the length and the block ids of the longest cached prefix of ``tokens``; change nothing.

        The last token is never matched, since it must be computed to choose the next one.
        """
        entry, n_common = self._nearest(tuple(tokens))
        n_matched = min(n_common, len(tokens) - 1) // self.alignment * self.alignment
        return (n_matched, self._first_blocks(self._entries[entry], n_matched)) if n_matched > 0 else (0, [])

    def match(self, tokens: SequenceOf[int]) -> tuple[int, list[int]]:
        """Return what :meth:`look_up` returns, for a caller that becomes a holder of the blocks.

        If the last block holds more tokens than were matched, it is cloned; if no block is free for the
        clone, even after eviction, only full blocks are matched.
        """
        n_matched, block_ids = self.look_up(tokens)
        if not n_matched:
            return 0, []
        self._refresh(self._nearest(tuple(tokens))[0])
        self.blocks.incref_blocks(block_ids)
        n_matched = self._own_tail(block_ids, n_matched)
        self.hits += n_matched > 0
        self.hit_tokens += n_matched
        return n_matched, block_ids

    def insert(self, tokens: SequenceOf[int], block_ids: list[int]) -> None:
        """Cache the blocks that hold ``tokens``; if an entry begins with them, only mark it as just used.

        An entry with which ``tokens`` begin is replaced.
        """
        prompt = tuple(tokens)
        entry, n_common = self._nearest(prompt)
        if n_common == len(prompt):
            if prompt:
                self._refresh(entry)
            return
        if entry and n_common == len(entry):
            self._evict(entry)
        self._entries[prompt] = self._first_blocks(block_ids, len(prompt))
        self.blocks.cache_blocks(self._entries[prompt])
        insort(self._ordered, prompt)

    def make_room(self, n_blocks: int, written: Iterable[int] = ()) -> None:
        """Evict entries until ``n_blocks`` blocks are free, or until eviction would free no more blocks.

        written: blocks about to be appended to; ``n_blocks`` includes the clones of those that are shared. If
            eviction frees too few blocks, entries that share ``written`` blocks are evicted too, so that no
            clone is needed.
        """
        while self.blocks.num_free_blocks() < n_blocks and (entry := self._least_useful()) is not None:
            self._evict(entry)
        if self.blocks.num_free_blocks() < n_blocks:
            partial = {b for b in written if self.blocks.length(b) < self.blocks.block_size}
            self._end_sharing(n_blocks - self.blocks.num_free_blocks(), partial)

    def holdings(self) -> Counter[int]:
        """Return the number of entries that hold each block, by block id."""
        return Counter(chain.from_iterable(self._entries.values()))

    def num_evictable(self) -> int:
        """Return the number of blocks that evicting all entries would free."""
        return self.blocks.num_evictable_blocks()

    def clear(self) -> None:
        """Evict all entries."""
        for entry in list(self._entries):
            self._evict(entry)

    def _nearest(self, tokens: Tokens) -> tuple[Tokens, int]:
        """Return the entry that shares the longest prefix with ``tokens``, and the length of that prefix."""
        place = bisect_left(self._ordered, tokens)
        beside = self._ordered[max(place - 1, 0) : place + 1]
        found = [(entry, common_prefix(entry, tokens)) for entry in beside]
        return max(found, key=itemgetter(1), default=((), 0))

    def _first_blocks(self, block_ids: list[int], n_tokens: int) -> list[int]:
        return block_ids[: blocks_for(n_tokens, self.blocks.block_size)]

    def _least_useful(self) -> Tokens | None:
        """Return the least recently used entry whose eviction frees a block, or None.

        Every holder of a block also holds the blocks before it, so the last block of an entry has the fewest
        holders. If several entries end in the same block, any of these entries may be returned.
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
        """Clone the last block if it holds more than ``n_tokens``, or drop it if no block is free.

        n_tokens: number of matched tokens.

        Returns the number of tokens that the blocks then match.
        """
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
    """Return the number of equal leading tokens, by binary search: Python compares slices fast."""
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
