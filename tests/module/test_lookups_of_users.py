"""Objects whose class looks up attributes by itself: what a forward asked of them counts, and what that depends on."""

import copy
import copyreg
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from held import Read, both
from wrapped import assert_same_step, n_graphs


class Renames:
    renamed: ClassVar[dict[str, str]] = {}

    def __getattribute__(self, name: str) -> Any:
        if name != "renamed" and name in object.__getattribute__(self, "renamed"):
            return object.__getattribute__(self, object.__getattribute__(self, "renamed")[name])
        return super().__getattribute__(name)


class View:
    def __init__(self, config: Any) -> None:
        self.config = config

    def first(self) -> Any:
        return self.config.scales[0]


class Config(Renames):
    """As those of transformers: some names stand for others."""

    names = {"alias": "scale"}  # noqa: RUF012

    def __init__(self) -> None:
        self.scale = 2.0
        self.scales = [3.0, 4.0]
        self.unread: Any = None

    def __getattribute__(self, name: str) -> Any:
        if name != "names" and name in super().__getattribute__("names"):
            name = super().__getattribute__("names")[name]
        return super().__getattribute__(name)

    def total(self) -> float:
        return sum(v for v in self.__dict__.values() if type(v) is float)

    @property
    def view(self) -> View:
        return View(self)


def reads(s: Any, y: Tensor) -> Tensor:
    if hasattr(s.held, "absent"):
        y = y * s.held.absent
    return y * s.held.alias + s.held.view.first()


Change = Callable[[Any], object]
UNREAD: list[Change] = [
    lambda c: setattr(c, "unread", 5),
    lambda c: setattr(c, "unread", {"a": [1, None]}),
    lambda c: setattr(c, "added", "text"),
    lambda c: delattr(c, "unread"),
]
READ: list[Change] = [
    lambda c: setattr(c, "scale", 3.0),
    lambda c: c.scales.__setitem__(0, 5.0),
    lambda c: setattr(c, "scales", [7.0]),
    lambda c: setattr(c, "absent", 2.0),
    lambda c: setattr(c, "names", {"alias": "five"}) or setattr(c, "five", 5.0),
    lambda c: (
        setattr(c, "renamed", {"absent": "gone"})
        or setattr(c, "names", {"alias": "scale", "scales": "more"})
        or setattr(c, "more", [1.5])
    ),
    lambda c: setattr(type(c), "names", {"alias": "five"}) or setattr(c, "five", 5.0),
]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    names, lookups = Config.names, [vars(c).get("__getattribute__") for c in Config.__mro__]
    yield
    Config.names = names
    assert [vars(c).get("__getattribute__") for c in Config.__mro__] == lookups


def steps(read: Read, make: Callable[[], Any], *changes: Change) -> int:
    """Steps beside eager, one before and one after each change; how many graphs there are at the end."""
    eager, ours = both(read, make)
    x = torch.randn(3, 4)
    assert_same_step(eager, ours, x)
    for change in changes:
        for m in (eager, ours.module):
            m.zero_grad()
            change(m.held)
        for _ in range(2):
            assert_same_step(eager, ours, x)
    return n_graphs(ours)


@pytest.mark.parametrize("change", UNREAD)
def test_what_changes_no_answer_needs_no_graph(change: Change) -> None:
    assert steps(reads, Config, change) == 1
    assert steps(reads, Config, *UNREAD) == 1


@pytest.mark.parametrize("change", READ)
def test_what_changes_an_answer_is_noticed(change: Change) -> None:
    assert steps(reads, Config, change) == 2


@pytest.mark.parametrize("change", READ)
def test_what_changes_an_answer_after_something_else_has_changed_is_noticed(change: Change) -> None:
    assert steps(reads, Config, *UNREAD, change) == 2


def test_a_change_in_place_of_what_came_later_is_noticed() -> None:
    later = lambda c: c.names.update(alias="five") or setattr(c, "five", 5.0)  # noqa: E731
    assert steps(reads, Config, lambda c: setattr(c, "names", {"alias": "scale"}), later) == 3


def test_what_came_later_and_cannot_be_compared_needs_a_graph() -> None:
    assert steps(reads, Config, lambda c: setattr(c, "unread", object())) == 2


ALL_AT_ONCE: list[Read] = [
    lambda s, y: y * s.held.total(),
    lambda s, y: y * len(vars(s.held)),
    lambda s, y: y * copy.copy(s.held).scale,
]


@pytest.mark.parametrize("read", ALL_AT_ONCE)
def test_who_asks_for_all_attributes_at_once_is_told_of_each(read: Read) -> None:
    assert steps(read, Config, lambda c: setattr(c, "unread", 5.0), lambda c: setattr(c, "added", 1.0)) == 3


class Passing(Config):
    def both(self) -> Any:
        return super().__getattribute__("scale") + super().__getattribute__("__dict__").get("unread", 0)


def test_who_goes_past_the_lookup_is_told_of_each() -> None:
    def make() -> Passing:
        made = Passing()
        made.unread = 1
        return made

    assert steps(lambda s, y: y * s.held.both(), make, lambda c: setattr(c, "unread", 5)) == 2


class Unrelated:
    k = 2.0


