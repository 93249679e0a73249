"""Convolutions and poolings: what is made of the elements of a window that goes over the last axes."""

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from ..lowering.draft import Val
from .importer import Given, Importer, Results


@dataclass(frozen=True)
class _Windows:
    """Where windows lie along the axes, of which `sizes` are those of what they go over."""

    sizes: list[int]
    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]
    ceil: bool

    @property
    def counts(self) -> list[int]:
        """How many there are; rounded up, none starts in the padding at the end."""
        counts = []
        for i, d in enumerate(self.sizes):
            rest, stride = d + self.before[i] + self.after[i] - self._span(i), self.strides[i]
            n = (-(-rest // stride) if self.ceil else rest // stride) + 1
            counts.append(n - (self.ceil and (n - 1) * stride >= d + self.before[i]))
        return counts

    @property
    def reach(self) -> list[int]:
        """How far they go beyond the end."""
        ends = [(n - 1) * s + self._span(i) for i, (n, s) in enumerate(zip(self.counts, self.strides, strict=True))]
        return [max(end - d - p, 0) for end, d, p in zip(ends, self.sizes, self.before, strict=True)]

    def elements(self, with_padding: bool) -> torch.Tensor:
        """How many elements each has."""
        axes = []
        for i, (d, n) in enumerate(zip(self.sizes, self.counts, strict=True)):
            starts = torch.arange(n) * self.strides[i] - self.before[i]
            at = starts[:, None] + torch.arange(self.kernel[i]) * self.dilations[i]
            low, high = (-self.before[i], d + self.after[i]) if with_padding else (0, d)
            inside = ((at >= low) & (at < high)).sum(1)
            axes.append(inside.reshape([-1 if j == i else 1 for j in range(len(self.sizes))]))
        return reduce(torch.mul, axes).clamp(min=1)

    def said(self, **more: Any) -> dict[str, Any]:
        """As attributes."""
        given = {"strides": self.strides, "dilations": self.dilations, "pads": [*self.before, *self.after]}
        return given | more

    def _span(self, i: int) -> int:
        return (self.kernel[i] - 1) * self.dilations[i] + 1


def _windows(node: Given, x: Val, kernel: list[int]) -> _Windows:
    """What the padding is to be follows from the sizes, if so is said."""
    said, ones = node.attributes, [1] * len(kernel)
    sizes, strides = [int(d) for d in x.dims[2:]], said.get("strides") or ones
    dilations, pads = said.get("dilations") or ones, said.get("pads") or [0] * (2 * len(kernel))
    if (auto := said.get("auto_pad", "NOTSET")) in ("SAME_UPPER", "SAME_LOWER"):
        pads = _halves(
            [
                max((-(-d // s) - 1) * s + (k - 1) * dilation + 1 - d, 0)
                for d, k, s, dilation in zip(sizes, kernel, strides, dilations, strict=True)
            ],
            auto,
        )
    before, after = pads[: len(kernel)], pads[len(kernel) :]
    return _Windows(sizes, kernel, strides, dilations, before, after, bool(said.get("ceil_mode")))


def _halves(total: list[int], auto: str) -> list[int]:
    """Padding at the beginnings and at the ends."""
    less, more = [p // 2 for p in total], [p - p // 2 for p in total]
    return [*less, *more] if auto == "SAME_UPPER" else [*more, *less]


def conv(t: Importer, node: Given, x: Val, weight: Val, bias: Val | None = None) -> Results:
    w = _windows(node, x, [int(d) for d in weight.dims[2:]])
    return t.emit("Conv", x, weight, bias, **w.said(group=node.attributes["group"]))


def conv_transpose(t: Importer, node: Given, x: Val, weight: Val, bias: Val | None = None) -> Results:
    """What the padding is to be follows from the size that the result is to have, if that is said."""
    said = {k: v for k, v in node.attributes.items() if k != "kernel_shape"}
    auto, wanted = said.pop("auto_pad", "NOTSET"), said.pop("output_shape", None)
    sizes, kernel = [int(d) for d in x.dims[2:]], [int(d) for d in weight.dims[2:]]
    strides, dilations = (said.get(k) or [1] * len(kernel) for k in ("strides", "dilations"))
    if wanted is None and auto in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [d * s for d, s in zip(sizes, strides, strict=True)]
    if wanted is None:
        return t.emit("ConvTranspose", x, weight, bias, **said)
    more = said.get("output_padding") or [0] * len(kernel)
    total = [
        s * (d - 1) + p + (k - 1) * dilation + 1 - w
        for d, s, p, k, dilation, w in zip(sizes, strides, more, kernel, dilations, wanted[-len(kernel) :], strict=True)
    ]
    pads = _halves(total, auto)
    said["pads"] = [max(p, 0) for p in pads]
    if min(pads) >= 0:
        return t.emit("ConvTranspose", x, weight, bias, **said)
    y = t.emit("ConvTranspose", x, weight, None, **said)  # where no element reaches there is the bias alone
    n = len(kernel)
    beyond = [max(-p, 0) for p in pads]
    y = t.emit("Pad", y, t.const([0, 0, *beyond[:n], 0, 0, *beyond[n:]]))
    return y if bias is None else t.emit("Add", y, by_channel(t, bias, x.rank))


def by_channel(t: Importer, v: Val, rank: int) -> Val:
    """A number for each channel beside what has them in its second dim."""
    return t.emit("Reshape", v, t.const([-1] + [1] * (rank - 2)))


def average(t: Importer, node: Given, x: Val) -> Results:
    w = _windows(node, x, node.attributes["kernel_shape"])
    with_padding = bool(node.attributes.get("count_include_pad"))
    if _is_pooled(w):
        said = w.said(kernel_shape=w.kernel, ceil_mode=int(w.ceil), count_include_pad=int(with_padding))
        return t.emit("AveragePool", x, **said)
    return t.emit("Div", _summed(t, w, x), t.tensor(w.elements(with_padding).to(x.dtype)))


def lp(t: Importer, node: Given, x: Val) -> Results:
    """Roots of sums of powers."""
    w, p = _windows(node, x, node.attributes["kernel_shape"]), node.attributes["p"]
    powers = t.emit("Pow", t.emit("Abs", x), t.like(x, p))
    return root(t, _summed(t, w, powers), 1 / p)


def global_lp(t: Importer, node: Given, x: Val) -> Results:
    p, axes = node.attributes["p"], t.const(list(range(2, x.rank)))
    powers = t.emit("Pow", t.emit("Abs", x), t.like(x, p))
    return root(t, t.emit("ReduceSum", powers, axes, keepdims=1), 1 / p)


def _fits(w: _Windows) -> bool:
    """Whether a pooling of the core has such padding."""
    return all(2 * p <= k for p, k in zip([*w.before, *w.after], w.kernel * 2, strict=True))


def _is_pooled(w: _Windows) -> bool:
    return _fits(w) and set(w.dilations) == {1}


def _summed(t: Importer, w: _Windows, x: Val) -> Val:
    """A convolution of each plane with ones, where no pooling of the core does it."""
    if _is_pooled(w):
        said = w.said(kernel_shape=w.kernel, ceil_mode=int(w.ceil), divisor_override=1)
        return t.emit("AveragePool", x, **said)
    planes = t.emit("Reshape", x, t.const([-1, 1, *w.sizes]))
    ones = t.tensor(torch.ones([1, 1, *w.kernel], dtype=x.dtype))
    total = t.emit("Conv", planes, ones, **w.said(pads=[*w.before, *w.reach]))
    return t.emit("Reshape", total, t.const([*(int(d) for d in x.dims[:2]), *w.counts]))


def root(t: Importer, x: Val, exponent: float) -> Val:
    """A root of what is not negative, of which that of 0 has no gradient."""
    none = t.emit("Equal", x, t.like(x, 0))
    some = t.emit("Where", none, t.like(x, 1), x)
    found = t.emit("Sqrt", some) if exponent == 0.5 else t.emit("Pow", some, t.like(x, exponent))
    return t.emit("Where", none, t.like(x, 0), found)


def maximum(t: Importer, node: Given, x: Val) -> Results:
    """ONNX counts places through the whole tensor, in either order of a plane's axes; the core within a plane."""
    w = _windows(node, x, node.attributes["kernel_shape"])
    whole = not x.dtype.is_floating_point
    given, sizes, columns = (
        t.cast(x, torch.float32) if whole else x,
        w.sizes,
        bool(node.attributes.get("storage_order")),
    )
    said = w.said(kernel_shape=w.kernel, ceil_mode=int(w.ceil))
    if padded := not _fits(w):
        sides = [[0, 0, *side] for side in (w.before, w.reach)]
        given = t.emit("Pad", given, t.const(sides[0] + sides[1]), t.like(given, -math.inf))
        sizes, said = [int(d) for d in given.dims[2:]], said | {"pads": None, "ceil_mode": 0}
    if node.outputs == 1:
        return t.cast(t.emit("MaxPool", given, **said), x.dtype)
    y, within, _ = t.emit("MaxPool", given, outputs=3, **said)
    if padded or columns:
        places, step = torch.zeros([1] * len(sizes), dtype=torch.int64), 1
        for i in range(len(sizes)) if columns else reversed(range(len(sizes))):
            at = torch.arange(sizes[i]) - (w.before[i] if padded else 0)
            along = [-1 if j == i else 1 for j in range(len(sizes))]
            places, step = places + at.clamp(0, w.sizes[i] - 1).reshape(along) * step, step * w.sizes[i]
        within = t.emit("Gather", t.tensor(places.reshape(-1)), within, axis=0)
    firsts = torch.arange(int(x.dims[0]) * int(x.dims[1])) * math.prod(w.sizes)
    first = t.tensor(firsts.reshape([int(d) for d in x.dims[:2]] + [1] * (x.rank - 2)))
    return t.cast(y, x.dtype), t.emit("Add", within, first)
