"""Random objects that a forward reads, one value in them changed between steps: `stale.py --seeds 0:2000`.

A program is a path: from a root (an attribute, a global, a variable of a closure, an argument ...) through holders
(objects, containers, functions, classes ...) to a leaf, which the forward makes a number of. Between steps one of what
lies on the path is replaced or changed in place. Results have to be those of eager at every step.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import dataclasses
import decimal
import enum
import functools
import math
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from ortmodule_c import DebugOptions, ORTModule

# Leaves: what makes one (different each time), and what the forward makes of it.


class Colour(enum.Enum):
    RED = 2
    BLUE = 3


class Scaling:
    """Called."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, value: float) -> float:
        return value * self.by


def doubled(value: float) -> float:
    return 2 * value


def squared(value: float) -> float:
    return value * value


def closing(by: float) -> Callable[[float], float]:
    return lambda value: value * by


def times(value: float, by: float = 1.0) -> float:
    return value * by


KEPT = [[1.0]]
Number = Callable[[int], Any]
LEAVES: dict[str, tuple[Number, str]] = {
    "int": (lambda n: n, "{}"),
    "float": (lambda n: n + 0.5, "{}"),
    "zero": (lambda n: 0.0 if n % 2 else -0.0, "math.copysign(2.0, {})"),
    "bool": (lambda n: n % 2 == 0, "(3.0 if {} else 2.0)"),
    "str": (lambda n: "a" * n, "len({})"),
    "none": (lambda n: None if n % 2 else n, "({0} or 7)"),
    "complex": (lambda n: complex(n, 1), "{}.real"),
    "minus": (lambda n: complex(1, 0.0 if n % 2 else -0.0), "math.copysign(2.0, {}.imag)"),
    "enum": (lambda n: list(Colour)[n % 2], "{}.value"),
    "dtype": (lambda n: (torch.float16, torch.int32)[n % 2], "torch.full((), 2.7, dtype={}).float()"),
    "bytes": (lambda n: b"a" * n, "len({})"),
    "slice": (lambda n: slice(0, n % 3 + 1), "x[:, {}].sum()"),
    "range": (range, "sum({})"),
    "stop": (lambda n: range(0, n, n), "{}.stop"),
    "decimal": (lambda n: decimal.Decimal("1." + "0" * n), "len(str({}))"),
    "identity": (lambda n: [KEPT[0], [1.0] if n % 2 else KEPT[0]], "(2.0 if {0}[0] is {0}[1] else 3.0)"),
    "numbers": (lambda n: {(1,)} if n % 2 else {(1.0,)}, "len(str(next(iter({}))))"),
    "set": (lambda n: {1, n}, "sum({})"),
    "frozen": (lambda n: frozenset({1, n}), "sum({})"),
    "tuple": (lambda n: (n, 1.0), "sum({})"),
    "int64": (np.int64, "int({})"),
    "float32": (np.float32, "float({})"),
    "numpyzero": (lambda n: np.float64(0.0 if n % 2 else -0.0), "math.copysign(2.0, {})"),
    "ndarray": (lambda n: np.array([1.0, n]), "float({}.sum())"),
    "fromnumpy": (lambda n: np.array([1.0, n], dtype=np.float32), "torch.from_numpy({}).sum()"),
    "array": (lambda n: array.array("d", [1.0, n]), "{}[1]"),
    "bytearray": (lambda n: bytearray([1, n]), "{}[1]"),
    "deque": (lambda n: collections.deque([1.0, n]), "{}[1]"),
    "list": (lambda n: [1.0, n], "sum({})"),
    "tensor": (lambda n: torch.tensor([float(n)]), "{}"),
    "item": (lambda n: torch.tensor(float(n)), "{}.item()"),
    "shape": (torch.ones, "{}.shape[0]"),
    "data": (lambda n: torch.tensor([float(n)]), "{}.data"),
    "function": (lambda n: (doubled, squared)[n % 2], "{}(3.0)"),
    "closure": (lambda n: closing(float(n)), "{}(3.0)"),
    "lambda": (lambda n: (lambda v: v + 1.0) if n % 2 else (lambda v: v + 2.0), "{}(3.0)"),
    "partial": (lambda n: functools.partial(times, by=float(n)), "{}(3.0)"),
    "callable": (lambda n: Scaling(float(n)), "{}(3.0)"),
    "method": (lambda n: Scaling(float(n)).__call__, "{}(3.0)"),
}


