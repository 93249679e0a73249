"""What a forward reads of Python is held by value or identity: a change of it is seen, by the first way."""

import abc
import collections
import copy
import dataclasses
import decimal
import enum
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from held import ON_THE_FAST_WAY, Plain, Read, both, setting, with_scale
from ortmodule_c import ORTModule
from wrapped import Function, assert_same_step, close, n_graphs, pair


class Slots:
    __slots__ = ("scale",)


@dataclasses.dataclass(slots=True)
class SlotsData:
    scale: Any = 2.0


class Settings:
    scale = 2.0


def deep(scale: Any = 2.0) -> Any:
    return with_scale(Plain, with_scale(Plain, with_scale(Plain, scale)))


SCALE = 2.0
CONFIGURATION = types.ModuleType("configuration")


class Mode(enum.Enum):
    FAST = [2.0]  # noqa: RUF012  # as users do


class Word(str, enum.Enum):  # noqa: UP042  # as users do
    ONE = "one"
    TWO = "two"


class Level:
    pass


def ring(scale: float) -> dict[str, Any]:
    made: dict[str, Any] = {"scale": scale}
    made["itself"] = made
    return made


def reloaded(values: dict[str, Any]) -> Callable[[Any], None]:
    return lambda m: (vars(m.held).clear(), vars(m.held).update(values))  # type: ignore[func-returns-value]


def by_global(_s: Any, y: Tensor) -> Tensor:
    return y * SCALE


def set_global(_m: Any) -> None:
    globals()["SCALE"] = 3.0


def scaling(scale: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda _s, y: y * scale


def two_attributes() -> Plain:
    made: Any = Plain()
    made.a, made.bb = 2.0, 3.0
    return made


def tolerant() -> Any:
    class Level(enum.Enum):
        LOW = 2.0
        HIGH = 3.0

        @classmethod
        def _missing_(cls, _value: object) -> Any:
            return cls[named()]

    def named() -> str:
        return taken["name"]

    taken = {"name": "LOW"}
    type.__setattr__(Level, "taken", taken)
    return Level


def subscripted() -> Any:
    class Table:
        table = {"scale": 2.0}  # noqa: RUF012

        def __class_getitem__(cls, name: str) -> float:
            return cls.table[name]

    return Table


def registered() -> Any:
    made = type("Made", (), {})()
    made.kind = abc.ABCMeta("Kind", (), {})
    return made


class Making(type):
    """A metaclass that does nothing to who reads its classes."""

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)


class Other(type):
    extra = 6.0


META: dict[str, Callable[[Any, Any], None]] = {
    "a property comes to it": lambda meta, _: setattr(meta, "scale", property(lambda _: 9.0)),
    "an attribute comes to it": lambda meta, _: setattr(meta, "extra", 5.0),
    "calls of its classes are its own": lambda meta, _: setattr(
        meta, "__call__", lambda _: types.SimpleNamespace(own=7.0)
    ),
    "it is another one": lambda _, made: setattr(made, "__class__", Other),
    "an attribute comes to its own": lambda meta, _: setattr(type(meta), "extra", 4.0),
}


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("change", META)
def test_a_metaclass_is_as_it_was(change: str) -> None:
    top = type("Top", (type,), {})
    meta: Any = top("Meta", (Making,), {})
    made: Any = meta("Made", (), {"scale": 2.0, "own": 3.0})

    def forward(m: Any, x: Tensor) -> Tensor:
        read = getattr(made, "extra", 1.0) * getattr(type(made), "extra", 1.0)
        return m.l(x) * made.scale * made().own * read

    eager, ours = pair(Function(forward, l=nn.Linear(4, 4)))
    x = torch.randn(3, 4)
    close(ours(x), eager(x))
    assert not ours.fallback_report()
    META[change](meta, made)
    close(ours(x), eager(x))


