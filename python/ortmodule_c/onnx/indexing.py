"""What is put into a tensor, or taken out of it, at places that are given."""

import math
from collections.abc import Callable

import torch

from ..lowering.draft import Val
from .importer import Given, Importer, Results


def scatter_elements(t: Importer, node: Given, x: Val, ids: Val, updates: Val) -> Results:
    """Scatter too."""
    axis, reduction = node.attributes["axis"], node.attributes.get("reduction", "none")

    def added(values: Val, base: Val) -> Val:
        return t.emit("GatherElementsGrad", values, ids, base, axis=axis)

    if reduction in ("none", "add"):
        return _scattered(t, node, x, updates, added)
    return _joined(t, x, ids, updates, axis, reduction)


def _joined(t: Importer, x: Val, ids: Val, updates: Val, axis: int, reduction: str) -> Val:
    wide = x.dtype if x.dtype.is_floating_point else torch.int64
    operands = t.cast(x, wide), ids, t.cast(updates, wide)
    return t.cast(t.emit("ScatterElements", *operands, axis=axis, reduction=reduction), x.dtype)


def scatter_nd(t: Importer, node: Given, x: Val, ids: Val, updates: Val) -> Results:
    def added(values: Val, base: Val) -> Val:
        return t.emit("GatherNDGrad", values, ids, base)

    reduction = node.attributes.get("reduction", "none")
    if reduction in ("none", "add"):
        return _scattered(t, node, x, updates, added)
    # Rows by their number.
    depth = int(ids.dims[-1])
    outer, inner = [[int(d) for d in part] for part in (x.dims[:depth], x.dims[depth:])]
    numbers = t.tensor(torch.arange(math.prod(outer)).reshape(outer))
    column = t.emit("Reshape", t.emit("GatherND", numbers, ids), t.const([-1, 1]))
    rows, width = math.prod(int(d) for d in ids.dims[:-1]), math.prod(inner)
    column = t.emit("Expand", column, t.const([rows, width]))
    table = t.emit("Reshape", x, t.const([math.prod(outer), width]))
    y = _joined(t, table, column, t.emit("Reshape", updates, t.const([rows, width])), 0, reduction)
    return t.emit("Reshape", y, t.const(outer + inner))


def _scattered(t: Importer, node: Given, x: Val, updates: Val, added: Callable[[Val, Val], Val]) -> Results:
    """ONNX says nothing of places that are given twice, unless values are added up."""
    reduction = node.attributes.get("reduction", "none")
    if reduction == "add":
        return added(updates, x)
    zeros = _filled(t, x, 0, x.dtype)
    hits = added(_filled(t, updates, 1, torch.float32), _filled(t, x, 0, torch.float32))
    return t.emit("Where", t.cast(hits, torch.bool), added(updates, zeros), x)


def _filled(t: Importer, like: Val, number: float, dtype: torch.dtype) -> Val:
    return t.tensor(torch.full([int(d) for d in like.dims], number, dtype=dtype))


def max_unpool(t: Importer, node: Given, x: Val, ids: Val, shape: Val | None = None) -> Results:
    """Places are counted through the whole result, whose size is another than that of the smallest if it is given."""
    said = node.attributes
    kernel = said["kernel_shape"]
    strides, pads = said.get("strides") or [1] * len(kernel), said.get("pads") or [0] * (2 * len(kernel))
    n, c, *sizes = (int(d) for d in x.dims)
    smallest = [n, c]
    for i, (d, k, s) in enumerate(zip(sizes, kernel, strides, strict=True)):
        smallest.append((d - 1) * s + k - pads[i] - pads[len(kernel) + i])
    result = smallest if shape is None else t.known(shape, "the shape").tolist()
    planes = t.tensor(torch.zeros(math.prod(smallest), dtype=x.dtype))
    values, places = [t.emit("Reshape", v, t.const([-1])) for v in (x, ids)]
    total: Val = t.emit("GatherElementsGrad", values, places, planes, axis=0)
    count = t.emit("GatherElementsGrad", _filled(t, values, 1, x.dtype), places, planes, axis=0)
    y = t.emit("Div", total, t.emit("Max", count, t.like(x, 1)))  # a maximum of several windows is given several times
    y = t.emit("Reshape", y, t.const(smallest))
    more = [w - d for w, d in zip(result, smallest, strict=True)]
    return t.emit("Pad", y, t.const([0] * len(more) + more)) if any(more) else y


def compress(t: Importer, node: Given, x: Val, condition: Val) -> Results:
    axis = node.attributes.get("axis")
    if axis is None:
        x, axis = t.emit("Reshape", x, t.const([-1])), 0
    return t.emit("Gather", x, t.tensor(t.known(condition, "the condition").nonzero().reshape(-1)), axis=axis)


def non_zero(t: Importer, node: Given, x: Val) -> Results:
    return t.tensor(t.known(x, "the operand").nonzero().T)


def reverse_sequence(t: Importer, node: Given, x: Val, lengths: Val) -> Results:
    """The first elements along an axis in reversed order: as many as are said for each sample."""
    batch, time = node.attributes["batch_axis"], node.attributes["time_axis"]
    n = int(x.dims[time])

    def along(v: Val, axis: int) -> Val:
        return t.emit("Reshape", v, t.const([-1 if i == axis else 1 for i in range(x.rank)]))

    places, ends = along(t.tensor(torch.arange(n)), time), along(lengths, batch)
    turned = t.emit("Sub", t.emit("Sub", ends, t.const(1)), places)
    ids = t.emit("Where", t.emit("Less", places, ends), turned, places)
    return t.emit("GatherElements", x, t.emit("Expand", ids, t.const([int(d) for d in x.dims])), axis=time)


def col2im(t: Importer, node: Given, x: Val, image: Val, block: Val) -> Results:
    """Columns of blocks, added up where blocks overlap."""
    said = node.attributes
    sizes, kernel = (t.known(v, "a shape").tolist() for v in (image, block))
    rank = len(sizes)
    strides, dilations = said.get("strides") or [1] * rank, said.get("dilations") or [1] * rank
    pads = said.get("pads") or [0] * (2 * rank)
    padded = [s + pads[i] + pads[rank + i] for i, s in enumerate(sizes)]
    places = torch.zeros([1] * (2 * rank), dtype=torch.int64)  # of an element of a block, and of a block
    for i, (size, k, step, dilation) in enumerate(zip(padded, kernel, strides, dilations, strict=True)):
        count = (size - dilation * (k - 1) - 1) // step + 1
        shape = [[k if j == i else 1 for j in range(rank)], [count if j == i else 1 for j in range(rank)]]
        along = torch.arange(k).reshape(shape[0] + [1] * rank) * dilation
        places = places * size + along + torch.arange(count).reshape([1] * rank + shape[1]) * step
    n, channels = int(x.dims[0]), int(x.dims[1]) // math.prod(kernel)
    values = t.emit("Reshape", x, t.const([n * channels, -1]))
    zeros = t.tensor(torch.zeros(n * channels, math.prod(padded), dtype=x.dtype))
    y = t.emit("GatherGrad", values, t.tensor(places.reshape(-1)), zeros, axis=1)
    y = t.emit("Reshape", y, t.const([n, channels, *padded]))
    if not any(pads):
        return y
    ends = [pads[i] + s for i, s in enumerate(sizes)]
    return t.emit("Slice", y, *[t.const(v) for v in (pads[:rank], ends, list(range(2, 2 + rank)))])
