"""Every function at the corners of its dtype, values and gradients, against eager PyTorch.

The corners are zeros of both signs, infinities, NaN, denormals, the least and the largest numbers,
ties, and where a function bends. NaN, infinities and signs of zeros must be those of PyTorch; other
numbers may differ by the row's `ulps`, of the number itself or of `floor` if that is larger. The
sign of a gradient of zero is nobody's.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ortmodule_c import ORTModule
from wrapped import Function, pair

INF, NAN = torch.inf, torch.nan
FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Row:
    """A function of some operands and how exact it is.

    Parameters
    ----------
    function
        What is computed by eager PyTorch and by us.
    operands
        How many tensors it takes: one of all corners, or all pairs, or some triples of them.
    ulps, floor
        How far results may be from PyTorch's: in units in the last place, of a number of at least `floor`.
    signed_zeros
        Whether zeros among the outputs have to have PyTorch's signs.
    values
        What makes the operands, if not these.
    dtypes
        Those in which it is compared.
    whole
        Whether it keeps its module in PyTorch: it is compared alone.
    """

    function: Callable[..., Any]
    operands: int = 1
    ulps: float = 4
    floor: float = 0
    signed_zeros: bool = True
    values: Callable[[torch.dtype], Sequence[Tensor]] | None = None
    dtypes: Sequence[torch.dtype] = FLOATS
    whole: bool = False


def corners(dtype: torch.dtype) -> Tensor:
    """Zeros, ones, halves, bends, infinities, NaN, denormals, extremes."""
    if not dtype.is_floating_point:
        i = torch.iinfo(dtype)
        both = [0, 1, 2, 3, 7, i.max, i.max - 1, i.min, i.min + 1, i.max // 2]
        return torch.tensor([*both, *([-1, -2, -3, -7] if i.min else [])], dtype=dtype)
    f = torch.finfo(dtype)
    sizes = [0, 1, 0.5, 2, 3, 6, 2.5, 1 + f.eps, 20.5, 104, 1e-3, 1e4, f.smallest_normal, f.smallest_normal / 4]
    sizes += [f.smallest_normal * f.eps, f.max, f.max / 2, f.max**0.5, INF]
    return torch.tensor([*sizes, *(-s for s in sizes), NAN], dtype=dtype)


def few(dtype: torch.dtype) -> Tensor:
    tiny = torch.finfo(dtype).smallest_normal / 4
    return torch.tensor([0.0, -0.0, 1, -1, 0.5, 3, INF, -INF, NAN, tiny, 1e4], dtype=dtype)


def moderate(dtype: torch.dtype) -> Tensor:
    """Corners that are neither large nor small."""
    return torch.tensor([0.0, -0.0, 1, -1, 0.5, -0.5, 2, -2, 3, -3, 2.5, 20.5, -20.5, INF, -INF, NAN], dtype=dtype)


def probabilities(dtype: torch.dtype) -> list[Tensor]:
    f = torch.finfo(dtype)
    return [torch.tensor([0, 1, 0.5, 0.1, f.tiny, f.tiny / 4, 1e-13, f.eps, 1 - f.eps], dtype=dtype)]


def pairs(values: Tensor) -> list[Tensor]:
    return [t.contiguous() for t in torch.cartesian_prod(values, values).unbind(1)]


def lists(dtype: torch.dtype) -> list[Tensor]:
    """Rows of four numbers: constant, tied, with infinities, NaN, zeros, denormals, extremes."""
    f = torch.finfo(dtype)
    return [
        torch.tensor(
            [
                [1.0, 2, 3, 4],
                [2, 2, 2, 2],
                [0, 0, 0, 0],
                [0, 1, 2, 0],
                [0, 1, 2, 3],
                [3, 3, 1, -3],
                [-1, -1, -2, -1],
                [NAN, 1, 2, 3],
                [1, NAN, 5, NAN],
                [INF, 1, 2, 3],
                [INF, INF, 1, 2],
                [INF, -INF, 1, 2],
                [-INF, -INF, -INF, -INF],
                [-INF, 1, 1, 0],
                [INF, INF, INF, INF],
                [0, INF, 1, 2],
                [0, NAN, 1, 2],
                [f.max, f.max, 1, 0],
                [-f.max, f.max, 1, 0],
                [f.tiny / 4, f.tiny / 2, 0, -f.tiny / 8],
                [-0.0, -0.0, -0.0, -0.0],
                [0.0, -0.0, 0.0, -0.0],
                [1e4, -1e4, 1e4, 0],
                [f.tiny, f.tiny, f.tiny, 1],
            ],
            dtype=dtype,
        )
    ]


def operands(row: Row, dtype: torch.dtype) -> list[Tensor]:
    if row.values is not None:
        return [t.clone() for t in row.values(dtype)]
    if row.operands == 1:
        return [corners(dtype)]
    if row.operands == 2:
        return pairs(corners(dtype))
    triples = torch.tensor(list(itertools.product(few(dtype).tolist(), repeat=3)), dtype=dtype)
    return [t.contiguous() for t in triples.unbind(1)]


def tame(dtype: torch.dtype) -> list[Tensor]:
    """Those lists whose numbers can be squared and added up."""
    (x,) = lists(dtype)
    return [torch.where(x.isfinite() & (x.abs() > 1e30), 7, x)]


def finite(dtype: torch.dtype) -> list[Tensor]:
    """Tame lists without infinities."""
    return [x.masked_fill(x.isinf(), 5) for x in tame(dtype)]


B, T = 2, 3  # pairs, triples
ELEMENTWISE = {
    "abs": Row(torch.abs, ulps=0),
    "ceil": Row(torch.ceil, ulps=0),
    "floor": Row(torch.floor, ulps=0),
    "round": Row(torch.round, ulps=0),
    "sign": Row(torch.sign, ulps=0),
    "neg": Row(torch.neg, ulps=0),
    "relu": Row(torch.relu, ulps=0),
    "clamp": Row(lambda x: x.clamp(-1, 0.5), ulps=0),
    "clamp low": Row(lambda x: x.clamp(min=0), ulps=0),
    "clamp high": Row(lambda x: x.clamp(max=1), ulps=0),
    "clamp crossed": Row(lambda x: x.clamp(1, -1), ulps=0),
    "clamp nan": Row(lambda x: x.clamp(min=NAN), ulps=0),
    "clamp infinite": Row(lambda x: x.clamp(-INF, INF), ulps=0),
    "clamp tensors": Row(torch.clamp, T, ulps=0),
    "clamp low tensor": Row(lambda x, y: x.clamp(min=y), B, ulps=0, signed_zeros=False),
    "clamp high tensor": Row(lambda x, y: x.clamp(max=y), B, ulps=0, signed_zeros=False),
    "hardtanh": Row(F.hardtanh, ulps=0),
    "hardtanh wide": Row(lambda x: F.hardtanh(x, -0.5, 2), ulps=0),
    "relu6": Row(F.relu6, ulps=0),
    "hardswish": Row(F.hardswish),
    "hardsigmoid": Row(F.hardsigmoid, dtypes=FLOATS[:1]),  # PyTorch's 1/6 is of float32 in float64 too
    "hardshrink": Row(F.hardshrink),
    "softshrink": Row(F.softshrink),
    "tanhshrink": Row(F.tanhshrink, floor=1),
    "softsign": Row(F.softsign),
    "threshold": Row(lambda x: F.threshold(x, 0.5, 2.0)),
    "leaky relu": Row(lambda x: F.leaky_relu(x, 0.1)),
    "leaky relu, negative slope": Row(lambda x: F.leaky_relu(x, -0.5)),
    "leaky relu, no slope": Row(lambda x: F.leaky_relu(x, 0.0)),
    "prelu": Row(lambda x: F.prelu(x, torch.tensor([0.25], dtype=x.dtype))),
    "elu": Row(F.elu),
    "elu, negative alpha": Row(lambda x: F.elu(x, -0.5)),
    "elu, alpha 0": Row(lambda x: F.elu(x, 0.0)),
    "elu, alpha 2": Row(lambda x: F.elu(x, 2.0)),
    "selu": Row(F.selu),
    "celu": Row(F.celu),
    "celu, alpha 2": Row(lambda x: F.celu(x, 2.0), signed_zeros=False),
    "celu, negative alpha": Row(lambda x: F.celu(x, -2.0)),
    "softplus": Row(F.softplus),
    "softplus, beta": Row(lambda x: F.softplus(x, beta=2, threshold=3)),
    "softplus, negative beta": Row(lambda x: F.softplus(x, beta=-2)),
    "logsigmoid": Row(F.logsigmoid),
    "sigmoid": Row(torch.sigmoid, floor=0.1),
    "tanh": Row(torch.tanh, floor=1),
    "silu": Row(F.silu),
    "mish": Row(F.mish, floor=1),
    "gelu": Row(F.gelu, floor=1, dtypes=FLOATS[1:]),  # PyTorch's gelu(inf) is NaN in float32
    "gelu tanh": Row(lambda x: F.gelu(x, approximate="tanh"), ulps=8, floor=1),
    "erf": Row(torch.erf),
    "exp": Row(torch.exp),
    "expm1": Row(torch.expm1, floor=1),
    "log": Row(torch.log),
    "log1p": Row(torch.log1p),
    "log2": Row(torch.log2),
    "log10": Row(torch.log10),
    "exp2": Row(torch.exp2),
    "sin": Row(torch.sin, floor=1),
    "cos": Row(torch.cos, floor=1),
    "tan": Row(torch.tan, ulps=8, floor=1),
    "atan": Row(torch.atan),
    "sinh": Row(torch.sinh),
    "cosh": Row(torch.cosh),
    "sqrt": Row(torch.sqrt),
    "rsqrt": Row(torch.rsqrt),
    "reciprocal": Row(torch.reciprocal),
    "square": Row(torch.square),
    "isnan": Row(lambda x: torch.where(x.isnan(), 1.0, x), ulps=0),
    "nan to num": Row(torch.nan_to_num, ulps=0),
    "frac": Row(torch.frac, ulps=0),
    "trunc": Row(torch.trunc, ulps=0),
    **{f"pow {p}": Row(lambda x, p=p: x**p) for p in (0, 1, 2, 3, 4, -1, -2, 0.5, -0.5, 1.5, -1.5, INF, -INF, NAN)},
    **{f"{p} pow": Row(lambda x, p=p: torch.pow(p, x)) for p in (0, 1, 2, 0.5, -2, INF, NAN)},
    "pow": Row(torch.pow, B, ulps=8),
    "add": Row(torch.add, B, ulps=0),
    "sub": Row(torch.sub, B, ulps=0),
    "mul": Row(torch.mul, B),
    "div": Row(torch.div, B),
    "div by number": Row(lambda x: x / 3.0),
    "number div": Row(lambda x: 3.0 / x),
    "mul by 0": Row(lambda x: x * 0.0),
    "div floor": Row(lambda x, y: torch.div(x, y, rounding_mode="floor"), B),
    "div trunc": Row(lambda x, y: torch.div(x, y, rounding_mode="trunc"), B),
    # PyTorch's vectorised remainder is NaN where the quotient overflows.
    "remainder": Row(torch.remainder, values=lambda t: pairs(moderate(t))),
    "remainder of number": Row(lambda x: torch.remainder(x, 0.7), values=lambda t: [moderate(t)]),
    "fmod": Row(torch.fmod, values=lambda t: pairs(moderate(t))),
    "maximum": Row(torch.maximum, B, ulps=0),
    "minimum": Row(torch.minimum, B, ulps=0),
    "fmax": Row(torch.fmax, B, ulps=0),
    "fmin": Row(torch.fmin, B, ulps=0),
    "where": Row(lambda x, y, z: torch.where(x > 0, y, z), T, ulps=0),
    "where, branch not taken": Row(lambda x: torch.where(x > 0, x.sqrt(), x.exp())),
    "masked fill": Row(lambda x, y: x.masked_fill(y > 0, 2.0), B, ulps=0),
    "lerp": Row(torch.lerp, T, floor=3, signed_zeros=False),
    "lerp by number": Row(lambda x, y: torch.lerp(x, y, 0.3), B, floor=3, signed_zeros=False),
    "addcmul": Row(lambda x, y, z: torch.addcmul(x, y, z, value=2), T, floor=1),
    "addcdiv": Row(lambda x, y, z: torch.addcdiv(x, y, z, value=2), T, floor=1),
    "hypot": Row(torch.hypot, B),
    "atan2": Row(torch.atan2, B),
    "logaddexp": Row(torch.logaddexp, B, floor=1),
    "xlogy": Row(torch.xlogy, B),
    "copysign": Row(torch.copysign, B, ulps=0),
    "heaviside": Row(lambda x, y: torch.heaviside(x.detach(), y.detach()) + x, B),
    "glu": Row(lambda x, y: F.glu(torch.stack([x, y]), 0), floor=0.1, values=lambda t: pairs(moderate(t))),
    **{
        f"compare {f.__name__}": Row(lambda x, y, f=f: torch.where(f(x, y), x, 3.0), B, ulps=0)
        for f in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)
    },
    "compare 0": Row(lambda x: (torch.where(x > 0, x, 2.0), torch.where(x < 0, x, 2.0), torch.where(x == 0, x, 2.0))),
    "logical": Row(lambda x, y: torch.where(x.logical_and(y) ^ y.logical_or(x), x, y), B, ulps=0),
    "to bool": Row(lambda x: torch.where(x.bool(), x, 5.0), ulps=0),
}
LOSSES = {
    "mse": Row(lambda x, y: F.mse_loss(x, y, reduction="none"), B),
    "l1": Row(lambda x, y: F.l1_loss(x, y, reduction="none"), B),
    "smooth l1": Row(lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.5), B),
    "smooth l1, beta 0": Row(lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.0), B),
    "huber": Row(lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.5), B),
    "huber mean": Row(lambda x: F.huber_loss(x[:8], x[8:16])),
    # PyTorch's least divisor is of float32 in float64 too.
    "bce": Row(
        lambda x: F.binary_cross_entropy(x, (x.detach() > 0.2).to(x.dtype), reduction="none"),
        values=probabilities,
        signed_zeros=False,
        dtypes=FLOATS[:1],
    ),
    "bce with logits": Row(lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"), B, floor=1),
    "bce with logits, weights": Row(
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, y.detach(), pos_weight=y.detach(), reduction="none"),
        ulps=8,
        floor=1,
        values=lambda t: [pairs(moderate(t))[0], pairs(moderate(t))[1].nan_to_num(2, 3, -3)],
    ),
    "kl": Row(lambda x, y: F.kl_div(x, y, reduction="none"), B, floor=1),
    "kl of logs": Row(lambda x, y: F.kl_div(x, y, reduction="none", log_target=True), B, floor=1),
    "soft margin": Row(
        lambda x, y: F.soft_margin_loss(x, y.detach(), reduction="none"), floor=1, values=lambda t: pairs(moderate(t))
    ),
    "hinge embedding": Row(lambda x: F.hinge_embedding_loss(x, torch.ones_like(x), reduction="none")),
    "margin ranking": Row(lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x), reduction="none"), B),
    "poisson": Row(lambda x, y: F.poisson_nll_loss(x, y, reduction="none"), B, floor=1),
    "gaussian": Row(
        lambda x, y: F.gaussian_nll_loss(x, y, x.detach().abs() + 1, reduction="none"), B, floor=1, whole=True
    ),
}
CLASSES = torch.tensor([0, 1, 2, 3] * 6)
SOME = torch.where(torch.arange(24) % 5 == 0, -100, CLASSES)
LISTS = {
    "sum": Row(lambda x: x.sum(1)),
    "sum of all": Row(lambda x: x.sum()),
    "sum keepdim": Row(lambda x: x.sum(1, keepdim=True)),
    "sum of columns": Row(lambda x: x.sum(0)),
    "sum over no axes": Row(lambda x: (x.sum(()), x.amax(()), x.mean(()))),
    "mean": Row(lambda x: x.mean(1)),
    "amax": Row(lambda x: x.amax(1), signed_zeros=False),
    "amin": Row(lambda x: x.amin(1), signed_zeros=False),
    "amax of columns": Row(lambda x: x.amax(0)),
    "max of all": Row(lambda x: (x.max(), x[:7].max(), x[12].max())),
    "min of all": Row(lambda x: (x.min(), x[:7].min())),
    "max": Row(lambda x: x.max(1)),
    "min": Row(lambda x: x.min(1)),
    "max of columns": Row(lambda x: x.max(0)),
    "min of columns": Row(lambda x: x.min(0)),
    "argmax": Row(lambda x: (x.argmax(1), x.argmax(), x.argmax(0), x.argmin(1), x.argmin(), x.argmin(0), x * 1)),
    "median": Row(lambda x: x.median(1)),
    "sort": Row(lambda x: x.sort(stable=True, dim=1)),
    "topk": Row(lambda x: x.topk(2, 1).values),
    "prod": Row(lambda x: x.prod(1)),
    "prod of all": Row(lambda x: (x.prod(), x[:2].prod(), x[3].prod(), x[4].prod(), (x[0] * 0 + x[3]).prod())),
    "prod of columns": Row(lambda x: x.prod(0)),
    "var": Row(lambda x: x.var(1), ulps=16, values=tame),
    "var, correction 0": Row(lambda x: x.var(1, correction=0), ulps=16, values=tame),
    "var, correction 4": Row(lambda x: x.var(1, correction=4), ulps=16),
    "var, correction 5": Row(lambda x: x.var(1, correction=5), ulps=16),
    "var of one": Row(lambda x: x[:, :1].var(1)),
    "std of one": Row(lambda x: x[:, :1].std(1)),
    "std": Row(lambda x: x.std(1), ulps=16, values=tame),
    "std, correction 0": Row(lambda x: x.std(1, correction=0), ulps=16, values=tame),
    # PyTorch's mean beside a variance is NaN where it is infinite.
    "var mean": Row(lambda x: torch.var_mean(x, 1), ulps=16, values=finite),
    # PyTorch's mean beside a variance is NaN where it is infinite.
    "std mean": Row(lambda x: torch.std_mean(x, 1), ulps=16, values=finite),
    "norm": Row(lambda x: x.norm(dim=1)),
    **{f"norm {p}": Row(lambda x, p=p: x.norm(p=p, dim=1)) for p in (0.5, 1, 1.5, INF, -INF)},
    "norm 3": Row(lambda x: x.norm(p=3, dim=1), ulps=64),
    "normalize": Row(lambda x: F.normalize(x, dim=1), ulps=16),
    "cosine": Row(lambda x: F.cosine_similarity(x, x.flip(0), dim=1), ulps=16, floor=1),
    "pairwise distance": Row(lambda x: F.pairwise_distance(x, x.flip(0)), ulps=16, floor=1),
    "logsumexp": Row(lambda x: x.logsumexp(1), floor=1),
    "logsumexp of columns": Row(lambda x: x.logsumexp(0), floor=1),
    "softmax": Row(lambda x: x.softmax(1), floor=1),
    "softmax of columns": Row(lambda x: x.T.softmax(0), floor=1),
    "softmin": Row(lambda x: F.softmin(x, 1), floor=1),
    "log softmax": Row(lambda x: x.log_softmax(1), floor=1),
    "log softmax of columns": Row(lambda x: x.T.log_softmax(0), floor=1),
    "log of softmax": Row(lambda x: x.softmax(1).log(), floor=1),
    "masked softmax": Row(lambda x: x.masked_fill(x > 1, -INF).softmax(1), floor=1),
    "safe softmax": Row(lambda x: torch.ops.aten._safe_softmax(x, 1), floor=1),
    "cumsum": Row(lambda x: (x.cumsum(1), x.cumsum(0))),
    "cumprod": Row(lambda x: x.cumprod(1), floor=1),
    "diff": Row(lambda x: x.diff(dim=1)),
    "any": Row(lambda x: torch.where(x.any(1, keepdim=True) ^ x.all(1, keepdim=True), x, 2.0)),
    "tril": Row(lambda x: (x.tril(-1), x.triu(1), x.tril(30), x.triu(-30), x.tril(-30), x.triu(30))),
    "layer norm": Row(lambda x: F.layer_norm(x, (4,)), ulps=32, floor=1, signed_zeros=False, values=tame),
    "layer norm, eps 0": Row(
        lambda x: F.layer_norm(x, (4,), eps=0.0), ulps=32, floor=1, signed_zeros=False, values=tame
    ),
    "layer norm of one": Row(
        lambda x: F.layer_norm(x.reshape(-1, 1), (1,)), ulps=32, floor=1, signed_zeros=False, values=tame
    ),
    "rms norm": Row(lambda x: F.rms_norm(x, (4,)), ulps=32, floor=1, signed_zeros=False, values=tame),
    "group norm": Row(lambda x: F.group_norm(x, 2), ulps=32, floor=1, signed_zeros=False, values=tame),
    "batch norm": Row(
        lambda x: F.batch_norm(x[:6], None, None, training=True), ulps=32, floor=1, signed_zeros=False, values=tame
    ),
    "batch norm of all": Row(
        lambda x: F.batch_norm(x.T, None, None, training=True), ulps=32, floor=1, signed_zeros=False, values=tame
    ),
    "cross entropy": Row(lambda x: F.cross_entropy(x, CLASSES, reduction="none"), floor=1),
    "cross entropy mean": Row(lambda x: F.cross_entropy(x[:7], SOME[:7]), floor=1),
    "cross entropy, smoothing": Row(
        lambda x: F.cross_entropy(x, SOME, reduction="none", label_smoothing=0.1), ulps=16, floor=1
    ),
    "cross entropy, ignored": Row(lambda x: F.cross_entropy(x, SOME, reduction="none"), floor=1),
    "cross entropy, all ignored": Row(lambda x: F.cross_entropy(x, torch.full((24,), -100)), floor=1),
    "cross entropy, all ignored, sum": Row(
        lambda x: F.cross_entropy(x, torch.full((24,), -100), reduction="sum"), floor=1
    ),
    "cross entropy, no weights": Row(
        lambda x: F.cross_entropy(x[:7], CLASSES[:7], torch.zeros(4, dtype=x.dtype)), floor=1
    ),
    "cross entropy, some weights": Row(
        lambda x: F.cross_entropy(x, CLASSES, torch.tensor([0.0, 1, 2, 0], dtype=x.dtype), reduction="none"), floor=1
    ),
    "cross entropy, negative index ignored": Row(lambda x: F.cross_entropy(x, SOME // 100, ignore_index=-1), floor=1),
    "cross entropy of probabilities": Row(
        lambda x: F.cross_entropy(x, x.detach().softmax(1).nan_to_num(0.25)), floor=1
    ),
    "cross entropy of pixels": Row(
        lambda x: F.cross_entropy(x.reshape(2, 12, 4).mT, CLASSES.reshape(2, 12), reduction="none"), floor=1
    ),
    "nll": Row(lambda x: F.nll_loss(x, CLASSES, reduction="none")),
    "nll mean": Row(lambda x: F.nll_loss(x[:7], SOME[:7])),
    "nll, all ignored": Row(lambda x: F.nll_loss(x, torch.full((24,), -100))),
    "nll, no weights": Row(lambda x: F.nll_loss(x[:7], CLASSES[:7], torch.zeros(4, dtype=x.dtype))),
    "nll, weights": Row(lambda x: F.nll_loss(x, SOME, torch.tensor([0.0, 1, 2, 0], dtype=x.dtype), reduction="none")),
    "max pool": Row(lambda x: F.max_pool1d(x[:, None], 2, 1, 1)),
    "max pool 2d": Row(lambda x: F.max_pool2d(x[None], 3, 2, 1)),
    "max pool, indices": Row(lambda x: F.max_pool2d(x[None], 3, 2, 1, return_indices=True)),
    "average pool": Row(lambda x: F.avg_pool1d(x[:, None], 2, 1, 1)),
    "average pool 2d": Row(lambda x: F.avg_pool2d(x[None], 3, 2, 1, count_include_pad=False), floor=1, values=tame),
    "adaptive average pool": Row(lambda x: F.adaptive_avg_pool1d(x[:, None], 3)),
    "adaptive max pool": Row(lambda x: F.adaptive_max_pool1d(x[:, None], 3)),
    "conv": Row(lambda x: F.conv1d(x[:, None], torch.ones(2, 1, 3, dtype=x.dtype), padding=1)),
    "linear": Row(lambda x: F.linear(x, torch.ones(2, 4, dtype=x.dtype))),
    "matmul": Row(lambda x: x @ x[:4], floor=1, values=tame),
    "gather": Row(
        lambda x: (x.gather(1, CLASSES[:, None]), x[[-1, 0, -24]], x.take_along_dim(x.argmax(1)[:, None], 1))
    ),
    "scatter": Row(lambda x: torch.zeros_like(x).scatter_add(1, CLASSES[:, None], x[:, :1])),
    "index add": Row(lambda x: torch.zeros_like(x).index_add(0, CLASSES, x)),
    "expand and reduce": Row(lambda x: (x[:, None] * x.flip(0)[:, :, None]).sum(1), floor=1),
    "maximum of broadcast": Row(lambda x: torch.maximum(x, x[:1])),
    "pad": Row(lambda x: (F.pad(x, (1, 1), value=-INF), F.pad(x, (-1, 2), value=NAN))),
    "scalars": Row(lambda x: (x[0, 0].sum(), x[0, 1].amax(), x[0, 2].var(correction=0), x[0, 3].softmax(0))),
    "empty": Row(lambda x: (x[:0].sum(), x[:0].mean(), x[:0].prod(), x[:0].var(), x[:, :0].logsumexp(1))),
    "truth of nothing": Row(lambda x: (x[:0].any(), x[:0].all(), x * 1), whole=True),
}
LISTS = {name: row if row.values else replace(row, values=lists) for name, row in LISTS.items()}


def pieces(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def spaced(x: Tensor) -> Tensor:
    """The distance from each number to the next."""
    x = x.abs().nan_to_num(0, 0, 0)
    return torch.nextafter(x, torch.full_like(x, INF)).nan_to_num(0, 0, 0) - x


def difference(got: Tensor, want: Tensor, row: Row, signed_zeros: bool) -> str:
    """The first elements that are not what PyTorch has; empty if there is none."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)} is not {want.dtype} {tuple(want.shape)}"
    if not got.is_floating_point():
        bad = got != want
    else:
        unit = spaced(want.abs().nan_to_num(0, 0, 0).clamp(min=row.floor))
        finite = got.isfinite() & want.isfinite()
        near = finite & ((got.double() - want.double()).abs() <= row.ulps * unit.double())
        same = (got == want) | (got.isnan() & want.isnan())
        bad = ~(near | same)
        if signed_zeros:
            bad |= (want == 0) & (got == 0) & (got.signbit() != want.signbit())
    at = bad.nonzero()[:4].tolist()
    return "; ".join(f"{tuple(i)}: {got[tuple(i)].item()!r} not {want[tuple(i)].item()!r}" for i in at)


