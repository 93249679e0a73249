"""Arithmetic on symbolic sizes, remembered while a graph is traced."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_BINARY = ("add", "sub", "mul", "mod", "int_floordiv", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "sym_max")
_ASKED = ("guard_bool", "guard_or_false", "guard_or_true", "expect_true")
_Method = Callable[..., Any]


class _Memory:
    """What was computed of sizes.

    Nodes are looked up by identity first, and by what they stand for second. Nothing is taken from before the
    tracer found out more about its symbols.
    """

    def __init__(self) -> None:
        self.environments: set[ShapeEnv] = set()
        self._version: Any = None
        self._near: dict[Any, Any] = {}
        self._far: dict[Any, Any] = {}
        self._numbers: dict[Any, SymNode] = {}

    def _fresh(self, env: Any) -> dict[Any, Any]:
        version = (env, getattr(env, "_replacements_version_counter", None))
        if version != self._version or version[1] is None:  # older PyTorch does not say when it finds out more
            self._near.clear()
            self._far.clear()
            self._version = version
            self.environments.add(env)
        return self._near

    def binary(self, name: str, compute: _Method) -> _Method:
        def operation(a: SymNode, b: SymNode) -> SymNode:
            if type(b) is not SymNode or get_proxy_mode() is not None:  # what traces operations is to see them
                return compute(a, b)
            near = self._fresh(a.shape_env)
            found = near.get((name, a, b))
            if found is None:
                key = (name, a._expr, a.pytype, b._expr, b.pytype)
                found = self._far.get(key)
                if found is None:
                    found = compute(a, b)
                near = self._fresh(a.shape_env)  # which `compute` may have found out more about
                near[name, a, b] = self._far[key] = found
            return found

        return operation

    def number(self, compute: _Method) -> _Method:
        def wrap_int(a: SymNode, number: int) -> SymNode:
            found = self._numbers.get((a.shape_env, number))
            if found is None:
                found = self._numbers[a.shape_env, number] = compute(a, number)
            return found

        return wrap_int

    def known(self, compute: _Method) -> _Method:
        def maybe_as_int(a: SymNode) -> int | None:
            near = self._fresh(a.shape_env)
            found = near.get(a, self)
            if found is self:
                found = near[a] = compute(a)
            return found

        return maybe_as_int

    def asked(self, name: str, compute: _Method) -> _Method:
        def ask(a: SymNode, file: str, line: int) -> bool:
            near = self._fresh(a.shape_env)
            key = (name, a, ShapeEnv._suppress_guards_tls())
            found = near.get(key)
            if found is None:
                found = compute(a, file, line)
                self._fresh(a.shape_env)[key] = found
            return found

        return ask


@contextlib.contextmanager
def remembered() -> Iterator[set[ShapeEnv]]:
    """Computes each sum, product and comparison of sizes once.

    For every tensor it meets, PyTorch's tracer derives in Python and sympy how many bytes it has, whether it is
    contiguous and so on: tens of thousands of operations on what is but a few hundred different expressions.
    Gives the environments of the symbols met so far.
    """
    memory = _Memory()
    methods = {name: memory.binary(name, getattr(SymNode, name)) for name in _BINARY}
    methods |= {name: memory.asked(name, getattr(SymNode, name)) for name in _ASKED}
    methods["wrap_int"] = memory.number(SymNode.wrap_int)
    methods["maybe_as_int"] = memory.known(SymNode.maybe_as_int)
    originals = {name: getattr(SymNode, name) for name in methods}
    try:
        for name, method in methods.items():
            setattr(SymNode, name, method)
        yield memory.environments
    finally:
        for name, method in originals.items():
            setattr(SymNode, name, method)


def let_go(environments: set[ShapeEnv]) -> None:
    """Free what nobody traces in any more: it holds tensors, whose sizes hold it where no collector of Python looks."""
    for env in environments:
        if env.tracked_fakes is not None:
            env.tracked_fakes.clear()
    getattr(proxy_tensor, "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", {}).clear()  # of the last export
    for method in vars(ShapeEnv).values():  # caches of the class
        if hasattr(method, "cache_clear"):
            method.cache_clear()
