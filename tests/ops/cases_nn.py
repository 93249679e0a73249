"""Rows of the softmax, loss, norm and pool families."""

import math
from itertools import pairwise

import torch
from torch import Tensor, tensor
from torch.nn import functional as F

from case import Case
from cases_movement import F64, ids, x

SOFT = [
    ((5, 7), -1),
    ((3, 130), 1),
    ((4, 5, 6), 1),
    ((4, 5, 6), 0),
    ((2, 1), -1),
    ((3, 1000), -1),
    ((0, 4), 1),
    ((2, 2048), -1),
    ((2, 2049), -1),
]


def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None = None, **attrs: object) -> Case:
    def f(a: Tensor, t: Tensor, w: Tensor | None = None) -> Tensor:
        return F.cross_entropy(a, t, w, **attrs)

    inputs = [logits, target] + ([weight] if weight is not None else [])
    return Case("CrossEntropy", inputs, f, attrs, outputs=4, compare=1, grads=[0])


def linear_cross_entropy(x: Tensor, w: Tensor, *rest: Tensor | None, **attrs: object) -> Case:
    """`rest`: target, and perhaps bias and class weights."""

    def f(a: Tensor, b: Tensor, t: Tensor, bias: Tensor | None = None, c: Tensor | None = None) -> Tensor:
        return F.cross_entropy(F.linear(a, b, bias), t, c, **attrs)

    grads = [0, 1, 3] if len(rest) > 1 and rest[1] is not None else [0, 1]
    return Case("LinearCrossEntropy", [x, w, *rest], f, attrs, outputs=4, compare=1, grads=grads)


def segments(op: str, x: Tensor, *offsets: int, closed: int = 0, **attrs: object) -> Case:
    def f(a: Tensor, at: Tensor) -> Tensor:
        ends = at.tolist() if closed else [*at.tolist(), attrs.get("shape", a.shape)[0]]
        if op == "SegmentSum":
            return torch.stack([a[i:j].sum(0) for i, j in pairwise(ends)] or [a[:0].sum(0)][:0])
        counts = torch.tensor([j - i for i, j in pairwise(ends)])
        rows = a.repeat_interleave(counts, 0)
        return torch.cat([rows, a.new_zeros(attrs["shape"][0] - len(rows), *a.shape[1:])])

    return Case(op, [x, tensor(offsets)], f, {"closed": closed, **attrs}, grads=[0])