def step(module: Any, xs: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    leaves = [x.clone().requires_grad_() for x in xs]
    outputs = module(*leaves)
    trained = [y for y in outputs if y.requires_grad]
    weights = [
        torch.tensor([0.75, -1.5, 2], dtype=y.dtype).repeat(y.numel())[: y.numel()].view(y.shape) for y in trained
    ]
    grads = torch.autograd.grad(trained, leaves, weights, allow_unused=True)
    return list(outputs), list(grads)


ROWS = {**ELEMENTWISE, **LOSSES, **LISTS}


def batched() -> Iterator[list[str]]:
    """Functions that are compared in one module: to export each alone would take most of the time."""
    for table in (ELEMENTWISE, LOSSES, LISTS):
        names = [name for name, row in table.items() if not row.whole]
        yield from (names[i : i + 12] for i in range(0, len(names), 12))
        yield from ([name] for name, row in table.items() if row.whole)


BATCHES = list(batched())


@functools.cache
def differences(number: int, dtype: torch.dtype) -> dict[str, list[str]]:
    """What differs of each function of a batch, all of which are computed by one module."""
    batch = {name: ROWS[name] for name in BATCHES[number] if dtype in ROWS[name].dtypes}
    inputs = {name: operands(row, dtype) for name, row in batch.items()}
    counts = {name: len(pieces(row.function(*inputs[name]))) for name, row in batch.items()}

    def forward(_: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        left = list(xs)
        outputs: list[Tensor] = []
        for name, row in batch.items():
            n = len(inputs[name])
            outputs += pieces(row.function(*left[:n]))
            left = left[n:]
        return tuple(outputs)

    xs = [x for name in batch for x in inputs[name]]
    eager, module = pair(Function(forward))
    want, want_grads = step(eager, xs)
    got, got_grads = step(module, xs)
    whole = any(r.name == "Function" for r in module.fallback_report())
    assert whole == any(row.whole for row in batch.values()), module.fallback_report()
    found: dict[str, list[str]] = {}
    for name, row in batch.items():
        said = {}
        for k in range(counts[name]):
            ours, eager = got.pop(0).detach(), want.pop(0).detach()
            said[f"output {k}"] = difference(ours, eager, row, row.signed_zeros)
        for k in range(len(inputs[name])):
            dx, expected = got_grads.pop(0), want_grads.pop(0)
            if dx is None or expected is None:
                said[f"gradient {k}"] = "" if dx is expected else "is None on one side"
            else:
                said[f"gradient {k}"] = difference(dx, expected, row, False)
        found[name] = [f"{what}: {text}" for what, text in said.items() if text]
    return found


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, row in ROWS.items() for dtype in row.dtypes], ids=str
)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    number = next(i for i, names in enumerate(BATCHES) if name in names)
    found = differences(number, dtype)[name]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_denormals_are_kept(dtype: torch.dtype) -> None:
    x = torch.full((1000,), torch.finfo(dtype).smallest_normal / 4, dtype=dtype, requires_grad=True)
    half, positive, twice = ORTModule(Function(lambda _, x: (x * 0.5, x > 0, (x * 3 - x).relu())))(x)
    assert positive.all() and torch.equal(half, x * 0.5) and torch.equal(twice, x * 2)
    (dx,) = torch.autograd.grad(half, x, x.detach())
    assert torch.equal(dx, x * 0.5)


