"""Aims that a record is held against: what a user should at most wait for, or at least get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from rosellm.lab.records.records import FULL_SIZE
from rosellm.roseinfer.bench.workloads import WORKLOADS

Of = TypeVar("Of")
MODEL = WORKLOADS["W1"].model


class Verdict(NamedTuple):
    """An aim, in ``unit``, and what was found; a share ("%") is at least the aim, a time at most."""

    told: str
    aim: float
    found: float
    unit: str

    @property
    def is_kept(self) -> bool:
        return self.found >= self.aim if self.unit == "%" else self.found <= self.aim


def aims_of(aims: Mapping[Of, float], model: str, size: str) -> dict[str, float]:
    """The aims by name, for a record of ``MODEL`` at full size, which they are of; none for any other."""
    return {str(name): aim for name, aim in aims.items()} if (model, size) == (MODEL, FULL_SIZE) else {}
