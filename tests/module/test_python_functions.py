"""`max`, `min`, `math.pow` and what torch.fx keeps whole are Python's own, whatever torch.export makes of them."""

import builtins
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule_c import ORTModule
from wrapped import Function, assert_same_step, n_graphs, pair


def by_rows(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] == 1 else x * 3


by_rows_itself = by_rows
torch.fx.wrap("by_rows")

CHOICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a hinge at its corner": lambda t: max(0.0, (t - t.detach()).sum()) * 3 + t.sum(),
    "equal losses": lambda t: max((t[0] * 2).sum(), (t[0] * 2).sum() + (t[1] - t[1].detach()).sum()),
    "NaN": lambda t: max(0.0, (t * math.nan).sum()) + t.sum(),
    "a number where the tensor is greater": lambda t: (
        t.sum() + torch.ones(3, dtype=torch.int64) * min(t.sum() * 0 + 5, 3)
    ),
    "of a list": lambda t: max([t.sum(), t.sum() * 2]),
    "of a generator": lambda t: min(v.sum() for v in (t, t * 2)),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_one_of_several_tensors_is_chosen_as_python_does(choose: Callable[[torch.Tensor], Any]) -> None:
    eager, ours = pair(Function(lambda s, x: choose(s.a(x)), a=nn.Linear(4, 3)))
    with pytest.warns(UserWarning, match=r"chooses one of several tensors by their values; torch\.m..imum"):
        assert_same_step(eager, ours, torch.randn(2, 4))


def test_the_greatest_of_sizes_stays_open() -> None:
    eager, ours = pair(
        Function(lambda s, x: s.a(x)[: max(x.shape[0] - 2, 1)] * min(x.shape[0], 3.0), a=nn.Linear(4, 3))
    )
    for n in (9, 4, 20, 7):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(n, 4))
    assert n_graphs(ours) == 1


@pytest.mark.parametrize("power", [lambda n: math.pow(2, 2), lambda n: math.pow(n, 2), lambda n: min(n, 7.0)])
def test_numbers_have_the_types_that_python_gives_them(power: Callable[[int], Any]) -> None:
    eager, ours = pair(Function(lambda s, x: (s.a(x), power(x.shape[0])), a=nn.Linear(4, 3)))
    for n in (3, 5, 9):
        got, want = ours(torch.randn(n, 4))[1], eager(torch.randn(n, 4))[1]
        assert type(got) is type(want) and got == want


def test_a_power_that_python_refuses_is_refused() -> None:
    ours = ORTModule(Function(lambda s, x: s.a(x) * math.pow(-8.0, 1 / 3), a=nn.Linear(4, 3)))
    with pytest.raises(ValueError, match="math domain error"):
        ours(torch.randn(2, 4))


def test_they_are_as_they_were_after_an_export() -> None:
    before = builtins.max, builtins.min, math.pow
    ORTModule(nn.Linear(4, 3))(torch.randn(2, 4))
    assert before == (builtins.max, builtins.min, math.pow)


def test_a_function_that_fx_keeps_whole_is_left_in_its_place() -> None:
    """As torchvision has its stochastic depth and its windowed attention."""
    eager, ours = pair(Function(lambda s, x: by_rows(s.a(x)), a=nn.Linear(4, 3)))
    for rows in (2, 1, 2, 1):
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, torch.randn(rows, 4))
        assert by_rows is by_rows_itself
    assert n_graphs(ours) == 2