def test_denormals_are_flushed_where_the_caller_asks_for_it() -> None:
    ours = ORTModule(Function(lambda _, x: (x * 0.5, x > 0)))
    x = torch.full((70000,), torch.finfo(torch.float32).tiny)
    for flush in (False, True, False):
        torch.set_flush_denormal(flush)
        try:
            half, positive = ours(x)
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(half.view(torch.int32) == 0, torch.full(x.shape, flush))
        assert positive.all()


def _rounded(mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: torch.div(x, y, rounding_mode=mode)


ON_INTEGERS: dict[str, Callable[[Tensor], Any]] = {
    "abs": torch.abs,
    "neg": torch.neg,
    "sign": torch.sign,
    "square": torch.square,
    "cube": lambda x: x**3,
    "relu": torch.relu,
    "clamp": lambda x: (x.clamp(-2, 5), x.clamp(min=1), x.clamp(max=0)),
    "numbers": lambda x: (x + 300, x * 3, 5 - x, x * 1000),
    "reductions": lambda x: (x.sum(), x.prod(), x.amax(), x.amin(), x.any(), x.cumsum(0)),
    "positions of extremes": lambda x: (x.argmax(), x.argmin(), x.max(0), x.min(0)),
    "scans": lambda x: (x.cumprod(0), x.diff(), x.sort()),
    "triangles": lambda x: (x[:9].view(3, 3).tril(-1), x[:9].view(3, 3).triu(5)),
    "linspace and logspace": lambda x: (
        torch.linspace(0, 10, 7, dtype=torch.int64) + x[0],
        torch.linspace(9.7, -9.7, 50, dtype=torch.int64),
        torch.linspace(4.3, x[3], 50, dtype=torch.int64),
        torch.linspace(x[4], 40.7, 50, dtype=torch.int64),
        torch.logspace(x[1], 2.9, 9, dtype=torch.int64),
    ),
    "floats": lambda x: (x.float(), x.double() / 2, x / 3, x.float().mean()),
}
OF_TWO_INTEGERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    f.__name__: f for f in (torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.lt, torch.ge, torch.eq)
}
DIVISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{f.__name__: f for f in (torch.floor_divide, torch.remainder, torch.fmod, torch.div)},
    **{mode: _rounded(mode) for mode in ("floor", "trunc")},
}


