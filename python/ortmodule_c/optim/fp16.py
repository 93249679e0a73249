"""Loss scaling around an optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .clip import clip_grad_norm_, clip_in_core


class FP16_Optimizer:
    """Scales the loss for gradients of 16 bits, and leaves out the steps whose gradients overflowed.

    onnxruntime's class of this name exchanges methods of the FP16_Optimizer of apex, Megatron-LM and DeepSpeed by
    fused ones. This one is such an optimizer itself, around any of ``torch.optim``: it has what their training loops
    call. It makes no master weights, which ``FusedAdam(..., master_weights=True)`` has, and wraps no other wrapper.

    Parameters
    ----------
    optimizer
        A ``torch.optim.Optimizer``. Those of this package divide by the scale in their own pass over memory, as those
        with ``fused=True`` do; no other takes gradients of float16.
    static_loss_scale
        The scale, if it is not dynamic.
    dynamic_loss_scale
        Whether the scale doubles after a window of finite steps and halves at an overflow.
    dynamic_loss_args
        ``init_scale`` (2**16), ``scale_window`` (2000 steps), ``min_scale`` (1), ``max_scale`` (2**24).
    verbose
        Whether an overflow is printed.

    Raises
    ------
    TypeError
        `optimizer` is no ``torch.optim.Optimizer``, as the wrappers of DeepSpeed, Megatron-LM and apex are not.
    ValueError
        A scale is not above 0, or an argument of the dynamic scale is not known.

    Examples
    --------
    >>> optimizer = FP16_Optimizer(FusedAdam(model.parameters(), master_weights=True), dynamic_loss_scale=True)
    >>> optimizer.zero_grad()
    >>> optimizer.backward(loss)
    >>> optimizer.clip_master_grads(1.0)
    >>> optimizer.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, float] | None = None,
        verbose: bool = False,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"FP16_Optimizer takes an optimizer of torch.optim, not {type(optimizer).__name__}")
        dynamic = {"init_scale": 2.0**16, "scale_window": 2000, "min_scale": 1.0, "max_scale": 2.0**24}
        unknown = set(dynamic_loss_args or ()) - set(dynamic)
        if unknown:
            raise ValueError(f"dynamic_loss_args has no {', '.join(sorted(unknown))}, but {', '.join(dynamic)}")
        dynamic.update(dynamic_loss_args or {})
        start = dynamic["init_scale"] if dynamic_loss_scale else static_loss_scale
        if not 0 < start < math.inf:
            raise ValueError(f"Invalid loss scale: {start}")
        self.optimizer = optimizer
        self.dynamic_loss_scale = dynamic_loss_scale
        self._overflow: bool | Tensor = False
        self.verbose = verbose
        self._range = (dynamic["min_scale"], dynamic["max_scale"]) if dynamic_loss_scale else (start, start)
        self._scaler = torch.amp.GradScaler(
            self._parameters()[0].device.type, init_scale=start, growth_interval=int(dynamic["scale_window"])
        )
        self._unscaled = False

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """Of the optimizer."""
        return self.optimizer.state

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by; a GPU is waited for."""
        return float(self._scaler.get_scale())

    @property
    def overflow(self) -> bool:
        """Whether a gradient of the last step was infinite or NaN; a GPU is waited for."""
        self._overflow = bool(self._overflow)
        return self._overflow

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run ``loss.backward(**options)`` on the scaled loss."""
        self._scaler.scale(loss.float()).backward(**options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to 0; those to come have the scale."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._forget_unscaled()

    def update_master_grads(self) -> None:
        """Divide the gradients by the scale now: to look at them before the step.

        Raises
        ------
        ValueError
            A gradient is of float16, where small ones would become 0.
        """
        if self._of_fp16():
            raise ValueError(
                "gradients of float16 keep their scale until the step, as small ones would become 0 without it; "
                f"they are {self.loss_scale:g} times as large as without"
            )
        if not self._unscaled:
            self._scaler.unscale_(self.optimizer)
        self._unscaled = True

    def _forget_unscaled(self) -> None:
        """What the scaler knows is of gradients that are gone: that they are divided, and whether any overflowed."""
        if self._unscaled:
            self._scaler.update(self._scaler.get_scale())
        self._unscaled = False

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip the gradients by the norm that all of them have without their scale, which those of float16 keep.

        Returns
        -------
        The norm as it was before, or -1 where gradients overflowed, as apex has it; a GPU is waited for.

        Raises
        ------
        ValueError
            A gradient is of float16, and the norm of another order than 2 and infinity, or over several devices.
        """
        if self._of_fp16():
            scale = self.loss_scale
            grads = [p.grad for p in self._parameters() if p.grad is not None]
            scaled = clip_in_core(grads, max_norm * scale, float(norm_type))
            if scaled is None:
                raise ValueError(
                    "norms of gradients of float16 are of order 2 or infinity, and of whole tensors on one device"
                )
            norm = float(scaled) / scale
        else:
            self.update_master_grads()
            norm = float(clip_grad_norm_(self._parameters(), max_norm, norm_type))
        return norm if math.isfinite(norm) else -1.0

    def _of_fp16(self) -> bool:
        return any(p.grad is not None and p.grad.dtype == torch.float16 for p in self._parameters())

    def step(self) -> None:
        """Update the parameters, unless a gradient is infinite or NaN; `overflow` tells, and the scale follows."""
        one = torch.ones((), device=self._parameters()[0].device)
        self._scaler.step(self.optimizer)
        before = self._scaler.scale(one)
        self._scaler.update()
        self._unscaled = False
        after = self._scaler.scale(one)
        self._overflow = after < before
        self._scaler.update(after.clamp(*self._range))
        if self.verbose and self.overflow:
            print(f"gradients overflowed: the step is left out, and the loss scaled by {self.loss_scale}")

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer and of the scale."""
        return {
            "optimizer_state_dict": self.optimizer.state_dict(),
            "loss_scaler": self._scaler.state_dict(),
            "overflow": self.overflow,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave; gradients that there are count as those of a batch to come."""
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self._scaler.load_state_dict(state_dict["loss_scaler"])
        self._overflow = state_dict["overflow"]
        self._forget_unscaled()
