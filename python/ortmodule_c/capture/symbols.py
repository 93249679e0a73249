"""Symbolic sizes while a graph is traced: arithmetic is remembered, and the user's code takes them for numbers."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..guards.anatomy import dict_of
from ..guards.frames import is_run_for_user

_BINARY = ("add", "sub", "mul", "mod", "int_floordiv", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "sym_max")
_ASKED = ("guard_bool", "guard_or_false", "guard_or_true", "expect_true")
_Method = Callable[..., Any]
_NUMBERS: dict[Any, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
# What makes something else of a number: the user's code gets it of the number itself, which is no longer open then.
_OF_NUMBERS = ("__repr__", "__str__", "__format__", "__sizeof__", "__divmod__", "__rdivmod__", "__invert__")
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "is_integer")
# What keeps a number for later, where a symbol is not to stay.
_KEPT = {"__hash__": "has a size as a key", "__reduce_ex__": "copies or pickles a size"}
_OF_ARRAYS = "__array"


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


class _Here(threading.local):
    """What this thread has in the place of methods of SymNode."""

    methods: dict[str, _Method] = {}  # noqa: RUF012


_here = _Here()
_PLAIN: dict[str, _Method] = {n: getattr(SymNode, n) for n in (*_BINARY, *_ASKED, "wrap_int", "maybe_as_int")}


def _of_thread(name: str, plain: _Method) -> _Method:
    def method(*args: Any) -> Any:
        return _here.methods.get(name, plain)(*args)

    return method


for _name, _plain in _PLAIN.items():  # for good: threads that trace at the same time would put back each other's
    setattr(SymNode, _name, _of_thread(_name, _plain))


@contextlib.contextmanager
def remembered() -> Iterator[set[ShapeEnv]]:
    """Computes each sum, product and comparison of sizes once, in this thread.

    For every tensor it meets, PyTorch's tracer derives in Python and sympy how many bytes it has, whether it is
    contiguous and so on: tens of thousands of operations on what is but a few hundred different expressions.
    Gives the environments of the symbols met so far.
    """
    memory, before = _Memory(), _here.methods
    plain = {**_PLAIN, **before}
    methods = {name: memory.binary(name, plain[name]) for name in _BINARY}
    methods |= {name: memory.asked(name, plain[name]) for name in _ASKED}
    methods["wrap_int"] = memory.number(plain["wrap_int"])
    methods["maybe_as_int"] = memory.known(plain["maybe_as_int"])
    _here.methods = methods
    try:
        yield memory.environments
    finally:
        _here.methods = before


def let_go(environments: set[ShapeEnv]) -> None:
    """Free what nobody traces in any more: it holds tensors, whose sizes hold it where no collector of Python looks."""
    for env in environments:
        if env.tracked_fakes is not None:
            env.tracked_fakes.clear()
    getattr(proxy_tensor, "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", {}).clear()  # of the last export
    for method in vars(ShapeEnv).values():  # caches of the class
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def _disguised(symbol: Any, number: type, refuse: Callable[[str], Any]) -> dict[str, Any]:
    """What to put into a class of symbols for the user's code, which this thread runs."""
    thread = threading.get_ident()

    def for_user() -> bool:
        return threading.get_ident() == thread and is_run_for_user(sys._getframe(2))

    def kind(value: Any) -> type:
        return number if for_user() else type(value)

    def of_number(name: str) -> _Method:
        plain = getattr(symbol, name, None)

        def method(value: Any, *args: Any) -> Any:
            if for_user():
                return getattr(number(value), name)(*args)
            return NotImplemented if plain is None else plain(value, *args)

        return method

    def compared(plain: _Method) -> _Method:
        def method(value: Any, *args: Any) -> Any:
            result = plain(value, *args)
            return bool(result) if type(result) is torch.SymBool and for_user() else result

        return method

    def kept(plain: _Method, what: str) -> _Method:
        def method(value: Any, *args: Any) -> Any:
            if for_user():
                refuse(f"the forward {what}, which is open")
            return plain(value, *args)

        return method

    def read(value: Any, name: str) -> Any:
        if (name.startswith(_OF_ARRAYS) or hasattr(number, name)) and for_user():
            if name.startswith(_OF_ARRAYS):
                refuse("the forward gives a size to NumPy, which is open")
            return getattr(number(value), name)
        raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}", name=name, obj=value)

    return {
        **{name: of_number(name) for name in _OF_NUMBERS if hasattr(number, name)},
        **{name: compared(getattr(symbol, name)) for name in _COMPARISONS if hasattr(symbol, name)},
        **{name: kept(getattr(symbol, name), what) for name, what in _KEPT.items()},
        "__class__": property(kind),
        "__getattr__": read,
    }


@contextlib.contextmanager
def numbers_to_the_user(refuse: Callable[[str], Any]) -> Iterator[None]:
    """Within it the user's code takes a symbol for the number that it is in eager; PyTorch's sees the symbol.

    Parameters
    ----------
    refuse
        Called, and to raise, if a symbol would outlive the trace or be taken for no number.
    """
    before = {symbol: dict(vars(symbol)) for symbol in _NUMBERS}
    try:
        for symbol, number in _NUMBERS.items():
            _change(symbol, _disguised(symbol, number, refuse))
        yield
    finally:
        for symbol, methods in before.items():
            now = set(vars(symbol))
            _change(symbol, {n: m for n, m in methods.items() if vars(symbol)[n] is not m}, now - set(methods))


def _change(symbol: Any, put: dict[str, Any], take: Iterable[str] = ()) -> None:
    """Set and delete attributes of a class; `__class__`, which `isinstance` believes, only its dictionary takes."""
    state = dict_of(symbol)
    if "__class__" in put:
        state["__class__"] = put["__class__"]
    if "__class__" in take:
        del state["__class__"]
    for name in take:
        if name != "__class__":
            delattr(symbol, name)
    for name, value in put.items():
        if name != "__class__":
            setattr(symbol, name, value)
