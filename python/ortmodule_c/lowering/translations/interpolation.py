"""Interpolation between neighbours, by lines and by cubic curves, an axis after the other from the last one on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import Unsupported
from ..builder import Builder
from ..draft import Val
from .registry import aten, computed_in, need_float, result_shape, translates

_CURVATURE = -0.75  # of PyTorch's cubic curves


@translates(
    aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_trilinear3d.vec, aten.upsample_bicubic2d.vec
)
def by_factors(
    b: Builder, x: Val, output_size: object, align_corners: bool, scale_factors: Sequence[float] | None
) -> Val:
    return interpolated(b, x, align_corners, scale_factors or ())


@translates(
    aten.upsample_linear1d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_trilinear3d.default,
    aten.upsample_bicubic2d.default,
)
def by_scales(b: Builder, x: Val, output_size: object, align_corners: bool, *scales: float | None) -> Val:
    return interpolated(b, x, align_corners, scales)


def interpolated(b: Builder, x: Val, align_corners: bool, scales: Sequence[float | None]) -> Val:
    """x with other sizes of all dims but the first two, of which halves are rounded once."""
    dtype = need_float(x.dtype)
    wide = computed_in(dtype)
    sizes = result_shape(b)
    y = b.cast(x, wide)
    for axis in range(x.rank - 1, 1, -1):
        before, after = x.dims[axis], sizes[axis]
        if not isinstance(before, int) or not isinstance(after, int):
            raise Unsupported("interpolation between sizes that are open")
        places = _places(before, after, align_corners, scales[axis - 2] if scales else None, wide)
        if "bicubic" in b.aten_name:
            taps = _cubic(places, before)
        else:
            taps = _linear(places, before) if before != after else _themselves(before, wide)
        y = resampled(b, y, axis, *taps)
    return b.cast(y, dtype)


def resampled(b: Builder, x: Val, axis: int, places: Tensor, weights: Tensor) -> Val:
    """Weighted sums of a few elements along an axis.

    Parameters
    ----------
    places, weights
        Of each element of the result, those of x and how much of them it has; of shape (elements, most of one).
    """
    back = turned_round(places, weights, int(x.dims[axis]))
    tables = [b.tensor(table, "taps") for table in (places, weights, *back)]
    y = b.emit("Resample", x, *tables, axis=axis)
    y.shape = (*x.dims[:axis], len(places), *x.dims[axis + 1 :])
    return y


def _places(before: int, after: int, align_corners: bool, scale: float | None, dtype: torch.dtype) -> Tensor:
    """Where each element of the result lies between those before, as PyTorch counts it in `dtype`."""
    n = torch.arange(after, dtype=dtype)
    if align_corners:
        return n * (torch.tensor(before - 1, dtype=dtype) / (after - 1) if after > 1 else 0)
    step = torch.tensor(1 / scale, dtype=dtype) if scale else torch.tensor(before, dtype=dtype) / after
    return step * (n + 0.5) - 0.5


def _linear(places: Tensor, n: int) -> tuple[Tensor, Tensor]:
    first, rest = _split(places.clamp(min=0), n)
    return torch.stack([first, (first + 1).clamp(max=n - 1)], 1), torch.stack([1 - rest, rest], 1)


def _themselves(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Elements that stay: of each once and nothing, which together are NaN of what is infinite, as in PyTorch."""
    return torch.arange(n)[:, None].repeat(1, 2), torch.tensor([1.0, 0.0], dtype=dtype).repeat(n, 1)


def _cubic(places: Tensor, n: int) -> tuple[Tensor, Tensor]:
    first, rest = _split(places, n)
    near = [((_CURVATURE + 2) * t - (_CURVATURE + 3)) * t * t + 1 for t in (rest, 1 - rest)]
    beyond = (rest + 1, (1 - rest) + 1)
    far = [((_CURVATURE * t - 5 * _CURVATURE) * t + 8 * _CURVATURE) * t - 4 * _CURVATURE for t in beyond]
    taps = torch.stack([(first + k).clamp(0, n - 1) for k in (-1, 0, 1, 2)], 1)
    return taps, torch.stack([far[0], *near, far[1]], 1)


def _split(places: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The element before each place, and how far that is behind."""
    first = places.floor().long().clamp(max=n - 1)
    return first, (places - first).clamp(0, 1)


def turned_round(places: Tensor, weights: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """For each of the n elements where it went, in order, and with which weight; -1 for nowhere."""
    came, order = places.flatten().sort(stable=True)
    counts = torch.bincount(came, minlength=n)
    column = torch.arange(len(came)) - (counts.cumsum(0) - counts)[came]
    went = torch.full((n, int(counts.max())), -1)
    by = torch.zeros(went.shape, dtype=weights.dtype)
    went[came, column] = order // places.shape[1]
    by[came, column] = weights.flatten()[order]
    return went, by
