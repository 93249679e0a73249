"""Objects whose class looks up attributes by itself: what a forward asked of them counts, and what that depends on."""

import copy
import copyreg
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from held import Read, both
from wrapped import assert_same_step, n_graphs


class Refuses:
    """Its lookup looks into all attributes each time."""

    def __getattribute__(self, name: str) -> Any:
        if name in (super().__getattribute__("__dict__").get("refused") or ()):
            raise AttributeError(name)
        return super().__getattribute__(name)


class View:
    def __init__(self, config: Any) -> None:
        self.config = config

    def first(self) -> Any:
        return self.config.scales[0]


class Config(Refuses):
    """As those of transformers: some names stand for others."""

    names = {"alias": "scale"}  # noqa: RUF012

    def __init__(self) -> None:
        self.scale = 2.0
        self.scales = [3.0, 4.0]
        self.unread: Any = None

    def __getattribute__(self, name: str) -> Any:
        names = super().__getattribute__("names")
        return super().__getattribute__(names.get(name, name))

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
    lambda c: setattr(c, "names", {"alias": "scale", "other": "scales"}),
    lambda c: setattr(c, "refused", ["other"]),
]
READ: list[Change] = [
    lambda c: setattr(c, "scale", 3.0),
    lambda c: c.scales.__setitem__(0, 5.0),
    lambda c: setattr(c, "scales", [7.0]),
    lambda c: setattr(c, "absent", 2.0),
    lambda c: setattr(c, "names", {"alias": "five"}) or setattr(c, "five", 5.0),
    lambda c: (
        setattr(c, "refused", ["absent"])
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
    assert steps(reads, Config, lambda c: setattr(c, "names", {"alias": "scale"}), later) == 2


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
