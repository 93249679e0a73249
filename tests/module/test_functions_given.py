"""Functions that a forward makes and gives away hold what it computed, which is another thing at each call."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wrapped import Function, close, pair


class Scaled:
    def __init__(self, n: Any) -> None:
        self.n = n

    def __call__(self, t: Tensor) -> Tensor:
        return t * self.n


def with_attribute(n: Any) -> Any:
    def scaled(t: Tensor) -> Any:
        return t * scaled.n  # type: ignore[attr-defined]

    scaled.n = n  # type: ignore[attr-defined]
    return scaled


GIVEN: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a closure over a size": lambda m, x, h: lambda t: t / x.shape[0],
    "a closure over a tensor": lambda m, x, h: lambda t: (h - t).square().mean(),
    "a default": lambda m, x, h: lambda t, n=x.shape[0]: t * n,
    "bound arguments": lambda m, x, h: functools.partial(torch.add, h.sum()),
    "a method of a tensor": lambda m, x, h: h.sum().mul,
    "an object that is called": lambda m, x, h: Scaled(x.shape[0]),
    "an attribute": lambda m, x, h: with_attribute(x.shape[0]),
    "a memo": lambda m, x, h: functools.lru_cache(lambda t: t * x.shape[0]),
    "a class": lambda m, x, h: type("Local", (), {"__new__": lambda cls, t: t * h.sum()}),
    "a method of a class": lambda m, x, h: type("Local", (), {"__call__": lambda self, t: t * h.sum()})(),
}
THERE: dict[str, Callable[[Any], Any]] = {
    "a function": lambda m: torch.relu,
    "a class": lambda m: Scaled,
}


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("what", GIVEN)
def test_a_function_that_the_forward_makes(what: str, kept: bool) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        h = m.layer(x)
        made = GIVEN[what](m, x, h)
        if kept:
            m.made = made
        return (h, made) if not kept else (h, None)

    eager, ours = pair(Function(forward, layer=nn.Linear(4, 4)))
    for n in (2, 3, 6):
        x = torch.randn(n, 4)
        found = []
        for model in (eager, ours):
            _, made = model(x)
            found.append((model.made if kept else made)(torch.ones(())))
        close(found[1], found[0])


@pytest.mark.filterwarnings("error:ortmodule_c")
@pytest.mark.parametrize("what", THERE)
def test_what_was_there_before_is_given(what: str) -> None:
    eager, ours = pair(Function(lambda m, x: (m.layer(x), THERE[what](m)), layer=nn.Linear(4, 4)))
    for n in (2, 3):
        x = torch.randn(n, 4)
        assert ours(x)[1] is eager(x)[1]
    assert ours.stats()["dynamo_graphs"] == 0
