"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .fused import FusedOptimizer, Group, check_halves, check_number, refuse


class FusedSGD(FusedOptimizer):
    """Stochastic gradient descent of all parameters in one pass over memory.

    It is used like ``torch.optim.SGD``, whose states it loads and who loads its own.

    Parameters
    ----------
    params
        Parameters, of real floating point, on the CPU or GPUs, or groups of them.
    lr, momentum, dampening, weight_decay, nesterov, maximize
        As of ``torch.optim.SGD``.
    set_grad_none, max_grad_norm, master_weights, stochastic_rounding
        As of :class:`FusedAdam`; what is kept here is the momentum.
    fused, foreach, differentiable
        How PyTorch computes a step. This one is fused: False for `fused`, and True for the others, is refused.

    Raises
    ------
    ValueError
        A number is out of its range, or an implementation is asked for that this is not.

    Notes
    -----
    With g the gradient and weight decay: ``b = momentum b + (1 - dampening) g``, g at the first step;
    ``p -= lr b``, or with Nesterov's momentum ``p -= lr (g + momentum b)``: Sutskever et al., "On the importance of
    initialization and momentum in deep learning", 2013, with lr outside of b.
    """

    rule = "sgd"
    known = ("lr", "momentum", "dampening", "weight_decay")
    counts = False
    fixed: ClassVar[dict[str, Any]] = {"foreach": None, "differentiable": False, "fused": None}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        set_grad_none: bool = True,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        fused: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        refuse(type(self).__name__, fused, foreach=foreach, differentiable=differentiable)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "master_weights": master_weights,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, defaults, max_grad_norm, set_grad_none)

    def _check(self, group: Group) -> None:
        check_number("learning rate", group["lr"], 0.0)
        check_number("momentum value", group["momentum"], 0.0)
        check_number("weight_decay value", group["weight_decay"], 0.0)
        check_halves(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")

    def _states(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _new_state(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(like, dtype=dtype, memory_format=torch.preserve_format)

    def _starts(self) -> bool:
        params = ((p, self._states(group)) for group in self.param_groups for p in group["params"])
        return any(
            p.grad is not None and self.state.get(p, {}).get(name) is None for p, names in params for name in names
        )

    def _numbers(self, group: Group) -> dict[str, float]:
        names = ("momentum", "dampening", "weight_decay", "nesterov", "maximize", "stochastic_rounding")
        return {name: float(group[name]) for name in names}
