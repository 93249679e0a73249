"""Which input shapes a captured graph is valid for."""

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

Sizes = tuple[torch.Size, ...]
_MAX_KNOWN = 256


class Fit:
    """The sizes a graph accepts: numbers, symbols with ranges, and the guards the trace took.

    Parameters
    ----------
    examples
        What torch.export knows of each user tensor; sizes may be symbolic.
    """

    def __init__(self, examples: Sequence[Tensor]) -> None:
        self._dims: list[list[Any]] = [[_expr(s) for s in t.shape] for t in examples]
        symbolic: list[Any] = [s for t in examples for s in t.shape if isinstance(s, torch.SymInt)]
        self.dynamic = bool(symbolic)
        env = symbolic[0].node.shape_env if symbolic else None
        self._replacements = dict(env.replacements) if env is not None else {}
        self._ranges = dict(env.var_to_range) if env is not None else {}
        self._guards = [g.expr for g in env.guards] if env is not None else []
        self._known: dict[Sizes, bool] = {}

    def accepts(self, sizes: Sizes) -> bool:
        """Whether tensors of these sizes may be given to the graph."""
        known = self._known.get(sizes)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[sizes] = self._check(sizes)
        return known

    def _check(self, sizes: Sizes) -> bool:
        bound: dict[sympy.Symbol, int] = {}
        derived: list[tuple[Any, int]] = []
        for dims, shape in zip(self._dims, sizes, strict=True):
            for dim, size in zip(dims, shape, strict=True):
                if not isinstance(dim, int) and dim.is_Symbol:
                    if bound.setdefault(dim, size) != size:
                        return False
                else:
                    derived.append((dim, size))
        if any(_value(dim, bound) != size for dim, size in derived):
            return False
        if any(s in self._ranges and not self._ranges[s].lower <= v <= self._ranges[s].upper for s, v in bound.items()):
            return False
        return all(self._holds(g, bound) for g in self._guards)

    def _holds(self, guard: Any, bound: dict[sympy.Symbol, int]) -> bool:
        """A guard that cannot be decided does not hold."""
        while any(s in self._replacements for s in guard.free_symbols):
            guard = guard.xreplace(self._replacements)
        return _value(guard, bound) in (True, sympy.true)


def _expr(size: Any) -> Any:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expr = size.node.expr
    return int(expr) if expr.is_Integer else expr


def _value(expr: Any, bound: dict[sympy.Symbol, int]) -> Any:
    return expr if isinstance(expr, int) else expr.xreplace({s: sympy.Integer(v) for s, v in bound.items()}).doit()
