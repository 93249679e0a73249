"""Configurations of the trainer's optimizer: numbers by their names in ONNX Runtime, of parameters by theirs."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from ...optim import AdamWMode, FusedAdam, FusedLamb, FusedSGD
from ...optim.fused import FusedOptimizer

Group = dict[str, Any]
Recipe = tuple[type[FusedOptimizer], list[Group], dict[str, Any]]  # a class and its arguments


@dataclass
class OptimizerConfig:
    """What the configurations have in common.

    Attributes
    ----------
    name
        Of the optimizer, as checkpoints have it.
    """

    name: ClassVar[str]

    params: list[Group] = field(default_factory=list)
    lr: float = 0.001

    def __post_init__(self) -> None:
        if not isinstance(self.params, list):
            raise TypeError(f"params is a {type(self.params).__name__}, expected a list of dicts")
        self._check(self.defaults)
        self.params = [self._filled(i, group) for i, group in enumerate(self.params)]

    @property
    def defaults(self) -> dict[str, Any]:
        """The numbers of parameters that are in no group."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "params"}

    def recipe(self, parameters: Mapping[str, nn.Parameter], frozen: Collection[str], clips: bool) -> Recipe:
        """What the optimizer of these parameters is made of, those that a group names in that group.

        Parameters
        ----------
        parameters
            By all names that they have, those to be trained.
        frozen
            Names of others, which groups may have too.
        clips
            Whether gradients are clipped.

        Raises
        ------
        ValueError
            If a group names what is no parameter, or one that another group has.
        """
        left, groups = dict.fromkeys(parameters.values()), []
        for i, group in enumerate(self.params):
            chosen = []
            for name in group["params"]:
                if name in frozen:
                    continue
                if name not in parameters:
                    raise ValueError(f"params[{i}] names {name!r}, which is no parameter of the model")
                if parameters[name] not in left:
                    raise ValueError(f"params[{i}] names {name!r}, which is there before")
                del left[parameters[name]]
                chosen.append(parameters[name])
            groups.append({"params": chosen, **self._options(group)})
        rest = {"params": [*left], **self._options(self.defaults)}
        kind, numbers = self._kind(clips)
        return kind, [rest, *groups] if left else groups, {"lr": self.lr, **numbers}

    def _kind(self, clips: bool) -> tuple[type[FusedOptimizer], dict[str, Any]]:
        """The class, and what all of its groups share."""
        raise NotImplementedError

    def _options(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """As our optimizers call them."""
        raise NotImplementedError

    def _filled(self, i: int, group: Any) -> Group:
        if not isinstance(group, dict) or not isinstance(group.get("params"), (list, tuple)) or len(group) == 1:
            raise ValueError(f"params[{i}] is {group!r}, expected a dict of a list of names, 'params', and of numbers")
        unknown = [name for name in group if name not in {"params", *self.defaults}]
        if unknown:
            raise ValueError(f"params[{i}] has {unknown[0]!r}, expected one of {', '.join(self.defaults)}")
        if "lr" in group:
            raise ValueError(f"params[{i}] has a learning rate, which all parameters share")
        if group.get("max_norm_clip", self.defaults.get("max_norm_clip")) != self.defaults.get("max_norm_clip"):
            raise ValueError(f"params[{i}] has max_norm_clip={group['max_norm_clip']}: the norm is of all gradients")
        filled = {**self.defaults, **group}
        self._check({name: filled[name] for name in self.defaults}, f"params[{i}]: ")
        return filled

    def _check(self, numbers: Mapping[str, Any], where: str = "") -> None:
        for name, value in numbers.items():
            if name in _FLAGS:
                if not isinstance(value, _FLAGS[name]):
                    raise TypeError(f"{where}{name} is {value!r}, expected a {_FLAGS[name].__name__.lstrip('_')}")
            elif isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{where}{name} is {value!r}, expected a number")
            elif not value >= _LEAST.get(name, 0.0):
                raise ValueError(f"{where}{name} is {value}, expected at least 0")


@dataclass
class SGDConfig(OptimizerConfig):
    """:class:`ortmodule_c.optim.FusedSGD` without momentum.

    Parameters
    ----------
    params
        Empty: there are no groups.
    lr
        Learning rate.

    Raises
    ------
    TypeError, ValueError
        If a number is none or below 0, or there are groups.
    """

    name: ClassVar[str] = "SGDOptimizer"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.params:
            raise ValueError("SGDConfig takes no groups: it has no number but the learning rate, which all share")

    def _kind(self, clips: bool) -> tuple[type[FusedOptimizer], dict[str, Any]]:
        return FusedSGD, {}

    def _options(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        return {}


class _DecayMode(enum.IntEnum):
    """When the weights of :class:`AdamConfig` decay."""

    BEFORE_WEIGHT_UPDATE = 0
    """As by ``torch.optim.AdamW``."""
    AFTER_WEIGHT_UPDATE = 1
    """As by the AdamW that transformers had."""


@dataclass
class AdamConfig(OptimizerConfig):
    """:class:`ortmodule_c.optim.FusedAdam`.

    Parameters
    ----------
    params
        Groups with other numbers than below: dicts of these, but `lr`, and of "params", a list of names.
    lr
        Learning rate.
    alpha, beta
        Of the means of gradients and of their squares, PyTorch's `betas`.
    lambda_coef
        Weight decay.
    epsilon
        Added to the root of the mean of squares.
    max_norm_clip
        The largest norm of all gradients together, where ``utils.grad_norm_clip`` is on.
    do_bias_correction
        Whether the means, which start at 0, are corrected for that.
    weight_decay_mode
        When weights decay.

    Raises
    ------
    TypeError, ValueError
        If a number is none or out of its range, or a group says what it cannot.
    """

    name: ClassVar[str] = "AdamOptimizer"
    DecayMode: ClassVar[type[_DecayMode]] = _DecayMode

    alpha: float = 0.9
    beta: float = 0.999
    lambda_coef: float = 0.0
    epsilon: float = 1e-8
    max_norm_clip: float = 1.0
    do_bias_correction: bool = True
    weight_decay_mode: _DecayMode = _DecayMode.BEFORE_WEIGHT_UPDATE

    def _kind(self, clips: bool) -> tuple[type[FusedOptimizer], dict[str, Any]]:
        return FusedAdam, {"max_grad_norm": self.max_norm_clip if clips else None}

    def _options(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        before = numbers["weight_decay_mode"] == _DecayMode.BEFORE_WEIGHT_UPDATE
        mode = AdamWMode.ADAMW_TORCH if before else AdamWMode.ADAMW_TRANSFORMERS
        return {**_of_adam(numbers), "adam_w_mode": mode}


@dataclass
class LambConfig(OptimizerConfig):
    """:class:`ortmodule_c.optim.FusedLamb`, all of whose steps are as long as the parameter.

    Parameters
    ----------
    params, lr, alpha, beta, lambda_coef, epsilon, max_norm_clip, do_bias_correction
        As of :class:`AdamConfig`.
    ratio_min, ratio_max
        Between which the ratio of a parameter's length to its step's is kept.

    Raises
    ------
    TypeError, ValueError
        If a number is none or out of its range, or a group says what it cannot.
    """

    name: ClassVar[str] = "LambOptimizer"

    alpha: float = 0.9
    beta: float = 0.999
    lambda_coef: float = 0.0
    ratio_min: float = -math.inf
    ratio_max: float = math.inf
    epsilon: float = 1e-6
    max_norm_clip: float = 1.0
    do_bias_correction: bool = False

    def _kind(self, clips: bool) -> tuple[type[FusedOptimizer], dict[str, Any]]:
        return FusedLamb, {"use_nvlamb": True, "max_grad_norm": self.max_norm_clip if clips else None}

    def _options(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        return {**_of_adam(numbers), "ratio_min": numbers["ratio_min"], "ratio_max": numbers["ratio_max"]}


_FLAGS: dict[str, type] = {"do_bias_correction": bool, "weight_decay_mode": _DecayMode}
_LEAST = {"ratio_min": -math.inf, "ratio_max": -math.inf}


def _of_adam(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "betas": (numbers["alpha"], numbers["beta"]),
        "weight_decay": numbers["lambda_coef"],
        "eps": numbers["epsilon"],
        "bias_correction": numbers["do_bias_correction"],
    }
