"""Numbers that a trace leaves open, and what they were when it was made."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def hint(value: Any) -> Any:
    """The number that a symbol was when the module was traced, None if it depends on values; all else as it is."""
    return value.node.hint if isinstance(value, SYMBOLIC) else value


def geometry(t: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Sizes and strides of a tensor as they were then."""
    return tuple(map(hint, t.shape)), tuple(map(hint, t.stride()))


def described(value: Any) -> Hashable:
    """An argument of an op as a key of what PyTorch answered of it: a tensor's values are no part of that."""
    return (value.dtype, geometry(value)) if isinstance(value, Tensor) else (type(value), repr(value))


def memory_of(t: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, in numbers: a trace may find out that two symbols are one."""
    return t.untyped_storage()._cdata, *map(hint, (t.storage_offset(), *t.shape, *t.stride()))
