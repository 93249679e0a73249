"""Elementwise ops whose slopes or corners are not those of the nodes that they are made of."""

import functools
import math
from typing import Any

import torch

from ...capture.numbers import is_number
from ...errors import Unsupported
from ..builder import Builder
from ..draft import Val
from .elementwise import arithmetic, pow_tensor
from .registry import HALVES, aten, computed_in, need_float, promoted, result_dtype, translates


@translates(aten.fmax.default, aten.fmin.default)
def fmax(b: Builder, x: Val, y: Val) -> Val:
    """The larger or smaller one, of which that which is no number is none."""
    dtype = result_dtype(b)
    x, y = b.cast(x, dtype), b.cast(y, dtype)
    largest = b.aten_name == "fmax"
    if not dtype.is_floating_point:
        return b.emit("Max" if largest else "Min", x, y)
    ahead = b.emit("GreaterOrEqual" if largest else "LessOrEqual", x, y)
    out = b.emit("Where", b.emit("Or", ahead, b.emit("IsNaN", y)), x, y)
    if not out.grad or _slopes_of_fmax() == _OF_WHERE:
        return out
    if _slopes_of_fmax() != _OF_MAXIMUM:
        raise Unsupported(f"the gradient of {b.aten_name} of this PyTorch")
    return b.with_gradient_of(out, b.emit("Max" if largest else "Min", x, y))


# Where both operands are equal, where the first is NaN, and where the second is; of the first one, then of the second.
_OF_WHERE = [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]
_OF_MAXIMUM = [0.5, 1.0, 1.0], [0.5, 1.0, 1.0]


@functools.cache
def _slopes_of_fmax() -> tuple[list[float], ...]:
    """What PyTorch gives of the gradient to fmax's operands; versions differ."""
    with torch.inference_mode(False), torch.enable_grad():
        x, y = (
            torch.tensor(v, device="cpu", dtype=torch.float32, requires_grad=True)
            for v in ([1.0, math.nan, 1.0], [1.0, 1.0, math.nan])
        )
        slopes = torch.autograd.grad(torch.fmax(x, y).sum(), [x, y])
    return tuple(s.tolist() for s in slopes)


@translates(aten.hypot.default)
def hypot(b: Builder, x: Val, y: Val) -> Val:
    """The root of the sum of squares, which are not lost where they leave the range; infinite where an operand is."""
    dtype = need_float(result_dtype(b))
    x, y = b.cast(x, dtype), b.cast(y, dtype)
    wide = torch.float64
    p, q = (b.emit("Abs", b.cast(b.detached(v), wide)) for v in (x, y))
    if dtype == wide:
        top, one = b.emit("Max", p, q), b.const(1.0, wide)
        ratio = b.emit("Div", b.emit("Min", p, q), b.emit("Where", b.emit("Equal", top, b.const(0.0, wide)), one, top))
        root = b.emit("Mul", top, b.emit("Sqrt", b.emit("MulAdd", ratio, ratio, one)))
    else:
        root = b.emit("Sqrt", b.emit("Add", b.emit("Mul", p, p), b.emit("Mul", q, q)))
    infinite = b.emit("Or", *[b.emit("Equal", v, b.const(math.inf, wide)) for v in (p, q)])
    out = b.cast(b.emit("Where", infinite, b.const(math.inf, wide), root), dtype)
    if not (x.grad or y.grad):
        return out
    parts = [b.emit("Mul", b.emit("Div", v, out), b.detached(v)) for v in (x, y) if v.grad]
    return b.with_gradient_of(out, parts[0] if len(parts) == 1 else b.emit("Add", *parts))


@translates(aten.heaviside.default)
def heaviside(b: Builder, x: Val, at_zero: Val) -> Val:
    if x.grad or at_zero.grad:
        raise Unsupported("the gradient of heaviside")  # PyTorch has none
    dtype = result_dtype(b)
    if x.dtype != at_zero.dtype:
        raise Unsupported(f"heaviside of {x.dtype} and {at_zero.dtype}")
    x, zero = b.cast(x, dtype), b.const(0, dtype)
    if dtype == torch.bool:
        return b.emit("Or", x, at_zero)
    return b.emit("Where", b.emit("Equal", x, zero), b.cast(at_zero, dtype), b.cast(b.emit("Greater", x, zero), dtype))


@translates(aten.sinc.default, aten.special_sinc.default)
def sinc(b: Builder, x: Val) -> Val:
    """sin(pi x) / (pi x); 1 at zero, where no gradient flows."""
    dtype = need_float(result_dtype(b))
    x = b.cast(x, dtype)
    wide = computed_in(dtype)
    p, zero, pi = b.detached(x), b.const(0.0, dtype), b.const(math.pi, wide)

    def turned(v: Val) -> Val:
        return b.emit("Mul", b.cast(v, wide), pi)

    angle = turned(p)
    ratio = b.cast(b.emit("Div", b.emit("Sin", angle), angle), dtype)
    out = b.emit("Where", b.emit("Equal", p, zero), b.const(1.0, dtype), ratio)
    if not x.grad:
        return out
    angle, under = b.cast(angle, dtype), b.cast(turned(b.emit("Mul", p, p)), dtype)
    over = b.emit("Sub", b.emit("Mul", angle, b.emit("Cos", angle)), b.emit("Sin", angle))
    flat = b.emit("Equal", under, zero)
    return b.with_gradient_of(out, _sloped(b, x, b.emit("Div", over, under), flat))


