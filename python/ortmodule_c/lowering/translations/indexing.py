"""Reading and adding by index."""

import math
from typing import Any

import torch

from ...errors import Unsupported
from ..builder import Builder
from ..draft import Size, Val, same_size
from .registry import aten, axis_of, translates


@translates(aten.index_select.default)
def index_select(b: Builder, x: Val, dim: int, index: Val) -> Val:
    if index.dtype not in (torch.int64, torch.int32):
        raise Unsupported(f"an index of dtype {index.dtype}")
    index = b.cast(index, torch.int64)
    ids = b.unsqueeze(index, 0) if index.rank == 0 else index  # it selects one, and the dim stays
    return b.emit("Gather", x, ids, axis=axis_of(x, dim), strict=1)


@translates(aten.gather.default)
def gather(b: Builder, x: Val, dim: int, index: Val, *, sparse_grad: bool = False) -> Val:
    if x.rank == 0:
        raise Unsupported("gather from a scalar")
    return b.emit("GatherElements", x, b.cast(index, torch.int64), axis=axis_of(x, dim), strict=1)


@translates(aten.one_hot.default)
def one_hot(b: Builder, index: Val, num_classes: int = -1) -> Val:
    if num_classes < 0 or index.dtype != torch.int64:
        raise Unsupported(f"one_hot of {index.dtype} and {num_classes} classes")
    classes = b.tensor(torch.arange(num_classes), "classes")
    checked = b.emit("Gather", classes, index, axis=0, strict=1)
    return b.cast(b.emit("Equal", b.unsqueeze(checked, index.rank), classes), torch.int64)


