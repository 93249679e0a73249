"""Ops that rearrange, cut, join or make tensors."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...errors import NeedsStatic, Unsupported
from ..builder import Builder
from ..draft import Size, Val, same_size, static
from .registry import INT64_MAX, aten, axes_of, axis_of, result_dtype, result_shape, translates


@translates(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.view_as.default,
    aten.unflatten.int,
    aten.reshape_as.default,
)
def reshape(b: Builder, x: Val, *_shape: Any, **_kwargs: Any) -> Val:
    return b.reshape(x, result_shape(b))


@translates(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(b: Builder, x: Val, dim: int | list[int] | None = None) -> Val:
    axes = [a for a in axes_of(x, dim) if x.dims[a] == 1]  # PyTorch has decided it for open sizes too
    return b.squeeze(x, *axes) if axes else x


@translates(aten.unsqueeze.default)
def unsqueeze(b: Builder, x: Val, dim: int) -> Val:
    return b.unsqueeze(x, dim + x.rank + 1 if dim < 0 else dim)


@translates(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def expand(b: Builder, x: Val, *_shape: Any, **_kwargs: Any) -> Val:
    return b.expand(x, result_shape(b))


@translates(aten.permute.default)
def permute(b: Builder, x: Val, dims: list[int]) -> Val:
    return b.transpose(x, [axis_of(x, d) for d in dims])


@translates(aten.transpose.int, aten.swapaxes.default, aten.swapdims.default)
def transpose(b: Builder, x: Val, dim0: int, dim1: int) -> Val:
    if x.rank == 0:
        return x
    perm = list(range(x.rank))
    i, j = axis_of(x, dim0), axis_of(x, dim1)
    perm[i], perm[j] = perm[j], perm[i]
    return b.transpose(x, perm)


@translates(aten.t.default, aten.numpy_T.default)
def numpy_t(b: Builder, x: Val) -> Val:
    return b.transpose(x, list(reversed(range(x.rank))))


@translates(aten.mT.default, aten.adjoint.default)
def matrix_t(b: Builder, x: Val) -> Val:
    return transpose(b, x, -2, -1)


@translates(aten.movedim.int, aten.movedim.intlist)
def movedim(b: Builder, x: Val, source: int | list[int], destination: int | list[int]) -> Val:
    sources = [axis_of(x, a) for a in ([source] if isinstance(source, int) else source)]
    targets = [axis_of(x, a) for a in ([destination] if isinstance(destination, int) else destination)]
    perm = [-1] * x.rank
    for s, t in zip(sources, targets, strict=True):
        perm[t] = s
    rest = iter([a for a in range(x.rank) if a not in sources])
    return b.transpose(x, [next(rest) if p < 0 else p for p in perm])


@translates(aten.select.int)
def select(b: Builder, x: Val, dim: int, index: Size) -> Val:
    return b.emit("Gather", x, b.size(index), axis=axis_of(x, dim))


@translates(aten.slice.Tensor)
def slice_(b: Builder, x: Val, dim: int = 0, start: Size | None = None, end: Size | None = None, step: int = 1) -> Val:
    axis = axis_of(x, dim)
    if same_size(x.dims[axis], result_shape(b)[axis]) and step == 1:
        return x
    return b.slice(x, axis, 0 if start is None else start, INT64_MAX if end is None else end, step)


@translates(aten.narrow.default)
def narrow(b: Builder, x: Val, dim: int, start: Size, length: Size) -> Val:
    if isinstance(start, int) and start < 0:
        start += x.dims[axis_of(x, dim)]
    return b.slice(x, axis_of(x, dim), start, start + length)


def _split(b: Builder, x: Val, sizes: Sequence[Size], axis: int) -> list[Val]:
    if len(sizes) == 1:
        return [x]
    return b.emit_all("Split", x, b.ints(sizes), outputs=len(sizes), axis=axis)


@translates(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.split.sizes,
    aten.chunk.default,
    aten.tensor_split.sections,
    aten.unsafe_split.Tensor,
    aten.unsafe_chunk.default,
)
def split(b: Builder, x: Val, _sizes: Any, dim: int = 0) -> list[Val]:
    axis = axis_of(x, dim)
    return _split(b, x, [part.shape[axis] for part in b.result], axis)


@translates(aten.unbind.int)
def unbind(b: Builder, x: Val, dim: int = 0) -> list[Val]:
    axis = axis_of(x, dim)
    return (
        [b.squeeze(part, axis) for part in _split(b, x, [1] * static(x.dims[axis]), axis)] if x.dims[axis] != 0 else []
    )


@translates(aten.cat.default, aten.concat.default, aten.concatenate.default)
def cat(b: Builder, tensors: list[Val], dim: int = 0) -> Val:
    dtype = result_dtype(b)
    rank = len(result_shape(b))
    parts = [b.cast(t, dtype) for t in tensors if t.rank == rank]  # PyTorch lets 1-d empty tensors through
    if len(parts) == 1:
        return parts[0]
    return b.emit("Concat", *parts, axis=dim + rank if dim < 0 else dim)


@translates(aten.stack.default)
def stack(b: Builder, tensors: list[Val], dim: int = 0) -> Val:
    dtype = result_dtype(b)
    axis = dim + len(result_shape(b)) if dim < 0 else dim
    parts = [b.unsqueeze(b.cast(t, dtype), axis) for t in tensors]
    return parts[0] if len(parts) == 1 else b.emit("Concat", *parts, axis=axis)


@translates(aten.repeat.default, aten.tile.default)
def repeat(b: Builder, x: Val, repeats: list[Size]) -> Val:
    rank = max(x.rank, len(repeats))
    x = b.reshape(x, (1,) * (rank - x.rank) + x.dims)
    times = [1] * (rank - len(repeats)) + list(repeats)
    return b.emit("Tile", x, b.ints(times))


@translates(aten.repeat_interleave.self_int)
def repeat_interleave(b: Builder, x: Val, repeats: Size, dim: int | None = None, *, output_size: Any = None) -> Val:
    if dim is None:
        x, dim = b.reshape(x, (math.prod(x.dims),)), 0
    axis = axis_of(x, dim)
    wide = b.unsqueeze(x, axis + 1)
    wide = b.expand(wide, (*x.dims[: axis + 1], repeats, *x.dims[axis + 1 :]))
    return b.reshape(wide, result_shape(b))


@translates(aten.flip.default)
def flip(b: Builder, x: Val, dims: list[int]) -> Val:
    axes = axes_of(x, dims)
    n = len(axes)
    if not n:
        return x
    return b.emit("Slice", x, b.ints([-1] * n), b.ints([-INT64_MAX - 1] * n), b.ints(axes), b.ints([-1] * n))


@translates(aten.roll.default)
def roll(b: Builder, x: Val, shifts: list[Any], dims: list[int] | tuple[()] = ()) -> Val:
    if 0 in x.example:
        return x
    if not dims:
        flat = b.reshape(x, (math.prod(x.dims),))
        return b.reshape(roll(b, flat, shifts, [0]), x.dims) if x.rank else x
    sizes = x.dims
    for shift, dim in zip(shifts, dims, strict=True):
        axis = axis_of(x, dim)
        size = sizes[axis]
        if isinstance(size, int) and size == 0:
            continue
        cut = -shift % size
        if not (isinstance(cut, int) and cut == 0):
            before, after = b.emit_all("Split", x, b.ints([cut, size - cut]), outputs=2, axis=axis)
            x = b.emit("Concat", after, before, axis=axis)
    return x


@translates(aten.constant_pad_nd.default)
def constant_pad(b: Builder, x: Val, pad: list[Size], value: Any = 0) -> Val:
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    pairs = [(0, 0)] * (x.rank - len(pairs)) + pairs
    for size, pair in zip(x.dims, pairs, strict=True):
        cut = [p for p in pair if not statically_known_true(p >= 0)]
        if cut and not (all(isinstance(n, int) for n in (size, *cut)) and -min(cut) <= size and -sum(cut) <= size):
            raise Unsupported("a pad that cuts off more than there is, or by or of an open size")
    pads = b.ints([p[0] for p in pairs] + [p[1] for p in pairs])
    return b.emit("Pad", x, pads, b.scalar(value, x.dtype), mode="constant")


@translates(aten.pad.default)
def pad_(b: Builder, x: Val, pad: list[Size], mode: str = "constant", value: Any = None) -> Val:
    if mode == "circular":
        return _wrapped(b, x, pad)
    if mode in ("reflect", "replicate"):
        return _continued(b, x, pad, mode == "reflect")
    return constant_pad(b, x, pad, 0 if value is None else value)


def _wrapped(b: Builder, x: Val, pad: list[Size]) -> Val:
    """With what lies at the other end of the last dims, the last of them first."""
    if not all(isinstance(p, int) for p in pad):
        raise Unsupported(f"a circular pad of {pad}")
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        axis = x.rank - 1 - i
        if before < 0 or after < 0:  # what is cut off does not come back at the other end
            x = b.slice(x, axis, max(-before, 0), min(after, 0) or INT64_MAX)
        parts = [b.slice(x, axis, -before, INT64_MAX)] if before > 0 else []
        parts += [x, *([b.slice(x, axis, 0, after)] if after > 0 else [])]
        x = x if len(parts) == 1 else b.emit("Concat", *parts, axis=axis)
    return x


def _continued(b: Builder, x: Val, pad: list[Size], reflected: bool) -> Val:
    """With what lies at the ends of the last dims: its reflection, in which the end itself is not, or the end again."""
    if not x.dtype.is_floating_point or not all(isinstance(p, int) for p in pad):
        raise Unsupported(f"a pad of {x.dtype} by {pad} of what is there")
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        axis = x.rank - 1 - i
        places = whole_numbers(b, -before, x.dims[axis] + after)
        last = b.size(x.dims[axis] - 1)
        if reflected:
            places = b.emit("Sub", last, b.emit("Abs", b.emit("Sub", last, b.emit("Abs", places))))
        else:
            places = b.emit("Max", b.emit("Min", places, last), b.const(0, torch.int64))
        sizes = (*x.dims[:axis], x.dims[axis] + before + after, *x.dims[axis + 1 :])
        if before or after:
            x = b.emit("Gather", x, places, axis=axis, strict=1)
            x.shape = sizes
    return x


@translates(aten.diagonal.default)
def diagonal(b: Builder, x: Val, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Val:
    return diagonal_of(b, x, offset, axis_of(x, dim1), axis_of(x, dim2), result_shape(b)[-1])


def diagonal_of(b: Builder, x: Val, offset: int, rows: int, columns: int, length: Size) -> Val:
    """So many elements along two dims, which become a last one."""
    if isinstance(length, int) and length == 0:
        raise Unsupported("a diagonal without elements")
    down, right = max(-offset, 0), max(offset, 0)
    x = b.transpose(x, [*[i for i in range(x.rank) if i not in (rows, columns)], rows, columns])
    if down or not same_size(x.dims[-2], length):
        x, sizes = b.slice(x, x.rank - 2, down, down + length), [*x.dims[:-2], length, x.dims[-1]]
        x.shape = tuple(sizes)
    places = b.unsqueeze(whole_numbers(b, right, right + length), 1)
    return b.squeeze(b.emit("GatherElements", x, b.expand(places, [*x.dims[:-1], 1]), axis=x.rank - 1), x.rank - 1)


def whole_numbers(b: Builder, start: Size, end: Size) -> Val:
    """Those from a start on to before an end."""
    if isinstance(start, int) and isinstance(end, int):
        return b.tensor(torch.arange(start, end), "places")
    return b.emit("Range", *[b.size(v) for v in (start, end, 1)])


@translates(aten.unfold.default)
def unfold(b: Builder, x: Val, dimension: int, size: int, step: int) -> Val:
    """Windows along a dim, each of them along a new last one."""
    if not x.rank:
        return b.slice(b.unsqueeze(x, 0), 0, 0, size)
    axis = axis_of(x, dimension)
    n = result_shape(b)[axis]
    if size == step:
        whole = x if same_size(x.dims[axis], n * size) else b.slice(x, axis, 0, n * size)
        out = b.reshape(whole, [*x.dims[:axis], n, size, *x.dims[axis + 1 :]])
    else:
        firsts = b.emit("Mul", whole_numbers(b, 0, n), b.const(step, torch.int64))
        places = b.emit("Add", b.unsqueeze(firsts, 1), whole_numbers(b, 0, size))
        out = b.emit("Gather", x, places, axis=axis)
    return b.transpose(out, [*[i for i in range(x.rank + 1) if i != axis + 1], axis + 1])


@translates(aten.triu.default, aten.tril.default)
def tri(b: Builder, x: Val, diagonal: int = 0) -> Val:
    return b.emit("Trilu", x, b.scalar(diagonal, torch.int64), upper=int(b.aten_name == "triu"))


@translates(aten.select_scatter.default)
def select_scatter(b: Builder, x: Val, source: Val, dim: int, index: Size) -> Val:
    axis = axis_of(x, dim)
    index = index + x.dims[axis] if index < 0 else index
    return _replace(b, x, b.unsqueeze(source, axis), axis, index, index + 1)


@translates(aten.diagonal_scatter.default)
def diagonal_scatter(b: Builder, x: Val, source: Val, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Val:
    first, second = axis_of(x, dim1), axis_of(x, dim2)
    order = [*[i for i in range(x.rank) if i not in (first, second)], first, second]
    rows, columns = x.dims[first], x.dims[second]
    down = max(-offset, 0)
    if not same_size(source.dims[-1], torch.sym_max(torch.sym_min(rows - down, columns - max(offset, 0)), 0)):
        raise Unsupported("a source of another size than the diagonal has")
    pads = [0] * (source.rank - 1)
    lines = b.ints([*pads, down, *pads, rows - down - source.dims[-1]])
    lines = b.emit("Pad", b.cast(source, x.dtype), lines, b.const(0, x.dtype), mode="constant")
    places = b.emit("Add", whole_numbers(b, 0, rows), b.const(offset, torch.int64))
    on_it = b.emit("Equal", b.unsqueeze(places, 1), whole_numbers(b, 0, columns))
    out = b.emit("Where", on_it, b.unsqueeze(lines, source.rank), b.transpose(x, order))
    return b.transpose(out, [order.index(i) for i in range(x.rank)])


@translates(aten.block_diag.default)
def block_diag(b: Builder, tensors: list[Val]) -> Val:
    dtype, (_, columns) = result_dtype(b), result_shape(b)
    blocks = [b.cast(t, dtype) for t in tensors]
    blocks = [b.reshape(t, (1,) * (2 - t.rank) + t.dims) if t.rank < 2 else t for t in blocks]
    rows: list[Val] = []
    before: Size = 0
    for block in blocks:
        after = columns - before - block.dims[1]
        rows.append(b.emit("Pad", block, b.ints([0, before, 0, after]), b.const(0, dtype), mode="constant"))
        before = before + block.dims[1]
    return rows[0] if len(rows) == 1 else b.emit("Concat", *rows, axis=0)


@translates(aten.slice_scatter.default)
def slice_scatter(
    b: Builder, x: Val, source: Val, dim: int = 0, start: Size | None = None, _end: Any = None, step: int = 1
) -> Val:
    axis = axis_of(x, dim)
    if same_size(source.dims[axis], x.dims[axis]):
        return b.cast(source, x.dtype)
    first = 0 if start is None else start
    if first < 0:
        first = torch.sym_max(0, first + x.dims[axis])
    if step != 1:
        return _replace_apart(b, x, source, axis, first, step)
    return _replace(b, x, source, axis, first, first + source.dims[axis])


def _replace(b: Builder, x: Val, source: Val, axis: int, start: Size, end: Size) -> Val:
    """`x` with [start, end) of one dim taken from `source`."""
    parts = [b.cast(source, x.dtype)]
    if not same_size(start, 0):
        parts.insert(0, b.slice(x, axis, 0, start))
    if not same_size(x.dims[axis], end):
        parts.append(b.slice(x, axis, end, INT64_MAX))
    return parts[0] if len(parts) == 1 else b.emit("Concat", *parts, axis=axis)


def _replace_apart(b: Builder, x: Val, source: Val, axis: int, first: Size, step: int) -> Val:
    """`x` with every `step`-th of one dim, from the first on, taken from `source`."""
    n = source.dims[axis]
    if same_size(n, 0):
        return x
    places, start, apart = whole_numbers(b, 0, x.dims[axis]), b.size(first), b.const(step, torch.int64)
    nearest = b.emit("Div", b.emit("Sub", places, start), apart)
    nearest = b.emit("Max", b.emit("Min", nearest, b.size(n - 1)), b.const(0, torch.int64))
    taken = b.emit("Equal", b.emit("Add", b.emit("Mul", nearest, apart), start), places)
    if axis < x.rank - 1:
        taken = b.unsqueeze(taken, *range(1, x.rank - axis))
    return b.emit("Where", taken, b.emit("Gather", b.cast(source, x.dtype), nearest, axis=axis), x)


# Making tensors


@translates(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(b: Builder, *bounds: Any, **_kwargs: Any) -> Val:
    dtype = result_dtype(b)
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    if all(isinstance(v, (int, float)) for v in (start, end, step)):
        return b.tensor(torch.arange(start, end, step, dtype=dtype), "arange")
    whole = [int(v) if isinstance(v, float) and v.is_integer() else v for v in (start, end, step)]
    if not all(isinstance(v, (int, torch.SymInt)) for v in whole):
        raise NeedsStatic("arange of symbolic floats")
    out = b.emit("Range", *[b.size(v) for v in whole])
    return b.cast(out, dtype)


@translates(aten.eye.default, aten.eye.m)
def eye(b: Builder, n: Size, m: Size | None = None, **_kwargs: Any) -> Val:
    rows, columns = whole_numbers(b, 0, n), whole_numbers(b, 0, n if m is None else m)
    return b.cast(b.emit("Equal", b.unsqueeze(rows, 1), columns), result_dtype(b))


@translates(aten.full.default, aten.full_like.default, aten.new_full.default)
def full(b: Builder, _like: Any, *args: Any, **_kwargs: Any) -> Val:
    return b.full(result_shape(b), args[-1], result_dtype(b))


@translates(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
)
def zeros(b: Builder, *_args: Any, **_kwargs: Any) -> Val:
    return b.full(result_shape(b), 0, result_dtype(b))


@translates(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(b: Builder, *_args: Any, **_kwargs: Any) -> Val:
    return b.full(result_shape(b), 1, result_dtype(b))


@translates(aten.scalar_tensor.default)
def scalar_tensor(b: Builder, value: Any, **_kwargs: Any) -> Val:
    return b.scalar(value, result_dtype(b))


@translates(aten.fill.Scalar, aten.fill.Tensor)
def fill(b: Builder, x: Val, value: Any) -> Val:
    return b.full(x.dims, value, x.dtype)


@translates(aten.zero.default)
def zero(b: Builder, x: Val) -> Val:
    return fill(b, x, 0)