# Changes of a leaf in place.
def _add_to_list(v: Any, n: int) -> None:
    v.append(float(n))


def _set_second(v: Any, n: int) -> None:
    v[1] = n


def _fill(v: Any, n: int) -> None:
    v.fill_(float(n))


def _fill_data(v: Any, n: int) -> None:
    v.data.fill_(float(n))


def _by(v: Any, n: int) -> None:
    getattr(v, "__self__", v).by = float(n)


IN_PLACE: dict[str, Callable[[Any, int], None]] = {
    "list": _add_to_list,
    "set": lambda v, n: v.add(n + 10),
    "deque": _set_second,
    "array": _set_second,
    "bytearray": _set_second,
    "ndarray": _set_second,
    "fromnumpy": _set_second,
    "tensor": _fill,
    "item": _fill,
    "data": _fill_data,
    "shape": lambda v, n: v.resize_(n),
    "callable": _by,
    "method": _by,
    "partial": lambda v, n: v.keywords.update(by=float(n)),
    "closure": lambda v, n: setattr(v.__closure__[0], "cell_contents", float(n)),
}

# Holders: what makes one around a value, how the forward reads it, how another value is put in.


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


def _cell(function: Any, value: Any) -> None:
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
    "closure": (_returning, "{}()", _cell),
    "decorated": (_decorated, "{}()", lambda h, v: _cell(h.__wrapped__, v)),
    "defaults": (_defaulting, "{}()", _defaults),
    "keyword": (_keyword, "{}()", _keyword_defaults),
    "attributed": (_function_attribute, "{}.a", _put()),
    "partial": (lambda v: functools.partial(_give, value=v), "{}()", lambda h, v: h.keywords.update(value=v)),
    "bound": (lambda v: _with(Property, "_a")(v).get, "{}()", lambda h, v: setattr(h.__self__, "_a", v)),
    "module": (_python_module, "{}.a", _put()),
    "weak": (_weak, "{}().a", lambda h, v: setattr(h(), "a", v)),
    "variable": (_variable, "{}.get()", lambda h, v: h.set(v)),
}

# What the first way refuses to follow, as README says.
NOT_FOLLOWED = frozenset(
    {
        *("identity", "ndarray", "fromnumpy", "array", "bytearray", "deque"),
        *("weak", "variable", "computedofmodule", "computedofclass", "reduced"),
        *("namespace", "default", "ownlist", "ownlistattribute", "state"),
    }
)

# Roots: the source of a module around an expression, and where the root lies.
ROOTS = {
    "attribute": ("self.root", lambda scope, m, v: setattr(m, "root", v)),
    "global": ("ROOT", lambda scope, m, v: scope.__setitem__("ROOT", v)),
    "classattribute": ("self.root", lambda scope, m, v: _put_root(type(m), v)),
    "ofclass": ("Net.root", lambda scope, m, v: _put_root(type(m), v)),
    "closure": ("root", lambda scope, m, v: _cell(m.read, v)),
    "helper": ("helper()", lambda scope, m, v: scope.__setitem__("ROOT", v)),
    "submodule": ("self.child.root", lambda scope, m, v: setattr(m.child, "root", v)),
    "argument": ("root", None),
}
SOURCE = """
def helper():
    return ROOT

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(3, 3)
        self.child = nn.Identity()

    def forward(self, x, root=None):
        return self.l(x) * self.read(self, x, root) if self.own else self.l(x) * READ

def reader(root=None):
    def read(self, x, given):
        return READ_CLOSED
    return read
"""


def _put_root(cls: Any, value: Any) -> None:
    cls.root = staticmethod(value) if callable(value) and not isinstance(value, type) else value


