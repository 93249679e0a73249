"""Reading and adding by index."""

import math
from typing import Any

import torch

from ...errors import Unsupported
from ..builder import Builder
from ..draft import Shape, Size, Val, same_size
from .registry import aten, axis_of, same_sizes, translates
from .shape import whole_numbers


@translates(aten.index_select.default)
def index_select(b: Builder, x: Val, dim: int, index: Val) -> Val:
    if index.dtype not in (torch.int64, torch.int32):
        raise Unsupported(f"an index of dtype {index.dtype}")
    index = b.cast(index, torch.int64)
    ids = b.unsqueeze(index, 0) if index.rank == 0 else index  # it selects one, and the dim stays
    if x.rank == 0:
        return b.squeeze(b.emit("Gather", b.unsqueeze(x, 0), ids, axis=0, strict=1), 0)
    return b.emit("Gather", x, ids, axis=axis_of(x, dim), strict=1)


@translates(aten.take.default)
def take(b: Builder, x: Val, index: Val) -> Val:
    if index.dtype != torch.int64 or 0 in x.example:
        raise Unsupported(f"take by {index.dtype}, or of nothing")
    return b.emit("Gather", _flat(b, x), index, axis=0)


def _flat(b: Builder, x: Val) -> Val:
    return b.reshape(x, (math.prod(x.dims),))


@translates(aten.gather.default)
def gather(b: Builder, x: Val, dim: int, index: Val, *, sparse_grad: bool = False) -> Val:
    if x.rank == 0:
        taken = b.emit("GatherElements", b.unsqueeze(x, 0), _flat(b, b.cast(index, torch.int64)), axis=0, strict=1)
        return b.reshape(taken, index.dims)
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
    """What is alike for all that a mask chooses is put there, or rows are put or added along axes that are one."""
    given = [(i, v) for i, v in enumerate(indices) if v is not None]
    axis, index = given[0]
    if len(given) > 1:
        return _put_along(b, x, [i for i, _ in given], [v for _, v in given], values, accumulate)
    whole = index.dtype in (torch.int64, torch.int32)
    if len(given) == 1 and not accumulate and whole and values.dtype == x.dtype:
        return _put(b, x, axis, b.cast(index, torch.int64), values)
    if len(given) == 1 and accumulate and whole and values.dtype == x.dtype:
        picked = (*x.dims[:axis], *index.dims, *x.dims[axis + 1 :])
        rows = values if tuple(values.dims) == picked else b.expand(values, picked)
        return b.emit("GatherGrad", rows, b.cast(index, torch.int64), x, axis=axis)
    rest = x.rank - axis - index.rank
    if index.dtype != torch.bool or rest < 0 or values.rank > rest or accumulate:
        raise Unsupported("index_put other than of the same by a mask, or along axes")
    if not all(map(same_size, index.dims, x.dims[axis:])) or (values.rank and values.dtype != x.dtype):
        raise Unsupported("index_put by a mask of other sizes, or of another dtype")
    return b.emit("Where", b.unsqueeze(index, *range(index.rank, index.rank + rest)), b.cast(values, x.dtype), x)


def _put_along(b: Builder, x: Val, axes: list[int], ids: list[Val], values: Val, accumulate: bool) -> Val:
    """Rows put along axes that lie side by side, as one axis of as many places."""
    first, end = axes[0], axes[-1] + 1
    if axes != list(range(first, end)) or any(v.dtype not in (torch.int64, torch.int32) for v in ids):
        raise Unsupported("index_put by masks, or by indices of axes that lie apart")
    sizes = x.dims[first:end]
    count = math.prod(sizes)
    place = index(b, b.reshape(whole_numbers(b, 0, count), sizes), list(ids))
    place.shape = _broadcast(ids)
    flat = b.reshape(x, (*x.dims[:first], count, *x.dims[end:]))
    return b.reshape(index_put(b, flat, [*[None] * first, place], values, accumulate), x.dims)


def _broadcast(vals: list[Val]) -> tuple[Any, ...]:
    """The common shape of several values; a size of 1 gives way."""
    rank = max(v.rank for v in vals)
    shape: list[Any] = [1] * rank
    for v in vals:
        for i, size in enumerate(v.dims, start=rank - v.rank):
            if not (isinstance(size, int) and size == 1):
                shape[i] = size
    return tuple(shape)


