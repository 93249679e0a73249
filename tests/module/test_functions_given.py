"""Functions that a forward makes and gives away hold what it computed, which is another thing at each call."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wrapped import Function, close, pair

GIVEN: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a closure over a size": lambda m, x, h: lambda t: t / x.shape[0],
    "a closure over a tensor": lambda m, x, h: lambda t: (h - t).square().mean(),
    "a default": lambda m, x, h: lambda t, n=x.shape[0]: t * n,
    "bound arguments": lambda m, x, h: functools.partial(torch.add, h.sum()),
    "a method of a tensor": lambda m, x, h: h.sum().mul,
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
