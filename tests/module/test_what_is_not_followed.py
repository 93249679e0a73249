"""What the first way does not follow it refuses by name; whoever runs the module then gives eager's results."""

import collections
import contextvars
import dataclasses
import functools
import gc
import operator
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from held import ON_THE_FAST_WAY, Read, with_scale
from ortmodule_c import ORTModule, ORTModuleError
from wrapped import Function, close

SCALE = 1.0
SETTINGS = types.ModuleType("settings_of_a_test")
sys.modules["settings_of_a_test"] = SETTINGS


class Level:
    pass


class Parts:
    __match_args__ = ("first",)
    first = 1.0
    second = 2.0


class Settings:
    scale = 1


class Array(np.ndarray):
    pass


@dataclasses.dataclass
class Data:
    scale: float = 1.0


def variable(value: Any) -> Any:
    made: contextvars.ContextVar[Any] = contextvars.ContextVar("variable")
    made.set(value)
    return made


KEPT: list[Any] = []


def reference() -> Any:
    KEPT[:] = [with_scale(Level, 1.0)]
    return weakref.ref(KEPT[0])


def by_match(s: Any, y: Tensor) -> Tensor:
    match s.held:
        case Parts(value):
            return y * value
    return y


def by_variable(s: Any, y: Tensor) -> Tensor:
    name = "".join(["sc", "ale"])
    return y * getattr(s.held, name)


def array_with_scale() -> Any:
    made: Any = np.ones(3).view(Array)
    made.scale = 1.0
    return made


def one_list() -> list[Any]:
    inner: list[float] = []
    return [inner, inner]


@functools.lru_cache
def remembered() -> Any:
    return with_scale(Level, 1.0)


