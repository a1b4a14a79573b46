"""Estimate which prompt prefixes a replica's prefix cache holds, from the prompts sent to that replica."""

from __future__ import annotations

from collections import OrderedDict


def marks(prompt: list[int], block_size: int) -> tuple[int, ...]:
    """Return the marks of a prompt: a hash of each prefix that is a whole number of blocks, shortest first.

    prompt: token ids.
    block_size: tokens per block.

    Prompts whose first k blocks are equal have the same first k marks.
    """
    found, mark = [], 0
    for end in range(block_size, len(prompt) + 1, block_size):
        mark = hash((mark, *prompt[end - block_size : end]))
        found.append(mark)
    return tuple(found)


class KnownPrefixes:
    """An estimate of the prefixes in a replica's cache: the marks of the prompts sent to it most recently.

    most: maximum number of marks kept, one per block.

    The replica may already have evicted some of these blocks. A wrong estimate only costs time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._marks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._marks)

    def length(self, of: tuple[int, ...]) -> int:
        """Return how many leading blocks of the prompt with marks ``of`` are known."""
        return next((n for n, mark in enumerate(of) if mark not in self._marks), len(of))

    def add(self, of: tuple[int, ...]) -> None:
        """Record the marks of a prompt; its first marks are evicted last, since later blocks need them."""
        for mark in reversed(of):
            self._marks[mark] = None
            self._marks.move_to_end(mark)
        while len(self._marks) > self._most:
            self._marks.popitem(last=False)
