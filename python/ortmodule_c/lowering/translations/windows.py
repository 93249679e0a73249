"""Windows of images: laid out as columns, put back from them, and the largest of each."""

from collections.abc import Sequence

import torch

from ...errors import Unsupported
from ..builder import Builder
from ..draft import Size, Val
from .registry import aten, need_float, result_shape, translates


def _places(size: int, window: int, dilation: int, padding: int, stride: int) -> list[list[int]]:
    """For each element of a window where it lies in a padded dim, in all windows."""
    n = (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1
    return [[i * dilation + k * stride for k in range(n)] for i in range(window)]


def _tables(b: Builder, sizes: Sequence[Size], *windows: Sequence[int]) -> list[Val]:
    each = zip(_known(sizes), *windows, strict=True)
    return [b.const(_places(*window), torch.int64) for window in each]


def _known(sizes: Sequence[Size]) -> list[int]:
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes):
        raise Unsupported("windows of images of open sizes")
    return known


@translates(aten.im2col.default)
def im2col(
    b: Builder, x: Val, kernel_size: list[int], dilation: list[int], padding: list[int], stride: list[int]
) -> Val:
    """[.., C, H, W] as [.., C * window, windows]."""
    need_float(x.dtype)
    rows, columns = _tables(b, x.dims[-2:], kernel_size, dilation, padding, stride)
    none = [0] * (x.rank - 2)
    if any(padding):
        x = b.emit("Pad", x, b.ints([*none, *padding] * 2), b.const(0, x.dtype), mode="constant")
    x = b.emit("Gather", x, rows, axis=x.rank - 2, strict=1)
    x = b.emit("Gather", x, columns, axis=x.rank - 1, strict=1)
    first = x.rank - 4  # of window and windows along the rows, then along the columns
    x = b.transpose(x, [*range(first), first, first + 2, first + 1, first + 3])
    return b.reshape(x, result_shape(b))


@translates(aten.col2im.default)
def col2im(
    b: Builder,
    x: Val,
    output_size: list[Size],
    kernel_size: list[int],
    dilation: list[int],
    padding: list[int],
    stride: list[int],
) -> Val:
    """What each place of an image has in all windows, summed."""
    if not x.dtype.is_floating_point:
        raise Unsupported(f"sums of {x.dtype}")
    rows, columns = _tables(b, output_size, kernel_size, dilation, padding, stride)
    shape = result_shape(b)
    first = len(shape) - 2
    tall, wide = (n + 2 * p for n, p in zip(_known(output_size), padding, strict=True))
    (down, n_rows), (across, n_columns) = rows.example, columns.example
    x = b.reshape(x, [*shape[:-2], down, across, n_rows, n_columns])
    x = b.transpose(x, [*range(first), first, first + 2, first + 1, first + 3])
    of_rows = b.full([*shape[:-2], down, n_rows, wide], 0, x.dtype)
    x = b.emit("GatherGrad", x, columns, of_rows, axis=first + 2, strict=1)
    x = b.emit("GatherGrad", x, rows, b.full([*shape[:-2], tall, wide], 0, x.dtype), axis=first, strict=1)
    if padding[0]:
        x = b.slice(x, first, padding[0], tall - padding[0])
    return b.slice(x, first + 1, padding[1], wide - padding[1]) if padding[1] else x


@translates(aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(b: Builder, x: Val, output_size: list[int]) -> list[Val]:
    """The largest of each window, and where it lies, where all windows are alike."""
    n = len(output_size)
    sizes, counts = _known(x.dims[-n:]), _known(result_shape(b, 0)[-n:])
    if 0 in x.example or 0 in counts or any(size % count for size, count in zip(sizes, counts, strict=True)):
        raise Unsupported(f"{b.aten_name} of {sizes} to {counts}")
    window = [size // count for size, count in zip(sizes, counts, strict=True)]
    return b.emit_all("MaxPool", x, kernel_shape=window, strides=window)[:2]
