"""Reductions, scans and losses made of them."""

import math
from collections.abc import Callable
from typing import Any

import torch

from ...errors import Unsupported
from ..builder import Builder
from ..draft import Val, same_size
from .registry import aten, axes_of, axis_of, computed_in, need_float, reduced_axes, result_dtype, translates

NONE, MEAN, SUM = 0, 1, 2  # PyTorch's codes of `reduction`


def reduce(b: Builder, op: str, x: Val, axes: list[int], keepdim: bool, **attributes: Any) -> Val:
    """One reduction; dims counted from the front, none for a scalar."""
    return b.emit(op, x, b.ints(axes), keepdims=int(keepdim), **attributes) if x.rank else x


@translates(aten.sum.default, aten.sum.dim_IntList)
def sum_(b: Builder, x: Val, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Val:
    return reduce(b, "ReduceSum", b.cast(x, result_dtype(b)), reduced_axes(x, dim), keepdim)


@translates(aten.mean.default, aten.mean.dim)
def mean(b: Builder, x: Val, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Val:
    return reduce(b, "ReduceMean", b.cast(x, result_dtype(b)), reduced_axes(x, dim), keepdim)


@translates(aten.amax.default, aten.amin.default)
def extreme(b: Builder, x: Val, dim: Any = (), keepdim: bool = False) -> Val:
    return reduce(b, "ReduceMax" if b.aten_name == "amax" else "ReduceMin", x, reduced_axes(x, dim), keepdim)


@translates(aten.max.default, aten.min.default)
def extreme_all(b: Builder, x: Val) -> Val:
    op = "ReduceMax" if b.aten_name == "max" else "ReduceMin"
    return reduce(b, op, x, axes_of(x, None), False, nan_ties=1)


@translates(aten.max.dim, aten.min.dim)
def extreme_dim(b: Builder, x: Val, dim: int, keepdim: bool = False) -> tuple[Val, Val]:
    if x.rank == 0:
        return x, b.const(0, torch.int64)
    axis = axis_of(x, dim)
    index = _arg(b, x, axis, True, b.aten_name == "max")
    value = b.emit("GatherElements", x, index, axis=axis)  # the gradient goes to the chosen element only
    return (value, index) if keepdim else (b.squeeze(value, axis), b.squeeze(index, axis))


@translates(aten.argmax.default, aten.argmin.default)
def argmax(b: Builder, x: Val, dim: int | None = None, keepdim: bool = False) -> Val:
    if dim is None:
        if keepdim:
            raise Unsupported("argmax of a flattened tensor with keepdim")
        return _arg(b, b.reshape(x, (math.prod(x.dims),)), 0, False, b.aten_name == "argmax")
    return _arg(b, x, axis_of(x, dim), keepdim, b.aten_name == "argmax")


def _arg(b: Builder, x: Val, axis: int, keepdim: bool, largest: bool) -> Val:
    op = "ArgMax" if largest else "ArgMin"
    return b.emit(op, x, axis=axis, keepdims=int(keepdim))


@translates(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)
def truth(b: Builder, x: Val, dim: Any = None, keepdim: bool = False) -> Val:
    op = "ReduceMax" if b.aten_name == "any" else "ReduceMin"
    flags, axes = b.cast(x, torch.bool), axes_of(x, dim)
    return b.cast(reduce(b, op, b.cast(flags, torch.int64), axes, keepdim), torch.bool) if axes else flags


@translates(aten.prod.default, aten.prod.dim_int)
def prod(b: Builder, x: Val, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Val:
    x = b.cast(x, result_dtype(b))
    if dim is None and x.rank:  # without axes the gradient is that of a product of all elements
        return b.emit("ReduceProd", x, keepdims=0)
    return reduce(b, "ReduceProd", x, axes_of(x, dim), keepdim)


@translates(aten.cumsum.default)
def cumsum(b: Builder, x: Val, dim: int, *, dtype: Any = None) -> Val:
    if x.rank == 0:
        return b.cast(x, result_dtype(b))
    return b.emit("CumSum", b.cast(x, result_dtype(b)), b.const(axis_of(x, dim), torch.int64))


@translates(aten.diff.default)
def diff(b: Builder, x: Val, n: int = 1, dim: int = -1, prepend: Val | None = None, append: Val | None = None) -> Val:
    axis = axis_of(x, dim)
    if n != 1 or x.dtype == torch.bool:
        raise Unsupported(f"diff of order {n} on {x.dtype}")
    parts = [p for p in (prepend, x, append) if p is not None]
    if len(parts) > 1:
        x = b.emit("Concat", *parts, axis=axis)
    return b.emit("Sub", b.slice(x, axis, 1, 2**63 - 1), b.slice(x, axis, 0, -1))


def _deviations(b: Builder, x: Val, axes: list[int]) -> tuple[Val, Val]:
    """Mean with the reduced dims kept, and the distances from it."""
    average = reduce(b, "ReduceMean", x, axes, True)
    if x.dtype == torch.float64:  # equal elements have no deviation at all; narrower ones are summed in more bits
        rest = reduce(b, "ReduceMean", b.emit("Sub", x, average), axes, True)
        lost = b.emit("IsNaN", rest)  # among infinities
        average = b.emit("Add", average, b.detached(b.emit("Where", lost, b.const(0.0, x.dtype), rest)))
    return average, b.emit("Sub", b.detached(x), b.detached(average))


def moments(b: Builder, x: Val, axes: list[int], correction: float) -> tuple[Val, Val, Val]:
    """Mean and variance with the reduced dims kept, the mean alone with gradients, and the distances from the mean."""
    n: Any = math.prod(x.dims[a] for a in axes)
    if n <= math.floor(correction):
        raise Unsupported(f"variance of {n} elements with correction {correction}")
    average, centered = _deviations(b, x, axes)
    variance = reduce(b, "ReduceMean", b.emit("Mul", centered, centered), axes, True)
    if x.dtype != torch.float64:  # the mean of numbers that are large and close is too coarse
        shift = reduce(b, "ReduceMean", centered, axes, True)
        excess = b.emit("Min", b.emit("Mul", shift, shift), b.const(torch.finfo(x.dtype).max, x.dtype))
        variance = b.emit("Relu", b.emit("Sub", variance, excess))
    if correction:
        variance = b.emit("Mul", variance, b.scalar(n / (n - correction), x.dtype))
    return average, variance, centered


def _spread(b: Builder, x: Val, dim: Any, correction: float, keepdim: bool, root: bool = False) -> tuple[Val, Val]:
    """Mean, and variance or its root; PyTorch's slope of that is 2 / (n - correction) times the deviations."""
    need_float(x.dtype)
    if x.dtype in (torch.bfloat16, torch.float16):
        average, out = _spread(b, b.cast(x, torch.float32), dim, correction, keepdim, root)
        return b.cast(average, x.dtype), b.cast(out, x.dtype)
    if isinstance(dim, (list, tuple)) and not dim:
        raise Unsupported("variance over an empty list of dims")  # whose gradient PyTorch divides by 0
    axes = axes_of(x, dim)
    average, out, centered = moments(b, x, axes, correction)
    if root:  # as in PyTorch it is taken before the squares are rounded: they leave the range long before it does
        out = b.cast(b.emit("Sqrt", moments(b, b.cast(b.detached(x), torch.float64), axes, correction)[1]), x.dtype)
    if x.grad:
        n: Any = math.prod(x.dims[a] for a in axes)
        like = b.emit("Mul", _along(b, x, centered, axes), b.scalar(2.0 / (n - correction), x.dtype))
        if root:
            like = _quotient(b, like, b.emit("Mul", out, b.const(2.0, x.dtype)), out)
        out = b.with_gradient_of(out, like)
    if not keepdim and axes:
        average, out = b.squeeze(average, *axes), b.squeeze(out, *axes)
    return average, out


def _along(b: Builder, x: Val, slope: Val, axes: list[int]) -> Val:
    """What has this slope in x."""
    return reduce(b, "ReduceSum", b.emit("Mul", x, b.detached(slope)), axes, True)


def _quotient(b: Builder, x: Val, y: Val, where: Val) -> Val:
    """x / y, and neither a value nor a slope where `where` is 0."""
    zero, one = b.const(0.0, x.dtype), b.const(1.0, x.dtype)
    is_zero = b.emit("Equal", where, zero)
    quotient = b.emit("Div", x, b.emit("Where", is_zero, one, y))
    return b.emit("Where", is_zero, zero, quotient)


@translates(aten.var.correction, aten.std.correction)
def var(b: Builder, x: Val, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Val:
    return _spread(b, x, dim, 1 if correction is None else correction, keepdim, b.aten_name == "std")[1]


@translates(aten.linalg_vector_norm.default)
def vector_norm(b: Builder, x: Val, p: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Val:
    axes = reduced_axes(x, dim)
    return _norm(b, x, p, axes, keepdim, alone=all(same_size(x.dims[axis], 1) for axis in axes))


def _norm(b: Builder, x: Val, p: float, axes: list[int], keepdim: bool, alone: bool) -> Val:
    dtype = need_float(result_dtype(b))
    return b.cast(norm_over(b, b.cast(x, computed_in(dtype)), p, axes, keepdim, alone), dtype)


def norm_over(b: Builder, x: Val, p: float, axes: list[int], keepdim: bool, alone: bool = False) -> Val:
    """The norm along axes, in the dtype of `x`; of numbers that are `alone` along them PyTorch takes no power.

    PyTorch's slope of a norm is 0 where the norm is.
    """
    size = b.emit("Abs", x)
    if p == 1:
        return reduce(b, "ReduceSum", size, axes, keepdim)
    if p in (math.inf, -math.inf):
        return reduce(b, "ReduceMax" if p > 0 else "ReduceMin", size, axes, keepdim, nan_ties=1)
    if p < 1:
        raise Unsupported(f"norm with p {p}")
    value, size = b.detached(x), b.detached(size)

    def power(of: Val, exponent: float) -> Val:
        return b.emit("Pow", of, b.const(exponent, of.dtype))

    out = size
    if not alone:
        total = reduce(b, "ReduceSum", power(size, p), axes, True)
        out = b.emit("Sqrt", total) if p == 2 else power(total, 1 / p)
    if x.grad and p == 2:
        out = b.with_gradient_of(out, _along(b, x, _quotient(b, value, out, out), axes))
    elif x.grad:
        slope = (
            b.emit("Mul", value, power(size, p - 2))
            if p > 2
            else b.emit("Mul", b.emit("Sign", value), power(size, p - 1))
        )
        out = b.with_gradient_of(out, _quotient(b, _along(b, x, slope, axes), power(out, p - 1), out))
    return out if keepdim or not axes else b.squeeze(out, *axes)


@translates(aten.norm.ScalarOpt_dim, aten.norm.Scalar)
def norm(b: Builder, x: Val, p: float | None = 2, dim: Any = None, keepdim: bool = False) -> Val:
    return vector_norm(b, x, 2 if p is None else p, dim, keepdim)


@translates(aten.dist.default)
def dist(b: Builder, x: Val, y: Val, p: float = 2) -> Val:
    dtype = result_dtype(b)
    off = b.emit("Sub", b.cast(x, dtype), b.cast(y, dtype))
    return _norm(b, off, p, axes_of(off, None), False, alone=all(same_size(n, 1) for n in (*x.dims, *y.dims)))


@translates(aten.var.default, aten.std.default)
def var_all(b: Builder, x: Val, unbiased: bool = True) -> Val:
    return var(b, x, None, correction=int(unbiased))


@translates(aten.var.dim, aten.std.dim)
def var_dim(b: Builder, x: Val, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Val:
    return var(b, x, dim, correction=int(unbiased), keepdim=keepdim)


@translates(aten.var_mean.correction)
def var_mean(b: Builder, x: Val, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Val, Val]:
    average, variance = _spread(b, x, dim, 1 if correction is None else correction, keepdim)
    return variance, average


@translates(aten.logsumexp.default)
def logsumexp(b: Builder, x: Val, dim: Any, keepdim: bool = False) -> Val:
    """top + log(sum(exp(x - top))), an infinite top being subtracted as 0; its slope is exp(x - result)."""
    x, axes = b.cast(x, result_dtype(b)), axes_of(x, dim)
    if any(isinstance(x.dims[a], int) and x.dims[a] == 0 for a in axes):
        return b.emit("Log", reduce(b, "ReduceSum", x, axes, keepdim))
    p = b.detached(x)
    top = reduce(b, "ReduceMax", p, axes, True)
    infinite = b.emit("Equal", b.emit("Abs", top), b.const(math.inf, x.dtype))
    top = b.emit("Where", infinite, b.const(0.0, x.dtype), top)

    def sum_exp(v: Val, shift: Val) -> Val:
        return reduce(b, "ReduceSum", b.emit("Exp", b.emit("Sub", v, shift)), axes, True)

    out = b.emit("Add", b.emit("Log", sum_exp(p, top)), top)
    if x.grad:
        out = b.with_gradient_of(out, sum_exp(x, out))
    return out if keepdim or not axes else b.squeeze(out, *axes)


def reduce_loss(b: Builder, loss: Val, reduction: int) -> Val:
    """Apply `reduction` to the elements of a loss."""
    if reduction == NONE:
        return loss
    return reduce(b, "ReduceMean" if reduction == MEAN else "ReduceSum", loss, axes_of(loss, None), False)


def _loss_operands(b: Builder, x: Val, target: Val) -> tuple[Val, Val]:
    dtype = need_float(result_dtype(b))
    return b.cast(x, dtype), b.cast(target, dtype)


def _differentiated(b: Builder, loss: Val, like: Val, reduction: int) -> Val:
    """Elements of a loss, reduced, with the gradient of the sum of those of `like`."""
    if not like.grad:
        return reduce_loss(b, loss, reduction)
    if reduction != MEAN:
        return reduce_loss(b, b.with_gradient_of(loss, like), reduction)
    return b.with_gradient_of(reduce_loss(b, loss, MEAN), reduce_loss(b, like, SUM))


def _share(b: Builder, of: float, x: Val, reduction: int) -> Val:
    """A number; for a mean divided by the number of elements of x, which PyTorch does before it multiplies."""
    number = b.const(of, computed_in(x.dtype))
    if reduction == MEAN:
        number = b.emit("Div", number, b.cast(b.emit("Size", x), number.dtype))
    return b.cast(number, x.dtype)


@translates(aten.mse_loss.default)
def mse_loss(b: Builder, x: Val, target: Val, reduction: int = MEAN) -> Val:
    x, target = _loss_operands(b, x, target)
    difference = b.emit("Sub", x, target)
    p = b.detached(difference)
    like = b.emit("Mul", difference, b.emit("Mul", p, _share(b, 2.0, p, reduction)))
    return _differentiated(b, b.emit("Mul", p, p), like, reduction)


@translates(aten.l1_loss.default)
def l1_loss(b: Builder, x: Val, target: Val, reduction: int = MEAN) -> Val:
    x, target = _loss_operands(b, x, target)
    return reduce_loss(b, b.emit("Abs", b.emit("Sub", x, target)), reduction)


@translates(aten.smooth_l1_loss.default)
def smooth_l1_loss(b: Builder, x: Val, target: Val, reduction: int = MEAN, beta: float = 1.0) -> Val:
    """d^2 / (2 beta) where |d| < beta, else |d| - beta / 2."""
    if beta < 0:
        raise Unsupported(f"beta={beta}, which PyTorch refuses")
    if beta == 0:
        return l1_loss(b, x, target, reduction)

    def near(v: Val, square: Val) -> tuple[Val, Val]:
        return b.emit("Div", square, b.const(beta, v.dtype)), b.emit("Div", v, b.const(beta, v.dtype))

    return _bent(b, x, target, reduction, beta, 1.0, near, torch.bfloat16)


@translates(aten.huber_loss.default)
def huber_loss(b: Builder, x: Val, target: Val, reduction: int = MEAN, delta: float = 1.0) -> Val:
    """d^2 / 2 where |d| < delta, else delta * (|d| - delta / 2)."""
    if x.dtype != target.dtype:
        raise Unsupported("huber_loss of two dtypes, of which PyTorch has no gradient")
    return _bent(b, x, target, reduction, delta, delta, lambda v, square: (square, v), None)


def _bent(
    b: Builder,
    x: Val,
    target: Val,
    reduction: int,
    bend: float,
    rise: float,
    near: Callable[[Val, Val], tuple[Val, Val]],
    widened: torch.dtype | None,
) -> Val:
    """rise * (|d| - bend / 2) where |d| is at least `bend`; else what `near` makes of d and d^2 / 2: loss and slope."""
    x, target = _loss_operands(b, x, target)
    dtype = x.dtype
    if dtype == torch.float16:
        raise Unsupported(f"{b.aten_name} of float16")  # each has its own rounding of what lies in between
    if dtype == widened:
        x, target = (b.cast(v, computed_in(v.dtype)) for v in (x, target))
    difference = b.emit("Sub", x, target)
    p = b.detached(difference)
    distance = b.emit("Abs", p)
    outside = b.emit("GreaterOrEqual", distance, b.const(bend, x.dtype))
    close, slope = near(p, b.emit("Mul", b.emit("Mul", distance, b.const(0.5, x.dtype)), distance))
    far = b.emit("Mul", b.emit("Sub", distance, b.const(0.5 * bend, x.dtype)), b.const(rise, x.dtype))
    steep = b.emit("Mul", b.emit("Sign", p), b.const(rise, x.dtype))
    slope = b.emit("Mul", b.emit("Where", outside, steep, slope), _share(b, 1.0, p, reduction))
    loss = b.emit("Where", outside, far, close)
    like = b.cast(b.emit("Mul", difference, slope), dtype)
    return _differentiated(b, b.cast(loss, dtype), like, reduction)


def _weighted(
    b: Builder, loss: Val, weight: Val | None, reduction: int, *parts: tuple[Val, Callable[[Val], Val]]
) -> Val:
    """Elements of a loss times the weight, reduced; `parts` make of each weighted operand what has its gradient.

    That of a mean is divided by the number of elements at the end.
    """

    def weigh(v: Val) -> Val:
        return v if weight is None else b.emit("Mul", v, b.cast(weight, v.dtype))

    def share(v: Val) -> Val:
        if reduction != MEAN:
            return v
        return b.emit("Div", v, b.cast(b.emit("Size", v), v.dtype))

    terms = [like(weigh(share(x))) for x, like in parts if x.grad]
    loss = weigh(loss)
    if not terms:
        return reduce_loss(b, loss, reduction)
    return _differentiated(b, loss, terms[0] if len(terms) == 1 else b.emit("Add", *terms), reduction)


_LEAST_SPREAD = float(torch.tensor(1e-12, dtype=torch.float32))


@translates(aten.binary_cross_entropy.default)
def bce(b: Builder, x: Val, target: Val, weight: Val | None = None, reduction: int = MEAN) -> Val:
    """Its logarithms are at least -100 and the divisor of its slope at least a float32 1e-12, in any dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)

    def within(v: Val, of: str) -> Val:
        return b.cast(b.emit("UnitInterval", b.cast(b.detached(v), wide), of=of), v.dtype)

    p, t, one = within(x, "input"), within(target, "target"), b.const(1.0, x.dtype)
    least = b.const(-100.0, x.dtype)
    log, log_not = b.emit("Log", p), b.emit("Log1p", b.emit("Neg", p))
    of_one, of_none = b.emit("Clip", log, least), b.emit("Clip", log_not, least)
    loss = b.emit("Sub", b.emit("Mul", b.emit("Sub", t, one), of_none), b.emit("Mul", t, of_one))

    def of_x(v: Val) -> Val:
        spread = b.emit("Clip", b.emit("Mul", b.emit("Sub", one, p), p), b.const(_LEAST_SPREAD, x.dtype))
        return b.emit("Mul", b.emit("Div", v, spread), b.emit("Sub", p, t))

    def of_target(v: Val) -> Val:
        return b.emit("Mul", v, b.emit("Sub", log_not, log))

    return _weighted(b, loss, weight, reduction, (x, of_x), (target, of_target))


@translates(aten.binary_cross_entropy_with_logits.default)
def bce_with_logits(
    b: Builder, x: Val, target: Val, weight: Val | None = None, pos_weight: Val | None = None, reduction: int = MEAN
) -> Val:
    """-(1 - t) log sigmoid(-x) - w t log sigmoid(x), where log sigmoid(-x) = log sigmoid(x) - x."""
    dtype = need_float(result_dtype(b))
    if x.dtype != dtype or target.dtype != dtype:
        raise Unsupported(f"{b.aten_name} of two dtypes, some steps of which PyTorch computes in the narrower one")
    p, t, one = b.detached(x), b.detached(target), b.const(1.0, dtype)
    log, not_t = b.emit("LogSigmoid", p), b.emit("Sub", one, t)
    if pos_weight is None:
        loss = b.emit("Sub", b.emit("Mul", not_t, p), log)
    else:
        w = b.cast(pos_weight, dtype)
        rise = b.emit("Add", b.emit("Mul", b.emit("Sub", w, one), t), one)
        loss = b.emit("Sub", b.emit("Mul", not_t, p), b.emit("Mul", log, rise))

    def of_x(v: Val) -> Val:
        slope = b.emit("Sigmoid", p)
        if pos_weight is None:
            slope = b.emit("Sub", slope, t)
        else:
            hit = b.emit("Mul", w, t)
            slope = b.emit("Sub", b.emit("Mul", b.emit("Sub", b.emit("Add", hit, one), t), slope), hit)
        return b.emit("Mul", v, slope)

    def of_target(v: Val) -> Val:
        if pos_weight is None:
            slope = b.emit("Neg", p)
        else:
            slope = b.emit("Sub", b.emit("LogSigmoid", b.emit("Neg", p)), b.emit("Mul", log, w))
        return b.emit("Mul", v, slope)

    return _weighted(b, loss, weight, reduction, (x, of_x), (target, of_target))
