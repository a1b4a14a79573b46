"""The ranks that run one engine together, as seen by its components.

Rank 0 plans. The methods that its planner calls on its worker, by name, run on the workers of all ranks;
their arguments are numbers, strings and arrays.
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
    """The interface of a group of ranks to one of them."""

    @property
    def part(self) -> Part:
        """This rank's part of the model."""

    def on_all(self, call: Call) -> Call:
        """Return a function that runs a worker's ``call`` on this rank and on all others.

        Its arguments are numbers, strings and arrays; it returns the result of this rank's worker.
        """

    def check(self) -> None:
        """Raise ``RankError`` if the group has ended; call it after waiting for the device."""

    def least(self, number: int) -> int:
        """Return the smallest of the ranks' numbers; all ranks must call it."""


class Ranks(Group, Protocol):
    """A group of several ranks; on GPUs, CUDA graphs can capture its collectives."""

    def summed(self, x: Tensor) -> Tensor:
        """Sum the ranks' tensors in place (all-reduce)."""

    def gathered(self, x: Tensor) -> Tensor:
        """Gather the ranks' contiguous tensors, in rank order: ``[size, *x.shape]`` (all-gather)."""

    def peers(self, n_bytes: int) -> PeerMemory:
        """Return ``n_bytes`` of memory shared by the ranks; all ranks must call it."""


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