HELD: dict[str, tuple[Callable[[], Any], Read, Callable[[Any], None]]] = {
    "a dataclass with slots, mutated": (
        SlotsData,
        lambda s, y: y * s.held.scale,
        lambda m: setattr(m.held, "scale", 3.0),
    ),
    "a dataclass with slots, replaced": (
        SlotsData,
        lambda s, y: y * s.held.scale,
        lambda m: setattr(m, "held", SlotsData(3.0)),
    ),
    "slots": (lambda: with_scale(Slots), lambda s, y: y * s.held.scale, lambda m: setattr(m.held, "scale", 3.0)),
    "np.int64": (lambda: np.int64(2), lambda s, y: y * int(s.held), setting("held", np.int64(3))),
    "np.float32": (lambda: np.float32(2), lambda s, y: y * float(s.held), setting("held", np.float32(3))),
    "a slice": (lambda: slice(0, 1), lambda s, y: y[:, s.held], setting("held", slice(1, 3))),
    "a range": (lambda: range(2), lambda s, y: y * len(s.held), setting("held", range(3))),
    "a complex number": (lambda: 2j, lambda s, y: y * s.held.imag, setting("held", 3j)),
    "a mixed dict": (
        lambda: {"scale": 2.0, "act": torch.relu},
        lambda s, y: s.held["act"](y) * s.held["scale"],
        lambda m: m.held.update(scale=3.0),
    ),
    "a list of functions": (
        lambda: [torch.relu],
        lambda s, y: s.held[0](y),
        lambda m: m.held.__setitem__(0, torch.tanh),
    ),
    "a list of objects": (
        lambda: [with_scale(Plain)],
        lambda s, y: y * s.held[0].scale,
        lambda m: setattr(m.held[0], "scale", 3.0),
    ),
    "nested lists of tensors": (
        lambda: [[torch.ones(4)]],
        lambda s, y: y * s.held[0][0],
        lambda m: m.held[0].__setitem__(0, torch.full((4,), 2.0)),
    ),
    "configuration at depth 3": (
        deep,
        lambda s, y: y * s.held.scale.scale.scale,
        lambda m: setattr(m.held.scale.scale, "scale", 3.0),
    ),
    "a callable object": (lambda: with_scale(Plain), lambda s, y: s.held(y), lambda m: setattr(m.held, "scale", 3.0)),
    "a partial": (
        lambda: functools.partial(torch.mul, other=2.0),
        lambda s, y: s.held(y),
        lambda m: m.held.keywords.update(other=3.0),
    ),
    "a bound method": (
        lambda: with_scale(Plain).get,
        lambda s, y: y * s.held(),
        lambda m: setattr(m.held.__self__, "scale", 3.0),
    ),
    "a property": (lambda: with_scale(Plain), lambda s, y: y * s.held.doubled, lambda m: setattr(m.held, "scale", 3.0)),
    "a tensor's shape": (lambda: torch.ones(2), lambda s, y: y * s.held.shape[0], setting("held", torch.ones(3))),
    "a tensor's data": (lambda: torch.ones(4), lambda s, y: y * s.held.data, lambda m: m.held.data.mul_(3)),
    "a tensor, replaced": (lambda: torch.ones(4), lambda s, y: y * s.held, setting("held", torch.full((4,), 3.0))),
    "zero and minus zero": (lambda: 0.0, lambda s, y: y * math.copysign(2.0, s.held), setting("held", -0.0)),
    "a global": (lambda: None, by_global, set_global),
    "a closure": (
        lambda: scaling(2.0),
        lambda s, y: s.held(s, y),
        lambda m: setattr(m.held.__closure__[0], "cell_contents", 3.0),
    ),
    "a module of Python": (
        lambda: with_scale(lambda: types.ModuleType("settings")),
        lambda s, y: y * s.held.scale,
        lambda m: setattr(m.held, "scale", 3.0),
    ),
    "a computed name of what is looked up": (
        lambda: with_scale(Level),
        lambda self, y: y * getattr(self.held, "".join(["sc", "ale"])),
        lambda m: setattr(m.held, "scale", 3.0),
    ),
    "an attribute that is not there": (
        Level,
        lambda s, y: y * getattr(s.held, "scale", 1.0),
        lambda m: setattr(m.held, "scale", 3.0),
    ),
    "a slot that is not set": (
        Slots,
        lambda s, y: y * getattr(s.held, "scale", 1.0),
        lambda m: setattr(m.held, "scale", 3.0),
    ),
    "an attribute that a module of Python has not": (
        lambda: types.ModuleType("empty"),
        lambda s, y: y * getattr(s.held, "scale", 1.0),
        lambda m: setattr(m.held, "scale", 3.0),
    ),
    "an attribute that a function has not": (
        lambda: lambda: None,
        lambda s, y: y * getattr(s.held, "scale", 1.0),
        lambda m: setattr(m.held, "scale", 3.0),
    ),
    "a dictionary that is filled anew": (
        lambda: with_scale(Level),
        lambda s, y: y * getattr(s.held, "bias", 1.0),
        reloaded({"bias": 3.0}),
    ),
    "a dictionary that is exchanged": (
        lambda: with_scale(Level),
        lambda s, y: y * s.held.scale,
        lambda m: setattr(m.held, "__dict__", {"scale": 3.0}),
    ),
    "a dictionary that contains itself": (
        lambda: ring(2.0),
        lambda s, y: y * s.held["itself"]["scale"],
        lambda m: setattr(m, "held", ring(3.0)),
    ),
    "the value of an enumeration": (
        lambda: Mode.FAST,
        lambda s, y: y * s.held.value[0],
        lambda m: Mode.FAST.value.__setitem__(0, Mode.FAST.value[0] + 1),
    ),
    "members of an enumeration of text": (
        lambda: (with_scale(lambda: Word.ONE), with_scale(lambda: Word.TWO)),
        lambda s, y: y * s.held[0].scale * s.held[1].scale,
        lambda m: setattr(m.held[1], "scale", m.held[1].scale + 1),
    ),
    "a method of a dict": (
        lambda: {"scale": 2.0}.get,
        lambda s, y: y * s.held("scale"),
        lambda m: m.held.__self__.update(scale=3.0),
    ),
    "the length of a list": (
        lambda: [1].__len__,
        lambda s, y: y * s.held(),
        lambda m: m.held.__self__.append(3.0),
    ),
    "a range of as many numbers": (
        lambda: range(0, 3, 2),
        lambda s, y: y * s.held.stop,
        setting("held", range(0, 4, 2)),
    ),
    "a number of as many digits": (
        lambda: decimal.Decimal("1.0"),
        lambda s, y: y * len(str(s.held)),
        setting("held", decimal.Decimal("1.000")),
    ),
    "elements of a set that are equal": (
        lambda: {(1,)},
        lambda s, y: y * len(str(next(iter(s.held)))),
        setting("held", {(1.0,)}),
    ),
    "the order of a dict": (
        lambda: collections.OrderedDict(a=2.0, b=3.0),
        lambda s, y: y * next(iter(s.held.values())),
        lambda m: m.held.move_to_end("a"),
    ),
    "the unit of a time": (
        lambda: np.timedelta64(1, "D"),
        lambda s, y: y * float(s.held / np.timedelta64(1, "h")),
        setting("held", np.timedelta64(1, "h")),
    ),
    "the order of attributes": (
        two_attributes,
        lambda s, y: y * len(next(iter(vars(s.held)))),
        lambda m: setattr(m.held, "a", vars(m.held).pop("a")),
    ),
    "a member by its value": (
        lambda: enum.Enum("Level", {"LOW": 2.0, "HIGH": 3.0}),
        lambda s, y: y * s.held(2.0).value,
        lambda m: m.held._value2member_map_.__setitem__(2.0, m.held.HIGH),
    ),
    "a member by its name": (
        lambda: enum.Enum("Level", {"LOW": 2.0, "HIGH": 3.0}),
        lambda s, y: y * s.held["LOW"].value,
        lambda m: m.held._member_map_.__setitem__("LOW", m.held.HIGH),
    ),
    "the order of members": (
        lambda: enum.Enum("Level", {"LOW": 2.0, "HIGH": 3.0}),
        lambda s, y: y * next(iter(s.held)).value,
        lambda m: m.held._member_names_.reverse(),
    ),
    "what an unknown member is taken for": (
        tolerant,
        lambda s, y: y * s.held(5.0).value,
        lambda m: m.held.taken.update(name="HIGH"),
    ),
    "what a subscript of a class gives": (
        subscripted,
        lambda s, y: y * s.held["scale"],
        lambda m: m.held.table.update(scale=3.0),
    ),
    "a class that is registered": (
        registered,
        lambda s, y: y * (2 if isinstance(s.held, s.held.kind) else 3),
        lambda m: m.held.kind.register(type(m.held)),
    ),
    "a computed name": (
        lambda: with_scale(Plain),
        lambda s, y: y * getattr(s.held, "".join(["sc", "ale"])),
        lambda m: setattr(m.held, "scale", 3.0),
    ),
}


