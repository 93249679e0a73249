"""Random numbers, made of bits that the core's Dropout draws from PyTorch's generator."""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from ..errors import Unsupported
from ..lowering.draft import Val
from .importer import Given, Importer, Results, torch_dtype

_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def uniform(t: Importer, node: Given, like: Val | None = None) -> Results:
    """RandomUniform and RandomUniformLike."""
    low, high = node.attributes["low"], node.attributes["high"]
    u = _unit(t, *_asked(node, like))
    return _scaled(t, u, high - low, low)


def normal(t: Importer, node: Given, like: Val | None = None) -> Results:
    """RandomNormal and RandomNormalLike: a length and an angle for each number."""
    sizes, dtype = _asked(node, like)
    wide = torch.promote_types(dtype, torch.float32)
    length = t.emit("Log", _scaled(t, _unit(t, sizes, wide), -1, 1))
    length = t.emit("Sqrt", _scaled(t, length, -2, 0))
    along = t.emit("Cos", _scaled(t, _unit(t, sizes, wide), 2 * math.pi, 0))
    y = _scaled(t, t.emit("Mul", length, along), node.attributes["scale"], node.attributes["mean"])
    return t.cast(y, dtype)


def bernoulli(t: Importer, node: Given, p: Val) -> Results:
    """Ones with the probabilities that are given; the function that defines it in ONNX gives them to zeros."""
    sizes, wide = [int(d) for d in p.dims], torch.promote_types(p.dtype, torch.float32)
    dtype = torch_dtype(node.attributes["dtype"]) if "dtype" in node.attributes else p.dtype
    return t.cast(t.emit("Less", _unit(t, sizes, wide), t.cast(p, wide)), dtype)


def multinomial(t: Importer, node: Given, x: Val) -> Results:
    """Of classes whose logarithmic odds are given, in each row."""
    rows, classes = (int(d) for d in x.dims)
    wide = torch.promote_types(x.dtype, torch.float32)
    odds = t.emit("Softmax", t.cast(t.emit("Detach", x), wide), axis=1)
    below = t.emit("Unsqueeze", t.emit("CumSum", odds, t.const(1)), t.const([1]))
    u = t.emit("Unsqueeze", _unit(t, [rows, node.attributes["sample_size"]], wide), t.const([2]))
    passed = t.cast(t.emit("GreaterOrEqual", u, below), torch.int64)
    at = t.emit("ReduceSum", passed, t.const([2]), keepdims=0)
    return t.cast(t.emit("Min", at, t.const(classes - 1)), torch_dtype(node.attributes["dtype"]))


def _asked(node: Given, like: Val | None) -> tuple[list[int], torch.dtype]:
    said: dict[str, Any] = node.attributes
    sizes = said["shape"] if like is None else [int(d) for d in like.dims]
    dtype = torch_dtype(said["dtype"]) if "dtype" in said or like is None else like.dtype
    if dtype not in _BITS:
        raise Unsupported(f"random numbers of {dtype}")
    return sizes, dtype


def _unit(t: Importer, sizes: Sequence[int], dtype: torch.dtype) -> Val:
    """From 0 to below 1, as many as the dtype tells apart: a bit of each worth."""
    wide = torch.promote_types(dtype, torch.float32)
    ones, bits = t.tensor(torch.ones(list(sizes), dtype=wide)), []
    for k in range(_BITS[dtype]):
        bit = t.emit("Dropout", ones, p=0.5, subsequence=t.draft.subsequence())  # 0 or 2
        bits.append(t.emit("Mul", bit, t.like(bit, 0.5 ** (k + 2))))
    return t.cast(reduce(lambda a, b: t.emit("Add", a, b), bits), dtype)


def _scaled(t: Importer, x: Val, factor: float, more: float) -> Val:
    y = x if factor == 1 else t.emit("Mul", x, t.like(x, factor))
    return y if more == 0 else t.emit("Add", y, t.like(x, more))
