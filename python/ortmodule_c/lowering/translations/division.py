"""Quotients, remainders and fractions."""

from typing import Any

import torch

from ...errors import Unsupported
from ..builder import Builder
from ..draft import Val
from .elementwise import arithmetic
from .registry import HALVES, aten, computed_in, need_float, result_dtype, translates


@translates(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def div(b: Builder, x: Any, y: Any) -> Val:
    return arithmetic(b, "Div", x, y)


@translates(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(b: Builder, x: Any, y: Any) -> Val:
    if result_dtype(b) == torch.float16:
        raise Unsupported("a remainder of float16, each step of which PyTorch rounds")
    if not isinstance(x, Val) and y.grad:
        raise Unsupported("the gradient of what a number is divided by")  # PyTorch has none
    if isinstance(y, Val) and y.grad and y.dtype != result_dtype(b):
        raise Unsupported("the gradient of what is divided by, which the quotient does not hold")
    return arithmetic(b, "Mod", x, y)


@translates(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(b: Builder, x: Any, y: Any) -> Val:
    if any(isinstance(v, Val) and v.grad for v in (x, y)):
        raise Unsupported("the gradient of floor_divide")  # PyTorch has none
    return div_mode(b, x, y, "floor")


@translates(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(b: Builder, x: Any, y: Any, rounding_mode: str | None = None) -> Val:
    dtype = result_dtype(b)
    if rounding_mode == "trunc" and dtype.is_floating_point:
        if dtype in HALVES and isinstance(y, Val) and y.rank:
            raise Unsupported("a quotient of 16 bits, which PyTorch rounds before it leaves out the fraction")
        return _divided_to_zero(b, x, y, dtype)
    if rounding_mode == "floor" and (dtype == torch.float16 or (dtype in HALVES and isinstance(y, Val))):
        raise Unsupported("a floored quotient of 16 bits, each step of which PyTorch rounds")
    return arithmetic(b, "FloorDiv" if rounding_mode == "floor" else "Div", x, y)


def _divided_to_zero(b: Builder, x: Any, y: Any, dtype: torch.dtype) -> Val:
    """A quotient without its fraction; its slopes are 0."""
    wide = computed_in(dtype)
    p, q = (b.scalar(b.detached(v) if isinstance(v, Val) else v, wide) for v in (x, y))
    out = b.cast(_without_fraction(b, b.emit("Div", p, q)), dtype)
    if not any(isinstance(v, Val) and v.grad for v in (x, y)):
        return out
    return b.with_gradient_of(out, b.emit("Add", *[b.emit("Floor", b.scalar(v, dtype)) for v in (x, y)]))


def _without_fraction(b: Builder, x: Val) -> Val:
    return b.emit("Where", b.emit("Less", x, b.const(0.0, x.dtype)), b.emit("Ceil", x), b.emit("Floor", x))


@translates(aten.trunc.default)
def trunc(b: Builder, x: Val) -> Val:
    if x.dtype == torch.bool:
        raise Unsupported("arithmetic on bools")
    return _without_fraction(b, x) if x.dtype.is_floating_point else x


@translates(aten.frac.default)
def frac(b: Builder, x: Val) -> Val:
    return b.emit("Sub", x, _without_fraction(b, b.detached(x)))


@translates(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(b: Builder, x: Val, y: Any) -> Val:
    """The remainder that has the sign of `x`."""
    dtype = need_float(result_dtype(b))  # PyTorch divides no integer by 0
    if isinstance(y, Val) and y.grad and (dtype in HALVES or y.dtype != dtype):
        raise Unsupported("the gradient of what is divided by, which the quotient does not hold")
    return b.emit("Mod", b.cast(x, dtype), b.scalar(y, dtype), fmod=1)
