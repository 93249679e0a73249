"""Ops on values of dtypes that the core holds as others: what moves them, sums and products of complex numbers.

The other ops run in PyTorch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ...capture.numbers import is_number
from ...dtypes import CARRIERS, encoded
from ...errors import Unsupported
from ..builder import Builder
from ..draft import Carried, Val, carried_as
from . import elementwise, indexing, reduce, shape  # noqa: F401 (the moves of other dtypes)
from .registry import TABLE, Translation, aten, result_dtype

CARRIED: dict[OpOverload, Translation] = {}
# What gives elements of its operands as they are, dims being counted where `_DIMS` says.
_MOVES = (
    *(aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default, aten.positive.default),
    *(aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default),
    *(aten.resolve_conj.default, aten.resolve_neg.default),
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints),
    *(aten.view_as.default, aten.unflatten.int, aten.reshape_as.default, aten.view_copy.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default),
    *(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default),
    *(aten.permute.default, aten.transpose.int, aten.swapaxes.default, aten.swapdims.default),
    *(aten.select.int, aten.slice.Tensor, aten.narrow.default, aten.index_select.default),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default, aten.unbind.int),
    *(aten.cat.default, aten.concat.default, aten.concatenate.default, aten.stack.default),
    *(aten.repeat.default, aten.tile.default, aten.flip.default, aten.roll.default, aten.constant_pad_nd.default),
    *(aten.index.Tensor, aten.slice_scatter.default, aten.select_scatter.default),
)
_DIMS = {"dim", "dims", "dim0", "dim1", "axis0", "axis1"}
_PUT = {aten.slice_scatter.default, aten.select_scatter.default}
_ADD_A_DIM = {aten.unsqueeze.default, aten.stack.default}


def touches_carried(args: Any, kwargs: Any, result: Any) -> bool:
    """Whether an op takes or gives a tensor that the core holds as another."""
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda v: isinstance(v, Val))
    fakes = pytree.tree_leaves(result)
    return any(isinstance(v, Carried) for v in leaves) or any(
        isinstance(t, Tensor) and t.dtype in CARRIERS for t in fakes
    )


def _translates(*ops: OpOverload) -> Callable[[Translation], Translation]:
    def add(function: Translation) -> Translation:
        CARRIED.update(dict.fromkeys(ops, function))
        return function

    return add


@_translates(*_MOVES)
def move(b: Builder, *args: Any, **kwargs: Any) -> Any:
    """The same op on what carries its operands, which are of one dtype."""
    op, first = b.op, next(v for v in pytree.tree_leaves(args, is_leaf=_is_val) if isinstance(v, Val))
    moved = pytree.tree_leaves(args if op in _PUT else args[0], is_leaf=_is_val)
    if any(not isinstance(v, Carried) or v.dtype != first.dtype for v in moved if isinstance(v, Val)):
        raise Unsupported(f"{op} of several dtypes")
    if first.rank == 0 and op is aten.index_select.default:
        raise Unsupported("an element of a scalar")
    if op is aten.constant_pad_nd.default and any(v != 0 for v in (*args[2:], *kwargs.values())):
        raise Unsupported("a pad by another number than 0")
    if first.dtype.is_complex:
        args = tuple([_of_pairs(op, a.name, v, first.rank) for a, v in zip(op._schema.arguments, args, strict=False)])
        if kwargs.keys() & _DIMS or (op is aten.roll.default and (len(args) < 3 or not args[2])):
            raise Unsupported(f"{op} of complex numbers, called like that")
    given = pytree.tree_map_only(Carried, lambda v: v.carrier, args, is_leaf=_is_val)
    part = b.of_part(op, pytree.tree_map_only(Tensor, encoded, b.result))
    return _carrying(TABLE[op](part, *given, **kwargs), first.dtype)


def _is_val(v: Any) -> bool:
    return isinstance(v, Val)


def _of_pairs(op: OpOverload, name: str, value: Any, rank: int) -> Any:
    """An argument for pairs along one more dim, behind all others."""
    if op in (aten.repeat.default, aten.tile.default) and name in ("repeats", "dims"):
        return [*value, 1]
    if name in _DIMS and value is not None:
        n = max(rank + (op in _ADD_A_DIM), 1)
        dims = [d + n if d < 0 else d for d in ([value] if isinstance(value, int) else value)]
        return dims[0] if isinstance(value, int) else [*dims, rank] if op is aten.permute.default else dims
    if name == "pad":
        return [0, 0, *value]
    return value


def _carrying(result: Any, dtype: torch.dtype) -> Any:
    if isinstance(result, (list, tuple)):
        return [_carrying(v, dtype) for v in result]
    return Carried(result, dtype)


@_translates(aten.view_as_real.default, aten.view_as_real_copy.default)
def view_as_real(_b: Builder, x: Carried) -> Val:
    return x.carrier


@_translates(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def view_as_complex(b: Builder, x: Val) -> Val:
    return Carried(x, result_dtype(b))


@_translates(aten.complex.default)
def complex_(b: Builder, real: Val, imag: Val) -> Val:
    shape_ = tuple(b.result.shape)
    parts = [b.unsqueeze(b.expand(v, shape_), len(shape_)) for v in (real, imag)]
    return Carried(b.emit("Concat", *parts, axis=len(shape_)), result_dtype(b))


@_translates(aten.t.default)
def t(b: Builder, x: Carried) -> Val:
    perm = [*reversed(range(x.rank)), *([x.rank] if x.dtype.is_complex else [])]
    return Carried(b.transpose(x.carrier, perm), x.dtype)


@_translates(aten.add.Tensor, aten.sub.Tensor)
def add(b: Builder, x: Val, y: Val, *, alpha: Any = 1) -> Val:
    """Of two tensors of complex numbers; the second is multiplied also by 1, of which infinity makes NaN."""
    dtype = result_dtype(b)
    both = isinstance(x, Carried) and isinstance(y, Carried) and x.dtype == y.dtype == dtype
    if not (both and dtype.is_complex) or not isinstance(alpha, (int, float, complex)):
        raise Unsupported("a sum other than of two tensors of complex numbers")
    first, second = (b.unsqueeze(v.carrier, *range(len(b.result.shape) - v.rank)) for v in (x, y))  # type: ignore[attr-defined]
    factor = -alpha if b.aten_name == "sub" else alpha
    times = b.emit("Concat", *_multiplied(b, Carried(second, dtype), factor, dtype), axis=len(b.result.shape))
    out = b.emit("Add", first, times)
    if alpha == 1 and out.grad:
        out = b.with_gradient_of(out, b.emit("Add" if factor == 1 else "Sub", first, second))
    return Carried(out, dtype)


@_translates(aten.neg.default)
def neg(b: Builder, x: Carried) -> Val:
    if not x.dtype.is_complex:
        raise Unsupported(f"neg of {x.dtype}")
    zero = b.const(0.0, CARRIERS[x.dtype])
    return Carried(b.emit("Sub", zero, x.carrier), x.dtype)  # a zero stays positive


@_translates(aten._conj.default, aten._conj_physical.default, aten._conj_copy.default)
def conj(b: Builder, x: Carried) -> Val:
    if not x.dtype.is_complex:
        return x
    real, imag = _parts(b, x)
    return Carried(b.emit("Concat", real, b.emit("Neg", imag), axis=x.rank), x.dtype)


def _parts(b: Builder, x: Carried) -> list[Val]:
    """Real and imaginary parts, each along a last dim of one."""
    parts = b.emit_all("Split", x.carrier, b.ints([1, 1]), outputs=2, axis=x.rank)
    for part in parts:
        part.shape = None if x.shape is None else (*x.shape, 1)
    return parts


@_translates(aten.real.default, aten.imag.default)
def part_of(b: Builder, x: Carried) -> Val:
    if not x.dtype.is_complex:
        raise Unsupported(f"a part of {x.dtype}")
    return b.squeeze(_parts(b, x)[b.aten_name == "imag"], x.rank)


def _factors(b: Builder, v: Any, dtype: torch.dtype) -> list[Val]:
    """Real and imaginary parts of a number, or of a tensor along a last dim of one, beside results of the dtype."""
    real = CARRIERS[dtype]
    if not isinstance(v, Val):
        number = complex(v)
        return [b.const(part, real) for part in (number.real, number.imag)]
    if isinstance(v, Carried):
        if v.dtype != dtype:
            raise Unsupported(f"a product of {v.dtype} and {dtype}")
        return _parts(b, v)
    return [b.unsqueeze(b.cast(v, real), v.rank), b.const(0.0, real)]


@_translates(aten.mul.Tensor, aten.mul.Scalar)
def mul(b: Builder, x: Val, y: Any) -> Val:
    """Of a number that is real the imaginary part is multiplied too, which tells where the other is infinite."""
    dtype, rank = result_dtype(b), len(b.result.shape)
    if not dtype.is_complex or is_number(y) or isinstance(y, (torch.SymInt, torch.SymFloat)):
        raise Unsupported("a product other than of known complex numbers")
    return Carried(b.emit("Concat", *_multiplied(b, x, y, dtype), axis=rank), dtype)


def _multiplied(b: Builder, x: Any, y: Any, dtype: torch.dtype) -> list[Val]:
    """Real and imaginary parts of a product, each along a last dim of one."""
    (a, c), (p, q) = _factors(b, x, dtype), _factors(b, y, dtype)
    real = b.emit("Sub", b.emit("Mul", a, p), b.emit("Mul", c, q))
    return [real, b.emit("Add", b.emit("Mul", a, q), b.emit("Mul", c, p))]


@_translates(aten.polar.default)
def polar(b: Builder, length: Val, angle: Val) -> Val:
    """Without a gradient, which is PyTorch's own where a length is 0."""
    if length.grad or angle.grad:
        raise Unsupported("the gradient of polar")
    return complex_(b, *[b.emit("Mul", length, b.emit(op, angle)) for op in ("Cos", "Sin")])