@pytest.mark.parametrize(("make", "read", "change"), HELD.values(), ids=HELD)
def test_a_change_is_seen(make: Callable[[], Any], read: Read, change: Callable[[Any], None]) -> None:
    eager, ours = both(read, make)
    x = torch.randn(3, 4)
    for _ in range(2):
        assert_same_step(eager, ours, x)
    assert n_graphs(ours) == 1
    change(eager)
    if change is not set_global:
        change(ours.module)
    for _ in range(2):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, x)


def test_combinations_of_flags_that_others_make_are_no_change() -> None:
    flags: Any = enum.Flag("Sides", "LEFT RIGHT TOP")
    eager, ours = both(lambda s, y: y * (2 if flags.LEFT in s.held else 3), lambda: flags.LEFT)
    for value in (3, 5, 6):
        assert_same_step(eager, ours, torch.ones(3, 4))
        assert flags(value) is not flags.LEFT
        for m in (eager, ours):
            m.zero_grad()
    assert n_graphs(ours) == 1


def test_the_values_of_a_tensor_outside_the_module_may_change_without_another_graph() -> None:
    teacher = nn.Linear(4, 4).requires_grad_(False)
    eager, ours = both(lambda s, y: y * s.held[0](y.detach()), lambda: [copy.deepcopy(teacher)])
    for _ in range(3):
        assert_same_step(eager, ours, torch.randn(3, 4))
        for m in (eager, ours):
            m.zero_grad()
            m.held[0].weight.mul_(0.5)
            m.held[0].bias.data.add_(1)
    assert n_graphs(ours) == 1


