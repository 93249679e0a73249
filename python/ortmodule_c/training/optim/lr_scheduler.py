"""Schedules of the learning rate: it rises to that of the optimizer, and then stays or falls."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..info import TrainStepInfo


class _LRScheduler:
    """The base of all schedules; those of users override :meth:`get_lr`."""

    def __init__(self) -> None:
        self._last_lr: list[float] = []

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """The learning rate of this step, as the one element of a list."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """What :meth:`get_lr` gave for the last step; empty before the first."""
        return self._last_lr

    def _step(self, train_step_info: TrainStepInfo) -> list[float]:
        self._last_lr = self.get_lr(train_step_info)
        return self._last_lr


class _WarmupLRScheduler(_LRScheduler):
    """Rises from 0 in proportion to the updates done, until `warmup` of all steps are.

    Parameters
    ----------
    total_steps
        Updates of the whole training.
    warmup
        Share of them, from 0 up to but not 1.

    Raises
    ------
    ValueError
        If a number is out of its range.
    """

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        super().__init__()
        if type(total_steps) is not int or total_steps < 1:
            raise ValueError(f"total_steps is {total_steps!r}, expected a whole number above 0")
        if isinstance(warmup, bool) or not isinstance(warmup, (int, float)) or not 0 <= warmup < 1:
            raise ValueError(f"warmup is {warmup!r}, expected a number of 0 <= warmup < 1")
        self.total_steps = total_steps
        self.warmup = warmup
        self._warmup_steps = warmup * total_steps

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """The learning rate of this step: the optimizer's, times a number of 0 to 1."""
        base, done = train_step_info.optimizer_config.lr, train_step_info.optimization_step
        if done < self._warmup_steps:
            return [base * done / max(1, self._warmup_steps)]
        return [self._after(base, done, (done - self._warmup_steps) / max(1, self.total_steps - self._warmup_steps))]

    def _after(self, base: float, done: int, progress: float) -> float:
        """The rate after the warmup, by the share that is done of what follows it."""
        raise NotImplementedError


class ConstantWarmupLRScheduler(_WarmupLRScheduler):
    """Stays at the optimizer's learning rate; parameters as of :class:`LinearWarmupLRScheduler`."""

    def _after(self, base: float, done: int, progress: float) -> float:
        return base


class CosineWarmupLRScheduler(_WarmupLRScheduler):
    """Falls along a cosine: half a wave with 0.5 for `cycles`, and as many as that says.

    Parameters
    ----------
    total_steps, warmup
        As of :class:`LinearWarmupLRScheduler`.
    cycles
        Waves.

    Raises
    ------
    ValueError
        If a number is out of its range.
    """

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if isinstance(cycles, bool) or not isinstance(cycles, (int, float)) or not cycles > 0:
            raise ValueError(f"cycles is {cycles!r}, expected a number above 0")
        self.cycles = cycles

    def _after(self, base: float, done: int, progress: float) -> float:
        return base * max(0.0, 0.5 * (1.0 + math.cos(math.pi * self.cycles * 2.0 * progress)))


class LinearWarmupLRScheduler(_WarmupLRScheduler):
    """Falls to 0 at the last step.

    Parameters
    ----------
    total_steps
        Updates of the whole training.
    warmup
        Share of them, from 0 up to but not 1, in which the rate rises from 0.

    Raises
    ------
    ValueError
        If a number is out of its range.
    """

    def _after(self, base: float, done: int, progress: float) -> float:
        return base * max(0, self.total_steps - done) / max(1, self.total_steps - self._warmup_steps)


class PolyWarmupLRScheduler(_WarmupLRScheduler):
    """Falls to `lr_end` at the last step, as a power of what is left.

    Parameters
    ----------
    total_steps, warmup
        As of :class:`LinearWarmupLRScheduler`.
    lr_end
        The learning rate at the end and after it.
    power
        1.0 is a straight line.

    Raises
    ------
    ValueError
        If a number is out of its range; at a step, if the optimizer's learning rate is not above `lr_end`.
    """

    def __init__(self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        for name, value in (("lr_end", lr_end), ("power", power)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(f"{name} is {value!r}, expected a number of at least 0")
        self.lr_end = lr_end
        self.power = power

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """The learning rate of this step."""
        if not train_step_info.optimizer_config.lr > self.lr_end:
            raise ValueError(
                f"lr_end is {self.lr_end}, not below the learning rate {train_step_info.optimizer_config.lr}"
            )
        return super().get_lr(train_step_info)

    def _after(self, base: float, done: int, progress: float) -> float:
        return self.lr_end + (base - self.lr_end) * (1 - min(progress, 1.0)) ** self.power