NUMBERS = "settings_of", "_a_test"
Change = Callable[[Any, int], None]
# What the forward holds, how it reads that, how that is changed to the number of a step, why it is refused.
NOT_FOLLOWED: dict[str, tuple[Callable[[], Any], Read, Change, str]] = {
    "a module of Python by a name that is made": (
        lambda: NUMBERS,
        lambda s, y: y * sys.modules["".join(s.held)].scale,
        lambda m, n: setattr(SETTINGS, "scale", float(n)),
        "sys.modules",
    ),
    "globals of a function": (
        lambda: setting_scale,
        lambda s, y: y * s.held.__globals__["SCALE"],
        lambda m, n: setting_scale(n),
        "__globals__",
    ),
    "all that a class has": (
        lambda: Settings,
        lambda s, y: y * sum(v for n, v in s.held.__dict__.items() if n.startswith("sc")),
        lambda m, n: setattr(Settings, "scale", n),
        "__dict__|computes names",
    ),
    "a computed name of a class that is held": (
        lambda: Settings,
        lambda s, y: y * getattr(s.held, "".join(["sc", "ale"])),
        lambda m, n: setattr(Settings, "scale", n),
        "computes names",
    ),
    "a computed name of a class that is kept": (
        lambda: Settings,
        by_variable,
        lambda m, n: setattr(Settings, "scale", n),
        "computes names",
    ),
    "a computed name of a class in a dict": (
        lambda: {"settings": Settings},
        lambda s, y: y * getattr(s.held["settings"], "".join(["sc", "ale"])),
        lambda m, n: setattr(Settings, "scale", n),
        "computes names",
    ),
    "a computed name of a module of Python": (
        lambda: SETTINGS,
        lambda s, y: y * functools.reduce(getattr, ["scale"], s.held),  # type: ignore[arg-type]
        lambda m, n: setattr(SETTINGS, "scale", float(n)),
        "getattr",
    ),
    "a computed name by another name": (
        lambda: getattr,
        lambda s, y: y * s.held(Settings, "".join(["sc", "ale"])),
        lambda m, n: setattr(Settings, "scale", n),
        "by another name",
    ),
    "an attribute that a text names": (
        lambda: Settings,
        lambda s, y: y * float("{.scale}".format(s.held)),  # noqa: UP032  # as users do
        lambda m, n: setattr(Settings, "scale", n),
        "formats attributes",
    ),
    "attributes that a pattern names": (
        Parts,
        by_match,
        lambda m, n: setattr(Parts, "__match_args__", ("second" if n % 2 else "first",)),
        "__match_args__",
    ),
    "the text of a dataclass": (
        Data,
        lambda s, y: y * len(repr(s.held)),
        lambda m, n: setattr(m.held, "scale", 10.0**n),
        "variable repr_running",
    ),
    "a weak reference that dies": (
        reference,
        lambda s, y: y * (s.held().scale if s.held() else 9.0),
        lambda m, n: (KEPT.clear(), gc.collect(), None)[-1],
        "weakref",
    ),
    "a variable of a context": (
        lambda: variable([1.0]),
        lambda s, y: y * s.held.get()[0],
        lambda m, n: m.held.get().__setitem__(0, float(n)),
        "ContextVar",
    ),
    "an array": (
        lambda: np.ones(2),
        lambda s, y: y * float(s.held.sum()),
        lambda m, n: m.held.__setitem__(0, float(n)),
        "ndarray",
    ),
    "an attribute of an array": (
        array_with_scale,
        lambda s, y: y * float(s.held[0]) * s.held.scale,
        lambda m, n: setattr(m.held, "scale", float(n)),
        "Array",
    ),
    "a row of an array": (
        lambda: np.ones(1, dtype=[("scale", "f4")])[0],
        lambda s, y: y * float(s.held["scale"]),
        lambda m, n: m.held.__setitem__("scale", float(n)),
        "void",
    ),
    "a deque": (
        lambda: collections.deque([2.0]),
        lambda s, y: y * s.held[0],
        lambda m, n: m.held.appendleft(float(n)),
        "deque",
    ),
    "a dict that makes up values": (
        lambda: collections.defaultdict(float, scale=1.0),
        lambda s, y: y * (s.held["other"] + s.held["scale"]),
        lambda m, n: m.held.update(scale=float(n)),
        "defaultdict",
    ),
    "the class of a namespace": (
        types.SimpleNamespace,
        lambda s, y: y * (2 if type(s.held) is types.SimpleNamespace else 3),
        lambda m, n: setattr(m, "held", type("Other", (types.SimpleNamespace,), {})()),
        "SimpleNamespace",
    ),
    "a memo of objects": (
        lambda: None,
        lambda s, y: y * remembered().scale,
        lambda m, n: setattr(remembered(), "scale", float(n)),
        "global remembered of module test_what_is_not_followed remembers its results",
    ),
    "which lists are one": (
        one_list,
        lambda s, y: y * (2.0 if s.held[0] is s.held[1] else 3.0),
        lambda m, n: m.held.__setitem__(1, m.held[0] if n % 2 else []),
        "by identity",
    ),
    "whether a list is one of several things": (
        one_list,
        lambda s, y: y * (2.0 if s.held[0] is (s.held[1] if s.held else None) else 3.0),
        lambda m, n: m.held.__setitem__(1, m.held[0] if n % 2 else []),
        "by identity",
    ),
    "which lists have one id": (
        one_list,
        lambda s, y: y * (2.0 if id(s.held[0]) == id(s.held[1]) else 3.0),
        lambda m, n: m.held.__setitem__(1, m.held[0] if n % 2 else []),
        "by identity",
    ),
}


def setting_scale(scale: float) -> None:
    globals()["SCALE"] = scale


@pytest.mark.parametrize(("make", "read", "change", "cause"), NOT_FOLLOWED.values(), ids=NOT_FOLLOWED)
def test_what_is_not_followed_is_refused_by_name_and_as_in_eager(
    make: Callable[[], Any], read: Read, change: Change, cause: str
) -> None:
    x, layer = torch.randn(3, 4), nn.Linear(4, 4)
    results: list[list[Tensor]] = []
    for wrap in (lambda m: m, ORTModule):
        m = Function(lambda s, x: read(s, s.l(x)), l=layer, held=make())
        if "scale" in vars(SETTINGS) or read is not None:
            remembered().scale = 1.0
            setting_scale(1.0)
            Settings.scale, SETTINGS.scale, Parts.__match_args__ = 1, 1.0, ("first",)  # type: ignore[attr-defined]
        model = wrap(m)  # type: ignore[no-untyped-call]
        results.append([model(x)])
        for n in (2, 3, 5):
            change(m, n)
            results[-1].append(model(x))
    close(results[1], results[0])
    refusing = ORTModule(Function(lambda s, x: read(s, s.l(x)), l=layer, held=make()), ON_THE_FAST_WAY)
    with pytest.raises(ORTModuleError, match=cause):
        refusing(x)


