"""Traces max pooling over one axis with its length left open, which PyTorch asks for where it composes that."""

from collections.abc import Sequence

import torch  # noqa: F401  the op is there
from torch import Tensor
from torch._C import DispatchKey

from ..lowering.translations.registry import aten
from .recurrent import is_of_all_lengths

_POOL = aten.max_pool1d.default


def _max_pool1d(
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Tensor:
    """As PyTorch composes it: of an image of one row."""
    if not is_of_all_lengths():
        composed: Tensor = _POOL._op_dk(
            DispatchKey.CompositeImplicitAutograd, x, size, stride, padding, dilation, ceil_mode
        )
        return composed
    steps = [1, *stride] if stride else []
    rows = aten.max_pool2d_with_indices.default(
        x.unsqueeze(-2), [1, *size], steps, [0, *padding], [1, *dilation], ceil_mode
    )
    pooled: Tensor = rows[0].squeeze(-2)
    return pooled


_POOL.py_impl(DispatchKey.CompositeImplicitAutograd)(_max_pool1d)  # for good, as those of recurrent layers
