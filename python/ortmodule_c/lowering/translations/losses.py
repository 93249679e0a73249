"""Losses: of numbers, of classes, with a margin."""

import math
from collections.abc import Callable
from typing import Any

import torch

from ...errors import Unsupported
from ..builder import Builder
from ..draft import Size, Val
from .elementwise import arithmetic, clamp
from .nn import scaled
from .reduce import reduce, wide_quotient
from .registry import aten, axes_of, computed_in, need_float, result_dtype, translates

NONE, MEAN, SUM = 0, 1, 2  # PyTorch's codes of `reduction`
_REDUCTIONS = {NONE: "none", MEAN: "mean", SUM: "sum"}
_NO_LABEL = -(1 << 62)
_TINY = float(torch.tensor(1e-12, dtype=torch.float32))  # of float32 in any dtype


def reduce_loss(b: Builder, loss: Val, reduction: int) -> Val:
    """Apply `reduction` to the elements of a loss."""
    if reduction == NONE:
        return loss
    return reduce(b, "ReduceMean" if reduction == MEAN else "ReduceSum", loss, axes_of(loss, None), False)


def _loss_operands(b: Builder, x: Val, target: Val) -> tuple[Val, Val]:
    dtype = need_float(result_dtype(b))
    return b.cast(x, dtype), b.cast(target, dtype)


def reduced_as(b: Builder, loss: Val, like: Val, reduction: int) -> Val:
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
    return reduced_as(b, b.emit("Mul", p, p), like, reduction)


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
    return reduced_as(b, b.cast(loss, dtype), like, reduction)


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
        return wide_quotient(b, v, b.emit("Size", v))

    terms = [like(weigh(share(x))) for x, like in parts if x.grad]
    loss = weigh(loss)
    if not terms:
        return reduce_loss(b, loss, reduction)
    return reduced_as(b, loss, terms[0] if len(terms) == 1 else b.emit("Add", *terms), reduction)


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
        spread = b.emit("Clip", b.emit("Mul", b.emit("Sub", one, p), p), b.const(_TINY, x.dtype))
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


@translates(aten.poisson_nll_loss.default)
def poisson_nll(b: Builder, x: Val, target: Val, log_input: bool, full: bool, eps: float, reduction: int) -> Val:
    """exp(x) - t x, or x - t log(x + eps); `full` adds Stirling's t log(t) - t + log(2 pi t) / 2 where t > 1."""
    if x.dtype != target.dtype and (x.grad or target.grad):
        raise Unsupported(f"{b.aten_name} of two dtypes")

    def times(v: Any, w: Any) -> Val:
        return arithmetic(b, "Mul", v, w)

    dtype = need_float(result_dtype(b))
    x, target = b.cast(x, dtype), b.cast(target, dtype)
    if log_input:
        loss = b.emit("Sub", b.emit("Exp", x), times(target, x))
    else:
        loss = b.emit("Sub", x, times(target, b.emit("Log", arithmetic(b, "Add", x, eps))))
    if full:
        rest = b.emit("Sub", times(target, b.emit("Log", target)), target)
        rest = b.emit("Add", rest, times(b.emit("Log", times(target, 2 * math.pi)), 0.5))
        few = b.emit("LessOrEqual", target, b.const(1.0, dtype))
        loss = b.emit("Add", loss, b.emit("Where", few, b.const(0.0, dtype), rest))
    return reduce_loss(b, loss, reduction)


# Losses of classes


def _classes(b: Builder, target: Val, ignore_index: Size) -> tuple[Val, int]:
    """Labels, and that of elements that do not count, as a number."""
    if target.dtype not in (torch.int64, torch.uint8):
        raise Unsupported(f"labels of dtype {target.dtype}")
    target = b.cast(target, torch.int64)
    if isinstance(ignore_index, int):
        return target, ignore_index
    ignored = b.emit("Equal", target, b.size(ignore_index))
    label = b.const(_NO_LABEL, torch.int64)
    return b.emit("Where", ignored, label, target), _NO_LABEL


@translates(aten.cross_entropy_loss.default)
def cross_entropy(
    b: Builder,
    x: Val,
    target: Val,
    weight: Val | None = None,
    reduction: int = MEAN,
    ignore_index: Size = -100,
    label_smoothing: float = 0.0,
) -> Val:
    if x.rank == target.rank:
        return _soft_cross_entropy(b, x, target, weight, reduction, label_smoothing)
    single = x.rank == 1
    if single:
        x, target = b.unsqueeze(x, 0), b.unsqueeze(target, 0)
    labels, ignored = _classes(b, target, ignore_index)
    loss = b.emit(
        "CrossEntropy",
        x,
        labels,
        weight,
        reduction=_REDUCTIONS[reduction],
        ignore_index=ignored,
        label_smoothing=float(label_smoothing),
    )
    return b.squeeze(loss, 0) if single and reduction == NONE else loss


