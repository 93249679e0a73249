"""Det: products of pivots."""

import torch

from ..lowering.draft import Val
from .importer import Given, Importer, Results


def det(t: Importer, node: Given, x: Val) -> Results:
    """Elimination, row and column of the largest element of what is left going in each step.

    A pivot of 0 thus leaves a matrix of zeros, with one row at least if it is not the last: then no element has a
    gradient, as there are two factors of 0.
    """
    *around, n, _ = (int(d) for d in x.dims)
    a = t.emit("Reshape", x, t.const([-1, n, n]))
    product: Val = t.tensor(torch.ones(int(a.dims[0]), dtype=x.dtype))
    for size in range(n, 0, -1):
        flat = t.emit("Reshape", a, t.const([-1, size * size]))
        at = t.emit("ArgMax", t.emit("Abs", t.emit("Detach", flat)), axis=1, keepdims=1)
        row, column = t.emit("FloorDiv", at, t.const(size)), t.emit("Mod", at, t.const(size))
        pivot = t.emit("GatherElements", flat, at, axis=1)
        product = t.emit(
            "Mul", product, t.emit("Mul", t.emit("Squeeze", pivot, t.const([1])), _sign(t, row, column, x))
        )
        if size == 1:
            break
        rows, columns = _others(t, row, size), _others(t, column, size)
        beside = _picked(t, a, rows, column)
        above = _picked(t, a, row, columns)
        none = t.emit("Equal", pivot, t.like(x, 0))
        divisor = t.emit("Unsqueeze", t.emit("Where", none, t.like(x, 1), pivot), t.const([2]))
        a = t.emit("Sub", _picked(t, a, rows, columns), t.emit("MatMul", t.emit("Div", beside, divisor), above))
    return t.emit("Reshape", product, t.const(around))


def _others(t: Importer, place: Val, size: int) -> Val:
    """All places but one of each matrix."""
    rest = t.tensor(torch.arange(size - 1)[None])
    return t.emit("Add", rest, t.cast(t.emit("GreaterOrEqual", rest, place), torch.int64))


def _picked(t: Importer, a: Val, rows: Val, columns: Val) -> Val:
    """Elements of each matrix where its rows and columns meet."""
    n, size = int(a.dims[1]), int(rows.dims[1]) * int(columns.dims[1])
    starts = t.emit("Unsqueeze", t.emit("Mul", rows, t.const(n)), t.const([2]))
    places = t.emit("Add", starts, t.emit("Unsqueeze", columns, t.const([1])))
    flat = t.emit("Reshape", a, t.const([-1, n * n]))
    found = t.emit("GatherElements", flat, t.emit("Reshape", places, t.const([-1, size])), axis=1)
    return t.emit("Reshape", found, t.const([-1, int(rows.dims[1]), int(columns.dims[1])]))


def _sign(t: Importer, row: Val, column: Val, x: Val) -> Val:
    odd = t.emit("Mod", t.emit("Add", row, column), t.const(2))
    sign = t.emit("Sub", t.const(1), t.emit("Mul", odd, t.const(2)))
    return t.cast(t.emit("Squeeze", sign, t.const([1])), x.dtype)