def _sloped(b: Builder, x: Val, slope: Val, flat: Val) -> Val:
    """x times a slope; no gradient flows, though it be infinite, where it is `flat`."""
    zero = b.const(0.0, x.dtype)
    return b.emit("Where", flat, zero, b.emit("Mul", x, b.emit("Where", flat, zero, slope)))


@translates(aten.angle.default)
def angle(b: Builder, x: Val) -> Val:
    """That of a real number: pi below zero, else 0; its slope is 0."""
    dtype = need_float(result_dtype(b))
    x = b.cast(x, dtype)
    p = b.detached(x)
    half = b.emit("Where", b.emit("Less", p, b.const(0.0, dtype)), b.const(math.pi, dtype), b.const(0.0, dtype))
    out = b.emit("Where", b.emit("IsNaN", p), p, half)
    return b.with_gradient_of(out, b.emit("Floor", x)) if x.grad else out


@translates(aten.round.decimals)
def round_decimals(b: Builder, x: Val, *, decimals: int) -> Val:
    """Rounded as a multiple of a power of ten; its slope is 0."""
    wide = computed_in(need_float(x.dtype))
    if abs(decimals) > 30:
        raise Unsupported(f"{decimals} decimals")
    if decimals == 0:
        return b.emit("Round", x)
    power = b.const(10.0 ** abs(decimals), wide)
    scaled, back = ("Mul", "Div") if decimals > 0 else ("Div", "Mul")
    p = b.cast(b.detached(x), wide)
    out = b.cast(b.emit(back, b.emit("Round", b.emit(scaled, p, power)), power), x.dtype)
    return b.with_gradient_of(out, b.emit("Round", x)) if x.grad else out


@translates(aten.special_entr.default)
def entr(b: Builder, x: Val) -> Val:
    """-x log(x); 0 at zero, and -inf below it. Its slope is -(1 + log(x))."""
    dtype = need_float(result_dtype(b))
    x = b.cast(x, dtype)
    p, zero = b.detached(x), b.const(0.0, dtype)
    log = b.emit("Log", p)
    rest = b.emit("Where", b.emit("Equal", p, zero), zero, b.const(-math.inf, dtype))
    out = b.emit("Where", b.emit("Greater", p, zero), b.emit("Mul", b.emit("Neg", p), log), rest)
    out = b.emit("Where", b.emit("IsNaN", p), p, out)
    if not x.grad:
        return out
    return b.with_gradient_of(out, b.emit("Mul", x, b.emit("Neg", b.emit("Add", log, b.const(1.0, dtype)))))


@translates(
    aten.xlogy.Tensor,
    aten.xlogy.Scalar_Other,
    aten.xlogy.Scalar_Self,
    aten.special_xlog1py.default,
    aten.special_xlog1py.other_scalar,
    aten.special_xlog1py.self_scalar,
)
def xlogy(b: Builder, x: Any, y: Any) -> Val:
    """x log(y), or log(1 + y), and 0 where x is, unless y is no number."""
    dtype = need_float(result_dtype(b))
    if any(isinstance(v, Val) and v.grad and v.dtype != dtype for v in (x, y)):
        raise Unsupported(f"the gradient of {b.aten_name} of two dtypes")
    if dtype in HALVES and isinstance(x, Val) and x is y and x.grad:
        raise Unsupported(f"the gradient of {b.aten_name} of one tensor of 16 bits, which is a sum that is rounded")
    if isinstance(y, float) and math.isnan(y):
        raise Unsupported(f"{b.aten_name} by NaN")  # of a number PyTorch's gradient asks otherwise than of a tensor
    x, y = b.scalar(x, dtype), b.scalar(y, dtype)
    p, q = b.detached(x), b.detached(y)
    plain = b.aten_name == "xlogy"
    zero, one, log = b.const(0.0, dtype), b.const(1.0, dtype), b.emit("Log" if plain else "Log1p", q)
    nothing = b.emit("Equal", p, zero)
    out = b.emit("Where", b.emit("And", nothing, b.emit("Equal", q, q)), zero, b.emit("Mul", p, log))
    parts = []
    if x.grad:
        flat = b.emit("And", nothing, b.emit("LessOrEqual", q, b.const(0.0 if plain else -1.0, dtype)))
        log = b.emit("Where", flat, zero, log)
        parts.append(b.emit("Where", flat, zero, _times(b, x, log, q)))
    if y.grad:
        under = q if plain else b.emit("Add", q, one)
        parts.append(b.emit("Mul", b.emit("Div", y, under), p))
    if not parts:
        return out
    return b.with_gradient_of(out, parts[0] if len(parts) == 1 else b.emit("Add", *parts))


