"""Arithmetic on symbolic sizes, remembered while a graph is traced."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

_BINARY = ("add", "sub", "mul", "mod", "int_floordiv", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "sym_max")
_Operation = Callable[[SymNode, SymNode], SymNode]


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Computes each sum, product and comparison of sizes once.

    For every tensor it meets, PyTorch's tracer derives in Python and sympy how many bytes it has, whether it is
    contiguous and so on: tens of thousands of operations on what is but a few hundred different expressions.
    """
    memo: dict[Any, Any] = {}

    def once(name: str, compute: _Operation) -> _Operation:
        def operation(a: SymNode, b: SymNode) -> SymNode:
            env = a.shape_env
            # What older PyTorch finds out about sizes has no version, and what traces operations is to see them.
            version = getattr(env, "_replacements_version_counter", None)
            if type(b) is not SymNode or version is None or get_proxy_mode() is not None:
                return compute(a, b)
            key = (name, env, version, a._expr, a.pytype, b._expr, b.pytype)
            found = memo.get(key)
            if found is None:
                found = memo[key] = compute(a, b)
            return found

        return operation

    originals = {name: getattr(SymNode, name) for name in _BINARY}
    try:
        for name, compute in originals.items():
            setattr(SymNode, name, once(name, compute))
        yield
    finally:
        for name, compute in originals.items():
            setattr(SymNode, name, compute)
