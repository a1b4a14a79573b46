"""The ranks that run one engine together, as its parts see them.

Rank 0 schedules. What it does on its device, every other rank does on its own: such a call is a command, by
name, with its numbers and the array that rank 0 has staged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from torch import Tensor

from rosellm.models.part import WHOLE, Part
from rosellm.roseinfer.ranks.peer_memory import PeerMemory

P = ParamSpec("P")
T = TypeVar("T")


class Group(Protocol):
    """One rank's view of its group."""

    @property
    def part(self) -> Part:
        """What of the model it has."""

    def command(self, name: str, run: Callable[P, T]) -> Callable[P, T]:
        """``run``, a method, as rank 0 is to call it: every rank runs its own of that name, in this order.

        Arguments are numbers, text, arrays, and tensors that an earlier command returned.
        """

    def check(self) -> None:
        """Raise ``RankError`` if the group has ended; call it after the device has been waited for."""

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers; all ranks call it."""


class Ranks(Group, Protocol):
    """A group of several, whose collectives are part of a captured step on a GPU."""

    def summed(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors, in place."""

    def gathered(self, x: Tensor) -> Tensor:
        """The ranks' contiguous tensors, by rank: ``[size, *x.shape]``."""

    def peers(self, n_bytes: int) -> PeerMemory:
        """So many bytes that the ranks share; all ranks call it."""


@dataclass(frozen=True)
class Alone:
    """The group of an engine that runs on one device."""

    part: Part = WHOLE

    def command(self, name: str, run: Callable[P, T]) -> Callable[P, T]:
        """``run`` itself."""
        return run

    def check(self) -> None:
        """There is no other rank to fail."""

    def least(self, number: int) -> int:
        return number


ALONE = Alone()
