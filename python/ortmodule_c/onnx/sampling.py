"""Resize, Upsample, GridSample and DeformConv: elements between those that are there."""

import itertools
import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from ..lowering.draft import Val
from ..lowering.translations.interpolation import turned_round
from .importer import Given, Importer, Results
from .windows import by_channel

_NEAREST = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round_prefer_floor": lambda x: (x - 0.5).ceil(),
    "round_prefer_ceil": lambda x: (x + 0.5).floor(),
}
_SAID: dict[str, Any] = {  # what Resize says since version 11, 13, 18 or 19, and had said before
    "coordinate_transformation_mode": "asymmetric",
    "nearest_mode": "floor",
    "cubic_coeff_a": -0.75,
    "exclude_outside": 0,
    "extrapolation_value": 0.0,
    "keep_aspect_ratio_policy": "stretch",
    "antialias": 0,
}


# Resize


def upsample_7(t: Importer, node: Given, x: Val) -> Results:
    return _resize(t, x, _SAID | node.attributes, [float(s) for s in node.attributes["scales"]], None, None)


def resize_10(t: Importer, node: Given, x: Val, scales: Val) -> Results:
    """Upsample since version 9 too."""
    return _resize(t, x, _SAID | node.attributes, t.known(scales, "the scales").tolist(), None, None)


def resize(
    t: Importer, node: Given, x: Val, roi: Val | None = None, scales: Val | None = None, sizes: Val | None = None
) -> Results:
    said = _SAID | node.attributes
    axes = [a % x.rank for a in said.get("axes") or range(x.rank)]
    given = t.known(scales, "the scales").tolist() if scales is not None else []
    wanted: list[int] | None = (
        None if given else _spread(t.known(sizes, "the sizes").tolist(), axes, [int(d) for d in x.dims])
    )
    region = None
    if said["coordinate_transformation_mode"] == "tf_crop_and_resize":
        edges, n = t.known(roi, "the region").tolist(), len(axes)
        region = list(
            zip(_spread(edges[:n], axes, [0.0] * x.rank), _spread(edges[n:], axes, [1.0] * x.rank), strict=True)
        )
    factors = _spread(given, axes, [1.0] * x.rank) if given else None
    if wanted is not None and said["keep_aspect_ratio_policy"] != "stretch":
        choose = min if said["keep_aspect_ratio_policy"] == "not_larger" else max
        scale = choose(wanted[a] / max(int(x.dims[a]), 1) for a in axes)
        wanted = [math.floor(scale * int(d) + 0.5) if a in axes else int(d) for a, d in enumerate(x.dims)]
        factors = _spread([scale] * len(axes), axes, [1.0] * x.rank)
    return _resize(t, x, said, factors, wanted, region)


