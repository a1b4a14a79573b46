"""From final hidden states to the device state's rows: the end of every run of a resident step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.layers.choosers import Chooser


@dataclass
class NextTokens:
    """Chooses tokens, and advances the rows that get them.

    advance: see ``kernels.advance.advance_ref``.
    """

    chooser: Chooser
    advance: Callable[..., None]

    def __call__(
        self, hidden: Tensor, settings: DeviceState, mode: str, state: DeviceState, slots: Tensor
    ) -> None:
        """hidden ``[n, C]``; settings: n rows with their requests' wishes; slots ``[n]`` int64: of state."""
        values, indices = self.chooser(hidden, settings, mode)
        self.advance(state=state, slots=slots, values=values, indices=indices)
