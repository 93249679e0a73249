"""Convolution and pooling."""

from collections.abc import Sequence
from typing import Any

from ...errors import Unsupported
from ..builder import Builder
from ..draft import Val
from .registry import HALVES, aten, result_shape, translates

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
    out = b.emit(op, x, weight, bias, **windows, group=groups, **more)
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


def _axes(b: Builder) -> int:
    """How many axes its op pools over: as many as its kernel or its result is given numbers for."""
    n: int = b.op._schema.arguments[1].N  # type: ignore[attr-defined]
    return n


def _window(b: Builder, kernel: Ints, stride: Ints, padding: Ints) -> dict[str, Any]:
    """The attributes that poolings have in common."""
    n = _axes(b)
    stride = kernel if not isinstance(stride, int) and not stride else stride
    return {"kernel_shape": _spread(kernel, n), "strides": _spread(stride, n), "pads": _spread(padding, n) * 2}


@translates(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool_indices(
    b: Builder,
    x: Val,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
) -> list[Val]:
    y, indices, _taps = b.emit_all(
        "MaxPool",
        x,
        **_window(b, kernel_size, stride, padding),
        dilations=_spread(dilation, _axes(b)),
        ceil_mode=int(ceil_mode),
    )
    return [y, indices]


@translates(aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
def max_pool(b: Builder, x: Val, *args: Any, **kwargs: Any) -> Val:
    return max_pool_indices(b, x, *args, **kwargs)[0]


@translates(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
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
    if x.dtype in HALVES and _axes(b) == 3:
        raise Unsupported(f"{b.aten_name} of {x.dtype}, which PyTorch refuses")
    return b.emit(
        "AveragePool",
        x,
        **_window(b, kernel_size, stride, padding),
        ceil_mode=int(ceil_mode),
        count_include_pad=int(count_include_pad),
        divisor_override=divisor_override,
    )


@translates(
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d.default,
)
def adaptive_avg_pool(b: Builder, x: Val, _output_size: Any) -> Val:
    size = result_shape(b)[-_axes(b) :]
    if 0 in x.example[-_axes(b) - 1 :] or 0 in [n for n in size if isinstance(n, int)]:
        raise Unsupported(f"{b.aten_name} of or to nothing, which PyTorch refuses, in some cases in backward")
    return b.emit("AdaptiveAvgPool", x, output_size=size)