class Behind:
    """A lookup that another class's stands before in those that have both."""

    def __getattribute__(self, name: str) -> Any:
        return 10.0 * type(self).k if name == "k" else super().__getattribute__(name)


class Both(Unrelated, Behind):
    pass


def test_a_lookup_behind_a_class_that_is_watched_is_asked() -> None:
    def made() -> Any:
        both = Both()
        both.plain = Unrelated()
        return both

    assert steps(lambda s, y: y * s.held.plain.k * s.held.k, made, lambda s: setattr(Unrelated, "k", 3.0)) <= 2


class Fails(Config):
    def __getattribute__(self, name: str) -> Any:
        if name == "broken":
            if super().__getattribute__("unread") is None:
                raise KeyError(name)
            return 3.0
        return super().__getattribute__(name)


def test_an_answer_that_is_another_error_is_no_answer() -> None:
    def read(s: Any, y: Tensor) -> Tensor:
        try:
            return y * s.held.broken
        except KeyError:
            return y

    assert steps(read, Fails, lambda c: setattr(c, "unread", 5)) == 2


class Plain:
    def __init__(self) -> None:
        self.scale = 2.0


def test_copies_and_annotations_are_no_change_of_a_class() -> None:
    """Python puts into it what it has found out for them."""
    changes: list[Change] = [copy.deepcopy, lambda c: type(c).__annotations__, lambda _: copyreg._slotnames(Tensor)]
    assert steps(lambda s, y: y * s.held.scale, Plain, *changes) == 1
    assert steps(lambda s, y: y * s.held.scale, Plain, *changes, lambda c: setattr(c, "scale", 3.0)) == 2


class Delegates:
    """Looks past the lookup of another."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        parents = object.__getattribute__(own["parent"], "__dict__") if "parent" in own else {}
        return parents[name] if name in parents and name not in own else object.__getattribute__(self, name)


class Slot:
    __slots__ = ("scale",)


class Made(Slot):
    """Has a slot and a dictionary."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Makes:
    def __init__(self) -> None:
        self._scale = 2.0

    def __getattribute__(self, name: str) -> Any:
        return Made(object.__getattribute__(self, "_scale")) if name == "made" else object.__getattribute__(self, name)


GET = object.__getattribute__


class Bound(Config):
    def __init__(self) -> None:
        super().__init__()
        self.past = GET.__get__(self)


def having(past: Any) -> type[Config]:
    return type("Past", (Config,), {"past": past})


ALL = vars(Renames)["__dict__"].__get__
set_scale: Change = lambda c: setattr(c, "scale", 5.0)  # noqa: E731
PAST: list[tuple[Callable[[], Any], Read, Change]] = [
    (
        lambda: Delegates(parent=Delegates(name="a", scale=2.0)),
        lambda s, y: y * s.held.scale if s.held.parent.name == "a" else y,
        lambda c: set_scale(c.parent),
    ),
    (
        lambda: Delegates(parent=Config()),
        lambda s, y: y * s.held.scale + s.held.parent.scales[0],
        lambda c: set_scale(c.parent),
    ),
    (Makes, lambda s, y: y * s.held.made.scale, lambda c: setattr(c, "_scale", 5.0)),
    (Config, lambda s, y: y * GET(s.held, "scale") + s.held.scales[0], set_scale),
    (Config, lambda s, y: y * ALL(s.held)["scale"] + s.held.scales[0], set_scale),
    (Bound, lambda s, y: y * s.held.past("scale"), set_scale),
    (having(GET), lambda s, y: y * s.held.past("scale"), set_scale),
    (having(Config.__getattribute__), lambda s, y: y * s.held.past("scale"), set_scale),
    (having(functools.partialmethod(GET)), lambda s, y: y * s.held.past("scale"), set_scale),
    (having(property(Slot.__getstate__)), lambda s, y: y * s.held.past["scale"], set_scale),
    (having(property(lambda s: GET(s, "scale"))), lambda s, y: y * s.held.past, set_scale),
]


@pytest.mark.parametrize(("make", "read", "change"), PAST)
def test_what_is_read_past_the_lookup_is_noticed(make: Callable[[], Any], read: Read, change: Change) -> None:
    steps(read, make, change, change)


class Counts:
    def __init__(self) -> None:
        self.scale = 2.0
        self.n = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "scale":
            object.__getattribute__(self, "__dict__")["n"] += 1
        return object.__getattribute__(self, name)


class CountsUses(Config):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    @property
    def counted(self) -> float:
        self.n += 1
        return self.scale


@pytest.mark.parametrize(
    ("make", "read", "is_told"),
    [
        (Counts, lambda s, y: y * s.held.scale * s.held.n, True),
        (CountsUses, lambda s, y: y * s.held.counted * s.held.n, False),
    ],
)
def test_looking_up_counts_as_often_as_in_eager(make: Callable[[], Any], read: Read, is_told: bool) -> None:
    eager, ours = both(read, make, "warn" if is_told else "error")
    for n in range(1, 5):
        ours.module.held.unread = eager.held.unread = n
        assert_same_step(eager, ours, torch.randn(3, 4))
        assert vars(ours.module.held)["n"] == vars(eager.held)["n"] == n
    assert any("attribute n of Counts" in record.cause for record in ours.fallback_report()) == is_told