def _times(b: Builder, x: Val, log: Val, of: Val) -> Val:
    """x times a logarithm, through which a gradient of 0 comes as 0, though that be infinite or of less than 0."""
    one, most = b.const(1.0, x.dtype), b.const(torch.finfo(x.dtype).max, x.dtype)
    lost = b.emit("And", b.emit("IsNaN", log), b.emit("Equal", of, of))
    steep = b.emit("Or", lost, b.emit("Equal", b.emit("Abs", log), b.const(math.inf, x.dtype)))
    infinite = b.emit("Mul", x, b.emit("Where", lost, b.const(0.0, x.dtype), b.emit("Sign", log)))  # 0 * inf is NaN
    for _ in range(3):  # enough for the least number
        infinite = b.emit("Mul", infinite, most)
    return b.emit("Where", steep, infinite, b.emit("Mul", x, b.emit("Where", steep, one, log)))


@translates(aten.logit.default, aten.special_logit.default)
def logit(b: Builder, x: Val, eps: float | None = None) -> Val:
    """log(x / (1 - x)), of x kept apart from 0 and 1; its slope is 1 / (x (1 - x)), and 0 beyond those bounds."""
    dtype = need_float(result_dtype(b))
    x = b.cast(x, dtype)
    if dtype in HALVES:
        raise Unsupported(f"logit of {dtype}")
    p, one = b.detached(x), b.const(1.0, dtype)
    low, high = (0.0, 1.0) if eps is None else (eps, 1 - eps)
    least, most = b.const(low, dtype), b.const(high, dtype)
    below, above = b.emit("Less", p, least), b.emit("Greater", p, most)
    kept = p if eps is None else b.emit("Where", below, least, b.emit("Where", above, most, p))
    out = b.emit("Log", b.emit("Div", kept, b.emit("Sub", one, kept)))
    if not x.grad:
        return out
    under, outside = b.emit("Mul", p, b.emit("Sub", one, p)), b.emit("Or", below, above)
    if eps is None:
        return b.with_gradient_of(out, b.emit("Div", x, b.emit("Where", outside, b.const(math.nan, dtype), under)))
    outside = b.emit("Or", outside, b.emit("IsNaN", p))
    line = b.emit("Div", x, b.emit("Where", outside, one, under))
    return b.with_gradient_of(out, b.emit("Where", outside, b.const(0.0, dtype), line))


@translates(aten.isclose.default)
def isclose(b: Builder, x: Val, y: Val, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Val:
    """Equal, or apart by no more than atol + |rtol y|, which is finite."""
    dtype = promoted(x, y)
    if x.dtype != y.dtype or rtol < 0 or atol < 0:
        raise Unsupported("operands of two dtypes, or a tolerance below 0")
    x, y = b.detached(x), b.detached(y)
    close = b.emit("Equal", x, y)
    if equal_nan and dtype.is_floating_point:
        close = b.emit("Or", close, b.emit("And", b.emit("IsNaN", x), b.emit("IsNaN", y)))
    if rtol == 0 and atol == 0:
        return close
    if not dtype.is_floating_point:
        x, y = (b.cast(v, torch.get_default_dtype()) for v in (x, y))
    wide = computed_in(y.dtype)
    share = b.cast(b.emit("Mul", b.cast(y, wide), b.const(rtol, wide)), y.dtype)
    allowed = b.emit("Add", b.emit("Abs", share), b.const(atol, y.dtype))
    actual = b.emit("Abs", b.emit("Sub", x, y))
    finite = b.emit("Less", actual, b.const(math.inf, actual.dtype))
    return b.emit("Or", close, b.emit("And", finite, b.emit("LessOrEqual", actual, allowed)))


@translates(aten.native_dropout_backward.default)
def native_dropout_backward(b: Builder, gradient: Val, mask: Val, scale: float) -> Val:
    dtype = need_float(gradient.dtype)
    kept = b.cast(mask, dtype)
    wide = computed_in(dtype)
    return b.emit("Mul", gradient, b.cast(b.emit("Mul", b.cast(kept, wide), b.const(scale, wide)), dtype))


@translates(aten.rrelu.default)
def rrelu(
    b: Builder, x: Val, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Val:
    """Without training, a slope between the bounds."""
    if training or is_number(lower) or is_number(upper):
        raise Unsupported("slopes that are drawn, or of open bounds")
    return b.emit("LeakyRelu", x, alpha=(float(lower) + float(upper)) / 2)


@translates(aten.ldexp.Tensor)
def ldexp(b: Builder, x: Val, exponent: Val) -> Val:
    """x times a power of two, which is of the exponent's dtype."""
    if exponent.grad:
        raise Unsupported("the gradient of the exponent of ldexp")
    dtype = exponent.dtype if exponent.dtype.is_floating_point else torch.get_default_dtype()
    power = pow_tensor(b.of_part(aten.pow.Scalar, torch.empty((), dtype=dtype, device="meta")), 2.0, exponent)
    return arithmetic(b, "Mul", x, power)
