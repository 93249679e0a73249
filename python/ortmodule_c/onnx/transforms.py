"""Of signals: DFT and STFT, products by a table of sines and cosines, and the weights of mel bands."""

import math

import torch

from ..errors import Unsupported
from ..lowering.draft import Val
from .importer import Given, Importer, Results, torch_dtype


def dft_17(t: Importer, node: Given, x: Val, length: Val | None = None) -> Results:
    return _given(t, node, x, length, node.attributes["axis"])


def dft(t: Importer, node: Given, x: Val, length: Val | None = None, axis: Val | None = None) -> Results:
    return _given(t, node, x, length, -2 if axis is None else int(t.known(axis, "the axis")))


def _given(t: Importer, node: Given, x: Val, length: Val | None, axis: int) -> Val:
    n = None if length is None else int(t.known(length, "the length"))
    return _dft(t, x, n, axis % x.rank, bool(node.attributes["inverse"]), bool(node.attributes["onesided"]))


def stft(t: Importer, node: Given, x: Val, step: Val, window: Val | None = None, length: Val | None = None) -> Results:
    """Of frames of the signal, as far as they are whole."""
    if window is None and length is None:
        raise Unsupported("neither a window nor the length of frames")
    n = int(t.known(length, "the length of frames")) if length is not None else int(window.dims[0]) if window else 0
    every, has = int(t.known(step, "the step")), int(x.dims[1])
    onesided = bool(node.attributes["onesided"])
    if x.rank != 3 or (onesided and int(x.dims[2]) > 1) or (window and int(window.dims[0]) != n) or has < n:
        raise Unsupported(f"frames of {n} of a signal of {tuple(x.dims)}")
    starts = torch.arange((has - n) // every + 1) * every
    frames = t.emit("Gather", x, t.tensor(starts[:, None] + torch.arange(n)), axis=1)
    if window is not None:
        frames = t.emit("Mul", frames, t.emit("Reshape", window, t.const([-1, 1])))
    return _dft(t, frames, n, 2, False, onesided)


def mel_weights(t: Importer, node: Given, *numbers: Val) -> Results:
    """Of how many bands, the length of the transform, the rate of samples, and the lowest and highest frequency."""
    bands, length, rate, *edges = (t.known(v, "the weights of bands").double() for v in numbers)
    low, high = (2595 * torch.log10(1 + hertz / 700) for hertz in edges)
    mels = low + torch.arange(int(bands) + 2) * (high - low) / (bands + 2)
    ends = ((length + 1) * 700 * (10 ** (mels / 2595) - 1) / rate).floor()
    start, centre, end = ends[:-2], ends[1:-1], ends[2:]
    at = torch.arange(int(length) // 2 + 1, dtype=torch.float64)[:, None]
    up = ((at - start) / (centre - start)).where(centre > start, 0.0)
    down = ((end - at) / (end - centre)).where(end > centre, 0.0)
    weights = up.where((at >= start) & (at < centre), down.where((at > centre) & (at < end), (at == centre).double()))
    return t.tensor(weights.to(torch_dtype(node.attributes["output_datatype"])))


def _dft(t: Importer, x: Val, length: int | None, axis: int, inverse: bool, onesided: bool) -> Val:
    """The last dim has real and imaginary parts, or real ones alone."""
    has, parts = int(x.dims[axis]), int(x.dims[-1])
    whole = parts == 1 or not (inverse and onesided)
    n = length if length is not None else has if whole else 2 * (has - 1)
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
