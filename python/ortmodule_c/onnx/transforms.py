"""DFT: products by a table of sines and cosines."""

import math

import torch

from ..errors import Unsupported
from ..lowering.draft import Val
from .importer import Given, Importer, Results


def dft_17(t: Importer, node: Given, x: Val, length: Val | None = None) -> Results:
    return _dft(t, node, x, length, node.attributes["axis"])


def dft(t: Importer, node: Given, x: Val, length: Val | None = None, axis: Val | None = None) -> Results:
    return _dft(t, node, x, length, -2 if axis is None else int(t.known(axis, "the axis")))


def _dft(t: Importer, node: Given, x: Val, length: Val | None, axis: int) -> Results:
    """The last dim has real and imaginary parts, or real ones alone."""
    axis %= x.rank
    inverse, onesided = bool(node.attributes["inverse"]), bool(node.attributes["onesided"])
    has, parts = int(x.dims[axis]), int(x.dims[-1])
    whole = parts == 1 or not (inverse and onesided)
    n = int(t.known(length, "the length")) if length is not None else has if whole else 2 * (has - 1)
    if not x.dtype.is_floating_point or parts > 2 or axis == x.rank - 1:
        raise Unsupported(f"a transform of {x.dtype} with {parts} parts along axis {axis}")
    if inverse and onesided:  # the other half mirrors the first
        given, wanted, twice = torch.arange(n // 2 + 1), torch.arange(n), torch.full((n // 2 + 1,), 2.0)
        twice[0] = 1
        if n % 2 == 0:
            twice[-1] = 1
    else:
        given, wanted = torch.arange(n), torch.arange(n // 2 + 1 if onesided else n)
        twice = torch.ones(n)
    angle = (given[:, None] * wanted % n).double() * (2 * math.pi / n)
    table = torch.polar(twice[:, None].double().expand(angle.shape), angle if inverse else -angle)
    table = table / n if inverse else table
    rows = [[table.real, table.imag], [-table.imag, table.real]][:parts]
    if inverse and onesided:
        rows = [row[:1] for row in rows]
    columns = len(rows[0])
    matrix = torch.stack([torch.stack(row, -1) for row in rows], 1)  # given, parts, wanted, parts of the result
    x = _fitted(t, x, axis, len(given))
    perm = [i for i in range(x.rank) if i not in (axis, x.rank - 1)]
    lines = t.emit("Transpose", x, perm=[*perm, axis, x.rank - 1])
    around = [int(x.dims[i]) for i in perm]
    flat = t.emit("Reshape", lines, t.const([math.prod(around), len(given) * parts]))
    y = t.emit("MatMul", flat, t.tensor(matrix.reshape(len(given) * parts, -1).to(x.dtype)))
    y = t.emit("Reshape", y, t.const([*around, len(wanted), columns]))
    order = [*perm, axis, x.rank - 1]
    return t.emit("Transpose", y, perm=[order.index(i) for i in range(x.rank)])


def _fitted(t: Importer, x: Val, axis: int, n: int) -> Val:
    """As many elements along an axis: zeros at the end, or without what is too much."""
    has = int(x.dims[axis])
    if has > n:
        return t.emit("Slice", x, *[t.const([v]) for v in (0, n, axis)])
    pads = [0] * (2 * x.rank)
    pads[x.rank + axis] = n - has
    return t.emit("Pad", x, t.const(pads)) if has < n else x