def _flat(values: Any) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else [t for v in values for t in _flat(v)]


@functools.cache
def integer_results(dtype: torch.dtype) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Ours and PyTorch's of each function, all of which are computed by one module."""
    x = corners(dtype)
    a, b = pairs(x)
    divides = (b != 0) & ~((a == torch.iinfo(dtype).min) & (b == -1))  # the rest is refused or undefined
    n, d = a[divides], b[divides]

    def forward(_: Any, *xs: Tensor) -> dict[str, Any]:
        x, a, b, n, d = xs
        outputs = {name: f(x) for name, f in ON_INTEGERS.items()}
        outputs |= {name: f(a, b) for name, f in OF_TWO_INTEGERS.items()}
        return outputs | {name: f(n, d) for name, f in DIVISIONS.items()}

    eager, ours = pair(Function(forward))
    got, want = ours(x, a, b, n, d), eager(x, a, b, n, d)
    assert not any(r.name == "Function" for r in ours.fallback_report())
    return {name: (_flat(got[name]), _flat(want[name])) for name in want}


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", [*ON_INTEGERS, *OF_TWO_INTEGERS, *DIVISIONS])
def test_integers(name: str, dtype: torch.dtype) -> None:
    for ours, eager in zip(*integer_results(dtype)[name], strict=True):
        assert ours.dtype == eager.dtype
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("divide", [torch.floor_divide, torch.remainder, torch.fmod, _rounded("trunc")])
def test_integers_are_not_divided_by_zero(divide: Callable[..., Tensor], dtype: torch.dtype) -> None:
    module = Function(lambda _, x, y: divide(x, y))
    for model in (module, ORTModule(module)):
        model(torch.ones(3000, dtype=dtype), torch.ones(3000, dtype=dtype))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            model(torch.ones(3000, dtype=dtype), torch.arange(2999, -1, -1).clamp(max=9).to(dtype))


