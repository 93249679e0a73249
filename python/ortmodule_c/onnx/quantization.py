"""QuantizeLinear and DequantizeLinear: whole numbers that stand for floats, by a scale and what stands for 0."""

import torch

from ..errors import Unsupported
from ..lowering.draft import Val
from .importer import Given, Importer, Results, torch_dtype

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
    y = t.emit("Round", t.emit("Div", t.cast(x, wide), t.cast(_beside(t, node, scale, x), wide)))
    if zero is not None:
        y = t.emit("Add", y, t.cast(_beside(t, node, zero, x), wide))
    ends = torch.iinfo(dtype)
    return t.cast(t.emit("Clip", y, t.like(y, ends.min), t.like(y, ends.max)), dtype)


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
