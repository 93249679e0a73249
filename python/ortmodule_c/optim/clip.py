"""Clipping of gradients by their norm."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .. import _C
from ..devices import device_refusal, provider_of
from .fused import PLAIN, in_one_order


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that the norm of all of them together is not above `max_norm`.

    It stands for ``torch.nn.utils.clip_grad_norm_``, which it calls for other norms and for gradients that are sparse,
    sharded, on devices without kernels or on several. The sum of squares is taken in float64 and does not depend on the
    number of threads; of gradients of 16 bits, norm and factor are not rounded to these before they are used.

    Parameters
    ----------
    parameters
        Whose `grad` is scaled; those that have none are left out.
    max_norm
        The norm that is not exceeded: gradients are multiplied by ``max_norm / (norm + 1e-6)`` if that is below 1.
    norm_type
        2 and infinity are computed here.
    error_if_nonfinite
        Whether a norm that is infinite or NaN is an error; gradients are not changed then.
    foreach
        Of PyTorch's; looked at only where PyTorch computes.

    Returns
    -------
    The norm as it was before, of no dims, where the gradients are, in the dtype that theirs promote to. A GPU is
    waited for only where `error_if_nonfinite` asks for the number.

    Raises
    ------
    RuntimeError
        The norm is not finite, and that is an error.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in params if p.grad is not None]
    norm = clip_in_core(grads, float(max_norm), float(norm_type), error_if_nonfinite)
    if norm is None:
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    return norm.to(functools.reduce(torch.promote_types, (g.dtype for g in grads)))


@torch.no_grad()
def clip_in_core(
    grads: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool = False
) -> Tensor | None:
    """As :func:`clip_grad_norm_`, but the norm in float64; None, and nothing done, where the core has no kernels."""
    runs = [run_of(g) for g in grads]
    known = [run for run in runs if run is not None]
    if not grads or len(known) < len(runs) or norm_type not in (2.0, math.inf) or device_refusal(grads):
        return None
    device = grads[0].device
    rows = [(0, None, run, None, None, False, ()) for run in known]
    scale = functools.partial(_C.optim_step, "scale", rows, [{}], norm_type=norm_type, provider=provider_of(device))
    norm = torch.empty((), dtype=torch.float64, device=device)
    scale(max_norm=None if error_if_nonfinite else max_norm, norm=norm)
    if error_if_nonfinite:
        known_norm = norm.item()
        if not math.isfinite(known_norm):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is {known_norm}, so it cannot be "
                "clipped; error_if_nonfinite=False scales by it anyway"
            )
        scale(max_norm=max_norm)
    torch.autograd.graph.increment_version(grads)
    return norm


def run_of(grad: Tensor) -> Tensor | None:
    """The run of memory that a gradient is, if it is one for kernels of the core."""
    plain = type(grad) in PLAIN and grad.layout is torch.strided
    if not plain or not grad.is_floating_point():
        return None
    run = in_one_order([grad])
    return run[0] if run else None