@translates(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(b: Builder, x: Val, indices: list[Val | None]) -> Val:
    """Advanced indexing by integers: GatherND reads, before which dims apart from each other are moved to the front."""
    given: list[tuple[int, Val]] = [(i, v) for i, v in enumerate(indices) if v is not None]
    if any(v.dtype in (torch.bool, torch.uint8) for _, v in given):
        raise Unsupported("index by a mask")
    axes = [i for i, _ in given]
    ids = [b.cast(v, torch.int64) for _, v in given]
    if len(axes) == 1:
        return b.emit("Gather", x, ids[0], axis=axes[0])
    shape = _broadcast(ids)
    columns = [b.unsqueeze(b.expand(v, shape), len(shape)) for v in ids]
    table = b.emit("Concat", *columns, axis=len(shape))
    if axes == list(range(axes[0], axes[0] + len(axes))):
        return b.emit("GatherND", x, table, **({"axis": axes[0]} if axes[0] else {}))
    rest = [a for a in range(x.rank) if a not in axes]
    return b.emit("GatherND", b.transpose(x, axes + rest), table)


@translates(aten.index_put.default)
def index_put(b: Builder, x: Val, indices: list[Val | None], values: Val, accumulate: bool = False) -> Val:
    """What is alike for all that a mask chooses is put there, or rows are added along an axis."""
    given = [(i, v) for i, v in enumerate(indices) if v is not None]
    axis, index = given[0]
    if len(given) == 1 and accumulate and index.dtype in (torch.int64, torch.int32) and values.dtype == x.dtype:
        picked = (*x.dims[:axis], *index.dims, *x.dims[axis + 1 :])
        rows = values if tuple(values.dims) == picked else b.expand(values, picked)
        return b.emit("GatherGrad", rows, b.cast(index, torch.int64), x, axis=axis)
    rest = x.rank - axis - index.rank
    if len(given) != 1 or index.dtype != torch.bool or rest < 0 or values.rank > rest or accumulate:
        raise Unsupported("index_put other than of the same by a mask, or added along one axis")
    if not all(map(same_size, index.dims, x.dims[axis:])) or (values.rank and values.dtype != x.dtype):
        raise Unsupported("index_put by a mask of other sizes, or of another dtype")
    return b.emit("Where", b.unsqueeze(index, *range(index.rank, index.rank + rest)), b.cast(values, x.dtype), x)


def _broadcast(vals: list[Val]) -> tuple[Any, ...]:
    """The common shape of several values; a size of 1 gives way."""
    rank = max(v.rank for v in vals)
    shape: list[Any] = [1] * rank
    for v in vals:
        for i, size in enumerate(v.dims, start=rank - v.rank):
            if not (isinstance(size, int) and size == 1):
                shape[i] = size
    return tuple(shape)


@translates(aten.index_add.default)
def index_add(b: Builder, x: Val, dim: int, index: Val, source: Val, *, alpha: Any = 1) -> Val:
    if x.rank == 0 or source.rank != x.rank or source.dtype != x.dtype:
        raise Unsupported("index_add to a scalar, or of another rank or dtype")
    ids = b.cast(index, torch.int64)
    ids = b.unsqueeze(ids, 0) if index.rank == 0 else ids
    if not (isinstance(alpha, (int, float)) and alpha == 1):
        source = b.emit("Mul", source, b.scalar(alpha, source.dtype))
    return b.emit("GatherGrad", source, ids, x, axis=axis_of(x, dim), strict=1)


@translates(aten.scatter_add.default)
def scatter_add(b: Builder, x: Val, dim: int, index: Val, source: Val) -> Val:
    if x.rank == 0 or source.dtype != x.dtype or tuple(index.dims) != tuple(source.dims):
        raise Unsupported("scatter_add to a scalar, or of a part of its source")
    return b.emit("GatherElementsGrad", source, b.cast(index, torch.int64), x, axis=axis_of(x, dim), strict=1)


@translates(aten.scatter.value)
def scatter_value(b: Builder, x: Val, dim: int, index: Val, value: Any) -> Val:
    if x.rank == 0 or index.dtype != torch.int64:
        raise Unsupported("scatter to a scalar, or by an index that is not int64")
    found, none = b.full(index.dims, 1.0, torch.float32), b.full(x.dims, 0.0, torch.float32)
    found = b.emit("GatherElementsGrad", found, index, none, axis=axis_of(x, dim), strict=1)
    return b.emit("Where", b.cast(found, torch.bool), b.scalar(value, x.dtype), x)


@translates(aten.index_fill.int_Scalar)
def index_fill(b: Builder, x: Val, dim: int, index: Val, value: Any) -> Val:
    if x.rank == 0 or index.dtype != torch.int64:
        raise Unsupported("index_fill of a scalar, or by an index that is not int64")
    axis = axis_of(x, dim)
    ids = b.unsqueeze(index, 0) if index.rank == 0 else index
    found, none = b.full(ids.dims, 1.0, torch.float32), b.full((x.dims[axis],), 0.0, torch.float32)
    found = b.cast(b.emit("GatherGrad", found, ids, none, axis=0), torch.bool)
    return b.emit("Where", b.unsqueeze(found, *range(1, x.rank - axis)), b.scalar(value, x.dtype), x)


@translates(aten.masked_scatter.default)
def masked_scatter(b: Builder, x: Val, mask: Val, source: Val) -> Val:
    """What a mask chooses is replaced, in its order, by what a source has; a mask of whole rows by its rows."""
    if mask.dtype != torch.bool or source.dtype != x.dtype:
        raise Unsupported(f"masked_scatter of {source.dtype} by a mask of {mask.dtype}")
    shape = _broadcast([x, mask])
    by_rows = mask.rank > 0 and source.rank > 0 and x.rank > 0
    by_rows = by_rows and same_size(mask.dims[-1], 1) and same_size(source.dims[-1], shape[-1])
    row: tuple[Size, ...] = (shape[-1],) if by_rows else ()
    chosen = b.expand(mask, (*shape[:-1], 1) if by_rows else shape)
    flat = b.cast(b.reshape(chosen, (math.prod(chosen.dims),)), torch.int64)
    place = b.emit("Mul", b.emit("CumSum", flat, b.const(0, torch.int64)), flat)  # from 1; 0 where x stays
    rows = b.reshape(source, (math.prod(source.dims[:-1] if by_rows else source.dims), *row))
    rows = b.emit("Concat", b.full((1, *row), 0, x.dtype), rows, axis=0)
    taken = b.emit("Gather", rows, place, axis=0, strict=1)
    return b.emit("Where", chosen, b.reshape(taken, shape), x)