class Scaled(nn.Linear):
    scale = 2.0

    def factor(self) -> float:
        return self.scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor()


CHANGES: dict[str, Callable[[Any], None]] = {
    "attribute": lambda cls: setattr(cls, "scale", 3.0),
    "method": lambda cls: setattr(cls, "factor", lambda self: 4.0),
    "forward": lambda cls: setattr(cls, "forward", lambda self, x: x @ self.weight),
    "code of the forward": lambda cls: setattr(cls.forward, "__code__", (lambda self, x: x * 2).__code__),
    "method of a base": lambda cls: setattr(cls.__mro__[1], "factor", lambda self: 5.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_a_class_is_seen(change: Callable[[Any], None]) -> None:
    base = type("Base", (Scaled,), {"factor": lambda self: self.scale})
    cls: Any = type("Net", (base,), {"forward": lambda self, x: nn.Linear.forward(self, x) * self.factor()})
    ours = ORTModule(nn.Sequential(cls(4, 4)), ON_THE_FAST_WAY)
    x = torch.randn(3, 4)
    for _ in range(2):
        close(ours(x), ours.module(x))
    made = ours.stats()["export_seconds"]
    assert n_graphs(ours) == 1
    change(cls)
    for _ in range(2):
        close(ours(x), ours.module(x))
    assert ours.stats()["export_seconds"] > made


def logged(cls: Any) -> Any:
    """With an `__init__` around that of the class: one code for all classes."""
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any) -> None:
        init(self, *args)

    cls.__init__ = __init__
    return cls


def set_half(self: Any, y: Any) -> None:
    self.y = y * 0.5


@pytest.mark.parametrize("way", ["__init__", "closure"])
@pytest.mark.parametrize("which", [0, 1])
def test_functions_of_classes_that_share_their_code_are_held(which: int, way: str) -> None:
    kinds = [logged(dataclasses.make_dataclass(name, [("y", Any)])) for name in ("First", "Second")]
    ours = ORTModule(Function(lambda s, x: kinds[0](s.l(x)).y + kinds[1](x).y, l=nn.Linear(4, 4)), ON_THE_FAST_WAY)
    x = torch.randn(3, 4)
    close(ours(x), ours.module(x))
    if way == "closure":
        kinds[which].__init__.__closure__[0].cell_contents = set_half
    else:
        kinds[which].__init__ = set_half
    close(ours(x), ours.module(x))


@pytest.mark.parametrize("stays", [True, False], ids=["exported", "refused"])
def test_a_method_of_all_modules_that_a_forward_takes_is_what_it_was(stays: bool) -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        call = s.l.__call__
        return call(x) if stays else checkpoint(call, x, use_reentrant=False)

    was = nn.Module.__call__
    eager, ours = pair(Function(forward, l=nn.Linear(4, 4)))
    for batch in (2, 2, 3):
        assert_same_step(eager, ours, torch.randn(batch, 4))
        assert nn.Module.__call__ is was
    assert n_graphs(ours) == 1 and not ours.fallback_report()


def test_a_submodule_replaced_by_one_of_its_kind_is_seen() -> None:
    ours = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.1)), ON_THE_FAST_WAY)
    x = torch.randn(3, 4)
    close(ours(x), ours.module(x))
    ours.module[1] = nn.LeakyReLU(0.5)
    close(ours(x), ours.module(x))