class Program:
    """One seed's module, and the changes of what it reads.

    Attributes
    ----------
    module
        What is run.
    words
        The path and the change, for people.
    followed
        Whether the first way has to take it.
    """

    def __init__(self, seed: int) -> None:
        self._r = r = random.Random(seed)
        self._n = 2
        self._root = r.choice([*ROOTS])
        self._path = [r.choice([*HOLDERS]) for _ in range(r.choice([0, 1, 1, 2, 2, 3, 4]))]
        self._leaf = r.choice([*LEAVES])
        self._at = r.randrange(-1, len(self._path))  # the holder of which the content changes; -1: the root
        while self._at >= 0 and HOLDERS[self._path[self._at]][2] is None:
            self._at -= 1
        self._in_place = self._leaf in IN_PLACE and r.random() < 0.3
        self.words = f"{self._root} {' '.join(self._path)} {self._leaf}, changed "
        self.words += "in place" if self._in_place else f"at {self._at}"
        self.followed = self._root != "argument" and not NOT_FOLLOWED & {*self._path, self._leaf}
        self._values = self._build(0)
        self._scope: dict[str, Any] = {
            "torch": torch,
            "nn": nn,
            "math": math,
            "functools": functools,
            "__name__": "program",
        }
        expression = ROOTS[self._root][0]
        for name in self._path:
            expression = HOLDERS[name][1].format(expression)
        expression = LEAVES[self._leaf][1].format(expression)
        closed = self._root == "closure"
        source = SOURCE.replace("READ_CLOSED", expression if closed else "1.0")
        exec(source.replace("READ", "1.0" if closed else expression), self._scope)
        self.module: Any = self._scope["Net"]()
        self.module.own = closed
        self.module.read = self._scope["reader"](None)
        self._put_root()

    def arguments(self) -> tuple[Any, ...]:
        """What the forward is given besides a tensor."""
        return (self._values[0],) if self._root == "argument" else ()

    def change(self) -> None:
        """Something on the path becomes another."""
        self._n += 1
        if self._in_place:
            IN_PLACE[self._leaf](self._values[-1], self._n)
            return
        self._values[self._at + 1 :] = self._build(self._at + 1)
        if self._at < 0:
            self._put_root()
        else:
            put = HOLDERS[self._path[self._at]][2]
            assert put is not None
            put(self._values[self._at], self._values[self._at + 1])

    def _build(self, first: int) -> list[Any]:
        """The values on the path from a position on."""
        values = [LEAVES[self._leaf][0](self._n)]
        for name in reversed(self._path[first:]):
            values.insert(0, HOLDERS[name][0](values[0]))
        return values

    def _put_root(self) -> None:
        put = ROOTS[self._root][1]
        if put is not None:
            put(self._scope, self.module, self._values[0])


def verdict(seed: int, capture: Any) -> tuple[str, str]:
    """What differed, or nothing; and where it ran."""
    torch.manual_seed(seed)
    ours, eager = Program(seed), Program(seed)
    eager.module.load_state_dict(ours.module.state_dict())
    model = ORTModule(ours.module, DebugOptions(capture=capture))
    x = torch.arange(6.0).view(2, 3)
    what = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            want, got = ([m(x, *p.arguments()), None] for m, p in ((eager.module, eager), (model, ours)))
            if (
                not torch.allclose(want[0], got[0], rtol=1e-4, atol=1e-6, equal_nan=True)
                or want[0].dtype != got[0].dtype
            ):
                what = f"step {step}: {got[0].flatten()[:2].tolist()} is not {want[0].flatten()[:2].tolist()}"
                break
            if step != 1:  # the second step is that of an unchanged module
                ours.change()
                eager.change()
    causes = [r.cause for r in model.fallback_report()]
    return what and f"seed {seed}: {ours.words}: {what}", f"{ours.words}: {causes[0]}" if causes else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:2000")
    parser.add_argument("--capture", choices=["export", "dynamo", "auto"], default="export")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
    torch.set_num_threads(1)
    failures, refused = [], []
    for seed in range(first, last):
        try:
            what, cause = verdict(seed, options.capture)
        except Exception as error:
            what, cause = f"seed {seed}: {Program(seed).words}: {type(error).__name__}: {error}", ""
        if what:
            failures.append(what)
            print(what, flush=True)
        if cause:
            refused.append(cause)
    print(f"{last - first} programs: {len(failures)} stale, {len(refused)} run in PyTorch")
    for cause, n in collections.Counter(c.split(": ", 1)[1] for c in refused).most_common(30):
        print(f"{n:5} {cause}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