def _spread(values: Sequence[Any], axes: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """Those of some axes, and of the others what they have."""
    return [values[axes.index(a)] if a in axes else other for a, other in enumerate(others)]


def _resize(
    t: Importer,
    x: Val,
    said: dict[str, Any],
    scales: list[float] | None,
    sizes: list[int] | None,
    region: list[tuple[float, float]] | None,
) -> Results:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    nearest = said["mode"] == "nearest"
    if not nearest and not x.dtype.is_floating_point:
        raise Unsupported(f"interpolation of {x.dtype}")
    y = t.emit("Identity", x) if nearest else t.cast(x, wide)
    outside: list[Val] = []
    for axis in reversed(range(x.rank)):
        before = int(x.dims[axis])
        scale = scales[axis] if scales else sizes[axis] / before if sizes and before else 1.0
        after = sizes[axis] if sizes else math.floor(scale * before)
        edges = region[axis] if region else (0.0, 1.0)
        if scale == 1 and after == before and edges == (0.0, 1.0):
            continue
        if before == 0:
            raise Unsupported("an axis without elements gets some")
        length = scale * before if scales else after
        places = _places(before, after, scale, length, said["coordinate_transformation_mode"], edges)
        if region:
            beyond = (places < 0) | (places > before - 1)
            outside.append(t.tensor(beyond.reshape([-1 if i == axis else 1 for i in range(x.rank)])))
        if nearest:
            ids = _NEAREST[said["nearest_mode"]](places).long().clamp(0, before - 1)
            y = t.emit("Gather", y, t.tensor(ids), axis=axis)
        else:
            taps, weights = _taps(places, before, scale, said)
            tables = [taps, weights.to(wide), *turned_round(taps, weights.to(wide), before)]
            y = t.emit("Resample", y, *[t.tensor(table) for table in tables], axis=axis)
    if outside:
        hidden = reduce(lambda a, b: t.emit("Or", a, b), outside)
        y = t.emit("Where", hidden, t.like(y, said["extrapolation_value"]), y)
    return t.cast(y, x.dtype)


def _places(before: int, after: int, scale: float, length: float, mode: str, edges: tuple[float, float]) -> Tensor:
    """Where each element of the result lies between those before; `length` is its size before it is cut to a whole."""
    n = torch.arange(after, dtype=torch.float64)
    last, (start, end) = before - 1, edges
    if mode == "asymmetric":
        return n / scale
    if mode == "align_corners":
        return n * last / (length - 1) if length != 1 else n * 0
    if mode == "tf_crop_and_resize":
        return start * last + n * (end - start) * last / (length - 1) if length != 1 else n + (start + end) * last / 2
    if mode == "tf_half_pixel_for_nn":
        return (n + 0.5) / scale
    if mode == "pytorch_half_pixel" and after <= 1:
        return n * 0
    places = (n + 0.5) / scale - 0.5
    if mode == "half_pixel_symmetric":
        places += before / 2 * (1 - after / (scale * before))
    return places


def _taps(places: Tensor, n: int, scale: float, said: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Neighbours of each place and their weights."""
    shrink = min(scale, 1.0) if said["antialias"] else 1.0
    reach = 1 if said["mode"] == "linear" else 2
    first = (places - reach / shrink).floor() + 1
    around = first[:, None] + torch.arange(math.ceil(2 * reach / shrink))
    far = ((around - places[:, None]) * shrink).abs()
    weights = (1 - far).clamp(min=0) if reach == 1 else _cubic(far, said["cubic_coeff_a"])
    if said["exclude_outside"]:
        weights = weights.where((around >= 0) & (around < n), torch.zeros(()).double())
    if said["exclude_outside"] or shrink < 1:
        weights = weights / weights.sum(1, keepdim=True)
    return around.clamp(0, n - 1).long(), weights


def _cubic(far: Tensor, a: float) -> Tensor:
    near, beyond = ((a + 2) * far - (a + 3)) * far**2 + 1, ((a * far - 5 * a) * far + 8 * a) * far - 4 * a
    return near.where(far <= 1, beyond.where(far < 2, torch.zeros(()).double()))


# GridSample


def grid_sample(t: Importer, node: Given, x: Val, grid: Val) -> Results:
    """Computed in float32 at least: 16 bits do not tell which elements a place lies between."""
    said, dtype = node.attributes, x.dtype
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(said["mode"], said["mode"])
    n, c, *sizes = (int(d) for d in x.dims)
    result = [int(d) for d in grid.dims[1:-1]]
    wide = torch.promote_types(torch.promote_types(dtype, grid.dtype), torch.float32)
    x, grid = t.cast(x, wide), t.cast(grid, wide)
    axes: list[Taps] = []
    for k, size in enumerate(reversed(sizes)):
        line = t.emit("Reshape", t.emit("Gather", grid, t.const(k), axis=-1), t.const([n, math.prod(result)]))
        axes.insert(0, _along(t, line, size, mode, said["padding_mode"], bool(said["align_corners"])))
    lines = t.emit("Transpose", t.emit("Reshape", x, t.const([n, c, math.prod(sizes)])), perm=[0, 2, 1])
    total = reduce(lambda a, b: t.emit("Add", a, b), weighted(t, lines, axes, sizes))
    total = t.cast(t.emit("Transpose", total, perm=[0, 2, 1]), dtype)
    return t.emit("Reshape", total, t.const([n, c, *result]))


Taps = list[tuple[Val, Val]]  # neighbours along an axis, as whole numbers, and their weights


def weighted(
    t: Importer, lines: Val, axes: Sequence[Taps], sizes: Sequence[int], first: Val | None = None
) -> list[Val]:
    """The neighbours of places in each of several images, times their weights; places begin at `first`.

    Of `lines` the dims are images, elements and channels; of neighbours and weights images and places.
    """
    steps = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    parts = []
    for taps in itertools.product(*axes):
        along = [t.emit("Mul", place, t.const(step)) for (place, _), step in zip(taps, steps, strict=True)]
        at = reduce(lambda a, b: t.emit("Add", a, b), along if first is None else [first, *along])
        weight = reduce(lambda a, b: t.emit("Mul", a, b), [w for _, w in taps])
        found = t.emit("GatherND", lines, t.emit("Unsqueeze", at, t.const([2])), batch_dims=1)
        parts.append(t.emit("Mul", found, t.emit("Unsqueeze", weight, t.const([2]))))
    if not axes:
        raise Unsupported("a grid of no axes")
    return parts


def _plus(t: Importer, a: Val, number: float) -> Val:
    return t.emit("Add", a, t.like(a, number))


def _times(t: Importer, a: Val, number: float) -> Val:
    return t.emit("Mul", a, t.like(a, number))


def _tap(t: Importer, place: Val, weight: Val | None, size: int) -> tuple[Val, Val]:
    """A neighbour, whose weight is 0 if it is none of the elements."""
    held = t.emit("Clip", place, t.like(place, 0), t.like(place, size - 1))
    inside = t.cast(t.emit("Equal", held, place), place.dtype)
    known = inside if weight is None else t.emit("Mul", weight, inside)
    there = t.emit("Where", t.emit("IsNaN", held), t.like(held, 0), held)
    return t.cast(t.emit("Detach", there), torch.int64), known


def linear(t: Importer, place: Val, size: int) -> Taps:
    """The two neighbours of places among as many elements."""
    first = t.emit("Detach", t.emit("Floor", place))
    rest = t.emit("Sub", place, first)
    others = _plus(t, _times(t, rest, -1), 1)
    return [_tap(t, first, others, size), _tap(t, _plus(t, first, 1), rest, size)]


def _along(t: Importer, line: Val, size: int, mode: str, padding: str, corners: bool) -> Taps:
    """Neighbours along an axis of `size` elements and their weights, of places from -1 to 1."""

    def plus(a: Val, number: float) -> Val:
        return _plus(t, a, number)

    def times(a: Val, number: float) -> Val:
        return _times(t, a, number)

    def bounded(a: Val) -> Val:
        if padding == "reflection":
            low, span = (0.0, size - 1.0) if corners else (-0.5, float(size))
            if span == 0:
                return times(a, 0)
            turns = t.emit("Abs", plus(a, -low))
            rest = t.emit("Sub", turns, times(t.emit("Floor", times(turns, 1 / (2 * span))), 2 * span))
            a = plus(plus(times(t.emit("Abs", plus(rest, -span)), -1), span), low)
        return a if padding == "zeros" else t.emit("Clip", a, t.like(a, 0), t.like(a, size - 1))

    place = times(plus(line, 1), (size - 1) / 2) if corners else plus(times(plus(line, 1), size / 2), -0.5)
    if mode == "nearest":
        return [_tap(t, t.emit("Round", bounded(place)), None, size)]
    if mode == "linear":
        return linear(t, bounded(place), size)
    first = t.emit("Detach", t.emit("Floor", place))
    rest = t.emit("Sub", place, first)
    taps = []
    for k, far in ((-1, plus(rest, 1)), (0, rest), (1, plus(times(rest, -1), 1)), (2, plus(times(rest, -1), 2))):
        a = -0.75
        if k in (0, 1):
            square = t.emit("Mul", far, far)
            weight = plus(t.emit("Mul", plus(times(far, a + 2), -(a + 3)), square), 1)
        else:
            weight = plus(t.emit("Mul", plus(t.emit("Mul", plus(times(far, a), -5 * a), far), 8 * a), far), -4 * a)
        taps.append(_tap(t, t.emit("Round", bounded(plus(first, k))), weight, size))
    return taps


# DeformConv


def deform_conv(
    t: Importer, node: Given, x: Val, weight: Val, offset: Val, bias: Val | None = None, mask: Val | None = None
) -> Results:
    """A product of the weights and columns of elements that lie where a window does, and by an offset elsewhere.

    Places are in float32 at least, as those of GridSample.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    said, (n, channels, *sizes), (filters, depth, *kernel) = node.attributes, map(int, x.dims), map(int, weight.dims)
    axes, result = len(sizes), [int(d) for d in offset.dims[2:]]
    strides, dilations = (said.get(k) or [1] * axes for k in ("strides", "dilations"))
    pads, groups, parts = said.get("pads") or [0] * axes, said["group"], said["offset_group"]
    taps, places = math.prod(kernel), math.prod(result)
    images = [n * parts, taps * places]
    offsets = t.emit("Reshape", t.cast(offset, wide), t.const([n * parts, taps, axes, places]))
    neighbours = []
    for i, size in enumerate(sizes):
        shape = [[d if j == i else 1 for j in range(axes)] for d in (kernel[i], result[i])]
        at = torch.arange(kernel[i]).reshape(shape[0] + [1] * axes) * dilations[i] - pads[i]
        at = (at + torch.arange(result[i]).reshape([1] * axes + shape[1]) * strides[i]).expand(*kernel, *result)
        moved = t.emit("Gather", offsets, t.const(i), axis=2)
        start = t.tensor(at.reshape(taps, places).to(wide))
        neighbours.append(linear(t, t.emit("Reshape", t.emit("Add", moved, start), t.const(images)), size))
    planes = t.emit("Reshape", t.cast(x, wide), t.const([n * parts, channels // parts, math.prod(sizes)]))
    lines = t.emit("Transpose", planes, perm=[0, 2, 1])
    found = reduce(lambda a, b: t.emit("Add", a, b), weighted(t, lines, neighbours, sizes))
    if mask is not None:
        found = t.emit("Mul", found, t.emit("Reshape", t.cast(mask, wide), t.const([*images, 1])))
    columns = t.emit("Transpose", t.cast(found, x.dtype), perm=[0, 2, 1])
    columns = t.emit("Reshape", columns, t.const([n, groups, depth * taps, places]))
    rows = t.emit("Reshape", weight, t.const([groups, filters // groups, depth * taps]))
    y = t.emit("Reshape", t.emit("MatMul", rows, columns), t.const([n, filters, *result]))
    return y if bias is None else t.emit("Add", y, by_channel(t, bias, x.rank))
