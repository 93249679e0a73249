"""Reductions, scans and what is made of them."""

import math
from typing import Any

import torch

from ...errors import Unsupported
from ..builder import Builder
from ..draft import Size, Val, same_size
from .registry import aten, axes_of, axis_of, computed_in, need_float, reduced_axes, result_dtype, translates
from .shape import diagonal_of


def reduce(b: Builder, op: str, x: Val, axes: list[int], keepdim: bool, **attributes: Any) -> Val:
    """One reduction; dims counted from the front, none for a scalar."""
    return b.emit(op, x, b.ints(axes), keepdims=int(keepdim), **attributes) if x.rank else x


@translates(aten.sum.default, aten.sum.dim_IntList)
def sum_(b: Builder, x: Val, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Val:
    return reduce(b, "ReduceSum", b.cast(x, result_dtype(b)), reduced_axes(x, dim), keepdim)


@translates(aten.mean.default, aten.mean.dim)
def mean(b: Builder, x: Val, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Val:
    return reduce(b, "ReduceMean", b.cast(x, result_dtype(b)), reduced_axes(x, dim), keepdim)


def wide_quotient(b: Builder, x: Val, count: Val) -> Val:
    """x by a number of elements, which in 16 bits would be another or none: rounded once."""
    wide = computed_in(x.dtype)
    return b.cast(b.emit("Div", b.cast(x, wide), b.cast(count, wide)), x.dtype)


@translates(aten.nanmean.default)
def nanmean(b: Builder, x: Val, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Val:
    """The sum of what are numbers by how many there are."""
    lost, axes = b.emit("IsNaN", x), reduced_axes(x, dim)
    kept = b.emit("Where", lost, b.const(0.0, x.dtype), b.detached(x))
    if x.grad:
        kept = b.with_gradient_of(kept, b.emit("Mul", x, b.cast(b.emit("Not", lost), x.dtype)))
    kept = b.cast(kept, result_dtype(b))
    count = reduce(b, "ReduceSum", b.cast(b.emit("Not", lost), torch.int64), axes, keepdim)
    total = reduce(b, "ReduceSum", kept, axes, keepdim)
    if math.prod(total.example) != 1:  # PyTorch rounds what are several numbers
        count = b.cast(count, kept.dtype)
    return wide_quotient(b, total, count)


@translates(aten.aminmax.default)
def aminmax(b: Builder, x: Val, *, dim: int | None = None, keepdim: bool = False) -> tuple[Val, ...]:
    axes = axes_of(x, dim)
    return tuple(reduce(b, op, x, axes, keepdim) for op in ("ReduceMin", "ReduceMax"))


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
    return b.emit(op, _widened(b, x), axis=axis, keepdims=int(keepdim))


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


@translates(aten.cumsum.default, aten.cumprod.default)
def running(b: Builder, x: Val, dim: int, *, dtype: Any = None) -> Val:
    if x.rank == 0:
        return b.cast(x, result_dtype(b))
    op = "CumSum" if b.aten_name == "cumsum" else "CumProd"
    out = b.emit(op, _widened(b, b.cast(x, result_dtype(b))), b.const(axis_of(x, dim), torch.int64))
    return b.cast(out, result_dtype(b))


def _widened(b: Builder, x: Val) -> Val:
    """Whole numbers in the dtype that has kernels; others as they are."""
    return x if x.dtype.is_floating_point or x.dtype == torch.bool else b.cast(x, torch.int64)


@translates(aten.topk.default)
def topk(b: Builder, x: Val, k: Size, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Val, Val]:
    return _first(b, x, k, dim, largest)


@translates(aten.sort.default)
def sort(b: Builder, x: Val, dim: int = -1, descending: bool = False) -> tuple[Val, Val]:
    return _first(b, x, None, dim, descending)


@translates(aten.sort.stable)
def sort_stable(
    b: Builder, x: Val, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Val, Val]:
    return _first(b, x, None, dim, descending)


def _first(b: Builder, x: Val, k: Size | None, dim: int, largest: bool) -> tuple[Val, Val]:
    """The first k of each line, or all, and their places; equal ones in the order they have."""
    if x.rank == 0 and dim in (0, -1):
        return x, b.const(0, torch.int64)
    if k is not None and x.dtype == torch.bool:
        raise Unsupported("the first of bools")
    axis = axis_of(x, dim)
    numbers = x if x.dtype.is_floating_point else b.cast(x, torch.int64)
    count = b.ints([x.dims[axis] if k is None else k])
    values, places = b.emit_all("TopK", numbers, count, axis=axis, largest=int(largest))
    return b.cast(values, x.dtype), places


@translates(aten.diff.default)
def diff(b: Builder, x: Val, n: int = 1, dim: int = -1, prepend: Val | None = None, append: Val | None = None) -> Val:
    axis = axis_of(x, dim)
    if n == 0:
        return x
    dtype = result_dtype(b)
    parts = [b.cast(p, dtype) for p in (prepend, x, append) if p is not None]
    x = b.emit("Concat", *parts, axis=axis) if len(parts) > 1 else parts[0]
    sizes = [p.dims[axis] for p in parts]
    size = sum(p.example[axis] for p in parts)
    if size < n and not all(isinstance(s, int) for s in sizes):
        raise Unsupported(f"diff of order {n} of an open size")
    for _ in range(min(n, size)):
        ends = b.slice(x, axis, 1, 2**63 - 1), b.slice(x, axis, 0, -1)
        x = b.emit("Xor" if dtype == torch.bool else "Sub", *ends)
    return x


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


@translates(aten.std_mean.correction)
def std_mean(b: Builder, x: Val, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Val, Val]:
    average, deviation = _spread(b, x, dim, 1 if correction is None else correction, keepdim, root=True)
    return deviation, average


@translates(aten.std_mean.default)
def std_mean_all(b: Builder, x: Val, unbiased: bool = True) -> tuple[Val, Val]:
    return std_mean(b, x, None, correction=int(unbiased))


@translates(aten.std_mean.dim)
def std_mean_dim(b: Builder, x: Val, dim: Any, unbiased: bool = True, keepdim: bool = False) -> tuple[Val, Val]:
    return std_mean(b, x, dim, correction=int(unbiased), keepdim=keepdim)


@translates(aten.cosine_similarity.default)
def cosine_similarity(b: Builder, x: Val, y: Val, dim: int = 1, eps: float = 1e-8) -> Val:
    """The sum of products of both by their norms, of which none is taken to be below eps, though its slope stays."""
    dtype = need_float(result_dtype(b))
    axis = axis_of(x, dim)
    if {x.dtype, y.dtype} != {dtype} or x.rank != y.rank or not x.rank or not same_size(x.dims[axis], y.dims[axis]):
        raise Unsupported("scalars, operands of two dtypes, or rows of two lengths")

    def scaled(v: Val) -> Val:
        norm = vector_norm(b, v, 2, [axis], True)
        least = b.emit("Clip", b.detached(norm), b.scalar(eps, dtype))
        return b.emit("Div", v, b.with_gradient_of(least, norm))

    return reduce(b, "ReduceSum", b.emit("Mul", scaled(x), scaled(y)), [axis], False)


@translates(aten.trace.default)
def trace(b: Builder, x: Val) -> Val:
    if x.dtype == torch.bool:
        raise Unsupported("a trace of bools")
    elements = diagonal_of(b, x, 0, 0, 1, torch.sym_min(*x.dims))
    return reduce(b, "ReduceSum", b.cast(elements, result_dtype(b)), [0], False)


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
