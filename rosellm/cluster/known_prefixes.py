"""Estimate which prompt prefixes a replica's prefix cache holds, from the prompts it was given."""

from __future__ import annotations

from collections import OrderedDict


def marks(prompt: list[int], block_size: int) -> tuple[int, ...]:
    """Return a hash for each prefix of ``prompt`` that is a whole number of blocks, shortest first.

    Prompts whose first k blocks are equal have the same first k marks.
    """
    found, mark = [], 0
    for end in range(block_size, len(prompt) + 1, block_size):
        mark = hash((mark, *prompt[end - block_size : end]))
        found.append(mark)
    return tuple(found)


class KnownPrefixes:
    """The marks of a replica's latest prompts, one per block, at most ``most`` of them.

    An estimate: the replica's cache may have evicted some of them. A wrong estimate only costs time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._marks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._marks)

    def length(self, of: tuple[int, ...]) -> int:
        """Return how many leading blocks of a prompt, given by its marks, are known."""
        return next((n for n, mark in enumerate(of) if mark not in self._marks), len(of))

    def add(self, of: tuple[int, ...]) -> None:
        """Record a prompt; its first blocks are kept longest, since later ones are useless without them."""
        for mark in reversed(of):
            self._marks[mark] = None
            self._marks.move_to_end(mark)
        while len(self._marks) > self._most:
            self._marks.popitem(last=False)
