"""Ops that work element by element, comparisons, selections and casts."""

import functools
import math
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from ...capture.numbers import is_number
from ...errors import Unsupported
from ..builder import Builder
from ..draft import Val
from .registry import HALVES, TABLE, aten, computed_in, need_float, promoted, result_dtype, result_shape, translates

_UNARY = {
    aten.abs.default: "Abs",
    aten.acos.default: "Acos",
    aten.acosh.default: "Acosh",
    aten.asin.default: "Asin",
    aten.asinh.default: "Asinh",
    aten.atan.default: "Atan",
    aten.atanh.default: "Atanh",
    aten.ceil.default: "Ceil",
    aten.cos.default: "Cos",
    aten.cosh.default: "Cosh",
    aten.erf.default: "Erf",
    aten.exp.default: "Exp",
    aten.exp2.default: "Exp2",
    aten.expm1.default: "Expm1",
    aten.floor.default: "Floor",
    aten.hardswish.default: "HardSwish",
    aten.log.default: "Log",
    aten.log10.default: "Log10",
    aten.log1p.default: "Log1p",
    aten.log2.default: "Log2",
    aten.log_sigmoid.default: "LogSigmoid",
    aten.mish.default: "Mish",
    aten.neg.default: "Neg",
    aten._neg_view.default: "Neg",
    aten._neg_view_copy.default: "Neg",
    aten.reciprocal.default: "Reciprocal",
    aten.relu.default: "Relu",
    aten.round.default: "Round",
    aten.rsqrt.default: "Rsqrt",
    aten.sgn.default: "Sign",
    aten.sigmoid.default: "Sigmoid",
    aten.sign.default: "Sign",
    aten.silu.default: "Silu",
    aten.sin.default: "Sin",
    aten.sinh.default: "Sinh",
    aten.sqrt.default: "Sqrt",
    aten.tan.default: "Tan",
    aten.tanh.default: "Tanh",
}
_ROUNDING = ("Ceil", "Floor", "Round")
_WITH_NUMBERS = ("Mul", "Div", "FloorDiv")  # take a number as it is; others round it to the dtype of the result first

_BINARY = {
    aten.atan2.default: "Atan2",
    aten.mul.Tensor: "Mul",
    aten.mul.Scalar: "Mul",
    aten.maximum.default: "Max",
    aten.minimum.default: "Min",
    aten.max.other: "Max",
    aten.min.other: "Min",
}

_COMPARE = {
    aten.eq.Scalar: "Equal",
    aten.eq.Tensor: "Equal",
    aten.ne.Scalar: "NotEqual",
    aten.ne.Tensor: "NotEqual",
    aten.lt.Scalar: "Less",
    aten.lt.Tensor: "Less",
    aten.le.Scalar: "LessOrEqual",
    aten.le.Tensor: "LessOrEqual",
    aten.gt.Scalar: "Greater",
    aten.gt.Tensor: "Greater",
    aten.ge.Scalar: "GreaterOrEqual",
    aten.ge.Tensor: "GreaterOrEqual",
}

_LOGICAL = {
    aten.logical_and.default: "And",
    aten.logical_or.default: "Or",
    aten.logical_xor.default: "Xor",
}

_BITWISE = {
    **{getattr(aten, f"bitwise_{n.lower()}"): n for n in ("And", "Or", "Xor")},
    **{getattr(aten, f"__{n.lower()}__"): n for n in ("And", "Or", "Xor")},
}

_SHIFTS = {
    aten.__lshift__: "LEFT",
    aten.__rshift__: "RIGHT",
    aten.bitwise_left_shift: "LEFT",
    aten.bitwise_right_shift: "RIGHT",
}


