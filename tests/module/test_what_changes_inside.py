"""What a forward changes of lists, dicts, sets and objects is changed as in PyTorch, at each call, and read by it."""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import DebugOptions, ORTModule

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore")]


@dataclass(slots=True)
class Kept:
    scale: float = 1.0


def taken_and_put_back(o: Any) -> None:
    key = next(iter(o))
    value = o.pop(key)
    o[key] = value


def subtracted(o: Any) -> None:
    o -= {max(o)}
    o |= {min(o) - 1.0}


def last(o: Any) -> float:
    return float(list(o.values())[-1])


def total(o: Any) -> float:
    return float(sum(o))


CHANGES: list[tuple[str, Any, Callable[[Any], Any], Callable[[Any], float]]] = [
    ("a list extended by name", [1.0], lambda o: o.__iadd__([2.0]), total),
    ("a list with a new front", [1.0, 2.0], lambda o: o.insert(0, o[0] + 1), lambda o: float(3.0 in o) + 1),
    ("a list with a new front, counted", [1.0, 2.0], lambda o: o.insert(0, o[0] + 1), lambda o: o.count(3.0) + 1.0),
    ("a list turned", [1.0, 2.0, 4.0], lambda o: o.append(o.pop(0)), lambda o: float(o[0])),
    ("a list of a pair", [(1.0, 0.0)], lambda o: o.append((o[-1][0] + 1, 0.0)), lambda o: float((2.0, 0.0) in o) + 1),
    ("a list in a tuple", ("x", [1.0]), lambda o: o[1].append(3.0), lambda o: total(o[1])),
    ("a set in a tuple", ("x", {1.0, 2.0}), lambda o: o[1].discard(1.0), lambda o: total(o[1])),
    ("a set subtracted from", {5.0, 6.0, 7.0}, subtracted, total),
    ("a dict in another order", {"a": 1.0, "b": 2.0, "c": 3.0}, taken_and_put_back, last),
    ("an item of a dict", {"a": 1.0, "b": 2.0}, lambda o: o.__setitem__("a", o["a"] + 1), lambda o: 2.0 in o.values()),
    ("an ordered dict moved", OrderedDict(a=1.0, b=2.0, c=3.0), lambda o: o.move_to_end(next(iter(o))), last),
    ("an ordered dict in another order", OrderedDict(a=1.0, b=2.0, c=3.0), taken_and_put_back, last),
    ("a new default", defaultdict(float, a=1.0), lambda o: o[f"b{len(o)}"], lambda o: float(len(o))),
    ("a deque turned", deque([1.0, 2.0, 4.0]), lambda o: o.rotate(1), lambda o: float(o[0])),
    ("a slot", Kept(), lambda o: setattr(o, "scale", o.scale * 1.5), lambda o: float(o.scale)),
]


class Changing(nn.Module):
    def __init__(self, held: Any, change: Callable[[Any], Any], read: Callable[[Any], float], breaks: bool) -> None:
        super().__init__()
        self.l = nn.Linear(3, 3)
        self.held, self.change, self.read, self.breaks = held, change, read, breaks

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.held)
        if self.breaks and x.sum() > 1e9:
            x = x + 1
        return self.l(x) * self.read(self.held)


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "two graphs"])
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize(("held", "change", "read"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_what_a_forward_changes_is_as_in_pytorch(
    held: Any, change: Callable[[Any], Any], read: Callable[[Any], float], capture: Any, breaks: bool
) -> None:
    torch.manual_seed(0)
    eager = Changing(copy.deepcopy(held), change, read, breaks)
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture))
    for _ in range(4):
        x = torch.randn(2, 3)
        torch.testing.assert_close(ours(x), eager(x))
        assert ours.module.held == eager.held
        assert not isinstance(held, dict) or [*ours.module.held] == [*eager.held]


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_a_tensor_in_a_list_may_be_equal_to_a_constant(capture: Any) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x) * (2.0 if 6.0 in [x.sum(), 1.0] else 3.0)

    torch.manual_seed(0)
    ours = ORTModule(Asking(), DebugOptions(capture=capture))
    for x in (torch.ones(2, 3), torch.zeros(2, 3), torch.ones(2, 3)):
        torch.testing.assert_close(ours(x), ours.module(x))


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("of", [Kept, nn.Identity])
def test_an_attribute_is_deleted_once(of: Callable[[], Any], capture: Any) -> None:
    class Deleting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(3, 3)
            self.held = of()
            self.held.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            del self.held.scale
            return self.l(x)

    ours = ORTModule(Deleting(), DebugOptions(capture=capture))
    ours(torch.ones(2, 3))
    with pytest.raises(AttributeError, match="scale"):
        ours(torch.ones(2, 3))


def test_an_ordered_dict_is_whole_after_a_trace_that_came_to_nothing() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(3, 3)
            self.held = OrderedDict(a=1.0, b=2.0)

        def forward(self, x: Tensor) -> Tensor:
            self.held.popitem(last=False)
            self.held["a"] = float(x.sum())
            return self.l(x)

    ours = ORTModule(Asking())
    for _ in range(3):
        x = torch.randn(2, 3)
        ours(x)
        assert [*ours.module.held.items()] == [*dict(ours.module.held).items()]
        assert ours.module.held["a"] == pytest.approx(float(x.sum()), rel=1e-5)
