"""How training goes: what schedules of the learning rate and scales of the loss are told."""

from __future__ import annotations

from dataclasses import dataclass, field

from .optim.config import OptimizerConfig


@dataclass
class TrainStepInfo:
    """How training goes.

    Attributes
    ----------
    optimizer_config
        The trainer's; its ``lr`` is what schedules start from.
    all_finite
        Whether the gradients of the last update were finite; of mixed precision alone.
    fetches
        Names of the outputs that steps return, in this order. Empty: all of the model's description.
    optimization_step
        Updates done.
    step
        Training steps done: `gradient_accumulation_steps` of them are one update.

    Raises
    ------
    TypeError, ValueError
        If a value is of the wrong kind, or a number below 0.
    """

    optimizer_config: OptimizerConfig
    all_finite: bool = True
    fetches: list[str] = field(default_factory=list)
    optimization_step: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer_config, OptimizerConfig):
            raise TypeError(f"optimizer_config is a {type(self.optimizer_config).__name__}, expected one of optim")
        if type(self.all_finite) is not bool:
            raise TypeError(f"all_finite is a {type(self.all_finite).__name__}, expected bool")
        if not isinstance(self.fetches, list) or not all(isinstance(name, str) for name in self.fetches):
            raise TypeError(f"fetches is {self.fetches!r}, expected a list of names")
        for name in ("optimization_step", "step"):
            value = getattr(self, name)
            if type(value) is not int:
                raise TypeError(f"{name} is a {type(value).__name__}, expected int")
            if value < 0:
                raise ValueError(f"{name} is {value}, expected at least 0")