# What a forward makes of two tensors, which may be one.
IDENTITIES: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "is": lambda a, b: a is b,
    "id": lambda a, b: id(a) == id(b),
    "a set": lambda a, b: len({a, b}) == 1,
    "operator.is_": operator.is_,
    "their memory": lambda a, b: a.untyped_storage()._cdata == b.untyped_storage()._cdata,
}


@pytest.mark.parametrize("same", IDENTITIES.values(), ids=IDENTITIES)
def test_which_tensors_are_one_is_as_in_eager(same: Callable[[Tensor, Tensor], bool]) -> None:
    ours = ORTModule(Function(lambda s, x, a, b: s.l(x) * (2 if same(a, b) else 3) + a + b, l=nn.Linear(4, 4)))
    x, a, b = torch.randn(3, 4), torch.ones(1), torch.ones(1)
    for given in ((a, b), (a, a), (b, a), (b, b)):
        close(ours(x, *given), ours.module(x, *given))


def test_which_tensor_came_last_is_as_in_eager() -> None:
    def forward(s: Any, x: Tensor, a: Tensor) -> Tensor:
        y = s.l(x) * (2.0 if s.last is a else 1.0)
        s.last = a
        return y

    layer = nn.Linear(4, 4)
    eager, ours = Function(forward, l=layer, last=None), ORTModule(Function(forward, l=layer, last=None))
    x, a, b = torch.randn(3, 4), torch.ones(1), torch.ones(1)
    for given in (a, a, b, a, a):
        close(ours(x, given), eager(x, given))


def inferred(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


def hooked(t: Tensor) -> Tensor:
    t = t.clone().requires_grad_()
    t.register_hook(lambda grad: grad)
    return t


ROW = torch.ones(5)
# What is asked of a tensor, and two tensors of which the answers differ.
FACTS: dict[str, tuple[Callable[[Tensor], Any], Tensor, Tensor]] = {
    "where it begins": (lambda t: t.storage_offset(), ROW[:2], ROW[2:4]),
    "how much memory it is in": (lambda t: t.untyped_storage().nbytes(), torch.ones(2), ROW[:2]),
    "what it is a view of": (lambda t: t._base is None, ROW, ROW[:]),
    "whether it is a view": (lambda t: t._is_view(), ROW, ROW[:]),
    "whether others share it": (lambda t: t.is_shared(), ROW, torch.ones(5).share_memory_()),
    "whether it may be changed": (lambda t: t.is_inference(), ROW, inferred(ROW)),
    "whether it has hooks": (lambda t: t._backward_hooks is None, ROW.clone().requires_grad_(), hooked(ROW)),
}


@pytest.mark.parametrize(("ask", "first", "second"), FACTS.values(), ids=FACTS)
def test_what_only_python_knows_of_a_tensor_is_as_in_eager(
    ask: Callable[[Tensor], Any], first: Tensor, second: Tensor
) -> None:
    ours = ORTModule(Function(lambda s, x, t: s.l(x) * (1.0 + float(ask(t))), l=nn.Linear(4, 4)))
    x = torch.randn(3, 4)
    with torch.no_grad():
        for given in (first, second, first):
            close(ours(x, given), ours.module(x, given))


def test_a_dataclass_has_the_text_it_had() -> None:
    held = Data()
    ORTModule(Function(lambda s, x: s.l(x) * len(repr(s.held)), l=nn.Linear(4, 4), held=held))(torch.randn(3, 4))
    assert repr(held) == "Data(scale=1.0)"
