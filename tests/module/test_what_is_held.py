"""What a forward reads besides its arguments is held or refused: eager's results, or a refusal that names the cause."""

import collections
import contextlib
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import gc
import importlib
import io
import logging
import math
import os
import pathlib
import pprint
import random
import secrets
import sys
import threading
import time
import types
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ortmodule_c import DebugOptions, ORTModule, ORTModuleError
from wrapped import Function, assert_same_step, close, n_graphs

ON_THE_FAST_WAY = DebugOptions(capture="export", fallback="error")


class Slots:
    __slots__ = ("scale",)


@dataclasses.dataclass(slots=True)
class SlotsData:
    scale: Any = 2.0


class Plain:
    scale: Any = 2.0

    def get(self) -> Any:
        return self.scale

    def __call__(self, y: Tensor) -> Tensor:
        return y * self.scale

    @property
    def doubled(self) -> Any:
        return 2 * self.scale


def with_scale(cls: Any, scale: Any = 2.0) -> Any:
    made = cls()
    made.scale = scale
    return made


class Settings:
    scale = 2.0


def deep(scale: Any = 2.0) -> Any:
    return with_scale(Plain, with_scale(Plain, with_scale(Plain, scale)))


SCALE = 2.0
CONFIGURATION = types.ModuleType("configuration")


class Mode(enum.Enum):
    FAST = [2.0]  # noqa: RUF012  # as users do


class Level:
    pass


def ring(scale: float) -> dict[str, Any]:
    made: dict[str, Any] = {"scale": scale}
    made["itself"] = made
    return made


def with_one_list() -> Any:
    made = with_scale(Plain, [1.0])
    made.again = made.scale
    return made


def reloaded(values: dict[str, Any]) -> Callable[[Any], None]:
    return lambda m: (vars(m.held).clear(), vars(m.held).update(values))  # type: ignore[func-returns-value]


def by_global(_s: Any, y: Tensor) -> Tensor:
    return y * SCALE


def set_global(_m: Any) -> None:
    globals()["SCALE"] = 3.0


