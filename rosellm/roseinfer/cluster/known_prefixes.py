"""Which beginnings of prompts a replica's prefix cache may have, told from what it was given."""

from __future__ import annotations

from collections import OrderedDict


def marks(prompt: list[int], block_size: int) -> tuple[int, ...]:
    """One number for each beginning of ``prompt`` that is whole blocks long, shortest first.

    Prompts whose first k blocks are equal have the same first k marks.
    """
    found, mark = [], 0
    for end in range(block_size, len(prompt) + 1, block_size):
        mark = hash((mark, *prompt[end - block_size : end]))
        found.append(mark)
    return tuple(found)


class KnownPrefixes:
    """The marks of the prompts that a replica was given: the latest ``most`` of them, one a block.

    A guess: the replica's own cache may have dropped what is known here. A wrong guess costs time alone.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._marks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._marks)

    def length(self, of: tuple[int, ...]) -> int:
        """How many blocks of a prompt are known, from its beginning."""
        return next((n for n, mark in enumerate(of) if mark not in self._marks), len(of))

    def add(self, of: tuple[int, ...]) -> None:
        """A prompt was given; the first blocks stay longest, since the others are of no use without them."""
        for mark in reversed(of):
            self._marks[mark] = None
            self._marks.move_to_end(mark)
        while len(self._marks) > self._most:
            self._marks.popitem(last=False)