def _need_ids(index: Val, *dtypes: torch.dtype) -> None:
    if index.dtype not in dtypes:
        raise Unsupported(f"an index of {index.dtype}")


@translates(aten.index_add.default)
def index_add(b: Builder, x: Val, dim: int, index: Val, source: Val, *, alpha: Any = 1) -> Val:
    if x.rank == 0 or source.rank != x.rank or source.dtype != x.dtype:
        raise Unsupported("index_add to a scalar, or of another rank or dtype")
    _need_ids(index, torch.int32, torch.int64)
    ids = b.cast(index, torch.int64)
    ids = b.unsqueeze(ids, 0) if index.rank == 0 else ids
    if not (isinstance(alpha, (int, float)) and alpha == 1):
        source = b.emit("Mul", source, b.scalar(alpha, source.dtype))
    return b.emit("GatherGrad", source, ids, x, axis=axis_of(x, dim), strict=1)


@translates(aten.scatter_add.default)
def scatter_add(b: Builder, x: Val, dim: int, index: Val, source: Val) -> Val:
    if x.rank == 0 or source.dtype != x.dtype or tuple(index.dims) != tuple(source.dims):
        raise Unsupported("scatter_add to a scalar, or of a part of its source")
    return _joined(b, x, axis_of(x, dim), index, source, "sum")


@translates(aten.scatter_reduce.two)
def scatter_reduce(
    b: Builder, x: Val, dim: int, index: Val, source: Val, reduce: str, *, include_self: bool = True
) -> Val:
    if x.rank == 0 or source.dtype != x.dtype or tuple(index.dims) != tuple(source.dims):
        raise Unsupported("scatter_reduce to a scalar, or of a part of its source")
    return _joined(b, x, axis_of(x, dim), index, source, reduce, include_self)


@translates(aten.index_reduce.default)
def index_reduce(
    b: Builder, x: Val, dim: int, index: Val, source: Val, reduce: str, *, include_self: bool = True
) -> Val:
    if x.rank == 0 or source.rank != x.rank or source.dtype != x.dtype or index.rank != 1:
        raise Unsupported("index_reduce to a scalar, or of another rank or dtype, or by no list")
    axis = axis_of(x, dim)
    _need_ids(index, torch.int32, torch.int64)
    if reduce == "sum" or not same_sizes(source.dims, (*x.dims[:axis], *index.dims, *x.dims[axis + 1 :])):
        raise Unsupported(f"index_reduce of a {reduce}, or of a source of other sizes")
    index = b.expand(b.unsqueeze(index, *range(1, x.rank - axis)), source.dims)
    return _joined(b, x, axis, index, source, reduce, include_self)


_REDUCTIONS = {"prod": "mul", "amax": "max", "amin": "min"}


def _joined(b: Builder, x: Val, axis: int, index: Val, source: Val, reduce: str, with_x: bool = True) -> Val:
    """Elements with what is put into their places; or of what is put in alone, where something is."""
    dtype, dims = x.dtype, x.dims
    if dtype == torch.bool or (reduce == "mean" and dtype not in (torch.int64, *_FLOATS)):
        raise Unsupported(f"{reduce} of {dtype} by an index")
    wide = dtype if dtype.is_floating_point else torch.int64
    x, source, index = b.cast(x, wide), b.cast(source, wide), b.cast(index, torch.int64)
    said = {"axis": axis, "strict": 1}
    if not with_x:
        named, there = _is_named(b, x, axis, index), x
        x = b.emit("Where", named, b.scalar(_nothing(reduce, wide), wide), there)
        if reduce in ("amax", "amin") and (there.grad or source.grad):
            # Of equal extremes each has its part of the gradient, and PyTorch counts what was there with them.
            there = b.detached(there)
            extreme = b.emit(
                "ScatterElements", b.detached(x), index, b.detached(source), reduction=_REDUCTIONS[reduce], **said
            )
            x = b.emit("Where", b.emit("And", named, b.emit("Equal", there, extreme)), there, x)
    if reduce in _REDUCTIONS:
        return b.cast(b.emit("ScatterElements", x, index, source, reduction=_REDUCTIONS[reduce], **said), dtype)
    total = b.emit("GatherElementsGrad", source, index, x, **said)
    if reduce == "sum":
        return b.cast(total, dtype)
    ones = b.full(index.dims, 1, wide)
    count = b.emit("GatherElementsGrad", ones, index, b.full(dims, int(with_x), wide), **said)
    if not with_x:
        count = b.emit("Max", count, b.scalar(1, wide))
    return b.emit("Div" if wide.is_floating_point else "FloorDiv", total, count)


