"""What a module that goes through TorchDynamo reads of Python is held as on the first way."""

import copy
import enum
import functools
import math
import random
import typing
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import DebugOptions, ORTModule
from test_what_is_held import HELD, Read, set_global
from wrapped import Function, assert_same_step, close, pair

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_attributes_that_change_are_seen() -> None:
    def scaled(s: Function, x: Tensor) -> Tensor:
        return s.l(x) * s.by if x.sum() > 0 else s.l(x)

    eager, ours = pair(Function(scaled, l=nn.Linear(2, 2), by=2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for by in (2.0, 3.0, 4.0):
            eager.by = ours.module.by = by
            assert_same_step(eager, ours, torch.ones(1, 2))


@pytest.mark.parametrize(("make", "read", "change"), HELD.values(), ids=HELD)
def test_a_change_that_dynamo_compares_less_is_seen(
    make: Callable[[], Any], read: Read, change: Callable[[Any], None]
) -> None:
    made = [Function(lambda s, x: read(s, s.l(x)), l=nn.Linear(4, 4), held=make()) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    eager, ours = made[0], ORTModule(made[1], DebugOptions(capture="dynamo"))
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            assert_same_step(eager, ours, x)
            for m in (eager, ours):
                m.zero_grad()
            if step == 1:
                change(eager)
                if change is not set_global:
                    change(ours.module)


def test_a_forward_of_pytorchs_that_is_replaced_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Function(lambda s, x: s.l(x) + 1, l=nn.Linear(4, 4))
    eager, ours = module, ORTModule(copy.deepcopy(module), DebugOptions(capture="dynamo"))
    x = torch.randn(3, 4)
    assert_same_step(eager, ours, x)
    before = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda s, x: before(s, x) * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(ours(x), eager(x))


@pytest.mark.parametrize("capture", ["auto", "export", "dynamo"])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", ["group_norm", "layer_norm"])
def test_what_is_in_the_place_of_a_function_of_pytorchs_is_called_once(
    name: str, early: bool, capture: Literal["auto", "export", "dynamo"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracer has it called by itself, as what PyTorch's own function calls."""
    before = getattr(F, name)
    eager = Function(lambda s, x: F.layer_norm(s.n(x), x.shape[2:]), n=nn.GroupNorm(2, 4))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture))
    x = torch.randn(2, 4, 5)
    if not early:
        assert_same_step(eager, ours, x)
    doubled = functools.partial(lambda by, *args: before(*args) * by, 2) if early else lambda *args: before(*args) * 2
    monkeypatch.setattr(F, name, doubled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(ours(x), eager(x))
    assert any("in the place of" in str(r.cause) or "the graph calls" in str(r.cause) for r in ours.fallback_report())


class Numbers(dict[str, float]):
    by = 2.0


def numbers(by: float) -> Numbers:
    made = Numbers(a=2.0)
    made.by = by
    return made


# An argument before and after a change, and how it is read.
GIVEN: dict[str, tuple[Any, Any, Callable[[Any], float]]] = {
    "the sign of zero": (0.0, -0.0, lambda given: math.copysign(2.0, given)),
    "the sign of zero of NumPy": (np.float64(0.0), np.float64(-0.0), lambda given: math.copysign(2.0, given)),
    "a range of as many numbers": (range(0, 3, 2), range(0, 4, 2), lambda given: given.stop),
    "elements that are equal": ({(1,)}, {(1.0,)}, lambda given: len(str(next(iter(given))))),
    "attributes of a dict": (numbers(2.0), numbers(3.0), lambda given: given.by),
    "a bound method": ({"a": 0.0}.get, {"a": -0.0}.get, lambda given: math.copysign(2.0, given("a"))),
    "the length that a deque is kept to": (deque([2.0]), deque([2.0], maxlen=3), lambda given: given.maxlen or 1),
    "an object without a dictionary": (Fraction(1, 2), Fraction(1, 3), lambda given: given.denominator),
}


@pytest.mark.parametrize(("first", "then", "read"), GIVEN.values(), ids=GIVEN)
def test_a_change_of_an_argument_is_seen(first: Any, then: Any, read: Callable[[Any], float]) -> None:
    eager = Function(lambda s, x, given: s.l(x) * read(given), l=nn.Linear(4, 4))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo"))
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in (first, first, then, first):
            assert_same_step(eager, ours, x, given)


def test_arguments_that_dynamo_compares_may_change_all_the_time() -> None:
    eager = Function(lambda s, x, by, words: s.l(x) * by * len(words), l=nn.Linear(4, 4))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo", fallback="error"))
    for by in range(2, 12):
        assert_same_step(eager, ours, torch.randn(3, 4), float(by), ["a"] * (by % 3))


@functools.lru_cache
def counted() -> list[int]:
    return [*range(100)]


class Rule(type):
    scale = 2.0


class Ruled(metaclass=Rule):
    pass


class Doubling(type):
    """A metaclass that only writes: what reads and calls its classes does not meet it."""

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value * 2)


class Doubled(metaclass=Doubling):
    scale = 1.0


def written_by_a_metaclass(_s: Any, y: Tensor) -> Tensor:
    type.__setattr__(Doubled, "scale", 1.0)
    Doubled.scale = Doubled.scale + 1.0
    return y * Doubled.scale


SEEN_OTHERWISE: dict[str, Read] = {
    "whether it is a leaf": lambda s, y: y * (2 if y.is_leaf else 3),
    "its node": lambda s, y: y * (2 if y.grad_fn is None else 3),
    "whether it keeps its gradient": lambda s, y: y * (2 if y.retains_grad else 3),
    "a generator": lambda s, y: y * s.generator.random(),
    "an attribute that a metaclass writes": written_by_a_metaclass,
    "a metaclass": lambda s, y: y * Ruled.scale,  # type: ignore[attr-defined]
    "the default dtype": lambda s, y: (torch.set_default_dtype(torch.get_default_dtype()), y * 2)[1],
    "a memo": lambda s, y: y * counted()[0],
    "a tracer": lambda s, y: y * (2 if torch.compiler.is_compiling() else 3),
}
SEEN_AT_ONCE: dict[str, Read] = {
    "whether gradients are on": lambda s, y: (torch.set_grad_enabled(False), y * 2)[1],
}


@pytest.mark.parametrize(
    ("read", "branches"),
    [
        *[pytest.param(r, False, id=n) for n, r in {**SEEN_OTHERWISE, **SEEN_AT_ONCE}.items()],
        *[pytest.param(r, True, id=f"{n}, after a branch") for n, r in SEEN_OTHERWISE.items()],
    ],
)
def test_what_dynamo_sees_otherwise_than_eager_runs_in_pytorch(read: Read, branches: bool) -> None:
    def forward(s: Any, x: Tensor) -> Any:
        y = s.l(x)
        if branches and y.sum() > 1e9:
            return y
        return read(s, y)

    eager, ours = (
        m := Function(forward, l=nn.Linear(4, 4), generator=random.Random(0)),
        ORTModule(copy.deepcopy(m)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            results = []
            for m in (eager, ours):
                results.append((m(torch.ones(2, 4)), torch.is_grad_enabled()))
                torch.set_grad_enabled(True)
            assert results[0][1] == results[1][1]
            close(results[1][0], results[0][0])
    assert branches or ours.stats()["graphs"] == 0


def test_a_dictionary_made_by_an_alias_of_typing_is_one() -> None:
    held = typing.OrderedDict[str, float](by=2.0)
    eager = Function(lambda s, x: s.l(x) * s.held["by"], l=nn.Linear(4, 4), held=held)
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo", fallback="error"))
    assert_same_step(eager, ours, torch.ones(2, 4))


class Sevenfold(float):
    def __mul__(self, other: Any) -> Any:
        return other * 7.0

    __rmul__ = __mul__


class First(int):
    def __index__(self) -> int:
        return 0


class Alike(str):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


class Halved(NamedTuple("Halved", [("whole", float), ("other", float)])):
    @property
    def whole(self) -> float:
        return self[0] / 2


class Named(NamedTuple):
    whole: float

    def half(self) -> float:
        return self.whole / 2


class Computed(tuple[float, ...]):
    @property
    def _fields(self) -> None:
        raise AssertionError("nobody asks for it")


class Rate(float):
    @property
    def half(self) -> float:
        return float(self) / 2


class Word(enum.StrEnum):
    ONE = "one"

    def spelled(self) -> int:
        return len(self.value)


# What Dynamo takes for a plain number, text or tuple, or not: the value, how it is read, and whether so.
TAKEN_FOR_ITS_BASE: dict[str, tuple[Any, Callable[[Any], Any], bool]] = {
    "a float": (Sevenfold(3.0), lambda v: v * torch.ones(4), True),
    "an int": (First(1), lambda v: (2.0, 3.0)[v], True),
    "a text": (Alike("a"), lambda v: 2.0 if v == "b" else 3.0, True),
    "a tuple": (Halved(1.0, 2.0), lambda v: v.whole + v[1], True),
    "a tuple with a function": (Named(1.0), lambda v: v.half(), False),
    "a tuple that computes its fields": (Computed((1.0,)), lambda v: v[0], True),
    "a float with a property": (Rate(3.0), lambda v: v.half, False),
    "an enumeration": (Word.ONE, lambda v: 2.0 if v == "one" else v.spelled(), False),
}


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("is_argument", [False, True], ids=["in an attribute", "an argument"])
@pytest.mark.parametrize(("value", "read", "is_taken"), TAKEN_FOR_ITS_BASE.values(), ids=TAKEN_FOR_ITS_BASE)
def test_what_does_not_compute_as_its_base_runs_in_pytorch(
    value: Any, read: Callable[[Any], Any], is_taken: bool, is_argument: bool
) -> None:
    eager = Function(lambda s, x, given: s.l(x) * read(given or s.held), l=nn.Linear(4, 4), held=value)
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo"))
    for _ in range(2):
        assert_same_step(eager, ours, torch.ones(2, 4), value if is_argument else None)
    assert (ours.stats()["graphs"] == 0) == is_taken
    assert any("does not compute as its base does" in r.cause for r in ours.fallback_report()) == is_taken


@dataclass(frozen=True)
class Key:
    name: str


class Folded(Key):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.name.lower() == other.name.lower()

    def __hash__(self) -> int:
        return hash(self.name.lower())


@dataclass(frozen=True)
class Outer:
    inner: Any


@dataclass(frozen=True, slots=True)
class Slots:
    inner: Any


class Unmeasured(tuple[int, ...]):
    def __len__(self) -> int:
        raise NotImplementedError


class Anything:
    def __eq__(self, _other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


# What is held, how something is found in it, and whether Dynamo sees the same.
FOUND: dict[str, tuple[Any, Callable[[Any], bool], bool]] = {
    "a key": ({Folded("A"): 1, "sought": Folded("a")}, lambda held: held.get(held["sought"]) == 1, False),
    "in a set": (({Folded("A")}, Folded("a")), lambda held: held[1] in held[0], False),
    "in a list": ([Anything()], lambda held: 5 in held, False),
    "its place": ((0, Anything()), lambda held: held.index(5) == 1, False),
    "a key of a data class": ({Key("a"): 1, "sought": Key("a")}, lambda held: held.get(held["sought"]) == 1, True),
    "a data class in a list": ([Key("a")], lambda held: Key("a") in held, True),
    "a data class of data classes": ({Outer(Key("a"))}, lambda held: Outer(Key("a")) in held, True),
    "a tuple that has no length": ({1: Unmeasured((1,)), Unmeasured((2,)): 3}, lambda held: 1 in held, True),
    "what a data class holds": ({Outer(Folded("A"))}, lambda held: Outer(Folded("a")) in held, False),
    "what a slot holds": ({Slots(Folded("A"))}, lambda held: Slots(Folded("a")) in held, False),
    "a tuple in a data class": ({Outer((Folded("A"),))}, lambda held: Outer((Folded("a"),)) in held, False),
}


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize(("held", "finds", "is_seen"), FOUND.values(), ids=FOUND)
def test_what_is_found_by_an_equality_of_its_own_is_found(
    held: Any, finds: Callable[[Any], bool], is_seen: bool
) -> None:
    eager = Function(lambda s, x: s.l(x) * (2 if finds(s.held) else 3), l=nn.Linear(4, 4), held=held)
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo"))
    for _ in range(2):
        assert_same_step(eager, ours, torch.ones(2, 4))
    assert (ours.stats()["graphs"] > 0) == is_seen


@functools.lru_cache
def remembered() -> int:
    return 2


class Builder:
    def build(self) -> int:
        return remembered()


@dataclass
class Entry:
    build: type


def test_of_what_a_data_class_compares_nothing_is_called() -> None:
    eager = Function(lambda s, x: s.l(x) * (2 if s.held is not None else 3), l=nn.Linear(4, 4), held=Entry(Builder))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo"))
    for _ in range(2):
        assert_same_step(eager, ours, torch.ones(2, 4))
    assert ours.stats()["graphs"] == 1, ours.fallback_report()


class Counting(type):
    def __len__(cls) -> int:
        return 2


class Codes(metaclass=Counting):
    pass


class Client:
    title = "of a client"

    @classmethod
    def named(cls) -> str:
        return cls.title

    def ask(self) -> int:
        return len(Codes)


class Settings:
    def __str__(self) -> str:
        return Client.named()


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_of_what_python_calls_is_held_what_it_calls_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = Function(lambda s, x: s.l(x) * len(str(s.settings)), l=nn.Linear(4, 4), settings=Settings())
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo"))
    assert_same_step(eager, ours, torch.ones(2, 4))
    assert ours.stats()["graphs"] > 0 and not ours.fallback_report()
    monkeypatch.setattr(Client, "title", "another")
    assert_same_step(eager, ours, torch.ones(2, 4))


class Setting:
    value = 2.0


def of_setting() -> float:
    return Setting.value


by_another_name, in_a_list = of_setting, [of_setting]


class Scale(enum.Enum):
    ONE = 1.0
    TWO = 2.0
    THREE = 3.0

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return cls(by_another_name() if value == "alias" else in_a_list[0]())


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("asked", ["alias", "list"])
def test_what_an_enumeration_calls_by_whatever_name_is_held(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = Function(lambda s, x: s.l(x) * Scale(asked).value, l=nn.Linear(4, 4))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture="dynamo"))
    for value in (2.0, 3.0):
        monkeypatch.setattr(Setting, "value", value)
        assert_same_step(eager, ours, torch.ones(2, 4))


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_hooks_of_all_modules_are_called_from_when_they_are_registered() -> None:
    eager, ours = pair(Function(lambda s, x: s.l(x) if x.sum() > 0 else s.l(x) * 2, l=nn.Linear(2, 2)))
    x = torch.ones(1, 2)
    close(ours(x), eager(x))
    hook = nn.modules.module.register_module_forward_hook(lambda m, _, out: out * 3 if type(m) is nn.Linear else None)
    try:
        for _ in range(2):
            close(ours(x), eager(x))
    finally:
        hook.remove()
    close(ours(x), eager(x))


class Cycle(list[float]):
    def __iter__(self) -> Iterator[float]:
        for _ in range(10_000):
            yield from super().__iter__()
        pytest.fail("it is gone through")


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_an_endless_list_is_not_gone_through() -> None:
    eager = Function(lambda s, x: s.l(x) * s.cycle[0] * (2 if "a" in s.names else 3), l=nn.Linear(2, 2))
    eager.names, eager.cycle = ["a"], Cycle([2.0])
    ours = ORTModule(eager, DebugOptions(capture="dynamo"))
    close(ours(torch.ones(1, 2)), eager(torch.ones(1, 2)))


class Sentinel(type):
    """Of classes that are their own metaclass, as those of h11 are."""


NOTHING: Any = Sentinel("NOTHING", (Sentinel,), {})
type.__setattr__(NOTHING, "__class__", NOTHING)


def test_a_class_may_be_its_own_metaclass() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.l(x)
        return y * 2 if y.sum() > 1e9 and s.given is NOTHING else y

    ours = ORTModule(eager := Function(forward, l=nn.Linear(2, 2), given=NOTHING))
    with pytest.warns(UserWarning, match="graph break: Data-dependent branching"):
        close(ours(torch.ones(1, 2)), eager(torch.ones(1, 2)))
    assert ours.stats()["graphs"] > 0


def test_classes_of_a_metaclass_that_only_writes_are_read_by_a_graph() -> None:
    type.__setattr__(Doubled, "scale", 1.0)
    eager, ours = pair(Function(lambda s, x: s.l(x) * Doubled.scale, l=nn.Linear(2, 2)))
    x = torch.ones(1, 2)
    for scale in (1.0, 2.5):
        Doubled.scale = scale
        assert Doubled.scale == 2 * scale
        close(ours(x), eager(x))
    assert not ours.fallback_report()


class Answering:
    """Has no attribute but those that it knows, and says so in its own way."""

    def __getattr__(self, name: str) -> Any:
        return {"scale": 2.0}[name]


class Asking(nn.Module):
    settings = Answering()

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x + 1
        return self.l(x) * self.settings.scale


@pytest.mark.filterwarnings("ignore")
def test_an_object_that_raises_its_own_errors_is_not_asked_what_it_is() -> None:
    eager = Asking()
    x = torch.randn(2, 4)
    close(ORTModule(eager)(x), eager(x))


def test_what_a_function_without_a_graph_reads_is_held() -> None:
    base = type("Base", (), {"get": lambda self: bytearray([1, 2])})
    held = type("Derived", (base,), {})()

    def read(self: Any, x: Tensor) -> Any:
        return held.get()[1]  # at which Dynamo breaks a graph that has no ops

    eager = Function(lambda s, x: s.l(x) * s.read(s, x), l=nn.Linear(4, 4), read=read)
    ours = ORTModule(eager, DebugOptions(capture="dynamo"))
    x = torch.randn(2, 4)
    close(ours(x), eager(x))
    base.get = lambda self: bytearray([1, 3])  # type: ignore[attr-defined]
    close(ours(x), eager(x))
