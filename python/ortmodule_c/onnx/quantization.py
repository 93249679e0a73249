"""Whole numbers that stand for floats, by a scale and what stands for 0, and what is computed of them."""

from typing import Any

import torch

from ..errors import Unsupported
from ..lowering.draft import Val
from .importer import Given, Importer, Results, torch_dtype
from .windows import by_channel, conv

_WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32)


def dequantize(t: Importer, node: Given, x: Val, scale: Val, zero: Val | None = None) -> Results:
    wide = _computed_in(scale.dtype)
    y = t.cast(_whole(x), torch.int32)
    if zero is not None:
        y = t.emit("Sub", y, t.cast(_beside(t, node, zero, x), torch.int32))
    y = t.emit("Mul", t.cast(y, wide), t.cast(_beside(t, node, scale, x), wide))
    return t.cast(
        y, torch_dtype(node.attributes["output_dtype"]) if node.attributes.get("output_dtype") else scale.dtype
    )


def quantize(t: Importer, node: Given, x: Val, scale: Val, zero: Val | None = None) -> Results:
    said = node.attributes.get("output_dtype")
    dtype = zero.dtype if zero is not None else torch_dtype(said) if said else torch.uint8
    if dtype not in _WHOLE:
        raise Unsupported(f"numbers of {dtype}")
    wide = _computed_in(x.dtype)
    y = t.emit("Div", t.cast(x, wide), t.cast(_beside(t, node, scale, x), wide))
    return _stored(t, y, None if zero is None else _beside(t, node, zero, x), dtype)


def _stored(t: Importer, y: Val, zero: Val | None, dtype: torch.dtype) -> Val:
    """Rounded to the nearest whole number that there is, halves to even ones, before what stands for 0 is added."""
    y = t.emit("Round", y)
    if zero is not None:
        y = t.emit("Add", y, t.cast(zero, y.dtype))
    ends = torch.iinfo(dtype)
    return t.cast(t.emit("Clip", y, t.like(y, ends.min), t.like(y, ends.max)), dtype)


# Sums of products are made in float64, which has all of them that 32 bits have.


def matmul(t: Importer, node: Given, a: Val, b: Val, a_zero: Val | None = None, b_zero: Val | None = None) -> Results:
    rows = None if a_zero is None else _rows(t, a_zero)
    return _in_32_bits(t, t.emit("MatMul", _exact(t, a, rows), _exact(t, b, b_zero)))


def matmul_between(
    t: Importer,
    node: Given,
    a: Val,
    a_scale: Val,
    a_zero: Val,
    b: Val,
    b_scale: Val,
    b_zero: Val,
    scale: Val,
    zero: Val,
) -> Results:
    y = t.emit("MatMul", _exact(t, a, _rows(t, a_zero)), _exact(t, b, b_zero))
    factor = _factor(t, _rows(t, a_scale), b_scale, _rows(t, scale))
    return _stored(t, t.emit("Mul", y, factor), _rows(t, zero), zero.dtype)


def convolution(
    t: Importer, node: Given, x: Val, weight: Val, x_zero: Val | None = None, weight_zero: Val | None = None
) -> Results:
    return _in_32_bits(t, _convolved(t, node, x, weight, x_zero, weight_zero))


def convolution_between(
    t: Importer,
    node: Given,
    x: Val,
    x_scale: Val,
    x_zero: Val,
    weight: Val,
    weight_scale: Val,
    weight_zero: Val,
    scale: Val,
    zero: Val,
    bias: Val | None = None,
) -> Results:
    """The bias is of whole numbers that stand for floats by the scale of the products."""
    y = _convolved(t, node, x, weight, x_zero, weight_zero)
    if bias is not None:
        y = t.emit("Add", y, by_channel(t, t.cast(bias, y.dtype), x.rank))
    if weight_scale.rank:
        weight_scale = by_channel(t, weight_scale, x.rank)
    return _stored(t, t.emit("Mul", y, _factor(t, x_scale, weight_scale, scale)), zero, zero.dtype)


def _convolved(t: Importer, node: Given, x: Val, weight: Val, x_zero: Val | None, weight_zero: Val | None) -> Val:
    """Padding stands for 0."""
    if weight_zero is not None and weight_zero.rank:
        weight_zero = t.emit("Reshape", weight_zero, t.const([-1] + [1] * (weight.rank - 1)))
    y: Any = conv(t, node, _exact(t, x, x_zero), _exact(t, weight, weight_zero))
    return y


def _exact(t: Importer, x: Val, zero: Val | None) -> Val:
    """What the numbers stand for, but for the scale."""
    y = t.cast(_whole(x), torch.float64)
    return y if zero is None else t.emit("Sub", y, t.cast(zero, torch.float64))


def _rows(t: Importer, v: Val) -> Val:
    """A number for each row, if there are several."""
    return t.emit("Unsqueeze", v, t.const([1])) if v.rank == 1 and int(v.dims[0]) > 1 else v


def _factor(t: Importer, *scales: Val) -> Val:
    """From the scales of two operands to that of their product."""
    a, b, product = (t.cast(v, torch.float64) for v in scales)
    return t.emit("Div", t.emit("Mul", a, b), product)


def _in_32_bits(t: Importer, y: Val) -> Val:
    return t.cast(t.cast(y, torch.int64), torch.int32)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _whole(x: Val) -> Val:
    if x.dtype not in _WHOLE:
        raise Unsupported(f"numbers of {x.dtype}")
    return x


def _beside(t: Importer, node: Given, v: Val, x: Val) -> Val:
    """One number for all, for each place along an axis, or for each block of them, as an operand beside `x`."""
    axis, block = node.attributes.get("axis", 1), node.attributes.get("block_size", 0)
    if v.rank == 0:
        return v
    axis %= x.rank
    if block:
        ids = torch.arange(int(x.dims[axis])) // block
        return t.emit("Gather", v, t.tensor(ids), axis=axis)
    if v.rank != 1:
        raise Unsupported(f"scales of {v.rank} dims")
    return t.emit("Reshape", v, t.const([-1 if i == axis else 1 for i in range(x.rank)])) if int(v.dims[0]) > 1 else v