@_translates(aten.sum.default, aten.sum.dim_IntList)
def sum_(b: Builder, x: Carried, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Val:
    if not x.dtype.is_complex or x.dtype != result_dtype(b) or x.rank == 0:
        raise Unsupported(f"a sum of {x.dtype}")
    return Carried(reduce.reduce(b, "ReduceSum", x.carrier, reduce.reduced_axes(x, dim), keepdim), x.dtype)


@_translates(aten.mm.default, aten.bmm.default, aten.matmul.default)
def matmul(b: Builder, x: Val, y: Val) -> Val:
    """One product of reals: of pairs (a, b) along the columns by rows (c, d) and (-d, c)."""
    dtype = result_dtype(b)
    if not (isinstance(x, Carried) and isinstance(y, Carried) and x.dtype == y.dtype and dtype.is_complex):
        raise Unsupported("a product other than of complex numbers of one dtype")
    if min(x.rank, y.rank) < 2:
        raise Unsupported("a product of vectors")
    real, imag = _parts(b, y)
    turned = b.emit("Concat", b.emit("Neg", imag), real, axis=y.rank)
    rows = b.emit("Concat", b.unsqueeze(y.carrier, y.rank - 1), b.unsqueeze(turned, y.rank - 1), axis=y.rank - 1)
    k, n = y.dims[-2:]
    left = b.reshape(x.carrier, (*x.dims[:-1], x.dims[-1] * 2))
    product = b.emit("MatMul", left, b.reshape(rows, (*y.dims[:-2], k * 2, n * 2)))
    return Carried(b.reshape(product, (*b.result.shape, 2)), dtype)


@_translates(aten._to_copy.default, aten.to.dtype)
def to_dtype(b: Builder, x: Val, *_args: Any, **_kwargs: Any) -> Val:
    """Between complex dtypes, or from numbers of the dtype of their parts."""
    dtype = result_dtype(b)
    if dtype not in CARRIERS:
        raise Unsupported(f"{x.dtype} as {dtype}")
    if dtype.is_complex and isinstance(x, Carried) and x.dtype.is_complex:
        return Carried(b.cast(x.carrier, CARRIERS[dtype]), dtype)
    if dtype.is_complex and not isinstance(x, Carried):
        real = b.unsqueeze(b.cast(x, CARRIERS[dtype]), x.rank)
        return Carried(b.emit("Concat", real, b.full(real.dims, 0.0, real.dtype), axis=x.rank), dtype)
    raise Unsupported(f"{x.dtype} as {dtype}")


@_translates(aten.copy.default)
def copy(b: Builder, x: Val, source: Val, _non_blocking: bool = False) -> Val:
    if not isinstance(source, Carried) or source.dtype != x.dtype:
        source = to_dtype(b, source)
    assert isinstance(source, Carried)
    return Carried(b.expand(source.carrier, carried_as(x.dtype, tuple(b.result.shape))[1]), x.dtype)


@_translates(aten.where.self)
def where(b: Builder, condition: Val, x: Val, y: Val) -> Val:
    dtype = result_dtype(b)
    if not (isinstance(x, Carried) and isinstance(y, Carried) and x.dtype == y.dtype == dtype):
        raise Unsupported("where of several dtypes")
    if dtype.is_complex:
        condition = b.unsqueeze(condition, condition.rank)
    return Carried(b.emit("Where", condition, x.carrier, y.carrier), dtype)