def grouped_matmul(a: Tensor, w: Tensor, *ends: int, transB: int = 0) -> Case:
    def f(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
        pairs = pairwise([0, *at.tolist()])
        parts = [x[i:j] @ (m.T if transB else m) for (i, j), m in zip(pairs, y, strict=True)]
        n = y.shape[1 if transB else 2]
        return torch.cat([*parts, x.new_zeros(len(x) - sum(map(len, parts)), n)])

    return Case("GroupedMatMul", [a, w, tensor(ends)], f, {"transB": transB}, grads=[0, 1])


def nll(logits: Tensor, target: Tensor, weight: Tensor | None = None, **attrs: object) -> Case:
    def f(a: Tensor, t: Tensor, w: Tensor | None = None) -> Tensor:
        return F.nll_loss(a, t, w, **attrs)

    inputs = [logits, target] + ([weight] if weight is not None else [])
    return Case("NegativeLogLikelihoodLoss", inputs, f, attrs, outputs=2, compare=1, grads=[0])


def layer_norm(a: Tensor, axis: int, gamma: bool = True, beta: bool = True) -> Case:
    shape = a.shape[axis:]

    def f(t: Tensor, g: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        return F.layer_norm(t, shape, g, b, 1e-5)

    inputs = [
        a,
        x(*shape, dtype=a.dtype, seed=1) if gamma else None,
        x(*shape, dtype=a.dtype, seed=2) if beta else None,
    ]
    while inputs[-1] is None:
        inputs.pop()
    return Case("LayerNormalization", inputs, f, {"axis": axis, "epsilon": 1e-5}, outputs=3, compare=1)


def rms_norm(a: Tensor, axis: int, gamma: bool = True) -> Case:
    shape = a.shape[axis:]

    def f(t: Tensor, g: Tensor | None = None) -> Tensor:
        return F.rms_norm(t, shape, g, 1e-5)

    inputs = [a, x(*shape, dtype=a.dtype, seed=1)] if gamma else [a]
    return Case("RmsNorm", inputs, f, {"axis": axis, "epsilon": 1e-5}, outputs=2, compare=1)


def group_norm(a: Tensor, groups: int, gamma: bool = True, beta: bool = True) -> Case:
    def f(t: Tensor, g: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        return F.group_norm(t, groups, g, b, 1e-5)

    c, dtype = a.shape[1], a.dtype
    inputs = [a, x(c, dtype=dtype, seed=1) if gamma else None, x(c, dtype=dtype, seed=2) if beta else None]
    while inputs[-1] is None:
        inputs.pop()
    return Case("GroupNorm", inputs, f, {"num_groups": groups, "epsilon": 1e-5}, outputs=3, compare=1)


def batch_norm(a: Tensor, momentum: float = 0.1, added: bool = False, relu: bool = False) -> Case:
    c = a.shape[1]
    gamma, beta, mean = (x(c, dtype=a.dtype, seed=i) for i in (1, 2, 3))
    var = x(c, dtype=a.dtype, seed=4).abs()

    def f(t: Tensor, g: Tensor, b: Tensor, m: Tensor, v: Tensor, r: Tensor | None = None) -> tuple[Tensor, ...]:
        m, v = m.clone(), v.clone()
        y = F.batch_norm(t, m, v, g, b, True, momentum, 1e-5)
        y = y if r is None else y + r
        y = y.relu() if relu else y
        dims = [0, *range(2, t.dim())]
        centre = t.mean(dims)
        rstd = (t.var(dims, unbiased=False) + 1e-5).rsqrt()
        return y, centre.detach(), rstd.detach(), m, v

    attrs = {"epsilon": 1e-5, "momentum": momentum} | ({"relu": True} if relu else {})
    inputs = [a, gamma, beta, mean, var] + [x(*a.shape, dtype=a.dtype, seed=5)] * added
    grads = [0, 1, 2] + [5] * added
    return Case("BatchNorm", inputs, f, attrs, outputs=5, grads=grads, differentiable=1)


def max_pool(
    a: Tensor, kernel: list[int], stride: list[int], pad: list[int], dilation: list[int], ceil: int = 0
) -> Case:
    def f(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[len(kernel)]
        y, at = pool(t, kernel, stride, pad, dilation, bool(ceil), return_indices=True)
        taps = torch.zeros_like(at)
        for i, place in enumerate(torch.unravel_index(at, t.shape[-len(kernel) :])):
            starts = (torch.arange(at.shape[i - len(kernel)]) * stride[i] - pad[i]).view(
                -1, *[1] * (len(kernel) - 1 - i)
            )
            taps = taps * kernel[i] + (place - starts) // dilation[i]
        return y, at, taps.to(torch.uint8 if math.prod(kernel) <= 256 else torch.int32)

    attrs = {"kernel_shape": kernel, "strides": stride, "pads": pad * 2, "dilations": dilation, "ceil_mode": ceil}
    return Case("MaxPool", [a], f, attrs, outputs=3)


def adaptive_pool(a: Tensor, size: list[int]) -> Case:
    pool = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[len(size)]
    return Case("AdaptiveAvgPool", [a], lambda t: pool(t, size), {"output_size": size})


def average_pool(
    a: Tensor, kernel: list[int], stride: list[int], pad: list[int], ceil: int, include: int, divisor: int
) -> Case:
    def f(t: Tensor) -> Tensor:
        if len(kernel) == 1:
            return F.avg_pool1d(t, kernel, stride, pad, bool(ceil), bool(include))
        pool = F.avg_pool2d if len(kernel) == 2 else F.avg_pool3d
        return pool(t, kernel, stride, pad, bool(ceil), bool(include), divisor or None)

    attrs = {"kernel_shape": kernel, "strides": stride, "pads": pad * 2, "ceil_mode": ceil, "count_include_pad": include,
             "divisor_override": divisor}  # fmt: skip
    return Case("AveragePool", [a], f, attrs)


CASES = [
    *[Case("Softmax", [x(*s)], lambda a, d=d: a.softmax(d), {"axis": d}) for s, d in SOFT],
    *[Case("LogSoftmax", [x(*s)], lambda a, d=d: a.log_softmax(d), {"axis": d}) for s, d in SOFT],
    *[Case(op, [x(4, 5, 6, dtype=F64)], f, {"axis": 1}) for op, f in [("Softmax", lambda a: a.softmax(1)), ("LogSoftmax", lambda a: a.log_softmax(1))]],
    Case("Softmax", [tensor([[0.0, -torch.inf, 2.0], [-1e4, 1e4, 3.0]])], lambda a: a.softmax(1), {"axis": 1}),
    cross_entropy(x(7, 11), ids(11, 7)), cross_entropy(x(7, 1003), ids(1003, 7)), cross_entropy(x(5, 6, dtype=F64), ids(6, 5)),
    cross_entropy(x(7, 11), tensor([1, -100, 3, -100, 5, 0, 10])), cross_entropy(x(7, 11), ids(11, 7), reduction="sum"),
    cross_entropy(x(7, 11), ids(11, 7), reduction="none"), cross_entropy(x(7, 11), ids(11, 7), label_smoothing=0.1),
    cross_entropy(x(7, 11), ids(11, 7), x(11, seed=5).abs()), cross_entropy(x(7, 11), ids(11, 7), x(11, seed=5).abs(), label_smoothing=0.2),
    cross_entropy(x(3, 5, 4, 2), ids(5, 3, 4, 2)), cross_entropy(x(7, 11), tensor([2, 2, 3, 2, 5, 0, 10]), ignore_index=2),
    cross_entropy(x(4, 5, dtype=F64), tensor([0, 4, -100, 1]), x(5, seed=5, dtype=F64).abs(), label_smoothing=0.1, reduction="none"),
    grouped_matmul(x(7, 5), x(3, 5, 4, seed=1), 2, 2, 7), grouped_matmul(x(7, 5), x(3, 4, 5, seed=1), 0, 3, 5, transB=1),
    grouped_matmul(x(4, 4, dtype=F64), x(4, 4, 4, dtype=F64, seed=1), 1, 2, 3, 4), grouped_matmul(x(0, 3), x(2, 3, 5), 0, 0),
    grouped_matmul(x(90, 40), x(5, 40, 33, seed=1), 1, 20, 20, 71, 90), grouped_matmul(x(500, 130), x(2, 70, 130, seed=1), 170, 480, transB=1),
    grouped_matmul(x(3, 1), x(2, 1, 1), 1, 3), grouped_matmul(x(3, 0), x(2, 0, 2), 1, 3),
    segments("SegmentSum", x(7, 5), 0, 2, 2, 6), segments("SegmentSum", x(7, 35), 0, 3, 5, closed=1), segments("SegmentSum", x(7, dtype=F64), 0, 7, 7),
    segments("SegmentSum", x(1, 1), 0), segments("SegmentSum", x(0, 3), 0, 0), segments("SegmentSum", x(900, 130), *range(0, 900, 3)),
    segments("SegmentSpread", x(3, 5), 0, 2, 2, shape=[6, 5]), segments("SegmentSpread", x(2, 17), 0, 3, 5, closed=1, shape=[7, 17]),
    segments("SegmentSpread", x(300, 33), *range(0, 900, 3), shape=[900, 33]),
    linear_cross_entropy(x(7, 5), x(11, 5, seed=2), ids(11, 7)), linear_cross_entropy(x(7, 5), x(1003, 5, seed=2), ids(1003, 7), x(1003, seed=3)),
    linear_cross_entropy(x(7, 5), x(11, 5, seed=2), tensor([1, -100, 3, -100, 5, 0, 10]), x(11, seed=3)),
    linear_cross_entropy(x(7, 7), x(7, 7, seed=2), tensor([2, 2, 3, 2, 5, 0, 6]), x(7, seed=3), ignore_index=2, reduction="sum"),
    linear_cross_entropy(x(7, 5), x(11, 5, seed=2), ids(11, 7), None, x(11, seed=5).abs(), label_smoothing=0.2),
    linear_cross_entropy(x(7, 5, dtype=F64), x(11, 5, seed=2, dtype=F64), ids(11, 7), x(11, seed=3, dtype=F64), x(11, seed=5, dtype=F64).abs()),
    linear_cross_entropy(x(1, 1), x(1, 1, seed=2), ids(1, 1)), linear_cross_entropy(x(3, 0), x(4, 0, seed=2), ids(4, 3), x(4, seed=3)),
    linear_cross_entropy(x(2, 3), x(4, 3, seed=2), tensor([-100, -100])),
    cross_entropy(x(2, 3), tensor([-100, -100])), cross_entropy(x(2, 3) + 1e5, tensor([0, 2])),
    Case("UnitInterval", [x(3, 50).sigmoid()], torch.clone, grads=[]),
    nll(x(7, 11), ids(11, 7)), nll(x(7, 11), ids(11, 7), reduction="sum"), nll(x(11), tensor(3), reduction="none"),
    nll(x(7, 11), tensor([1, -100, 3, -100, 5, 0, 10]), x(11, seed=5).abs()), nll(x(3, 5, 4, 2), ids(5, 3, 4, 2)),
    nll(x(3, 5, 4, 2, dtype=F64), ids(5, 3, 4, 2), reduction="none", ignore_index=2), nll(x(2, 3), tensor([-100, -100])),
    layer_norm(x(5, 7), 1), layer_norm(x(3, 4, 768), 2), layer_norm(x(3, 4, 5), 1), layer_norm(x(6, 130), 1, False, False),
    layer_norm(x(6, 33), 1, True, False), layer_norm(x(70, 33, dtype=F64), 1), layer_norm(x(200, 65), 1),
    rms_norm(x(5, 7), 1), rms_norm(x(3, 4, 768), 2), rms_norm(x(3, 4, 5), 1), rms_norm(x(6, 130), 1, False), rms_norm(x(200, 65), 1),
    rms_norm(x(70, 33, dtype=F64), 1), rms_norm(x(1, 1), 1), rms_norm(x(0, 5), 1), rms_norm(x(2, 3, 1), 0), rms_norm(x(6, 17, dtype=F64), 1, False),
    group_norm(x(3, 6, 5, 7), 2), group_norm(x(2, 6, 17), 3), group_norm(x(5, 6), 2), group_norm(x(2, 4, 3, 3), 4), group_norm(x(4, 4, 4, 4), 1),
    group_norm(x(70, 33, 2), 11), group_norm(x(2, 6, 9, 9), 2, False, False), group_norm(x(2, 6, 9, 9), 2, True, False), group_norm(x(1, 2, 70, 70), 1),
    group_norm(x(0, 4, 5), 2), group_norm(x(2, 6, 4, 5, dtype=F64), 3), group_norm(x(3, 64, 1, 1), 8), group_norm(x(2, 2, 40, 1, 30), 2),
    batch_norm(x(4, 3, 5, 7)), batch_norm(x(6, 5), 0.3), batch_norm(x(3, 4, 9)), batch_norm(x(4, 3, 2, 2, dtype=F64)), batch_norm(x(2, 17, 8, 8)),
    batch_norm(x(4, 3, 5, 7), relu=True), batch_norm(x(6, 5), added=True), batch_norm(x(3, 4, 9), added=True, relu=True), batch_norm(x(70, 67), relu=True),
    batch_norm(x(4, 3, 2, 2, dtype=F64), added=True, relu=True), batch_norm(x(2, 17, 8, 8), added=True), batch_norm(x(5, 70), relu=True),
    max_pool(x(2, 3, 9, 11), [3, 3], [2, 2], [1, 1], [1, 1]), max_pool(x(1, 2, 8, 8), [2, 2], [2, 2], [0, 0], [1, 1]),
    max_pool(x(2, 2, 7, 10), [2, 3], [2, 1], [1, 1], [1, 2], 1), max_pool(x(2, 2, 7, 7, dtype=F64), [3, 3], [2, 2], [1, 1], [1, 1], 1),
    average_pool(x(2, 3, 9, 11), [3, 3], [2, 2], [1, 1], 0, 1, 0), average_pool(x(2, 3, 9, 11), [3, 2], [2, 2], [1, 1], 1, 0, 0),
    average_pool(x(2, 3, 8, 8), [2, 2], [2, 2], [0, 0], 0, 1, 3), average_pool(x(1, 2, 7, 7, dtype=F64), [3, 3], [2, 2], [1, 1], 1, 1, 0),
    adaptive_pool(x(2, 3, 7, 9), [1, 1]), adaptive_pool(x(2, 3, 7, 9), [3, 4]), adaptive_pool(x(1, 2, 5, 5, dtype=F64), [2, 3]),
    max_pool(x(2, 3, 5, 75), [3, 3], [2, 2], [1, 1], [1, 1]), max_pool(x(2, 2, 4, 70), [2, 2], [1, 1], [0, 1], [1, 3]),
    max_pool(x(2, 3, 11), [3], [2], [1], [2], 1), max_pool(x(2, 2, 5, 6, 7), [2, 3, 3], [2, 1, 2], [1, 1, 0], [1, 2, 1]),
    max_pool(x(3, 5, 4, 300), [3, 2, 3], [1, 2, 1], [1, 1, 1], [2, 1, 2], 1), max_pool(x(1, 2, 4, 4, 4, dtype=F64), [4, 4, 4], [1, 1, 1], [2, 2, 2], [1, 1, 1]),
    max_pool(x(2, 3, 701), [257], [2], [3], [1]), max_pool(x(1, 2, 33, 40), [16, 16], [3, 5], [8, 8], [1, 2]),
    average_pool(x(2, 3, 11), [3], [2], [1], 1, 1, 0), average_pool(x(2, 2, 5, 6, 7), [2, 3, 3], [2, 1, 2], [1, 1, 0], 0, 0, 0),
    average_pool(x(2, 5, 4, 6, dtype=F64), [3, 2, 2], [2, 2, 3], [1, 1, 1], 1, 1, 0), average_pool(x(2, 4, 4, 4), [2, 2, 2], [2, 2, 2], [0, 0, 0], 0, 1, 3),
    adaptive_pool(x(2, 3, 9), [4]), adaptive_pool(x(2, 5, 7, 6), [1, 1, 1]), adaptive_pool(x(2, 3, 5, 7, 6), [2, 3, 4]), adaptive_pool(x(1, 4, 4, 3, dtype=F64), [3, 1, 1]),
]  # fmt: skip
