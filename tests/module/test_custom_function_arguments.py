"""What a custom function is given besides tensors: objects that hold weights, and containers that it changes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function as Base

from wrapped import Function, assert_same_step, pair

pytestmark = pytest.mark.filterwarnings("ignore:ortmodule_c")


class Adjoint(Base):
    """Finds the gradients of weights by computing anew with what holds them, as solvers by the adjoint method do."""

    @staticmethod
    def forward(ctx: Any, flow: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.flow = flow
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return x + flow(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x + ctx.flow(x)
        return None, *torch.autograd.grad(y, (x, *weights), grad, allow_unused=True)


class Holder:
    def __init__(self, layer: nn.Module) -> None:
        self.layers = {"first": [layer]}

    def __call__(self, x: Tensor) -> Any:
        return self.layers["first"][0](x)


FLOWS: dict[str, Any] = {
    "a module": lambda layer: layer,
    "a method": lambda layer: layer.forward,
    "a function": lambda layer: lambda x: 2 * layer(x),
    "an object": Holder,
}


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_weights_that_a_backward_finds_by_an_object_are_those_that_it_saved(flow: Any) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.out(Adjoint.apply(flow(s.l), x * 1, *s.l.parameters()))

    eager, ours = pair(Function(forward, l=nn.Linear(4, 4), out=nn.Linear(4, 2)))
    for batch in (3, 4, 2):
        assert_same_step(eager, ours, torch.randn(batch, 4))
    assert all(p.grad.count_nonzero() for p in ours.parameters())


class Noting(Base):
    """Writes down in its backward, or in its forward, that it was there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, notes: Any, when: str = "never") -> Tensor:
        ctx.notes, ctx.when = notes, when
        ctx.save_for_backward(x, weight)
        note(notes, when == "forward")
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        note(ctx.notes, ctx.when == "backward")
        return grad @ weight, grad.T @ x, None, None


def note(notes: Any, now: bool) -> None:
    if now and isinstance(notes, dict):
        notes["n"] = notes.get("n", 0) + 1
    elif now:
        notes.append(1)


def test_an_object_without_weights_leaves_a_function_in_the_graph() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return Noting.apply(x, s.l.weight, {"noted": Holder(nn.ReLU())})

    eager, ours = pair(Function(forward, l=nn.Linear(4, 4)))
    assert_same_step(eager, ours, torch.randn(3, 4))
    assert ours.stats()["graph_breaks"] == 0


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("kind", [list, dict])
def test_a_container_that_it_changes_is_the_callers_own(when: str, kind: type) -> None:
    eager, ours = pair(Function(lambda s, x: Noting.apply(x, s.l.weight, s.notes, when), l=nn.Linear(4, 4)))
    eager.notes, ours.notes = kind(), kind()
    for _ in range(4):
        assert_same_step(eager, ours, torch.randn(3, 4))
        assert ours.notes == eager.notes


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_container_of_the_forwards_own_is_a_new_one_each_time(when: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        notes: list[int] = []
        return Noting.apply(x, s.l.weight, notes, when) * (1 + len(notes))

    eager, ours = pair(Function(forward, l=nn.Linear(4, 4)))
    for _ in range(4):
        assert_same_step(eager, ours, torch.randn(3, 4))
