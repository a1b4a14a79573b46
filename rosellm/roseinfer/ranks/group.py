"""The ranks that run one engine together, as its components see them.

Rank 0 plans. When its planner calls a method of its worker by name, that method runs on the workers of all
ranks. The arguments are numbers, strings and arrays; a profiler's are functions, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from rosellm.models.part import WHOLE, Part
from rosellm.roseinfer.ranks.peer_memory import PeerMemory

Call = Callable[..., Any]  # ``Worker.call``: a method's name, and its arguments


class Group(Protocol):
    """The interface through which one rank sees its group."""

    @property
    def part(self) -> Part:
        """This rank's part of the model."""

    def on_all(self, call: Call) -> Call:
        """Return a function that runs a worker's ``call`` on all ranks, and returns this rank's result.

        The arguments of the function are numbers, strings and arrays.
        """

    def check(self) -> None:
        """Raise ``RankError`` if the group has ended; to be called after waiting for the device."""

    def least(self, number: int) -> int:
        """Return the minimum of the ranks' numbers; all ranks must call it."""


class Ranks(Group, Protocol):
    """A group of several ranks; on GPUs, CUDA graphs can capture its collectives."""

    def summed(self, x: Tensor) -> Tensor:
        """Sum the ranks' contiguous tensors in place (all-reduce); return ``x``."""

    def gathered(self, x: Tensor) -> Tensor:
        """Gather the ranks' contiguous tensors, in rank order: ``[size, *x.shape]`` (all-gather)."""

    def peers(self, n_bytes: int) -> PeerMemory:
        """Return ``n_bytes`` of memory per rank that all ranks share; all ranks must call it."""


@dataclass(frozen=True)
class Alone:
    """The group of an engine on a single device."""

    part: Part = WHOLE

    def on_all(self, call: Call) -> Call:
        """Return ``call``: there is no other rank."""
        return call

    def check(self) -> None:
        """Do nothing: there is no other rank that could fail."""

    def least(self, number: int) -> int:
        return number


ALONE = Alone()