def scaling(scale: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda _s, y: y * scale


def setting(name: str, value: Any) -> Callable[[Any], None]:
    return lambda m: setattr(m, name, value)


Read = Callable[[Any, Tensor], Tensor]
# What the forward holds, how it reads that, how that is changed.
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
    "an array": (lambda: np.ones(2), lambda s, y: y * float(s.held.sum()), lambda m: m.held.__setitem__(0, 5.0)),
    "a slice": (lambda: slice(0, 1), lambda s, y: y[:, s.held], setting("held", slice(1, 3))),
    "a range": (lambda: range(2), lambda s, y: y * len(s.held), setting("held", range(3))),
    "a deque": (lambda: collections.deque([2.0]), lambda s, y: y * s.held[0], lambda m: m.held.appendleft(3.0)),
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
    "a computed name of a class": (
        lambda: None,
        lambda s, y: y * getattr(Settings, "".join(["sc", "ale"])),
        lambda m: setattr(Settings, "scale", 3.0),
    ),
    "a computed name of a class in a dict": (
        lambda: {"settings": Settings},
        lambda s, y: y * getattr(s.held["settings"], "".join(["sc", "ale"])),
        lambda m: setattr(Settings, "scale", 5.0),
    ),
    "a computed name of a module of Python": (
        lambda: setattr(CONFIGURATION, "scale", 2.0),
        lambda s, y: y * functools.reduce(getattr, ["scale"], CONFIGURATION),  # type: ignore[arg-type]
        lambda m: setattr(CONFIGURATION, "scale", 3.0),
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
    "which lists are one": (
        with_one_list,
        lambda s, y: y * (2 if s.held.scale is s.held.again else 3),
        lambda m: setattr(m.held, "again", [1.0]),
    ),
    "which lists have one id": (
        with_one_list,
        lambda s, y: y * (2 if id(s.held.scale) == id(s.held.again) else 3),
        lambda m: setattr(m.held, "again", [1.0]),
    ),
    "the value of an enumeration": (
        lambda: Mode.FAST,
        lambda s, y: y * s.held.value[0],
        lambda m: Mode.FAST.value.__setitem__(0, Mode.FAST.value[0] + 1),
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
    "the class of a namespace": (
        types.SimpleNamespace,
        lambda s, y: y * (2 if type(s.held) is types.SimpleNamespace else 3),
        lambda m: setattr(m, "held", type("Other", (types.SimpleNamespace,), {})()),
    ),
    "a computed name": (
        lambda: with_scale(Plain),
        lambda s, y: y * getattr(s.held, "".join(["sc", "ale"])),
        lambda m: setattr(m.held, "scale", 3.0),
    ),
}


def both(read: Read, make: Callable[[], Any]) -> tuple[nn.Module, ORTModule]:
    """For PyTorch and for the fast way; they share nothing."""
    made = [Function(lambda s, x: read(s, s.l(x)), l=nn.Linear(4, 4), held=make()) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    return made[0], ORTModule(made[1], ON_THE_FAST_WAY)


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
    assert n_graphs(ours) == 1
    change(cls)
    for _ in range(2):
        close(ours(x), ours.module(x))
    assert n_graphs(ours) == 2


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


def test_tensors_that_are_one_are_refused_where_identity_counts() -> None:
    ours = ORTModule(Function(lambda s, x, y: s.l(x) * (2 if x is y else 3), l=nn.Linear(4, 4)), ON_THE_FAST_WAY)
    x = torch.randn(3, 4)
    close(ours(x, x.clone()), ours.module(x, x.clone()))
    with pytest.raises(ORTModuleError, match="by identity"):
        ours(x, x)


# What a graph would do once


class Schedule:
    def __init__(self) -> None:
        self.now = [0]

    def step(self) -> int:
        self.now[0] += 1
        return self.now[0]


SEEN: list[int] = []


def append_to_a_global(s: Any, y: Tensor) -> Tensor:
    SEEN.append(1)
    return y


def appending() -> Callable[[Any, Tensor], Tensor]:
    seen: list[int] = []

    def forward(_s: Any, y: Tensor) -> Tensor:
        seen.append(1)
        return y * len(seen)

    return forward


def count(_s: Any, y: Tensor) -> Tensor:
    global SCALE  # noqa: PLW0603  # as users do
    SCALE += 1
    return y


def counting() -> Iterator[float]:
    yield from (1.0, 2.0, 3.0)


def kept(s: Any, y: Tensor) -> Tensor:
    s.kept = y.sum().item()
    return y


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Filling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        buffer.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


def hooked(_s: Any, y: Tensor) -> Tensor:
    y.register_hook(lambda grad: grad * 10)
    return y * 2


@functools.lru_cache
def remembered() -> Any:
    return with_scale(Plain)


@functools.cache
def number() -> float:
    return 2.0


def set_new_global(_s: Any, y: Tensor) -> Tensor:
    global NEW_GLOBAL  # noqa: PLW0603  # as users do
    NEW_GLOBAL = y.shape[0]
    return y


def counting_calls(_s: Any, y: Tensor) -> Tensor:
    counting_calls.n = 1  # type: ignore[attr-defined]
    return y


def guessing(_s: Any, y: Tensor) -> Tensor:
    try:
        return y * float(y.sum())
    except Exception:
        return y


def set_dtype(_s: Any, y: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64 if torch.get_default_dtype() is torch.float32 else torch.float32)
    return y


class Rule(type):
    scale = 2.0


class Ruled(metaclass=Rule):
    pass


def caught(make_number: Callable[[Tensor], Any]) -> Read:
    """A forward that goes on after whatever making a number of a tensor raises."""

    def forward(_s: Any, y: Tensor) -> Tensor:
        try:
            return y * make_number(y)
        except Exception:
            return y * 7

    return forward


def seeded(_s: Any, y: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        torch.manual_seed(3)
    return y * torch.rand(4)


def suppressed_hook(_s: Any, y: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        y.register_hook(lambda grad: grad * 10)
    return y


def inference(_s: Any, y: Tensor) -> Tensor:
    try:
        with torch.inference_mode():
            return y * 2
    except Exception:
        return y


def doing(act: Callable[[Any, Tensor], Any]) -> Read:
    """A forward that does something besides."""

    def forward(s: Any, y: Tensor) -> Tensor:
        act(s, y)
        return y

    return forward


def swap(s: Any, y: Tensor) -> Tensor:
    s.held[0], s.held[1] = s.held[1], s.held[0]
    return s.held[0](y)


def set_on(owner: Callable[[Any, Tensor], Any]) -> Read:
    """A forward that sets an attribute of something."""
    return doing(lambda s, y: setattr(owner(s, y), "seen", 1))


LOGGER = logging.getLogger("a_logger")
CAUGHT = "catches what is raised"
SETS = "sets attribute seen of a tensor"

REFUSED: dict[str, tuple[Callable[[], Any], Read, str]] = {
    "a computed name of a class that is held": (
        lambda: Settings,
        lambda self, y: y * getattr(self.held, "".join(["sc", "ale"])),
        "computes names of attributes of attribute held",
    ),
    "Python's random numbers": (lambda: None, lambda s, y: y * random.random(), "Python's random numbers"),
    "NumPy's random numbers": (lambda: None, lambda s, y: y * float(np.random.rand()), "NumPy's random numbers"),
    "random numbers of its own": (lambda: random.Random(0), lambda s, y: y * s.held.random(), "attribute held"),
    "an iterator": (lambda: iter([2.0, 3.0]), lambda s, y: y * next(s.held), "list_iterator"),
    "a generator": (counting, lambda s, y: y * next(s.held), "generator"),
    "a schedule": (Schedule, lambda s, y: y * s.held.step(), "attribute now of Schedule"),
    "a list of the globals": (lambda: None, append_to_a_global, "global SEEN"),
    "a list of a closure": (appending, lambda s, y: s.held(s, y), "variable seen of forward"),
    "a global": (lambda: None, count, "global SCALE"),
    "print": (lambda: None, lambda s, y: (print("seen"), y)[1], r"print\(\)"),
    "a file": (lambda: None, lambda s, y: (open(os.devnull).close(), y)[1], r"open\(\)"),
    "a stream": (io.StringIO, lambda s, y: (s.held.write("seen"), y)[1], "StringIO"),
    "the time": (lambda: None, lambda s, y: y * (time.time() > 0), r"time\(\)"),
    "the date": (lambda: None, lambda s, y: y * datetime.datetime.now().year, r"now\(\)"),
    "all globals": (lambda: None, lambda s, y: y * globals()["SCALE"], r"globals\(\)"),
    "a number that is kept": (lambda: None, kept, "depends on the elements of a tensor"),
    "a hook on a tensor": (lambda: None, hooked, "registers a hook"),
    "a function that changes its argument": (
        lambda: None,
        lambda s, y: Dirty.apply(y * 1),
        "Dirty changes an argument",
    ),
    "a function that changes a buffer": (
        lambda: None,
        lambda s, y: Filling.apply(y, s.buffer),
        "Filling changes an argument",
    ),
    "a memo of objects": (lambda: None, lambda s, y: y * remembered().scale, "remembers objects"),
    "a metaclass": (lambda: Ruled, lambda s, y: y * s.held.scale, "Ruled has a metaclass of its own, Rule"),
    "a module of Python by a string": (
        lambda: None,
        lambda s, y: y * (2 if importlib.import_module("math").pi else 3),
        "import_module",
    ),
    "all modules of Python": (lambda: None, lambda s, y: y * (2 if "math" in sys.modules else 3), "sys.modules"),
    "an attribute past its lookup": (
        lambda: with_scale(Plain),
        lambda s, y: y * object.__getattribute__(s.held, "scale"),
        "__getattribute__",
    ),
    "a number that is drawn in Python's library": (lambda: None, lambda s, y: y * uuid.uuid4().int, "uuid4"),
    "a file that may be there": (lambda: None, lambda s, y: y * os.path.exists("nowhere"), "exists"),
    "a global that is new": (lambda: None, set_new_global, "global NEW_GLOBAL"),
    "an attribute of a function": (lambda: None, counting_calls, "function counting_calls"),
    "a tensor that is no buffer, in place": (
        lambda: torch.ones(4),
        lambda s, y: y * s.held.add_(1),
        r"no buffer, in place",
    ),
    "a gradient": (lambda: None, lambda s, y: y * (2 if s.l.weight.grad is None else 3), "asks for grad of a tensor"),
    "whether a tensor is a leaf": (lambda: None, lambda s, y: y * (2 if y.is_leaf else 3), "asks for is_leaf"),
    "a failure of the tracer that is caught": (lambda: None, guessing, CAUGHT),
    "how many threads there are": (lambda: None, lambda s, y: y * torch.get_num_threads(), "get_num_threads"),
    "PyTorch's own state": (lambda: None, set_dtype, "set_default_dtype"),
    "a result that was there before": (lambda: [1.0], lambda s, y: (y, s.held), "returns a list"),  # type: ignore[return-value]
    "the mode of a submodule": (lambda: None, lambda s, y: (s.l.eval(), y)[1], "the mode of Linear"),
    "a generator of PyTorch": (
        torch.Generator,
        lambda s, y: y * s.held.initial_seed(),
        "Generator, which cannot be compared",
    ),
    "a caught number": (lambda: None, caught(lambda y: float(y.sum())), CAUGHT),
    "a caught branch": (lambda: None, caught(lambda y: 2 if y.sum() > -100 else 3), CAUGHT),
    "a caught array": (lambda: None, caught(lambda y: float(y.detach().numpy().sum())), CAUGHT),
    "a caught pointer": (lambda: None, caught(lambda y: 2 if y.data_ptr() else 3), CAUGHT),
    "a caught hook": (lambda: None, suppressed_hook, "registers a hook"),
    "a caught seed": (lambda: None, seeded, "seeds PyTorch's random numbers"),
    "caught inference mode": (lambda: None, inference, "enters inference mode"),
    "a file that is read": (
        lambda: pathlib.Path(os.devnull),
        lambda s, y: y * len(s.held.read_text()),
        "Path.read_text",
    ),
    "a file that is asked for": (lambda: None, lambda s, y: y * os.path.exists(os.devnull), "exists"),
    "a saved array": (lambda: None, doing(lambda s, y: np.save(os.devnull, np.ones(1))), "save"),
    "a saved tensor": (lambda: None, doing(lambda s, y: torch.save(1.0, os.devnull)), "torch.serialization.save"),
    "a directory": (lambda: None, doing(lambda s, y: os.makedirs(os.curdir, exist_ok=True)), "makedirs"),
    "a unique number": (lambda: None, lambda s, y: y * (uuid.uuid4().int % 7), "uuid4"),
    "a secret number": (lambda: None, lambda s, y: y * secrets.randbelow(7), "randbelow"),
    "a generator that is made": (lambda: None, lambda s, y: y * random.Random().random(), "Random"),
    "a generator of NumPy that is made": (
        lambda: None,
        lambda s, y: y * np.random.default_rng().random(),
        "default_rng",
    ),
    "the level of a log": (lambda: None, lambda s, y: y * (2 if LOGGER.isEnabledFor(20) else 1), "isEnabledFor"),
    "a log": (lambda: None, doing(lambda s, y: LOGGER.info("seen")), "Logger.info"),
    "a warning": (lambda: None, doing(lambda s, y: warnings.warn("seen", stacklevel=1)), "warn"),
    "pprint": (lambda: None, doing(lambda s, y: pprint.pprint("seen")), "pprint"),
    "the name of a thread": (lambda: None, lambda s, y: y * len(threading.current_thread().name), "current_thread"),
    "a thread": (lambda: None, doing(lambda s, y: threading.Thread(target=print).start()), "Thread"),
    "collection of garbage": (lambda: None, doing(lambda s, y: gc.collect()), r"gc.collect\(\)"),
    "the number of threads": (lambda: None, lambda s, y: y * torch.get_num_threads(), "get_num_threads"),
    "setting the number of threads": (lambda: None, doing(lambda s, y: torch.set_num_threads(1)), "set_num_threads"),
    "setting the default dtype": (
        lambda: None,
        doing(lambda s, y: torch.set_default_dtype(torch.float32)),
        "set_default_dtype",
    ),
    "the precision of products": (
        lambda: None,
        lambda s, y: y * len(torch.get_float32_matmul_precision()),
        "get_float32_matmul_precision",
    ),
    "leaving grad off": (lambda: None, doing(lambda s, y: torch.set_grad_enabled(False)), "PyTorch's own state"),
    "the mode": (lambda: None, doing(lambda s, y: s.train(not s.training)), "the mode of"),
    "exchanged submodules": (
        lambda: nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
        swap,
        "attribute 0 of submodules of ModuleList",
    ),
    "asking for a compiler": (
        lambda: None,
        lambda s, y: y * (2 if torch.compiler.is_compiling() else 1),
        "is_compiling",
    ),
    "asking for an export": (
        lambda: None,
        lambda s, y: y * (2 if torch.compiler.is_exporting() else 1),
        "is_exporting",
    ),
    "the type of a tensor": (lambda: None, lambda s, y: y * (2 if type(y) is Tensor else 1), "by type"),
    "the class of a parameter": (
        lambda: None,
        lambda s, y: y * (2 if s.l.weight.__class__ == nn.Parameter else 1),
        "by type",
    ),
    "an attribute of a parameter": (lambda: None, set_on(lambda s, y: s.l.weight), SETS),
    "an attribute of a result": (lambda: None, set_on(lambda s, y: y), SETS),
    "the gradient of a parameter": (lambda: None, doing(lambda s, y: setattr(s.l.weight, "grad", None)), "grad"),
    "a gradient that is kept": (lambda: None, doing(lambda s, y: y.retain_grad()), "retains the gradient"),
    "a generator's seed": (
        lambda: torch.Generator().manual_seed(3),
        lambda s, y: y * s.held.initial_seed(),
        "torch._C.Generator",
    ),
    "a list that is given away": (lambda: [1, 2], lambda s, y: (y, s.held), "returns a list that was there"),
    "the seed": (lambda: None, lambda s, y: y * (torch.initial_seed() % 7), "asks for their seed"),
}


@pytest.mark.parametrize(("make", "read", "cause"), REFUSED.values(), ids=REFUSED)
def test_what_would_happen_once_is_refused_and_left_as_it_was(
    make: Callable[[], Any], read: Read, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    eager, ours = both(read, make)
    for m in (eager, ours.module):
        m.register_buffer("buffer", torch.ones(4))
    dtype = torch.get_default_dtype()
    state = SCALE, list(SEEN), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    with pytest.raises(ORTModuleError, match=cause):
        try:
            ours(torch.randn(3, 4))
        finally:
            torch.set_default_dtype(dtype)
    assert (SCALE, SEEN, random.getstate(), np.random.get_state()[1].tolist()) == state  # type: ignore[union-attr]
    assert capsys.readouterr().out == ""
    if eager.held is None:
        return
    x = torch.randn(3, 4)
    for _ in range(2):
        close(ours.module(x), eager(x))
        close(ours.module.buffer, eager.buffer)


def test_a_state_of_python_that_only_others_change_is_no_reason_to_refuse() -> None:
    eager, ours = both(lambda s, y: y * 2 if s.training or random.random() < 2 or SEEN else y, lambda: None)
    assert_same_step(eager, ours, torch.randn(3, 4))
    random.random()
    for m in (eager, ours):
        m.zero_grad()
    assert_same_step(eager, ours, torch.randn(3, 4))
    assert n_graphs(ours) == 1


def test_the_name_of_a_type_and_the_type_of_the_module_are_no_reason_to_refuse() -> None:
    eager, ours = both(lambda self, y: y * len(type(self.l).__name__) * isinstance(self, type(self)), lambda: None)
    assert_same_step(eager, ours, torch.randn(3, 4))


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


def twice_of_layers(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda m, *args, **kwargs: call(m, *args, **kwargs) * (2 if isinstance(m, nn.Linear) else 1)


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (nn.functional, "linear", twice(nn.functional.linear)),
        (nn.Linear, "forward", twice(nn.Linear.forward)),
        (nn.Module, "__call__", twice_of_layers(nn.Module.__call__)),
        (Tensor, "a_number", 2.0),
        (Tensor, "a_method", lambda t: t * 2),
    ],
)
def test_what_is_replaced_in_pytorch_is_seen(
    owner: Any, name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.l(x)
        return y.a_method() * y.a_number * Tensor.a_number  # type: ignore[attr-defined]

    monkeypatch.setattr(Tensor, "a_number", 1.0, raising=False)
    monkeypatch.setattr(Tensor, "a_method", lambda t: t * 1, raising=False)
    eager = Function(forward, l=nn.Linear(4, 4))
    ours = ORTModule(eager)
    x = torch.randn(3, 4)
    before = eager(x)
    close(ours(x), before)
    assert n_graphs(ours) == 1
    monkeypatch.setattr(owner, name, other)
    assert not torch.equal(eager(x), before)
    for _ in range(2):
        close(ours(x), eager(x))
    monkeypatch.undo()
    monkeypatch.setattr(Tensor, "a_number", 1.0, raising=False)
    monkeypatch.setattr(Tensor, "a_method", lambda t: t * 1, raising=False)
    close(ours(x), before)


def test_an_environment_variable_is_seen_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = both(lambda s, y: y * float(os.environ.get("A_SCALE", "2")), lambda: None)
    x = torch.randn(3, 4)
    close(ours(x), eager(x))
    monkeypatch.setenv("A_SCALE", "3")
    close(ours(x), eager(x))


def test_a_variable_of_the_environment_that_a_function_asks_for_is_seen_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_SCALE", "2")
    eager, ours = both(lambda s, y: y * float(os.getenv("A_SCALE") or 0), lambda: None)
    x = torch.randn(3, 4)
    close(ours(x), eager(x))
    monkeypatch.setenv("A_SCALE", "3")
    close(ours(x), eager(x))


class Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.addmm.default else result


class DoublingFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


@pytest.mark.parametrize("moment", [torch.inference_mode, Doubling, DoublingFunctions, lambda: torch.device("meta")])
def test_the_moment_of_a_call_counts(moment: Callable[[], Any]) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        of_default = torch.ones(4)
        return s.l(x) * (2 if torch.is_inference_mode_enabled() else 3) * (2 if of_default.is_meta else 3)

    eager = Function(forward, l=nn.Linear(4, 4))
    ours = ORTModule(eager)
    x = torch.randn(3, 4)
    for manager in (torch.no_grad, moment, torch.no_grad):
        with manager():
            close(ours(x), eager(x))


def test_counters_of_functions_and_of_pytorchs_classes_count_as_in_eager() -> None:
    def function(y: Tensor) -> Tensor:
        function.n = getattr(function, "n", 0) + 1  # type: ignore[attr-defined]
        nn.Linear.n = getattr(nn.Linear, "n", 0) + 1  # type: ignore[attr-defined]
        return y

    ours = ORTModule(Function(lambda s, x: function(s.l(x)), l=nn.Linear(4, 4)))
    try:
        for _ in range(3):
            ours(torch.randn(3, 4))
        assert (function.n, nn.Linear.n) == (3, 3)  # type: ignore[attr-defined]
    finally:
        del nn.Linear.n  # type: ignore[attr-defined]


def test_an_object_that_is_given_away_is_the_modules() -> None:
    ours = ORTModule(Function(lambda s, x: (s.l(x), s.held), l=nn.Linear(4, 4), held=types.SimpleNamespace()))
    assert ours(torch.randn(3, 4))[1] is ours.module.held


def test_a_container_of_the_arguments_that_is_given_back_is_the_callers() -> None:
    ours = ORTModule(Function(lambda s, x, d: (s.l(x), d), l=nn.Linear(4, 4)))
    given = {"x": torch.ones(4)}
    assert ours(torch.randn(3, 4), given)[1] is given


def test_a_container_that_is_given_away_twice_is_one() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        result = [s.l(x)]
        return result, result

    ours = ORTModule(Function(forward, l=nn.Linear(4, 4)))
    first, second = ours(torch.randn(3, 4))
    assert first is second


def test_a_copy_of_a_parameter_a_buffer_or_an_input_is_a_tensor_of_its_own() -> None:
    m = Function(lambda s, x: (s.l(x), s.l.weight.clone(), s.buffer.clone(), x.clone()), l=nn.Linear(4, 4))
    m.register_buffer("buffer", torch.ones(4))
    ours = ORTModule(m, ON_THE_FAST_WAY)
    x = torch.randn(3, 4)
    _, *copies = ours(x)
    before = [t.detach().clone() for t in copies]
    with torch.no_grad():
        for t in (m.l.weight, m.buffer, x):
            t.add_(1)
    close([t.detach() for t in copies], before)


def test_a_memo_of_numbers_is_as_good_as_a_function() -> None:
    eager, ours = both(lambda s, y: y * number(), lambda: None)
    assert_same_step(eager, ours, torch.randn(3, 4))


def test_a_profiler_goes_on_after_a_trace() -> None:
    seen = []

    def profile(frame: Any, event: str, _argument: Any) -> None:
        seen.append(event)

    sys.setprofile(profile)
    try:
        ORTModule(nn.Linear(2, 2), ON_THE_FAST_WAY)(torch.randn(1, 2))
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert seen
