"""What lies between a root and a value: objects, containers, functions, classes."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from leaves import doubled
from torch import nn


class Plain:
    """Keeps `a`."""


class Slots:
    """Keeps `a`."""

    __slots__ = ("a",)


@dataclasses.dataclass
class Data:
    """Keeps `a`."""

    a: Any = None
    b: int = 1


@dataclasses.dataclass(slots=True)
class SlotsData:
    """Keeps `a`."""

    a: Any = None


class Property:
    """Keeps `_a`."""

    _a: Any = None

    @property
    def a(self) -> Any:
        return self._a

    def get(self) -> Any:
        return self._a

    def __getitem__(self, _index: int) -> Any:
        return self._a

    def __len__(self) -> int:
        return 1


class Dynamic:
    """Finds whatever it is asked for in a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["values"][name]


class Whole:
    """Has a lookup of its own."""

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "a" if name == "alias" else name)

    def get(self) -> Any:
        return LOOK_UP(self, "a")


LOOK_UP = object.__getattribute__


class Delegating:
    """Looks up in another what it has not."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattribute__(self, name: str) -> Any:
        own = LOOK_UP(self, "__dict__")
        parents = LOOK_UP(own["parent"], "__dict__") if "parent" in own else {}
        return parents[name] if name in parents and name not in own else LOOK_UP(self, name)


class Given(Slots):
    """Keeps `a`, and has a dictionary."""


class Answering:
    """Makes what it is asked for of what it has."""

    def __getattribute__(self, name: str) -> Any:
        return _with(Given)(LOOK_UP(self, "_a")) if name == "given" else LOOK_UP(self, name)


class OwnDict(dict):
    """A dictionary with attributes."""


class OwnList(list):
    """A list with attributes."""


class Inner(nn.Module):
    """A module that is a holder."""


def _with(cls: Any, name: str = "a") -> Callable[[Any], Any]:
    def make(value: Any) -> Any:
        holder = cls()
        setattr(holder, name, value)
        return holder

    return make


def _put(name: str = "a") -> Callable[[Any, Any], None]:
    return lambda holder, value: object.__setattr__(holder, name, value)


def setattr_a(holder: Any, value: Any) -> None:
    """As a module wants it."""
    if hasattr(holder, "a"):
        del holder.a
    holder.a = value


def _item(key: Any) -> Callable[[Any, Any], None]:
    return lambda holder, value: holder.__setitem__(key, value)


def _class(value: Any) -> Any:
    return type("Made", (), {"a": staticmethod(value) if callable(value) else value})


def _put_class(holder: Any, value: Any) -> None:
    cls = holder if isinstance(holder, type) else type(holder)
    cls.a = staticmethod(value) if callable(value) else value


def _returning(value: Any) -> Any:
    return lambda: value


def _defaulting(value: Any) -> Any:
    def get(value: Any = value) -> Any:
        return value

    return get


def _keyword(value: Any) -> Any:
    def get(*, value: Any = value) -> Any:
        return value

    return get


def _give(value: Any = None) -> Any:
    return value


def _function_attribute(value: Any) -> Any:
    def get() -> Any:
        return None

    get.a = value  # type: ignore[attr-defined]
    return get


def _python_module(value: Any) -> Any:
    module = types.ModuleType("configuration")
    module.a = value  # type: ignore[attr-defined]
    return module


def _overriding(value: Any) -> Any:
    base = type("Base", (), {"get": lambda self: self._a})
    return _with(type("Derived", (base,), {}), "_a")(value)


def _decorated(value: Any) -> Any:
    def get() -> Any:
        return value

    @functools.wraps(get)
    def wrapper() -> Any:
        return get()

    return wrapper


_KEPT: list[Any] = []  # what is referred to weakly only


def _weak(value: Any) -> Any:
    holder = _with(Plain)(value)
    _KEPT.append(holder)
    return weakref.ref(holder)


def _variable(value: Any) -> Any:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable")
    variable.set(value)
    return variable


def _of_thread(value: Any) -> Any:
    holder = threading.local()
    holder.a = value
    return holder


_BEHIND: dict[int, dict[str, Any]] = {}  # of what only shows a dictionary


def _shown(value: Any) -> Any:
    state = {"a": value}
    shown = types.MappingProxyType(state)
    _BEHIND[id(shown)] = state
    _KEPT.append(shown)
    return shown


def put_in_cell(function: Any, value: Any) -> None:
    function.__closure__[0].cell_contents = value


def _defaults(function: Any, value: Any) -> None:
    function.__defaults__ = (value,)


def _keyword_defaults(function: Any, value: Any) -> None:
    function.__kwdefaults__["value"] = value


def _reload(holder: Any, value: Any) -> None:
    vars(holder).clear()
    vars(holder).update(a=value)


Make = Callable[[Any], Any]
Put = Callable[[Any, Any], None]
# What makes one around a value, how the forward reads it, how another value is put in.
HOLDERS: dict[str, tuple[Make, str, Put | None]] = {
    "plain": (_with(Plain), "{}.a", _put()),
    "slots": (_with(Slots), "{}.a", _put()),
    "data": (_with(Data), "{}.a", _put()),
    "slotsdata": (_with(SlotsData), "{}.a", _put()),
    "namespace": (_with(types.SimpleNamespace), "{}.a", _put()),
    "property": (_with(Property, "_a"), "{}.a", _put("_a")),
    "get": (_with(Property, "_a"), "{}.get()", _put("_a")),
    "getitem": (_with(Property, "_a"), "{}[0]", _put("_a")),
    "computed": (_with(Plain), 'getattr({}, "".join(["a"]))', _put()),
    "computedofmodule": (_python_module, 'getattr({}, "".join(["a"]))', _put()),
    "computedofclass": (_class, 'getattr({}, "".join(["a"]))', _put_class),
    "reduced": (_python_module, 'functools.reduce(getattr, ["a"], {})', _put()),
    "exchanged": (_with(Plain), "{}.a", lambda h, v: setattr(h, "__dict__", {"a": v})),
    "reloaded": (_with(Plain), "{}.a", _reload),
    "methodofdict": (lambda v: {"a": v}.get, '{}("a")', lambda h, v: h.__self__.update(a=v)),
    "constant": (_with(Plain), 'getattr({}, "a", 1.0)', _put()),
    "vars": (_with(Plain), 'vars({})["a"]', _put()),
    "state": (_with(Plain), '{}.__dict__["a"]', _put()),
    "dynamic": (
        lambda v: (d := Dynamic(), d.values.update(a=v))[0],
        "{}.a",
        lambda h, v: h.values.update(a=v),
    ),
    "whole": (_with(Whole), "{}.alias", _put()),
    "wholeby": (_with(Whole), "({0}.get, {0}.get())[1]", _put()),
    "delegating": (
        lambda v: Delegating(parent=Delegating(a=v, b=1)),
        "({0}.parent.b, {0}.a)[1]",
        lambda h, v: _put()(h.parent, v),
    ),
    "answering": (_with(Answering, "_a"), "{}.given.a", _put("_a")),
    "inner": (_with(Inner), "{}.a", setattr_a),
    "list": (lambda v: ["x", v, doubled], "{}[1]", _item(1)),
    "tuple": (lambda v: ("x", v), "{}[1]", None),
    "dict": (lambda v: {"act": torch.relu, "a": v, 3: None}, '{}["a"]', _item("a")),
    "iterated": (lambda v: {"a": v}, "[v for v in {}.values()][0]", _item("a")),
    "ordered": (lambda v: collections.OrderedDict(a=v), '{}["a"]', _item("a")),
    "default": (lambda v: collections.defaultdict(int, a=v), '{}["a"]', _item("a")),
    "user": (lambda v: collections.UserDict(a=v), '{}["a"]', _item("a")),
    "chain": (lambda v: collections.ChainMap({"a": v}), '{}["a"]', _item("a")),
    "deque": (lambda v: collections.deque([v]), "{}[0]", _item(0)),
    "owndict": (lambda v: OwnDict(a=v), '{}["a"]', _item("a")),
    "owndictattribute": (_with(OwnDict), "{}.a", _put()),
    "ownlist": (lambda v: OwnList([v]), "{}[0]", _item(0)),
    "ownlistattribute": (_with(OwnList), "{}.a", _put()),
    "class": (_class, "{}.a", _put_class),
    "ofclass": (lambda v: _class(v)(), "{}.a", _put_class),
    "typeof": (lambda v: _class(v)(), "type({}).a", _put_class),
    "inherited": (_overriding, "{}.get()", lambda h, v: setattr(type(h), "get", lambda _self: v)),
    "overridden": (_overriding, "{}.get()", lambda h, v: setattr(type(h).__mro__[1], "get", lambda _self: v)),
    "shadowed": (_overriding, "{}.get()", lambda h, v: setattr(h, "get", lambda: v)),
    "closure": (_returning, "{}()", put_in_cell),
    "decorated": (_decorated, "{}()", lambda h, v: put_in_cell(h.__wrapped__, v)),
    "defaults": (_defaulting, "{}()", _defaults),
    "keyword": (_keyword, "{}()", _keyword_defaults),
    "attributed": (_function_attribute, "{}.a", _put()),
    "partial": (lambda v: functools.partial(_give, value=v), "{}()", lambda h, v: h.keywords.update(value=v)),
    "partialattribute": (_with(lambda: functools.partial(_give)), "{}.a", _put()),
    "thread": (_of_thread, "{}.a", setattr_a),
    "shown": (_shown, '{}["a"]', lambda h, v: _BEHIND[id(h)].update(a=v)),
    "bound": (lambda v: _with(Property, "_a")(v).get, "{}()", lambda h, v: setattr(h.__self__, "_a", v)),
    "module": (_python_module, "{}.a", _put()),
    "weak": (_weak, "{}().a", lambda h, v: setattr(h(), "a", v)),
    "variable": (_variable, "{}.get()", lambda h, v: h.set(v)),
}