def _soft_cross_entropy(b: Builder, x: Val, target: Val, weight: Val | None, reduction: int, smoothing: float) -> Val:
    """Targets are probabilities; the mean is over everything but classes."""
    axis = 0 if x.rank == 1 else 1
    target = b.cast(target, x.dtype)
    if smoothing:
        kept = b.cast(scaled(b, target, 1 - smoothing), x.dtype)
        target = b.emit("Add", kept, b.scalar(smoothing / x.dims[axis], x.dtype))
    terms = b.emit("Mul", b.emit("LogSoftmax", x, axis=axis), target)
    if weight is not None:
        terms = b.emit("Mul", terms, b.reshape(weight, (x.dims[axis], *[1] * (x.rank - axis - 1))))
    loss = b.emit("Neg", reduce(b, "ReduceSum", terms, [axis], False))
    return reduce_loss(b, loss, reduction)


@translates(aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
def nll_loss(
    b: Builder, x: Val, target: Val, weight: Val | None = None, reduction: int = MEAN, ignore_index: Size = -100
) -> Val:
    labels, ignored = _classes(b, target, ignore_index)
    return b.emit(
        "NegativeLogLikelihoodLoss",
        x,
        labels,
        weight,
        reduction=_REDUCTIONS[reduction],
        ignore_index=ignored,
    )


@translates(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    b: Builder, x: Val, target: Val, weight: Val | None, reduction: int, ignore_index: Size
) -> tuple[Val, None]:
    return nll_loss(b, x, target, weight, reduction, ignore_index), None


# Losses with a margin


@translates(aten.margin_ranking_loss.default)
def margin_ranking(b: Builder, x: Val, y: Val, target: Val, margin: float = 0.0, reduction: int = MEAN) -> Val:
    sign = b.emit("Neg", target)
    apart = arithmetic(b, "Add", arithmetic(b, "Mul", sign, arithmetic(b, "Sub", x, y)), margin)
    return reduce_loss(b, clamp(b, apart, 0), reduction)


@translates(aten.hinge_embedding_loss.default)
def hinge_embedding(b: Builder, x: Val, target: Val, margin: float = 1.0, reduction: int = MEAN) -> Val:
    """x where the target is 1, max(0, margin - x) where it is -1, and both elsewhere."""
    apart = _where_not(b, target, 1, clamp(b, arithmetic(b, "Sub", margin, x), 0))
    return reduce_loss(b, b.emit("Add", apart, _where_not(b, target, -1, x)), reduction)


@translates(aten.cosine_embedding_loss.default)
def cosine_embedding(b: Builder, x: Val, y: Val, target: Val, margin: float = 0.0, reduction: int = MEAN) -> Val:
    """1 - cos where the target is 1, max(0, cos - margin) where it is -1, and nothing elsewhere."""
    if target.rank not in (0, 1) or x.dtype != y.dtype:
        raise Unsupported(f"targets of {target.rank} dims, or operands of two dtypes")

    def summed(v: Val, w: Val) -> Val:
        return reduce(b, "ReduceSum", arithmetic(b, "Mul", v, w), [target.rank], False)

    squares = [arithmetic(b, "Add", summed(v, v), _TINY) for v in (x, y)]
    cosine = arithmetic(b, "Div", summed(x, y), b.emit("Sqrt", arithmetic(b, "Mul", *squares)))
    parts = {1: arithmetic(b, "Sub", 1, cosine), -1: clamp(b, arithmetic(b, "Sub", cosine, margin), 0)}
    zero = b.const(0.0, cosine.dtype)
    alike, apart = (b.emit("Where", _is(b, target, sign), part, zero) for sign, part in parts.items())
    return reduce_loss(b, b.emit("Add", alike, apart), reduction)


def _is(b: Builder, target: Val, sign: int) -> Val:
    target = b.cast(target, torch.int64) if target.dtype == torch.bool else target
    return b.emit("Equal", target, b.scalar(sign, target.dtype))


def _where_not(b: Builder, target: Val, sign: int, part: Val) -> Val:
    return b.emit("Where", _is(b, target, sign), b.const(0.0, part.dtype), part)
