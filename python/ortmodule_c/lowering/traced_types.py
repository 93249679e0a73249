"""The types of an op's operands and results in any call, as PyTorch's tracer has them in symbols."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.shapes import dim_of, value_of
from .draft import Shape, Type, carried_as, dtype_text

_Traced = tuple[str, tuple[Any, ...]]  # a dtype, and sizes that are numbers or expressions of sympy's


@dataclass(frozen=True, slots=True)
class TracedTypes:
    """What results are for operands, without asking PyTorch again."""

    operands: Sequence[_Traced]
    results: Sequence[_Traced]

    def results_for(self, types: Sequence[Type]) -> list[Type] | None:
        """The types of the results for operands of these types, None if that does not follow.

        Sizes that the op refuses are refused when it runs.
        """
        known: dict[Any, int] = {}  # what each number or expression is in this call
        for (dtype, dims), (given, sizes) in zip(self.operands, types, strict=True):
            if dtype != given or len(dims) != len(sizes):
                return None
            for dim, size in zip(dims, sizes, strict=True):
                if known.setdefault(dim, dim if isinstance(dim, int) else size) != size:
                    return None
        bound = {dim: size for dim, size in known.items() if not isinstance(dim, int) and dim.is_Symbol}
        found: list[Type] = []
        for dtype, dims in self.results:
            told = [known.get(dim, dim if isinstance(dim, int) else value_of(dim, bound)) for dim in dims]
            if not all(isinstance(size, int) or size.is_Integer for size in told):
                return None
            found.append((dtype, tuple(map(int, told))))
        return found


def traced_types(operands: Sequence[tuple[torch.dtype, Shape | None]], results: Any) -> TracedTypes | None:
    """Those of operands and results of these dtypes and shapes, None if some shape is not known."""
    known = [carried_as(dtype, shape) for dtype, shape in (*operands, *results) if shape is not None]
    if len(known) < len(operands) + len(results):
        return None
    told = [(dtype_text(dtype), tuple(map(dim_of, shape))) for dtype, shape in known]
    return TracedTypes(told[: len(operands)], told[len(operands) :])
