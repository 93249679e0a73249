"""The table from ATen ops to functions that express them in the graph.

A translation takes a builder, which knows the node that is translated, and the op's arguments, tensors as
:class:`~ortmodule_c.lowering.draft.Val` and sizes as int or SymInt, and returns what the op returns. It raises
:class:`~ortmodule_c.errors.Unsupported` for arguments it does not cover; any other error is a mistake.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from ...errors import Unsupported
from ..builder import Builder
from ..draft import Shape, Val, same_size

Translation = Callable[..., Any]
TABLE: dict[OpOverload, Translation] = {}
NAMED: dict[str, Translation] = {}  # of libraries that may not be there
aten = torch.ops.aten
# Ops with a kernel and a derivative of their own, both of which come down to PyTorch's decomposition at every value:
# they move, choose, scale or test elements.
EXACTLY_DECOMPOSED = {
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
    aten.channel_shuffle.default,
    aten.count_nonzero.dim_IntList,
    aten.deg2rad.default,
    aten.diag_embed.default,
    aten.isinf.default,
    aten.isneginf.default,
    aten.isposinf.default,
    aten.nansum.default,
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    aten.rad2deg.default,
    aten.rot90.default,
    aten.threshold.default,
    aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default,
}

HALVES = (torch.float16, torch.bfloat16)
INT64_MAX = 2**63 - 1


def translates(*ops: OpOverload) -> Callable[[Translation], Translation]:
    """Register a function as the translation of `ops`."""

    def add(function: Translation) -> Translation:
        for op in ops:
            TABLE[op] = function
        return function

    return add


def translates_named(name: str) -> Callable[[Translation], Translation]:
    """Register a function as the translation of an op of another library."""

    def add(function: Translation) -> Translation:
        NAMED[name] = function
        return function

    return add


def translation_of(op: OpOverload) -> Translation | None:
    """That of an op, if there is one."""
    return TABLE.get(op) or NAMED.get(op.name())


def has_kernel(op: OpOverload, *keys: str) -> bool:
    """Whether PyTorch has a kernel of `op` for one of these dispatch keys."""
    name = op._schema.name + (f".{op._overloadname}" if op._overloadname != "default" else "")
    known = torch._C._dispatch_has_kernel(name)  # else of TorchScript alone
    return known and any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def is_composite(op: OpOverload) -> bool:
    """Whether PyTorch differentiates `op` through the ops that it is composed of."""
    return has_kernel(op, "CompositeImplicitAutograd") and not has_kernel(op, "Autograd", "AutogradCPU")


def axis_of(x: Val, axis: int) -> int:
    """A dim counted from the front; Unsupported if there is none, which PyTorch refuses in its own words."""
    if not -max(x.rank, 1) <= axis < max(x.rank, 1):
        raise Unsupported(f"dim {axis} of a tensor of {x.rank}")
    return axis + max(x.rank, 1) if axis < 0 else axis


def same_sizes(a: Shape, b: Shape) -> bool:
    """Whether two shapes are known to be the same."""
    return len(a) == len(b) and all(map(same_size, a, b))


def axes_of(x: Val, axes: int | list[int] | None) -> list[int]:
    """Dims counted from the front; all of them for None."""
    if axes is None:
        return list(range(x.rank))
    listed = [axes] if isinstance(axes, int) else list(axes)
    return sorted(axis_of(x, a) for a in listed) if x.rank else []


def reduced_axes(x: Val, axes: int | list[int] | None) -> list[int]:
    """Dims counted from the front for the ops that take an empty list for all of them."""
    return axes_of(x, None if isinstance(axes, (list, tuple)) and not axes else axes)


def result_dtype(b: Builder, which: int | None = None) -> torch.dtype:
    """Element type PyTorch gives the op's (or its `which`-th) result."""
    value = b.result if which is None else b.result[which]
    return value.dtype


def result_shape(b: Builder, which: int | None = None) -> Shape:
    """Shape PyTorch gives the op's (or its `which`-th) result."""
    value = b.result if which is None else b.result[which]
    return tuple(value.shape)


def promoted(*operands: Any) -> torch.dtype:
    """The dtype in which PyTorch compares or combines these operands."""

    def stand_in(x: Any) -> Any:
        if isinstance(x, Val):
            return torch.empty((1,) * min(x.rank, 1), dtype=x.dtype, device="meta")
        return 1 if isinstance(x, torch.SymInt) else 1.0 if isinstance(x, torch.SymFloat) else x

    first, *rest = map(stand_in, operands)
    dtype = first.dtype if isinstance(first, torch.Tensor) else torch.result_type(first, first)
    for other in rest:
        dtype = torch.result_type(first, other)
    return dtype


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """What PyTorch computes in: what lies between the parts of an op is not rounded to 16 bits."""
    return torch.float32 if dtype in HALVES else dtype


def need_float(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, which must be floating."""
    if not dtype.is_floating_point:
        raise Unsupported(f"dtype {dtype} is not floating")
    return dtype
