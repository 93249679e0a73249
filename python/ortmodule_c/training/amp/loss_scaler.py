"""What the loss is multiplied by, and how it follows from the steps taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..info import TrainStepInfo


class LossScaler:
    """A scale that stays as it is, and the base of those that do not: they override :meth:`update`.

    Parameters
    ----------
    loss_scale
        What losses are multiplied by: above 0, and finite.

    Raises
    ------
    ValueError
        If it is not.
    """

    def __init__(self, loss_scale: float) -> None:
        self._first = _scale("loss_scale", loss_scale)
        self.loss_scale = self._first

    def reset(self) -> None:
        """Start again at the first scale."""
        self.loss_scale = self._first

    def update(self, train_step_info: TrainStepInfo) -> float:
        """Set the scale of the next step by how this one went; the scale."""
        return self.loss_scale

    def state_dict(self) -> dict[str, float]:
        """What it goes on from."""
        return {"loss_scale": self.loss_scale}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Go on from what :meth:`state_dict` gave; what it does not say stays."""
        self.loss_scale = _scale("loss_scale", float(state_dict.get("loss_scale", self.loss_scale)))


class DynamicLossScaler(LossScaler):
    """A scale that doubles after a window of steps with finite gradients, and halves at one without.

    Parameters
    ----------
    automatic_update
        False: the scale stays as it is.
    loss_scale
        The first.
    up_scale_window
        Steps with finite gradients, one after another, before it doubles.
    min_loss_scale, max_loss_scale
        Between which it stays.

    Raises
    ------
    ValueError
        If a number is out of its range.
    """

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = 2.0**16,
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        super().__init__(loss_scale)
        if type(up_scale_window) is not int or up_scale_window < 1:
            raise ValueError(f"up_scale_window is {up_scale_window!r}, expected a whole number of steps")
        self.automatic_update = automatic_update
        self.up_scale_window = up_scale_window
        self.min_loss_scale = _scale("min_loss_scale", min_loss_scale)
        self.max_loss_scale = _scale("max_loss_scale", max_loss_scale)
        if self.min_loss_scale > self.max_loss_scale:
            raise ValueError(f"min_loss_scale is {min_loss_scale}, above max_loss_scale={max_loss_scale}")
        if not self.min_loss_scale <= self.loss_scale <= self.max_loss_scale:
            raise ValueError(f"loss_scale is {loss_scale}, expected {min_loss_scale} to {max_loss_scale}")
        self._finite_steps = 0

    def state_dict(self) -> dict[str, float]:
        """What it goes on from."""
        return {**super().state_dict(), "finite_steps": self._finite_steps}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Go on from what :meth:`state_dict` gave; what it does not say stays."""
        super().load_state_dict(state_dict)
        self._finite_steps = int(state_dict.get("finite_steps", self._finite_steps))

    def reset(self) -> None:
        """Start again at the first scale, and a window."""
        super().reset()
        self._finite_steps = 0

    def update(self, train_step_info: TrainStepInfo) -> float:
        """Set the scale of the next step by whether the gradients of this one were finite; the scale."""
        if not self.automatic_update:
            return self.loss_scale
        if not train_step_info.all_finite:
            self.loss_scale = max(self.min_loss_scale, self.loss_scale / 2)
            self._finite_steps = 0
            return self.loss_scale
        self._finite_steps += 1
        if self._finite_steps >= self.up_scale_window:
            self.loss_scale = min(self.max_loss_scale, self.loss_scale * 2)
            self._finite_steps = 0
        return self.loss_scale


def _scale(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, expected a finite number above 0")
    return float(value)