@pytest.mark.parametrize("target", [-1, 4])
@pytest.mark.parametrize("loss", [F.nll_loss, F.cross_entropy])
def test_a_target_has_to_be_a_class(loss: Callable[..., Tensor], target: int) -> None:
    module = Function(lambda _, x, t: loss(x, t))
    x = torch.randn(2, 4, requires_grad=True)
    for model in (module, ORTModule(module)):
        model(x, torch.tensor([0, -100])).backward()
        with pytest.raises(IndexError, match=rf"Target {target} is out of bounds\."):
            model(x, torch.tensor([0, target]))


_attend = F.scaled_dot_product_attention
OUTSIDE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[list[int]], type[Exception], str]] = {
    "rows": (lambda x, i: x[i], [[0, 4], [-5, 0]], IndexError, "is out of bounds for dimension 0 with size 4"),
    "columns": (lambda x, i: x[:, i], [[0, 3], [-4, 0]], IndexError, "is out of bounds for dimension 0 with size 3"),
    "elements": (lambda x, i: x[i, i], [[0, 3]], IndexError, "index 3 is out of bounds for dimension 1 with size 3"),
    "gather": (
        lambda x, i: x.gather(1, i[:, None]),
        [[0, 3], [-1, 0]],
        RuntimeError,
        "is out of bounds for dimension 1 with size 3",
    ),
    "index_select": (lambda x, i: x.index_select(0, i), [[0, 4], [-1, 0]], IndexError, "index out of range in self"),
    "embedding": (lambda x, i: F.embedding(i, x), [[0, 4], [-1, 0]], IndexError, "index out of range in self"),
}


