"""LAMB: Adam's step, as long as the parameter."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor

from .adam import AdamWMode, check_adam
from .fused import FusedOptimizer, Group, check_number, refuse


class FusedLamb(FusedOptimizer):
    """LAMB of all parameters in two passes over memory.

    Parameters
    ----------
    params
        Parameters, of real floating point, whole, on the CPU or GPUs, or groups of them.
    lr
        Learning rate; a tensor of one element, or an array of NumPy without dims, is read at each step.
    betas, eps, weight_decay
        As of ``torch.optim.AdamW``.
    bias_correction
        Whether the means, which start at 0, are corrected for that.
    adam_w_mode
        Whether weight decay is added to the step; else to the gradient.
    grad_averaging
        Whether the mean of the gradient takes (1 - beta1) of a gradient; else all of it.
    use_nvlamb
        Whether the step of a parameter without weight decay gets the parameter's length too.
    ratio_min, ratio_max
        Between which the ratio of the two lengths is kept.
    amsgrad
        Refused: LAMB has none.
    max_grad_norm
        The largest norm of all gradients together, or None, see :class:`FusedAdam`.
    maximize, set_grad_none, master_weights, stochastic_rounding
        As of :class:`FusedAdam`. The means of parameters of 16 bits are always kept in 32.
    fused, foreach, capturable, differentiable
        As of :class:`FusedAdam`.

    Raises
    ------
    ValueError
        A number is out of its range, or an implementation is asked for that this is not.

    Notes
    -----
    With m and v the means of Adam, ``u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p``;
    ``p -= lr |p| / |u| u`` where neither length is 0, of each parameter apart, and the ratio within its bounds:
    algorithm 2 of You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020, with
    the length of p itself. The clipping of the gradients before it, and lr alone for parameters without weight decay,
    are NVIDIA's.
    """

    rule = "lamb"
    known = ("lr", "betas", "eps", "weight_decay")
    whole = True
    fixed: ClassVar[dict[str, Any]] = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        ratio_min: float = 0.0,
        ratio_max: float = math.inf,
        maximize: bool = False,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        fused: bool | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        asked = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "amsgrad": amsgrad}
        refuse(type(self).__name__, fused, **asked)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "use_nvlamb": use_nvlamb,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
            "maximize": maximize,
            "master_weights": master_weights,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, defaults, max_grad_norm, set_grad_none)

    def _check(self, group: Group) -> None:
        check_adam(group)
        check_number("ratio_min", group["ratio_min"], -math.inf)
        if not group["ratio_min"] <= group["ratio_max"]:
            raise ValueError(f"Invalid ratio_max: {group['ratio_max']}, with ratio_min={group['ratio_min']}")

    def _states(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _widens(self, group: Group) -> bool:
        return True

    def _numbers(self, group: Group) -> dict[str, float]:
        names = ("eps", "weight_decay", "bias_correction", "grad_averaging", "use_nvlamb", "ratio_min", "ratio_max")
        beta1, beta2 = group["betas"]
        mode = AdamWMode.ADAMW_TORCH if group["adam_w_mode"] else AdamWMode.ADAM_L2_REGULARIZATION
        return {
            **{name: float(group[name]) for name in (*names, "maximize", "stochastic_rounding")},
            **{"beta1": float(beta1), "beta2": float(beta2), "decay": float(mode)},
        }