def arithmetic(b: Builder, op: str, x: Any, y: Any, alpha: Any = 1) -> Val:
    """x op alpha * y, of tensors or numbers, in the dtype of the result of the op that is translated."""
    dtype = result_dtype(b)
    if op == "Sub" and any(isinstance(v, Val) and v.dtype == torch.bool for v in (x, y)):
        raise Unsupported("arithmetic on bools")
    scaled = not (isinstance(alpha, (int, float)) and alpha == 1)
    if not dtype.is_floating_point and isinstance(alpha, (float, torch.SymFloat)):
        raise Unsupported("integers scaled by a float")
    number = not (isinstance(x, Val) and isinstance(y, Val)) or y.rank == 0 < x.rank
    inner = computed_in(dtype) if scaled or (number and op in _WITH_NUMBERS) else dtype
    left, right = (b.cast(b.scalar(v, inner if op in _WITH_NUMBERS else dtype), inner) for v in (x, y))
    if scaled and dtype.is_floating_point:
        return b.cast(_plus_scaled(b, left, right, -alpha if op == "Sub" else alpha, dtype), dtype)
    if scaled:
        right = b.emit("Mul", right, b.scalar(alpha, inner))
    return b.cast(b.emit(op, left, right), dtype)


def _plus_scaled(b: Builder, x: Val, y: Val, alpha: Any, dtype: torch.dtype) -> Val:
    """x + alpha y; a gradient is multiplied with alpha as it was before it was rounded to a `dtype` of 16 bits."""
    slope = b.scalar(alpha, y.dtype)
    out = b.emit("MulAdd", y, b.cast(b.scalar(alpha, dtype), y.dtype), x)
    return b.with_gradient_of(out, b.emit("MulAdd", y, slope, x)) if dtype in HALVES and y.grad else out


def _unary(op: str) -> Any:
    def translate(b: Builder, x: Val) -> Val:
        dtype = result_dtype(b)
        if dtype == torch.bool and op != "Sign":
            raise Unsupported("arithmetic on bools")
        if op in _ROUNDING and not dtype.is_floating_point:
            return x
        return b.emit(op, b.cast(x, dtype))

    return translate


def _binary(op: str) -> Any:
    def translate(b: Builder, x: Any, y: Any) -> Val:
        return arithmetic(b, op, x, y)

    return translate


def _compare(op: str) -> Any:
    def translate(b: Builder, x: Any, y: Any) -> Val:
        dtype = promoted(x, y)
        if dtype == torch.bool and op not in ("Equal", "NotEqual"):
            dtype = torch.int64
        return b.emit(op, b.scalar(x, dtype), b.scalar(y, dtype))

    return translate


def _logical(op: str) -> Any:
    def translate(b: Builder, x: Any, y: Any) -> Val:
        return b.emit(op, b.scalar(x, torch.bool), b.scalar(y, torch.bool))

    return translate


def _bitwise(op: str, on_bools: str | None, **said: Any) -> Any:
    def translate(b: Builder, x: Any, y: Any) -> Val:
        dtype = result_dtype(b)
        if dtype.is_floating_point or (dtype == torch.bool and not on_bools):
            raise Unsupported(f"bits of {dtype}")
        if dtype == torch.bool:
            return b.emit(str(on_bools), b.scalar(x, dtype), b.scalar(y, dtype))
        return b.emit(op, b.scalar(x, dtype), b.scalar(y, dtype), **said)

    return translate


def _forms(packet: OpOverloadPacket) -> list[OpOverload]:
    """An op of tensors, and of a tensor and a number, that gives a new one."""
    names = ("Tensor", "Scalar", "Scalar_Tensor", "Tensor_Scalar")
    return [getattr(packet, name) for name in names if name in packet.overloads()]


TABLE.update({aten_op: _unary(op) for aten_op, op in _UNARY.items()})
TABLE.update({aten_op: _binary(op) for aten_op, op in _BINARY.items()})
TABLE.update({aten_op: _compare(op) for aten_op, op in _COMPARE.items()})
TABLE.update({aten_op: _logical(op) for aten_op, op in _LOGICAL.items()})
TABLE.update({form: _bitwise(f"Bitwise{op}", op) for packet, op in _BITWISE.items() for form in _forms(packet)})
TABLE.update(
    {form: _bitwise("BitShift", None, direction=way) for packet, way in _SHIFTS.items() for form in _forms(packet)}
)


