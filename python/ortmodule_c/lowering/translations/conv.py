"""Convolution and pooling."""

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import Unsupported
from ..builder import Builder
from ..draft import Val
from .registry import aten, result_shape, translates

Ints = int | Sequence[int]


def _spread(value: Ints, n: int) -> list[int]:
    """One number per spatial dim."""
    listed = [value] if isinstance(value, int) else list(value)
    return listed * n if len(listed) == 1 else listed


def _conv(
    b: Builder,
    x: Val,
    weight: Val,
    bias: Val | None,
    stride: Ints,
    pads: list[int],
    dilation: Ints,
    groups: int,
    op: str = "Conv",
    **more: Any,
) -> Val:
    n = weight.rank - 2
    batched = x.rank == weight.rank
    x = x if batched else b.unsqueeze(x, 0)
    windows: dict[str, Any] = {"strides": _spread(stride, n), "pads": pads, "dilations": _spread(dilation, n)}
    out: Val = b.emit(op, x, weight, bias, **windows, group=groups, **more)
    return out if batched else b.squeeze(out, 0)


@translates(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def conv(
    b: Builder,
    x: Val,
    weight: Val,
    bias: Val | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Val:
    pads = _spread(padding, weight.rank - 2)
    return _conv(b, x, weight, bias, stride, pads * 2, dilation, groups)


@translates(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
def conv_padding(
    b: Builder,
    x: Val,
    weight: Val,
    bias: Val | None = None,
    stride: Ints = 1,
    padding: str = "valid",
    dilation: Ints = 1,
    groups: int = 1,
) -> Val:
    n = weight.rank - 2
    begin, end = [0] * n, [0] * n
    if padding == "same":
        for i, (k, d) in enumerate(zip(weight.dims[2:], _spread(dilation, n), strict=True)):
            total = d * (int(k) - 1)
            begin[i], end[i] = total // 2, total - total // 2
    return _conv(b, x, weight, bias, stride, begin + end, dilation, groups)


@translates(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def conv_transpose(
    b: Builder,
    x: Val,
    weight: Val,
    bias: Val | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Val:
    n = weight.rank - 2
    pads, extra = _spread(padding, n) * 2, _spread(output_padding, n)
    return _conv(b, x, weight, bias, stride, pads, dilation, groups, "ConvTranspose", output_padding=extra)


@translates(aten.convolution.default)
def convolution(
    b: Builder,
    x: Val,
    weight: Val,
    bias: Val | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> Val:
    if transposed:
        return conv_transpose(b, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(b, x, weight, bias, stride, padding, dilation, groups)


def _pool(b: Builder, op: str, x: Val, spatial: int, outputs: list[Any], **attributes: Any) -> list[Val]:
    """A 2-d pooling op; one spatial dim becomes two, a missing batch dim becomes one of size 1."""
    if spatial > 2:
        raise Unsupported(f"{op} over {spatial} dims")
    extra = []
    if x.rank == spatial + 1:
        extra.append(0)
        x = b.unsqueeze(x, 0)
    if spatial == 1:
        extra.append(2)
        x = b.unsqueeze(x, 2)
    results = b.emit(op, x, outputs=outputs, **attributes)
    listed = [r for r in (results if isinstance(results, tuple) else (results,)) if r is not None]
    return [b.squeeze(r, *extra) for r in listed] if extra else listed


def _window(kernel: Ints, stride: Ints, padding: Ints, n: int) -> tuple[list[int], list[int], list[int]]:
    """Kernel, strides and pads, with an untouched first spatial dim for 1-d pooling."""
    kernel = _spread(kernel, n)
    stride = kernel if not isinstance(stride, int) and not stride else _spread(stride, n)
    padding = _spread(padding, n)
    if n == 1:
        kernel, stride, padding = [1, *kernel], [1, *stride], [0, *padding]
    return kernel, stride, padding * 2


def _max_pool(
    b: Builder,
    x: Val,
    n: int,
    kernel: Ints,
    stride: Ints = (),
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
) -> list[Val]:
    size, strides, pads = _window(kernel, stride, padding, n)
    dilations = _spread(dilation, n)
    return _pool(
        b,
        "MaxPool",
        x,
        n,
        [x.dtype, torch.int64],
        kernel_shape=size,
        strides=strides,
        pads=pads,
        dilations=[1, *dilations] if n == 1 else dilations,
        ceil_mode=int(ceil_mode),
    )


@translates(aten.max_pool1d.default, aten.max_pool2d.default)
def max_pool(b: Builder, x: Val, *args: Any, **kwargs: Any) -> Val:
    return _max_pool(b, x, 1 if "1d" in b.aten_name else 2, *args, **kwargs)[0]


@translates(aten.max_pool2d_with_indices.default)
def max_pool_indices(b: Builder, x: Val, *args: Any, **kwargs: Any) -> Any:
    return _max_pool(b, x, 2, *args, **kwargs)


@translates(aten.avg_pool1d.default, aten.avg_pool2d.default)
def avg_pool(
    b: Builder,
    x: Val,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Val:
    n = 1 if "1d" in b.aten_name else 2
    size, strides, pads = _window(kernel_size, stride, padding, n)
    return _pool(
        b,
        "AveragePool",
        x,
        n,
        [x.dtype],
        kernel_shape=size,
        strides=strides,
        pads=pads,
        ceil_mode=int(ceil_mode),
        count_include_pad=int(count_include_pad),
        divisor_override=divisor_override or 0,
    )[0]


@translates(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool(b: Builder, x: Val, _output_size: Any) -> Val:
    n = 1 if "1d" in b.aten_name else 2
    size = [int(s) for s in result_shape(b)[-n:]]
    return _pool(b, "AdaptiveAvgPool", x, n, [x.dtype], output_size=[1, *size] if n == 1 else size)[0]
