"""Losses of classes with a margin."""

import torch

from ...capture.numbers import is_number
from ...errors import Unsupported
from ..builder import Builder
from ..draft import Val, static
from .losses import MEAN, NONE, reduce_loss, reduced_as
from .reduce import reduce
from .registry import HALVES, aten, need_float, result_shape, same_sizes, translates


@translates(aten.soft_margin_loss.default)
def soft_margin(b: Builder, x: Val, target: Val, reduction: int = MEAN) -> Val:
    """log(1 + exp(-t x)), whose slope is -t exp(-t x) / (1 + exp(-t x))."""
    dtype = need_float(x.dtype)
    if target.dtype != dtype or target.grad or dtype in HALVES or not same_sizes(x.dims, target.dims):
        raise Unsupported(f"{b.aten_name} of {dtype} and a target of {target.dtype}, or one that is trained")
    p, one = b.detached(x), b.const(1.0, dtype)
    z = b.emit("Exp", b.emit("Mul", b.emit("Neg", target), p))
    loss = b.emit("Log1p", z)
    if not x.grad:
        return reduce_loss(b, loss, reduction)
    count = b.cast(b.emit("Size", loss), dtype) if reduction == MEAN else one
    slope = b.emit("Mul", b.emit("Mul", target, z), b.emit("Neg", b.emit("Div", one, count)))
    return reduced_as(b, loss, b.emit("Mul", x, b.emit("Div", slope, b.emit("Add", z, one))), reduction)


def _rows(b: Builder, x: Val, target: Val, classes: bool) -> tuple[Val, Val]:
    """Scores as [rows, classes], and int64 targets of each row."""
    need_float(x.dtype)
    if x.rank not in (1, 2) or 0 in x.example or target.dtype != torch.int64 or x.dtype in HALVES:
        raise Unsupported(f"{b.aten_name} of {x.dtype} with {x.rank} dims, and targets of {target.dtype}")
    n, c = x.dims if x.rank == 2 else (1, x.dims[0])
    return b.reshape(x, (n, c)), b.reshape(target, (n, c) if classes else (n,))


@translates(aten.multi_margin_loss.default)
def multi_margin(
    b: Builder,
    x: Val,
    target: Val,
    p: float = 1,
    margin: float = 1,
    weight: Val | None = None,
    reduction: int = MEAN,
) -> Val:
    """The mean over all classes of max(0, margin - x[target] + x)^p, in which the target's own is nothing."""
    if is_number(p):
        raise Unsupported("an open power")
    if target.rank == 0 and reduction == NONE:
        raise Unsupported("losses of one row, for which PyTorch's tracer gives a dim that there is not")
    x, target = _rows(b, x, target, False)
    dtype, zero, scores = x.dtype, b.const(0.0, x.dtype), b.detached(x)
    ids, classes = b.unsqueeze(target, 1), b.tensor(torch.arange(static(x.dims[1])), "classes")
    own = b.emit("GatherElements", scores, ids, axis=1, strict=1)
    apart = b.emit("Add", b.emit("Sub", b.scalar(margin, dtype), own), scores)
    is_target = b.emit("Equal", ids, classes)
    counts = b.emit("And", b.emit("Greater", apart, zero), b.emit("Not", is_target))
    kept, share = b.emit("Where", counts, apart, zero), _share(b, x, reduction)
    terms, slope = kept, b.emit("Mul", b.cast(counts, dtype), share)
    if p == 2:
        terms, slope = b.emit("Mul", kept, kept), b.emit("Mul", kept, b.emit("Mul", share, b.const(2.0, dtype)))
    if weight is not None:
        factor = b.emit("Gather", b.detached(weight), ids, axis=0, strict=1)
        terms, slope = b.emit("Mul", terms, factor), b.emit("Mul", slope, factor)
    back = b.emit("Where", is_target, reduce(b, "ReduceSum", slope, [1], True), zero)
    return _of_rows(b, x, reduce(b, "ReduceSum", terms, [1], False), b.emit("Sub", slope, back), reduction)


def _share(b: Builder, x: Val, reduction: int) -> Val:
    """What a term counts: one of the classes, in a mean of all rows."""
    n = b.emit("Size", x) if reduction == MEAN else b.size(x.dims[1])
    return b.emit("Div", b.const(1.0, x.dtype), b.cast(n, x.dtype))


def _of_rows(b: Builder, x: Val, sums: Val, slope: Val, reduction: int) -> Val:
    """Sums of each row divided by the classes, with the slope that a gradient is multiplied with."""

    def shaped(v: Val) -> Val:
        return b.reshape(v, result_shape(b)) if reduction == NONE else v

    loss = shaped(b.emit("Div", sums, b.cast(b.size(x.dims[1]), x.dtype)))
    like = shaped(reduce(b, "ReduceSum", b.emit("Mul", x, slope), [1], False))
    return reduced_as(b, loss, like, reduction)


@translates(aten.multilabel_margin_loss.default)
def multilabel_margin(b: Builder, x: Val, target: Val, reduction: int = MEAN) -> Val:
    """The sum over the labels, of which the first below 0 ends the list, and over all that are none, by the classes."""
    if x.rank == 1 and reduction == NONE:
        raise Unsupported("losses of one row, for which PyTorch's tracer gives a dim that there is not")
    x, target = _rows(b, x, target, True)
    dtype, none, scores = x.dtype, b.const(0, torch.int64), b.detached(x)
    zero, zeros = b.const(0.0, dtype), b.full(x.dims, 0.0, dtype)
    # Places in a table: what is in none of them, after the end of the list too, is an error.
    table = b.size(x.dims[1])
    places = b.emit("Range", b.const(-1, torch.int64), table, b.const(1, torch.int64))
    target = b.emit("Gather", places, b.emit("Add", target, b.const(1, torch.int64)), axis=0, strict=1)
    ended = b.cast(b.emit("Less", target, none), torch.int64)
    listed = b.emit("Equal", b.emit("CumSum", ended, b.const(1, torch.int64)), none)
    ids = b.emit("Where", listed, target, none)

    def at_labels(v: Val) -> Val:
        return b.emit("GatherElementsGrad", v, ids, zeros, axis=1, strict=1)

    own = b.emit("GatherElements", scores, ids, axis=1, strict=1)
    apart = b.emit("Add", b.emit("Sub", b.const(1.0, dtype), b.unsqueeze(own, 2)), b.unsqueeze(scores, 1))
    others = b.emit("Equal", at_labels(b.cast(listed, dtype)), zero)
    pairs = b.emit("And", b.unsqueeze(listed, 2), b.unsqueeze(others, 1))
    counts = b.emit("And", pairs, b.emit("Greater", apart, zero))
    sums = reduce(b, "ReduceSum", b.emit("Where", counts, apart, zero), [1, 2], False)
    found = b.emit("Mul", b.cast(counts, dtype), _share(b, x, reduction))
    back = at_labels(reduce(b, "ReduceSum", found, [2], False))
    return _of_rows(b, x, sums, b.emit("Sub", reduce(b, "ReduceSum", found, [1], False), back), reduction)
