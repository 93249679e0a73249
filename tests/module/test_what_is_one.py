"""What a forward asks by `is`, of modules and of all else; what holds modules is looked into."""

import copy
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from held import ON_THE_FAST_WAY
from ortmodule_c import DebugOptions, ORTModule

Read = Callable[[Any], Any]


class Scaled(nn.Module):
    """Its linear layer, by what it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.scale = 7.0
        self.put("partner", None)

    def put(self, name: str, value: Any) -> None:
        """An attribute that is no submodule."""
        object.__setattr__(self, name, value)


class Alone(Scaled):
    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        return self.l(x) * (2.0 if self.partner is self or given is self else 3.0)


class AmongOthers(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        for one in self.partner or ():
            if self is one:
                return self.l(x) * 2.0
        return self.l(x) * 3.0


def assert_same(ours: ORTModule, *given: Any) -> None:
    x = torch.randn(3, 4)
    torch.testing.assert_close(ours(x, *given), ours.module(x, *given))


def test_that_something_is_the_module_is_seen_to_change() -> None:
    torch.manual_seed(0)
    ours = ORTModule(Alone(), ON_THE_FAST_WAY)
    for partner in (None, ours.module, Alone(), ours.module, [ours.module]):
        ours.module.put("partner", partner)
        assert_same(ours)


def test_that_an_argument_is_the_module_is_seen_to_change() -> None:
    torch.manual_seed(0)
    ours = ORTModule(Alone())
    for given in (ours.module, Alone(), None, ours.module):
        assert_same(ours, given)


def test_that_the_module_is_in_a_list_is_seen_to_change() -> None:
    torch.manual_seed(0)
    ours = ORTModule(AmongOthers(), ON_THE_FAST_WAY)
    team = [Alone()]
    ours.module.put("partner", team)
    assert_same(ours)
    team.append(ours.module)
    assert_same(ours)
    team[1] = Alone()
    assert_same(ours)


def test_that_a_submodule_is_another_one_is_seen() -> None:
    torch.manual_seed(0)
    ours = ORTModule(nn.Sequential(Alone()), ON_THE_FAST_WAY)
    ours.module[0].put("partner", ours.module[0])
    assert_same(ours)
    before = ours.module[0]
    ours.module[0] = Alone()
    ours.module[0].put("partner", before)
    assert_same(ours)


class Renamed(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        me = self
        self = self.partner[0]  # noqa: PLW0642  # as users do
        return me.l(x) * (2.0 if me.partner[1] is self else 3.0)


@pytest.mark.filterwarnings("ignore")
def test_a_name_that_may_have_become_another_thing_is_not_taken_for_the_module() -> None:
    torch.manual_seed(0)
    ours = ORTModule(Renamed())
    one, other = [1], [1]
    for partner in ((one, one), (one, other)):
        ours.module.put("partner", partner)
        assert_same(ours)


class Team(list[Any]):
    def is_it(self, other: Any) -> bool:
        return other is self


def are_one(a: Any, b: Any) -> bool:
    return a is b


class Compared(Scaled):
    def forward(self, x: Tensor, *given: Any) -> Tensor:
        if x.sum() > 1e9:
            x = x + 1
        one, other = given or self.partner
        same = one.is_it(other) if isinstance(one, Team) else are_one(one, other)
        return self.l(x) * (2.0 if same else 3.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("are_given", [False, True])
@pytest.mark.parametrize("make", [lambda: [1], lambda: {"a": 1}, lambda: Team([1]), types.SimpleNamespace])
@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)])
def test_which_lists_are_one_is_seen_where_there_are_two_graphs(
    order: tuple[bool, ...], make: Callable[[], Any], are_given: bool
) -> None:
    torch.manual_seed(0)
    ours = ORTModule(Compared())
    for are_same in order:
        one = make()
        both = [one, one if are_same else make()]
        ours.module.put("partner", both)
        assert_same(ours, *(both if are_given else ()))


@pytest.mark.filterwarnings("ignore")
def test_which_tensors_are_one_is_seen_where_there_are_two_graphs() -> None:
    torch.manual_seed(0)
    ours = ORTModule(Compared())
    for are_same in (True, False, True):
        one = torch.ones(2)
        assert_same(ours, one, one if are_same else torch.ones(2))
    assert all("branching" in record.cause for record in ours.fallback_report())


HELD: Any = None


def shown() -> tuple[Any, Callable[[Any], None], Read]:
    state: dict[str, Any] = {}
    return types.MappingProxyType(state), functools.partial(state.__setitem__, "it"), lambda held: held["it"]


def of_a_thread() -> tuple[Any, Callable[[Any], None], Read]:
    held = threading.local()
    return held, functools.partial(setattr, held, "it"), lambda held: held.it


def of_a_partial_function() -> tuple[Any, Callable[[Any], None], Read]:
    held = functools.partial(len)
    return held, functools.partial(setattr, held, "it"), lambda held: held.it


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "two graphs"])
@pytest.mark.parametrize("make", [shown, of_a_thread, of_a_partial_function])
def test_modules_and_numbers_in_what_holds_them_are_seen_to_change(
    make: Callable[[], Any], breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    held, put, get = make()
    monkeypatch.setitem(globals(), "HELD", held)

    class Reading(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            if breaks and x.sum() > 1e9:
                x = x + 1
            it = get(HELD)
            return self.l(x) * (it if isinstance(it, float) else it.scale)

    ours = ORTModule(Reading())
    for it in (ours.module, Alone(), 2.0, 3.0, ours.module):
        put(it)
        if isinstance(it, Alone):
            it.scale = 5.0
        assert_same(ours)


def test_what_another_thread_has_there_is_its_own() -> None:
    torch.manual_seed(0)
    held, put, get = of_a_thread()

    class Reading(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return self.l(x) * get(held).scale

    ours, other, found = ORTModule(Reading()), Alone(), []
    other.scale = 5.0

    def in_another_thread() -> None:
        put(other)
        x = torch.randn(3, 4)
        found.append((ours(x), ours.module(x)))

    put(ours.module)
    assert_same(ours)
    thread = threading.Thread(target=in_another_thread)
    thread.start()
    thread.join()
    torch.testing.assert_close(*found[0])
    assert_same(ours)


def aside() -> Any:
    """What Dynamo does not trace."""
    return torch.compiler.disable(lambda: HELD)()


class Asking(Scaled):
    """Compares, in one graph or two, what `of` gives of it."""

    def __init__(self, of: Callable[[Any], tuple[Any, Any]], breaks: bool) -> None:
        super().__init__()
        self.of, self.breaks, self.held, self.other = of, breaks, [1], [1]
        self.tied = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks and x.sum() > 1e9:
            x = x + 1
        return self.l(x) * (2.0 if are_one(*self.of(self)) else 3.0)


def tie(m: Any) -> None:
    m.tied.weight = m.l.weight


def untie(m: Any) -> None:
    m.tied.weight = nn.Parameter(torch.ones(4, 4))


def share(m: Any) -> None:
    m.other = m.held


def part(m: Any) -> None:
    m.other = [1]


def hold(value: Any) -> Callable[[Any], None]:
    return lambda m: globals().update(HELD=m if value is Asking else value)


ASKED: dict[str, tuple[Callable[[Any], tuple[Any, Any]], Callable[[Any], None], Callable[[Any], None]]] = {
    "weights": (lambda m: (m.l.weight, m.tied.weight), tie, untie),
    "lists": (lambda m: (m.held, m.other), share, part),
    "parts of a tuple": (lambda m: ((m.held, m.other)[0], (m.held, m.other)[1]), share, part),
    "what is not traced": (lambda m: (aside(), m), hold(Asking), hold(None)),
    "a list found aside": (lambda m: (aside(), m.held), lambda m: hold(m.held)(m), hold([1])),
    "methods": (lambda m: (m.put, m.put), lambda m: None, lambda m: None),
    "a method and itself": (lambda m: (m.put,) * 2, lambda m: None, lambda m: None),
    "texts": (lambda m: (m.held, m.other), lambda m: m.__dict__.update(held="ab", other="ab"), part),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "two graphs"])
@pytest.mark.parametrize(("of", "make_one", "make_two"), ASKED.values(), ids=ASKED)
def test_what_is_one_is_seen_to_change(
    of: Any, make_one: Any, make_two: Any, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setitem(globals(), "HELD", None)
    ours = ORTModule(Asking(of, breaks))
    assert_same(ours)
    for change in (make_one, make_two, make_one):
        change(ours.module)
        assert_same(ours)


class Owned(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.owner, self.who = [1], [1]

    def owns(self, who: Any) -> bool:
        return (self.owner or self) is who

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) * (2.0 if self.owns(self.who) else 3.0)


@pytest.mark.filterwarnings("ignore")
def test_one_of_several_things_that_is_compared_is_seen_to_change() -> None:
    torch.manual_seed(0)
    ours = ORTModule(Owned())
    for who in (ours.module.owner, [1], ours.module.owner):
        ours.module.who = who
        assert_same(ours)


def comparing(with_: Any) -> Callable[[Any], bool]:
    return lambda other: other is with_


class Closed(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.held = [1]
        self.put("first", comparing(self.l))
        self.put("second", comparing(self.held))

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) * (1.0 if self.first(self) else 5.0) * (2.0 if self.second(self.held) else 3.0)


@pytest.mark.filterwarnings("ignore")
def test_each_closure_compares_with_what_it_has() -> None:
    torch.manual_seed(0)
    ours = ORTModule(Closed())
    assert_same(ours)
    ours.module.held = [1]
    assert_same(ours)
    ours.module.put("second", comparing(ours.module.held))
    assert_same(ours)
    ours.module.put("first", comparing(ours.module))
    assert_same(ours)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "two graphs"])
@pytest.mark.parametrize(
    "make", [threading.local, lambda: functools.partial(len), lambda: types.ModuleType("settings")]
)
def test_what_comes_to_be_there_is_seen(make: Callable[[], Any], breaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setitem(globals(), "HELD", make())

    class Reading(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            if breaks and x.sum() > 1e9:
                x = x + 1
            try:
                scale = HELD.scale
            except AttributeError:
                scale = 2.0
            return self.l(x) * scale

    ours = ORTModule(Reading())
    assert_same(ours)
    HELD.scale = 5.0
    assert_same(ours)


class OfTuple(Scaled):
    """What it asks of two lists in a tuple of constants, or makes of the first."""

    def __init__(self, held: tuple[Any, ...], ask: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.held, self.ask = held, ask

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x + 1
        first, second = self.held[-1]
        return self.l(x) * (2.0 + float(self.ask(first, second)))


ONE = [1.0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("held", [("x", [ONE, ONE]), ("x", (ONE, ONE)), (1.0, (ONE, [1.0])), (([0.0], ONE),)], ids=repr)
def test_which_lists_in_a_tuple_of_constants_are_one_is_seen(held: tuple[Any, ...], capture: Any) -> None:
    torch.manual_seed(0)
    ours = ORTModule(OfTuple(held, are_one), DebugOptions(capture=capture))
    for now in (held, held, ((ONE, ONE),), (([1.0], ONE),)):
        ours.module.held = now
        assert_same(ours)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize(
    "change",
    [
        lambda a, _: a.append(1.0) or len(a),
        lambda a, b: a.extend(b) or sum(a),
        lambda a, _: a.insert(0, a[0] + 1) or a[0],
    ],
    ids=["append", "extend", "insert"],
)
def test_a_list_in_a_tuple_of_constants_changes_at_each_call(change: Callable[[Any, Any], Any], capture: Any) -> None:
    torch.manual_seed(0)
    plain = OfTuple((([1.0], [2.0]),), change)
    ours = ORTModule(copy.deepcopy(plain), DebugOptions(capture=capture))
    for _ in range(4):
        x = torch.randn(3, 4)
        torch.testing.assert_close(ours(x), plain(x))
        assert ours.module.held == plain.held