@pytest.mark.parametrize("row", OUTSIDE.items(), ids=lambda r: r[0])
def test_an_index_has_to_be_inside(row: tuple[str, Any]) -> None:
    _, (read, outside, error, says) = row
    module = Function(lambda _, x, i: read(x, i))
    x = torch.randn(4, 3, requires_grad=True)
    for model in (module, ORTModule(module)):
        model(x, torch.tensor([0, 2])).sum().backward()
        for ids in outside:
            with pytest.raises(error, match=says):
                model(x, torch.tensor(ids))


ROW_MASKED = torch.tensor([[0.5, -1, 0, 2], [-INF] * 4, [-INF, 1, 0, -0.5], [0, 0, -INF, 0]])
ATTENTION: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "trained mask with a row of -inf": (
        lambda q, k, v, m: _attend(q, k, v, m + ROW_MASKED),
        [(2, 3, 4, 8)] * 3 + [(4, 4)],
    ),
    "trained mask of heads": (lambda q, k, v, m: _attend(q, k, v, m + ROW_MASKED), [(2, 3, 4, 8)] * 3 + [(3, 1, 4)]),
    "trained mask of three dims": (lambda q, k, v, m: _attend(q, k, v, m + ROW_MASKED), [(3, 4, 8)] * 3 + [(3, 4, 4)]),
    "mask with a row of -inf": (lambda q, k, v: _attend(q, k, v, ROW_MASKED), [(2, 3, 4, 8)] * 3),
    "bool mask": (lambda q, k, v: _attend(q, k, v, ROW_MASKED > -INF), [(2, 3, 4, 8)] * 3),
    "nothing attended to": (lambda q, k, v: _attend(q, k, v, ROW_MASKED > INF), [(2, 3, 4, 8)] * 3),
    "written out": (lambda q, k, v, m: (q @ k.mT + m + ROW_MASKED).softmax(-1) @ v, [(2, 3, 4, 8)] * 3 + [(4, 4)]),
    "written out, filled": (
        lambda q, k, v: (q @ k.mT).masked_fill(ROW_MASKED < 0, -INF).softmax(-1) @ v,
        [(2, 3, 4, 8)] * 3,
    ),
    "heads of no elements": (_attend, [(2, 3, 4, 0), (2, 3, 4, 0), (2, 3, 4, 8)]),
    "values of no elements": (_attend, [(2, 3, 4, 8), (2, 3, 4, 8), (2, 3, 4, 0)]),
    "no queries": (_attend, [(2, 3, 0, 8), (2, 3, 4, 8), (2, 3, 4, 8)]),
    "no keys": (_attend, [(2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 8)]),
    "no samples": (_attend, [(0, 3, 4, 8)] * 3),
    "one token": (lambda q, k, v: _attend(q, k, v, is_causal=True), [(2, 3, 1, 8)] * 3),
    "causal, more queries": (
        lambda q, k, v: _attend(q, k, v, is_causal=True),
        [(2, 3, 6, 8), (2, 3, 4, 8), (2, 3, 4, 8)],
    ),
    "causal, more keys": (lambda q, k, v: _attend(q, k, v, is_causal=True), [(2, 3, 3, 8), (2, 3, 4, 8), (2, 3, 4, 8)]),
}


@pytest.mark.parametrize("row", ATTENTION.items(), ids=lambda r: r[0])
def test_attention(row: tuple[str, Any]) -> None:
    _, (attend, shapes) = row
    xs = [torch.randn(shape) for shape in shapes]
    module = Function(lambda _, *xs: (attend(*xs),))
    (want, want_grads), (got, got_grads) = step(module, xs), step(ORTModule(module), xs)
    for ours, eager in zip(got + got_grads, want + want_grads, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_elements_have_no_deviation(dtype: torch.dtype) -> None:
    """Their mean is one of them, though their sum is rounded."""
    x = torch.tensor([0.1, 1 / 3, 1e-30, 7.7], dtype=dtype).expand(3, 4).clone().requires_grad_()
    deviation = ORTModule(Function(lambda _, x: x.std(0)))(x)
    deviation.sum().backward()
    assert not deviation.any() and x.grad is not None and not x.grad.any()
