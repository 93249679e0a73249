"""Calls in graphs of TorchDynamo that hold functions of their own: checkpoints, hooks, custom functions."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from by_dynamo import assert_same, compiled, x
from wrapped import close

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.save_for_backward(t)
        return t**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (t,) = ctx.saved_tensors
        return grad * 7 * t  # not the derivative


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.mark_dirty(t)
        return t.mul_(2)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def custom_function(t: Tensor) -> Tensor:
    return Cube.apply(t * 2).sin()


def custom_function_that_writes(t: Tensor) -> Tensor:
    return Doubled.apply(t * 1) + 1


def hooked(t: Tensor) -> Tensor:
    h = t * 2
    h.register_hook(lambda grad: grad * 10)
    return h.sin()


def checkpointed(t: Tensor) -> Tensor:
    return checkpoint(lambda v: torch.tanh(v) * 2, t, use_reentrant=False) + t


def checkpointed_reentrant(t: Tensor) -> Tensor:
    return checkpoint(lambda v: torch.tanh(v) * 2, t, use_reentrant=True) + t


@pytest.mark.parametrize(
    "function", [custom_function, custom_function_that_writes, hooked, checkpointed, checkpointed_reentrant]
)
def test_keeps_its_meaning(function: Callable[..., Any]) -> None:
    assert_same(function, x())


def dropped_in_checkpoint(t: Tensor) -> Tensor:
    return checkpoint(lambda v: F.dropout(v, 0.5) * v, t, use_reentrant=False) * 1


def test_a_checkpoint_draws_the_same_numbers_again() -> None:
    given = torch.ones(64, requires_grad=True)
    out = compiled(dropped_in_checkpoint)(given)
    out.sum().backward()
    close(given.grad, out * 2)  # of v * v / 0.5 where it is kept


def test_a_checkpoint_holds_what_eagers_does() -> None:
    def layers(t: Tensor) -> Tensor:
        for _ in range(3):
            t = checkpoint(lambda v: torch.tanh(v) * v.sin() * v.exp(), t, use_reentrant=False)
        return t

    assert assert_same(layers, x()) == []
    held: list[list[int]] = [[], []]
    for function, sizes in zip((layers, compiled(layers)), held, strict=True):

        def pack(t: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            function(x())
    assert sum(held[1]) == sum(held[0]) == 3 * 12


def test_what_is_around_such_calls_runs_in_c() -> None:
    for function in (hooked, checkpointed):
        assert not any("the graph" in told for told in assert_same(function, x()))
    (told,) = assert_same(custom_function, x())
    line = custom_function.__code__.co_firstlineno + 1
    assert f"autograd_function_apply at {__file__}:{line} runs in PyTorch" in told


def test_numbers_reach_what_is_around_such_calls() -> None:
    def scaled(t: Tensor, by: float) -> Tensor:
        return checkpoint(lambda v: v.sin() * by, t * by, use_reentrant=False) + by

    ours = compiled(scaled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for by in (0.5, 0.25, 3.0):
            given = x()
            close(ours(given, by), scaled(given, by))


def test_constants_are_in_the_parts_too() -> None:
    def masked(t: Tensor) -> Tensor:
        h = t * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.ones(4).cumsum(0)
        h = checkpoint(lambda v: v[:, torch.tensor([0, 2])].sin(), h, use_reentrant=False)
        return h.masked_fill(torch.tensor([True, False]), 7.0)

    assert assert_same(masked, x()) == []


def test_each_run_of_a_custom_function_has_its_own_backward() -> None:
    ours = compiled(custom_function)
    given = [x(), x()]
    losses = [ours(t).sum() for t in given]
    for t, loss in zip(given, losses, strict=True):
        loss.backward()
        again = t.detach().requires_grad_()
        custom_function(again).sum().backward()
        close(t.grad, again.grad)


def test_a_call_inside_a_region_takes_its_graph_to_pytorch() -> None:
    def inside(t: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = Cube.apply(t * 2)
        return h * t

    (told,) = assert_same(inside, x())
    assert "autograd_function_apply" in told