@translates(aten.add.Tensor, aten.add.Scalar)
def add(b: Builder, x: Any, y: Any, alpha: Any = 1) -> Val:
    return arithmetic(b, "Or" if result_dtype(b) == torch.bool else "Add", x, y, alpha)


@translates(aten.sub.Tensor, aten.sub.Scalar)
def sub(b: Builder, x: Any, y: Any, alpha: Any = 1) -> Val:
    if isinstance(x, bool) or isinstance(y, bool):
        raise Unsupported("a bool in a subtraction")
    return arithmetic(b, "Sub", x, y, alpha)


@translates(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(b: Builder, x: Any, y: Any, alpha: Any = 1) -> Val:
    return sub(b, y, x, alpha)


@translates(aten.logaddexp.default)
def logaddexp(b: Builder, x: Val, y: Val) -> Val:
    """log(exp(x) + exp(y)); its slopes are 1 / (1 + exp(y - x)) and 1 / (1 + exp(x - y))."""
    dtype = need_float(result_dtype(b))
    x, y = (b.cast(v, dtype) for v in (x, y))
    p, q = (b.cast(b.detached(v), computed_in(dtype)) for v in (x, y))
    same = b.emit("And", b.emit("Equal", p, q), b.emit("Equal", b.emit("Abs", p), b.const(math.inf, p.dtype)))
    apart = b.emit("Neg", b.emit("Abs", b.emit("Sub", p, q)))
    total = b.emit("Add", b.emit("Max", p, q), b.emit("Log1p", b.emit("Exp", apart)))
    out = b.cast(b.emit("Where", same, p, total), dtype)
    if not (x.grad or y.grad):
        return out
    one = b.const(1.0, dtype)

    def share(v: Val, w: Val) -> Val:
        rest = b.emit("Exp", b.emit("Sub", b.detached(w), b.detached(v)))
        return b.emit("Div", v, b.emit("Add", rest, one))

    return b.with_gradient_of(out, b.emit("Add", share(x, y), share(y, x)))


@translates(aten.pow.Tensor_Scalar)
def pow_scalar(b: Builder, x: Val, exponent: Any) -> Val:
    dtype = result_dtype(b)
    x = b.cast(x, dtype)
    if exponent == 1:
        return x
    if not dtype.is_floating_point and exponent in (2, 3):
        square = b.emit("Mul", x, x)
        return square if exponent == 2 else b.emit("Mul", square, x)
    out = b.emit("Pow", x, b.scalar(exponent, dtype))
    if dtype not in HALVES or not x.grad or (not is_number(exponent) and _is_held(dtype, exponent)):
        return out
    # The gradient is multiplied with the exponent as it is, not as 16 bits hold it.
    rest = b.cast(b.emit("Pow", b.detached(x), b.scalar(exponent - 1, dtype)), computed_in(dtype))
    slope = b.cast(b.emit("Mul", rest, b.scalar(exponent, rest.dtype)), dtype)
    return b.with_gradient_of(out, b.emit("Mul", x, slope))


def _is_held(dtype: torch.dtype, number: float) -> bool:
    """Whether a dtype has a number as it is."""
    return bool(number == torch.tensor(number, dtype=dtype).item())


@translates(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(b: Builder, x: Any, exponent: Val) -> Val:
    dtype = result_dtype(b)
    base = b.scalar(x, dtype)
    if base.grad and exponent.dtype != dtype:
        return _pow_mixed(b, base, exponent, dtype)
    exponent = b.cast(exponent, dtype)
    out = b.emit("Pow", base, exponent)
    if dtype in HALVES and exponent.grad and (isinstance(x, (int, float)) or is_number(x)) and 0 < x < math.inf:
        wide = b.cast(b.detached(out), computed_in(dtype))  # with which the logarithm is multiplied, itself not rounded
        slope = b.cast(b.emit("Mul", wide, b.const(math.log(x), wide.dtype)), dtype)
        return b.with_gradient_of(out, b.emit("Mul", exponent, slope))
    return out


def _pow_mixed(b: Builder, base: Val, exponent: Val, dtype: torch.dtype) -> Val:
    """A power whose exponent less 1, with which the base's gradient is computed, is of the exponent's own dtype."""
    power, p = b.cast(exponent, dtype), b.detached(base)
    e, zero = b.detached(power), b.const(0.0, dtype)
    less = b.cast(b.emit("Sub", b.detached(exponent), b.const(1, exponent.dtype)), dtype)
    none = b.emit("Equal", e, zero)
    slope = b.emit("Where", none, zero, b.emit("Mul", e, b.emit("Pow", p, less)))
    like = b.emit("Where", none, zero, b.emit("Mul", base, slope))
    out = b.emit("Pow", p, power)
    return b.with_gradient_of(out, b.emit("Add", like, out) if exponent.grad else like)


@translates(aten.square.default)
def square(b: Builder, x: Val) -> Val:
    return pow_scalar(b, x, 2)


@translates(aten.logical_not.default, aten.bitwise_not.default)
def logical_not(b: Builder, x: Val) -> Val:
    if result_dtype(b) != torch.bool:
        return b.emit("BitwiseNot", x)
    return b.emit("Not", b.cast(x, torch.bool))


@translates(aten.isnan.default)
def isnan(b: Builder, x: Val) -> Val:
    if not x.dtype.is_floating_point and not x.dtype.is_complex:
        return b.full(x.dims, False, torch.bool)
    return b.emit("IsNaN", x)


@translates(aten.gelu.default)
def gelu(b: Builder, x: Val, *, approximate: str = "none") -> Val:
    return b.emit("Gelu", x, approximate=approximate)


@translates(aten.hardsigmoid.default)
def hardsigmoid(b: Builder, x: Val) -> Val:
    """Its slope is 1/6 as float32 has it, between -3 and 3."""
    wide = b.cast(b.detached(x), computed_in(need_float(x.dtype)))
    six = b.const(6.0, wide.dtype)
    gate = b.emit("Clip", b.emit("Add", wide, b.const(3.0, wide.dtype)), b.const(0.0, wide.dtype), six)
    out = b.cast(b.emit("Div", gate, six), x.dtype)
    if not x.grad:
        return out
    low, high = b.scalar(-3.0, x.dtype), b.scalar(3.0, x.dtype)
    inside = b.emit("And", b.emit("Greater", x, low), b.emit("Less", x, high))
    slope = b.scalar(float(torch.tensor(1 / 6, dtype=torch.float32)), computed_in(x.dtype))
    line = b.cast(b.emit("Mul", b.cast(x, slope.dtype), slope), x.dtype)
    return b.with_gradient_of(out, b.emit("Where", inside, line, b.scalar(0.0, x.dtype)))


@translates(aten.elu.default)
def elu(b: Builder, x: Val, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Val:
    return b.emit("Elu", x, alpha=float(alpha), scale=float(scale), input_scale=float(input_scale))


@translates(aten.celu.default)
def celu(b: Builder, x: Val, alpha: float = 1) -> Val:
    """Its slope is that of an alpha which float32 holds."""
    out, single = elu(b, x, alpha, 1, 1 / alpha), float(torch.tensor(alpha, dtype=torch.float32))
    return b.with_gradient_of(out, elu(b, x, alpha, 1, 1 / single)) if x.grad and single != alpha else out


@translates(aten.leaky_relu.default)
def leaky_relu(b: Builder, x: Val, negative_slope: float = 0.01) -> Val:
    if is_number(negative_slope):
        return prelu(b, x, b.scalar(negative_slope, need_float(x.dtype)))
    return b.emit("LeakyRelu", x, alpha=float(negative_slope))


@functools.cache
def _share_at_bound(by_tensor: bool) -> float:
    """What PyTorch gives of the gradient to a number that is clamped to itself; versions differ."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones((), device="cpu", dtype=torch.float32, requires_grad=True)
        bound: Any = x.detach() if by_tensor else 1.0
        (share,) = torch.autograd.grad(torch.clamp(x, min=bound), x)
    return float(share)


def _holds(dtype: torch.dtype, number: float) -> bool:
    """Whether a number is not too large for a dtype."""
    if dtype.is_floating_point:
        return not math.isfinite(number) or abs(number) <= torch.finfo(dtype).max
    return not isinstance(number, int) or number == int(torch.tensor(number).to(dtype))


@translates(aten.clamp.default)
def clamp(b: Builder, x: Val, low: Any = None, high: Any = None) -> Val:
    dtype = result_dtype(b)
    if not all(v is None or isinstance(v, Val) or v <= math.inf for v in (low, high)):
        raise Unsupported("a bound that is NaN, of which versions of PyTorch make different things")
    x = b.cast(x, dtype)
    if not all(_holds(dtype, v) for v in (low, high) if isinstance(v, (int, float))):
        raise Unsupported(f"a bound that {dtype} does not hold")
    if not dtype.is_floating_point or isinstance(low, Val) or isinstance(high, Val):
        return clamp_tensor(b, x, low, high)
    if _share_at_bound(False) == 1:
        numbers = not any(isinstance(v, (torch.SymInt, torch.SymFloat)) for v in (low, high))
        return _clip(b, x, low, high) if numbers else clamp_tensor(b, x, low, high)
    return _open_clamp(b, x, low, high, dtype)


def _clip(b: Builder, x: Val, low: Any, high: Any) -> Val:
    return b.emit("Clip", x, *[None if v is None else b.scalar(v, x.dtype) for v in (low, high)])


def _open_clamp(b: Builder, x: Val, low: Any, high: Any, compared_in: torch.dtype) -> Val:
    """A clamp through which no gradient flows at the bounds, as they are in a dtype, nor at NaN."""
    if not x.grad:
        return _clip(b, x, low, high)
    p = b.cast(b.detached(x), compared_in)
    inside = [] if low is None else [b.emit("Greater", p, b.scalar(low, p.dtype))]
    inside += [] if high is None else [b.emit("Less", p, b.scalar(high, p.dtype))]
    keeps = inside[0] if len(inside) == 1 else b.emit("And", *inside)
    return b.emit("Where", keeps, x, _clip(b, b.detached(x), low, high))


@translates(aten.clamp.Tensor)
def clamp_tensor(b: Builder, x: Val, low: Any = None, high: Any = None) -> Val:
    dtype = result_dtype(b)
    bounds = [None if v is None else b.scalar(v, dtype) for v in (low, high)]
    x = b.cast(x, dtype)
    trained = [v for v in bounds if v is not None and v.grad]
    if None not in bounds and (trained or (x.grad and _share_at_bound(True) != 1)):
        raise Unsupported("the gradient where two bounds meet")
    if (trained or x.grad) and _share_at_bound(True) != 1:  # a clamp by one tensor is what maximum or minimum is
        return b.emit("Max" if bounds[1] is None else "Min", x, *[v for v in bounds if v is not None])
    x = x if bounds[0] is None else _bounded(b, "Max", "Greater", x, bounds[0])
    return x if bounds[1] is None else _bounded(b, "Min", "Less", x, bounds[1])


def _bounded(b: Builder, op: str, inside: str, x: Val, bound: Val) -> Val:
    """Max or Min whose gradient goes where the element comes from: nowhere if either is NaN."""
    out = b.emit(op, x, bound)
    if not out.grad:
        return out
    tie, none = b.emit("Equal", x, bound), b.const(0.0, x.dtype)

    def part(v: Val, other: Val, at_tie: bool) -> Val:
        rest = b.emit("Where", tie, v, none) if at_tie else none
        return b.emit("Where", b.emit(inside, v, other), v, rest)

    parts = [part(v, w, at_tie) for v, w, at_tie in ((x, bound, True), (bound, x, False)) if v.grad]
    return b.with_gradient_of(out, parts[0] if len(parts) == 1 else b.emit("Add", *parts))


@translates(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(b: Builder, x: Val, low: Any) -> Val:
    return clamp(b, x, low, None)


@translates(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(b: Builder, x: Val, high: Any) -> Val:
    return clamp(b, x, None, high)


@translates(aten.hardtanh.default)
def hardtanh(b: Builder, x: Val, min_val: Any = -1, max_val: Any = 1) -> Val:
    """A gradient flows through NaN in the few elements that do not fill one of PyTorch's vectors, but not in those."""
    return _open_clamp(b, x, min_val, max_val, computed_in(x.dtype))


@translates(aten.relu6.default)
def relu6(b: Builder, x: Val) -> Val:
    return hardtanh(b, x, 0, 6)


@translates(aten.hardshrink.default)
def hardshrink(b: Builder, x: Val, lambd: float = 0.5) -> Val:
    """x outside of -lambd .. lambd; no gradient flows at NaN, as none does in PyTorch's vectors."""
    low, high, none = (b.scalar(v, need_float(x.dtype)) for v in (-lambd, lambd, 0.0))

    def both(join: str, left: str, right: str) -> Val:
        bounds = [b.emit(op, x, v) for op, v in ((left, low), (right, high))]
        return b.emit(join, *bounds)

    out = b.emit("Where", both("And", "GreaterOrEqual", "LessOrEqual"), none, x)
    if not x.grad:
        return out
    return b.with_gradient_of(out, b.emit("Where", both("Or", "Less", "Greater"), x, none))


@translates(aten.softshrink.default)
def softshrink(b: Builder, x: Val, lambd: float = 0.5) -> Val:
    """x nearer to zero by lambd; zero within."""
    low, high, none = (b.scalar(v, need_float(x.dtype)) for v in (-lambd, lambd, 0.0))
    within = b.emit("Where", b.emit("IsNaN", x), b.detached(x), none)
    below = b.emit("Where", b.emit("Less", x, low), b.emit("Add", x, high), within)
    return b.emit("Where", b.emit("Greater", x, high), b.emit("Sub", x, high), below)


@translates(aten.nan_to_num.default)
def nan_to_num(
    b: Builder, x: Val, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Val:
    """Its slope is 1 or 0, and something that it multiplies."""
    if not x.dtype.is_floating_point:
        return x
    most = torch.finfo(x.dtype).max
    p, out = b.detached(x), x
    infinite = [b.emit("Equal", p, b.const(v, x.dtype)) for v in (math.inf, -math.inf)]
    tests = [b.emit("IsNaN", p), *infinite]
    finite = [0.0 if nan is None else nan, most if posinf is None else posinf, -most if neginf is None else neginf]
    for test, value in zip(tests, finite, strict=True):
        out = b.emit("Where", test, b.scalar(value, x.dtype), b.detached(out))
    if not x.grad:
        return out
    none = b.emit("Or", tests[0], b.emit("Or", *infinite))
    slope = b.emit("Where", none, b.const(0.0, x.dtype), b.const(1.0, x.dtype))
    return b.with_gradient_of(out, b.emit("Mul", x, slope))


@translates(aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther)
def where(b: Builder, condition: Val, x: Any, y: Any) -> Val:
    dtype = result_dtype(b)
    return b.emit("Where", b.cast(condition, torch.bool), b.scalar(x, dtype), b.scalar(y, dtype))


@translates(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(b: Builder, x: Val, mask: Val, value: Any) -> Val:
    return where(b, mask, value, x)


@translates(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(b: Builder, start: Val, end: Val, weight: Any) -> Val:
    operands = [b.scalar(v, computed_in(start.dtype)) for v in (start, end, weight)]
    return b.cast(b.emit("Lerp", *operands), start.dtype)


@translates(aten.addcmul.default)
def addcmul(b: Builder, x: Val, t1: Val, t2: Val, *, value: Any = 1) -> Val:
    dtype = result_dtype(b)
    if dtype == torch.bool:
        raise Unsupported("arithmetic on bools")
    x, t1, t2 = (b.cast(v, dtype) for v in (x, t1, t2))
    # Gradients of operands that are repeated are sums, which are not taken in 16 bits.
    summed = dtype in HALVES and not x.shape == t1.shape == t2.shape
    own = not summed and any(v.grad for v in (x, t1, t2))
    base, left, right = (b.cast(b.detached(v) if own else v, computed_in(dtype)) for v in (x, t1, t2))
    factor = b.scalar(value, base.dtype)
    if dtype.is_floating_point:
        out = b.cast(b.emit("MulAdd", b.emit("Mul", left, factor), right, base), dtype)
    else:
        out = b.emit("Add", base, b.emit("Mul", b.emit("Mul", left, factor), right))
    if not own:
        return out
    parts = [b.emit("Mul", v, b.cast(b.emit("Mul", w, factor), dtype)) for v, w in ((t1, right), (t2, left))]
    return b.with_gradient_of(out, b.emit("Add", x, b.emit("Add", *parts)))


@translates(aten.addcdiv.default)
def addcdiv(b: Builder, x: Val, t1: Val, t2: Val, *, value: Any = 1) -> Val:
    dtype = need_float(result_dtype(b))
    wide = computed_in(dtype)
    x, t1, t2 = (b.cast(v, dtype) for v in (x, t1, t2))
    base, over, under = (b.cast(b.detached(v), wide) for v in (x, t1, t2))
    factor = b.scalar(value, wide)

    def stepwise(op: str, left: Val, right: Val) -> Val:
        return b.cast(b.cast(b.emit(op, left, right), dtype), wide)

    out = b.cast(b.emit("Add", base, b.emit("Div", b.emit("Mul", over, factor), under)), dtype)
    if not any(v.grad for v in (x, t1, t2)):
        return out
    share = stepwise("Div", stepwise("Mul", over, factor), stepwise("Mul", under, under))
    slopes = (stepwise("Div", factor, under), b.emit("Neg", share))
    parts = [b.emit("Mul", v, b.cast(slope, dtype)) for v, slope in zip((t1, t2), slopes, strict=True)]
    return b.with_gradient_of(out, b.emit("Add", x, b.emit("Add", *parts)))


@translates(aten.softplus.default)
def softplus(b: Builder, x: Val, beta: float = 1, threshold: float = 20) -> Val:
    return b.emit("Softplus", x, beta=float(beta), threshold=float(threshold))


@translates(aten._prelu_kernel.default)
def prelu(b: Builder, x: Val, weight: Val) -> Val:
    """x times 1 or the weight: a product's gradients are exact where the factor not chosen is infinite."""
    positive = b.emit("Greater", x, b.const(0.0, x.dtype))
    return b.emit("Mul", x, b.emit("Where", positive, b.const(1.0, x.dtype), weight))


# Casts. Devices and layouts are refused before capture, so only the dtype is left.


@translates(aten.to.dtype)
def to_dtype(b: Builder, x: Val, _dtype: torch.dtype, *_rest: Any, **_kwargs: Any) -> Val:
    return b.cast(x, result_dtype(b))


@translates(
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
    aten.to.prim_Device,
    aten._autocast_to_reduced_precision.default,
    aten._autocast_to_full_precision.default,
)
def to_copy(b: Builder, x: Any, *_args: Any, **_kwargs: Any) -> Val:
    return b.scalar(x, result_dtype(b))  # rules for batches cast numbers too


@translates(aten.copy.default)
def copy(b: Builder, x: Val, source: Val, _non_blocking: bool = False) -> Val:
    return b.expand(b.cast(source, x.dtype), result_shape(b))


@translates(
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.positive.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
)
def same(_b: Builder, x: Val, *_args: Any, **_kwargs: Any) -> Val:
    return x


@translates(aten.detach.default)
def detach(b: Builder, x: Val) -> Val:
    return b.detached(x)
