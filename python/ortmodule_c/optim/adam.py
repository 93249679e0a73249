"""Adam and the two AdamWs."""

from __future__ import annotations

import enum
from typing import Any, ClassVar

from torch import Tensor

from .fused import FusedOptimizer, Group, check_halves, check_number, refuse


class AdamWMode(enum.IntEnum):
    """What weight decay is to :class:`FusedAdam`."""

    ADAM_L2_REGULARIZATION = 0
    """Added to the gradient, as by ``torch.optim.Adam``."""
    ADAMW_TRANSFORMERS = 1
    """After the step, and `eps` before the bias is corrected, as by the AdamW that transformers had."""
    ADAMW_TORCH = 2
    """Before the step, as by ``torch.optim.AdamW``."""


# (eps, weight_decay) of the optimizer that a mode stands for.
DEFAULTS = {
    AdamWMode.ADAM_L2_REGULARIZATION: (1e-8, 0.0),
    AdamWMode.ADAMW_TRANSFORMERS: (1e-6, 0.0),
    AdamWMode.ADAMW_TORCH: (1e-8, 1e-2),
}


class FusedAdam(FusedOptimizer):
    """Adam and AdamW of all parameters in one pass over memory.

    It is used like ``torch.optim.AdamW`` or ``torch.optim.Adam``, with arguments in their order; it loads their states,
    and they load its own.
    Parameters, gradients and state may be strided in any way; those that lie alike and leave no gaps are updated
    in place, others through a copy. The result does not depend on the number of threads.

    Parameters
    ----------
    params
        Parameters, of real floating point, on the CPU or GPUs, or groups of them.
    lr
        Learning rate; a tensor of one element, or an array of NumPy without dims, is read at each step.
    betas, eps
        As of ``torch.optim.Adam``. By default `eps` is that of the optimizer that `adam_w_mode` stands for: 1e-8,
        and 1e-6 for ADAMW_TRANSFORMERS.
    weight_decay
        By default 1e-2 for ADAMW_TORCH, else 0.
    adam_w_mode
        Where weight decay comes in.
    bias_correction
        Whether the means, which start at 0, are corrected for that.
    amsgrad, maximize
        As of ``torch.optim.Adam``.
    set_grad_none
        What :meth:`zero_grad` does by default: drop gradients, or set them to 0.
    max_grad_norm
        The largest norm of all gradients together: above, they are used times
        ``max_grad_norm / (norm + 1e-6)``, as by ``torch.nn.utils.clip_grad_norm_``. `Parameter.grad` is not
        changed; `grad_norm` of the optimizer is the norm at the last step, and waits for a GPU when it is read. All
        are on one device then. In mixed precision Lightning asks for this: it does not clip for optimizers that
        divide by the loss scale themselves.
    master_weights
        Parameters of 16 bits: keep them in 32 too, as "master" of their state, and round once to what the model
        sees. A parameter that was changed by others counts, not its master. The means are kept in 32 bits.
    stochastic_rounding
        Parameters of 16 bits: round up or down with the probability that makes the expected value right, by
        numbers of torch's generator. The means are kept in 32 bits. With neither, states have the dtype of the
        parameter, and all is computed in 32 bits and rounded once, as by ``torch.optim.AdamW(fused=True)``.
    fused, foreach, capturable, differentiable
        How PyTorch computes a step. This one is fused: False for `fused`, and True for the others, is refused.

    Raises
    ------
    ValueError
        A number is out of its range, or an implementation is asked for that this is not.

    Notes
    -----
    With g the gradient, m and v the means of g and of its square, t the step:
    ``m += (1 - beta1) (g - m)``, ``v = beta2 v + (1 - beta2) g^2``,
    ``p -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)``: Kingma and Ba, "Adam", 2015; decay apart from
    the gradient is of Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    rule = "adam"
    known = ("lr", "betas", "eps", "weight_decay")
    fixed: ClassVar[dict[str, Any]] = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        *,
        adam_w_mode: AdamWMode = AdamWMode.ADAMW_TORCH,
        bias_correction: bool = True,
        maximize: bool = False,
        set_grad_none: bool = True,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        fused: bool | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        refuse(type(self).__name__, fused, foreach=foreach, capturable=capturable, differentiable=differentiable)
        mode = mode_of(adam_w_mode)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": DEFAULTS[mode][0] if eps is None else eps,
            "weight_decay": DEFAULTS[mode][1] if weight_decay is None else weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "adam_w_mode": mode,
            "bias_correction": bias_correction,
            "master_weights": master_weights,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, defaults, max_grad_norm, set_grad_none)

    def _check(self, group: Group) -> None:
        check_adam(group)
        mode_of(group["adam_w_mode"])

    def _settle(self, group: Group) -> None:
        super()._settle(group)
        group["adam_w_mode"] = int(group["adam_w_mode"])  # which torch.load takes for a number without asking
        group["decoupled_weight_decay"] = group["adam_w_mode"] != AdamWMode.ADAM_L2_REGULARIZATION

    def _states(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def _numbers(self, group: Group) -> dict[str, float]:
        names = ("eps", "weight_decay", "bias_correction", "amsgrad", "maximize", "stochastic_rounding")
        beta1, beta2 = group["betas"]
        betas = {"beta1": float(beta1), "beta2": float(beta2), "decay": float(group["adam_w_mode"])}
        return {**{name: float(group[name]) for name in names}, **betas}

    def _refuse_sparse(self) -> None:
        raise RuntimeError("Adam does not support sparse gradients, please consider SparseAdam instead")


def mode_of(value: Any) -> AdamWMode:
    """The mode, itself or its number; ValueError for all else, as True, which is AdamW to apex and 1 to Python."""
    if type(value) not in (AdamWMode, int) or value not in list(AdamWMode):
        expected = ", ".join(f"AdamWMode.{mode.name}" for mode in AdamWMode)
        raise ValueError(f"Invalid adam_w_mode: {value!r}, expected one of {expected}")
    return AdamWMode(value)


def check_adam(group: Group) -> None:
    """Raises ValueError for numbers outside of the ranges that torch.optim.Adam has for them."""
    check_number("learning rate", group["lr"], 0.0)
    check_number("epsilon value", group["eps"], 0.0)
    betas = group["betas"]
    if not hasattr(betas, "__len__"):
        raise TypeError(f"betas must be two numbers, not {betas!r} of {type(betas).__name__}")
    if len(betas) != 2:
        raise ValueError(f"betas has {len(betas)} numbers, expected 2")
    for i, beta in enumerate(betas):
        check_number(f"beta parameter at index {i}", beta, 0.0, 1.0)
    check_number("weight_decay value", group["weight_decay"], 0.0)
    check_halves(group)
