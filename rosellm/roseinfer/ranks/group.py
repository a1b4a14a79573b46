"""The ranks that run one engine together, as seen by its components.

Rank 0 schedules. Its device work is broadcast to every other rank as commands, each made of a name, scalar
arguments and the array that rank 0 has staged.
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
        """This rank's part of the model."""

    def broadcast(self, name: str, run: Callable[P, T]) -> Callable[P, T]:
        """Wrap the method ``run`` for rank 0: a call runs every rank's method of that name, in call order.

        Arguments may be numbers, strings, arrays, and tensors that an earlier command returned.
        """

    def check(self) -> None:
        """Raise ``RankError`` if the group has ended; call it after waiting for the device."""

    def least(self, number: int) -> int:
        """Return the smallest of the ranks' numbers; all ranks call it."""


class Ranks(Group, Protocol):
    """A group of several ranks; on a GPU its collectives can be captured in a step."""

    def summed(self, x: Tensor) -> Tensor:
        """Sum the ranks' tensors in place (all-reduce)."""

    def gathered(self, x: Tensor) -> Tensor:
        """Gather the ranks' contiguous tensors, in rank order: ``[size, *x.shape]`` (all-gather)."""

    def peers(self, n_bytes: int) -> PeerMemory:
        """Return ``n_bytes`` of memory shared by the ranks; all ranks call it."""


@dataclass(frozen=True)
class Alone:
    """The group of an engine on a single device."""

    part: Part = WHOLE

    def broadcast(self, name: str, run: Callable[P, T]) -> Callable[P, T]:
        """Return ``run`` unchanged."""
        return run

    def check(self) -> None:
        """Do nothing: there is no other rank that could fail."""

    def least(self, number: int) -> int:
        return number


ALONE = Alone()
