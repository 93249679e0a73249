"""How far tensors are apart, and when that is more than rounding."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .dtypes import differentiable

NEGLIGIBLE = 1e-3  # what is smaller than this part of the largest of its kind counts as that: it may be rounding alone

# In units of the dtype's epsilon. Nothing tells rounding from faults in float64 but the size, of which there is plenty.
_ROUNDINGS = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 64, torch.float64: 2**18}


def rounding(dtype: torch.dtype) -> float:
    """What the order of summation may do to a tensor of this dtype, as part of its largest element."""
    dtype = dtype.to_real()
    return _ROUNDINGS.get(dtype, 1) * torch.finfo(dtype).eps


def _exactly(t: Tensor) -> Tensor:
    """The elements, in float64; of complex numbers their parts."""
    t = t.detach()
    t = t if t.layout is torch.strided else t.to_dense()
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).double()


def widened(t: Tensor) -> Tensor:
    """Numbers in float64, complex ones in complex128; integers as they are."""
    return t.to(torch.complex128) if t.is_complex() else t.double() if t.is_floating_point() else t


def distance(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Largest distance between finite elements, as part of the largest one of `b`, or of `floor` if that is more."""
    a, b = _exactly(a), _exactly(b)
    finite = a.isfinite() & b.isfinite()
    if not bool(finite.any()):
        return 0.0
    a, b = a[finite], b[finite]
    scale = max(float(b.abs().max()), floor)
    off = float((a - b).abs().max())
    return off / scale if scale else off


def mismatches(a: Tensor, b: Tensor) -> int:
    """How many elements are infinite or NaN in one tensor and something else in the other."""
    a, b = _exactly(a), _exactly(b)
    return int((~((a == b) | (a.isnan() & b.isnan()) | (a.isfinite() & b.isfinite()))).sum())


def infinities(t: Tensor) -> int:
    """How many elements are infinite or NaN."""
    return int((~_exactly(t).isfinite()).sum())


def largest(t: Tensor | None) -> float:
    """The largest finite absolute value, 0 for none and for integers."""
    if t is None or not differentiable(t):
        return 0.0
    t = _exactly(t).abs()
    t = t[t.isfinite()]
    return float(t.max()) if t.numel() else 0.0


def backward_from(outputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs a backward starts from, and a gradient for each.

    They are the loss alone, if the first output is a scalar that requires grad, else all that require it.
    The gradients are 1 for a scalar, else random numbers that depend on nothing but the shape.
    """
    roots = [t for t in outputs if t.requires_grad]
    if roots and roots[0] is outputs[0] and roots[0].dim() == 0:
        roots = roots[:1]
    return roots, [_direction(t) for t in roots]


def _direction(output: Tensor) -> Tensor:
    if output.dim() == 0:
        return torch.ones_like(output)
    generator = torch.Generator().manual_seed(output.numel())
    wide = torch.complex128 if output.is_complex() else torch.float64
    return torch.randn(output.shape, generator=generator, dtype=wide).to(output)