_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _nothing(reduce: str, dtype: torch.dtype) -> float:
    """What changes nothing that it is joined with."""
    if reduce in ("amax", "amin"):
        largest = math.inf if dtype.is_floating_point else torch.iinfo(dtype).max
        return largest if reduce == "amin" else -largest - (not dtype.is_floating_point)
    return int(reduce == "prod")


def _is_named(b: Builder, x: Val, axis: int, index: Val) -> Val:
    """Which elements an index names."""
    found, none = b.full(index.dims, 1.0, torch.float32), b.full(x.dims, 0.0, torch.float32)
    return b.cast(b.emit("GatherElementsGrad", found, index, none, axis=axis, strict=1), torch.bool)


@translates(aten.scatter.value)
def scatter_value(b: Builder, x: Val, dim: int, index: Val, value: Any) -> Val:
    if x.rank == 0 or index.dtype != torch.int64:
        raise Unsupported("scatter to a scalar, or by an index that is not int64")
    return b.emit("Where", _is_named(b, x, axis_of(x, dim), index), b.scalar(value, x.dtype), x)


@translates(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(b: Builder, x: Val, dim: int, index: Val, value: Any) -> Val:
    if index.dtype != torch.int64:
        raise Unsupported("index_fill by an index that is not int64")
    if isinstance(value, Val) and value.grad:
        raise Unsupported("index_fill with a value that is trained")
    if x.rank == 0:
        return b.squeeze(index_fill(b, b.unsqueeze(x, 0), 0, index, value), 0)
    axis = axis_of(x, dim)
    ids = b.unsqueeze(index, 0) if index.rank == 0 else index
    found, none = b.full(ids.dims, 1.0, torch.float32), b.full((x.dims[axis],), 0.0, torch.float32)
    found = b.cast(b.emit("GatherGrad", found, ids, none, axis=0), torch.bool)
    return b.emit("Where", b.unsqueeze(found, *range(1, x.rank - axis)), b.scalar(value, x.dtype), x)


@translates(aten.index_copy.default)
def index_copy(b: Builder, x: Val, dim: int, index: Val, source: Val) -> Val:
    if x.rank == 0 or source.rank != x.rank or source.dtype != x.dtype:
        raise Unsupported("index_copy to a scalar, or of another rank or dtype")
    _need_ids(index, torch.int64)
    return _put(b, x, axis_of(x, dim), b.unsqueeze(index, 0) if index.rank == 0 else index, source, strict=1)


@translates(aten.put.default)
def put(b: Builder, x: Val, index: Val, source: Val, accumulate: bool = False) -> Val:
    if source.dtype != x.dtype or 0 in x.example or (accumulate and not x.dtype.is_floating_point):
        raise Unsupported(f"put of {source.dtype} into {x.dtype}, or into nothing")
    _need_ids(index, torch.int64)
    if not same_size(math.prod(index.dims), math.prod(source.dims)):
        raise Unsupported("put of another number of elements than there are places")
    flat, ids, source = _flat(b, x), _flat(b, index), _flat(b, source)
    out = b.emit("GatherGrad", source, ids, flat, axis=0) if accumulate else _put(b, flat, 0, ids, source)
    return b.reshape(out, x.dims)


def _put(b: Builder, x: Val, axis: int, index: Val, values: Val, strict: int = 0) -> Val:
    """Rows along an axis replaced by those that `values` is broadcast to, of several for one place by the last.

    Each of them has the gradient of its place.
    """
    picked = (*x.dims[:axis], *index.dims, *x.dims[axis + 1 :])
    count, n = math.prod(index.dims), x.dims[axis]
    if 0 in (*index.example, *x.example):
        raise Unsupported(f"{count} rows put into {n}")
    rows = b.reshape(b.expand(values, picked), (*x.dims[:axis], count, *x.dims[axis + 1 :]))
    flat = b.emit("Gather", whole_numbers(b, 0, n), _flat(b, index), axis=0, strict=strict)  # counted from the front
    stays, place = _last_put(b, (n,), 0, flat, whole_numbers(b, 1, count + 1))
    stays = b.unsqueeze(stays, *range(1, x.rank - axis))
    taken = b.emit("Gather", b.detached(rows), place, axis=axis, strict=1)
    return _replaced(b, x, stays, taken, "GatherGrad", rows, flat, axis)


def _replaced(b: Builder, x: Val, stays: Val, taken: Val, add: str, source: Val, index: Val, axis: int) -> Val:
    """`x` where it stays, else what is taken; all of a source has the gradient of where the op `add` would add it."""
    out = b.emit("Where", stays, b.detached(x), taken)
    parts = [b.emit("Where", stays, x, b.full((), 0, x.dtype))] if x.grad else []
    if source.grad:
        parts.append(b.emit(add, source, index, b.full(x.dims, 0, x.dtype), axis=axis, strict=1))
    if not parts:
        return out
    return b.with_gradient_of(out, parts[0] if len(parts) == 1 else b.emit("Add", *parts))


def _last_put(b: Builder, shape: Shape, axis: int, index: Val, order: Val) -> tuple[Val, Val]:
    """Where nothing is put, and which, counted from 1 by `order`, was the last that was, less one."""
    none = b.full(shape, 0, torch.int64)
    last = b.emit("ScatterElements", none, index, order, axis=axis, strict=1, reduction="max")
    place = b.emit("Max", b.emit("Sub", last, b.const(1, torch.int64)), b.const(0, torch.int64))
    return b.emit("Equal", last, b.const(0, torch.int64)), place


@translates(aten.scatter.src)
def scatter(b: Builder, x: Val, dim: int, index: Val, source: Val) -> Val:
    """Elements put into lines, of several for one place the last; each has the gradient of its place."""
    _need_ids(index, torch.int64)
    if x.rank == 0 or source.dtype != x.dtype or not same_sizes(index.dims, source.dims):
        raise Unsupported("scatter to a scalar, or of a part of its source")
    axis = axis_of(x, dim)
    others = [(*v.dims[:axis], *v.dims[axis + 1 :]) for v in (x, index)]
    if not same_sizes(*others) or 0 in (*index.example, *x.example):
        raise Unsupported("scatter to a part of the lines")
    order = b.unsqueeze(whole_numbers(b, 1, index.dims[axis] + 1), *range(1, x.rank - axis))
    stays, place = _last_put(b, x.dims, axis, index, b.expand(order, index.dims))
    taken = b.emit("GatherElements", b.detached(source), place, axis=axis, strict=1)
    return _replaced(b, x, stays, taken, "GatherElementsGrad", source, index, axis)


@translates(aten.histc.default)
def histc(b: Builder, x: Val, bins: int = 100, min: Any = 0, max: Any = 0) -> Val:
    """How many numbers are in each of equally wide parts of a range, the last of which has its end."""
    if not (isinstance(min, (int, float)) and isinstance(max, (int, float)) and min < max and x.dtype in _FLOATS[:2]):
        raise Unsupported(f"histc of {x.dtype} from {min} to {max}")
    flat = _flat(b, b.detached(x))
    low, high, n = (b.const(float(v), x.dtype) for v in (min, max, bins))
    width = b.emit("Sub", high, low)
    place = b.emit("Div", b.emit("Mul", b.emit("Sub", flat, low), n), width)
    within = b.emit("And", b.emit("GreaterOrEqual", flat, low), b.emit("LessOrEqual", flat, high))
    place = b.emit("Where", within, place, b.const(0.0, x.dtype))
    place = b.emit("Min", b.cast(place, torch.int64), b.const(bins - 1, torch.int64))
    found = b.cast(within, x.dtype)
    return b.emit("GatherGrad", found, place, b.full((bins,), 0.0, x.dtype), axis=0, strict=1)


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