def test_a_callable_argument_is_seen_to_change() -> None:
    eager, ours = (m := Function(lambda s, x, f: f(s.l(x)), l=nn.Linear(4, 4))), ORTModule(m, ON_THE_FAST_WAY)
    x, act = torch.randn(3, 4), with_scale(Plain)
    close(ours(x, act), eager(x, act))
    act.scale = 3.0
    close(ours(x, act), eager(x, act))


def test_numbers_of_arguments_are_told_apart_by_type_and_sign() -> None:
    def forward(s: Any, x: Tensor, n: Any) -> Tensor:
        return s.l(x) * (2.0 if isinstance(n, np.generic) else 3.0) * np.copysign(1.0, complex(n).imag).item()

    eager, ours = (m := Function(forward, l=nn.Linear(4, 4))), ORTModule(m, ON_THE_FAST_WAY)
    x = torch.randn(3, 4)
    for n in (1.0, np.float64(1.0), complex(1, -0.0), complex(1, 0.0), float("nan")):
        close(ours(x, n), eager(x, n))


def test_how_an_input_lies_in_memory_is_held_where_the_forward_asks() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.l(x) * (2 if x.is_contiguous() else 3) * x.stride(0)

    eager, ours = (m := Function(forward, l=nn.Linear(4, 4))), ORTModule(m, ON_THE_FAST_WAY)
    x = torch.randn(4, 4)
    for given in (x, x.t(), x, x[:, ::2].repeat(1, 2), x.t()):
        close(ours(given), eager(given))
    assert n_graphs(ours) == 2


def test_what_arithmetic_of_decimals_depends_on_is_held() -> None:
    eager, ours = both(lambda s, y: y * float(1 / s.held), lambda: decimal.Decimal(3))
    for precision in (28, 2):
        with decimal.localcontext(prec=precision):
            x = torch.randn(3, 4)
            close(ours(x), eager(x))


def test_a_method_of_what_says_itself_what_is_equal_goes_another_way() -> None:
    class Alike:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def __call__(self, _owner: Any) -> float:
            return self.scale

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Alike)

        __hash__ = object.__hash__

    eager = Function(lambda s, x: s.l(x) * s.held(), l=nn.Linear(4, 4), held=types.MethodType(Alike(2.0), 3))
    ours, x = ORTModule(eager), torch.randn(3, 4)
    for scale in (2.0, 5.0):
        eager.held = types.MethodType(Alike(scale), 3)
        close(ours(x), eager(x))
