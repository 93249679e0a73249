"""A backward after what it reads was changed: refused where PyTorch refuses it, else of what was there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from wrapped import Function, assert_same_state, close, pair, two_losses


def test_a_changed_input_is_an_error_also_for_a_backward_that_was_not_met() -> None:
    for m in pair(two_losses()):
        out = m(torch.randn(5, 4))
        with torch.no_grad():
            m.head.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out[2].sum().backward()


def test_a_changed_input_that_this_backward_does_not_read_is_none() -> None:
    eager, ours = pair(
        Function(lambda s, x: (s.a(x).exp().sum(), s.b(x.tanh()).sum()), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    )
    x = torch.randn(2, 4)
    for m in (eager, ours):
        first, _ = m(x)
        with torch.no_grad():
            m.b.weight.mul_(2)
        first.backward(retain_graph=True)
    assert_same_state(ours, eager)


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda x: x.log_softmax(1),
    "softmax": lambda x: x.softmax(1),
    "sigmoid": torch.sigmoid,
    "square root": lambda x: (x * x + 1).sqrt(),
    "logsumexp": lambda x: x.logsumexp(1),
    "largest": lambda x: x.max(1)[0],
    "gelu": nn.functional.gelu,
    "layer_norm": lambda x: nn.functional.layer_norm(x, (4,)),
    "max_pool": lambda x: nn.functional.max_pool1d(x[None], 2),
    "clamp": lambda x: x.clamp(-1, 1),
    "variance": lambda x: x.var(1),
    "threshold": lambda x: nn.functional.threshold(x, 0.1, 0.2),
    "sum": lambda x: x.sum(1),
}


@pytest.mark.parametrize("which", ["argument", "result"])
@pytest.mark.parametrize("what", CHANGED)
def test_a_backward_is_refused_where_what_pytorch_saves_for_it_has_changed(what: str, which: str) -> None:
    """And not elsewhere: the argument and the result of the function are results of the module."""
    given = torch.randn(3, 4)

    def forward(s: Function, x: Tensor) -> tuple[Tensor, ...]:
        y = CHANGED[what](x)
        return (y + s.w).square(), x, y

    found: list[Tensor | None] = []
    for m in pair(Function(forward, w=nn.Parameter(torch.ones(())))):
        leaf = given.clone().requires_grad_()
        out, x, y = m(leaf * 1)
        with torch.no_grad():
            (x if which == "argument" else y).mul_(-2)
        try:
            out.sum().backward()
            assert leaf.grad is not None
            found.append(leaf.grad)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            found.append(None)
    eager, ours = found
    assert (ours is None) == (eager is None)
    if eager is not None:
        close(ours, eager)


def test_a_backward_is_refused_where_an_input_that_pytorch_saves_has_changed_through_a_view() -> None:
    for m in pair(Function(lambda s, x: (x.view(-1).logsumexp(0) * s.w).sum(), w=nn.Parameter(torch.ones(())))):
        x = torch.randn(3, 4, requires_grad=True)
        out = m(x)
        with torch.no_grad():
            x[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def counted(s: Function, x: Tensor) -> Tensor:
    s.seen += 1
    return (s.norm(x) * s.seen).sum()


@pytest.mark.parametrize("forward", [counted, lambda s, x: (s.norm(x.relu_()) * x).sum()], ids=["buffer", "input"])
def test_a_backward_is_refused_after_a_second_forward_that_changes_what_pytorch_saved_in_the_first(
    forward: Callable[..., Tensor],
) -> None:
    for m in pair(Function(forward, norm=nn.BatchNorm1d(4), seen=nn.Buffer(torch.zeros(())))):
        x = torch.randn(3, 4)
        first, second = m(x), m(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.backward()
        second.backward()


def test_statistics_that_a_second_forward_changes_are_none_of_these() -> None:
    eager, ours = pair(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double())
    x = torch.randn(5, 4, dtype=torch.float64)
    for m in (eager, ours):
        first, second = m(x), m(x * 2)
        (first.square().sum() + second.exp().sum()).backward()
    assert_same_state(ours, eager)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": Tensor.clone,
    "of a transpose": lambda t: t.mT.contiguous().mT,
    "of one": lambda t: torch.cat([t]),
    "product with one": lambda t: t * 1.0,
    "to and fro": lambda t: t.double().float(),
}


@pytest.mark.parametrize("unseen", [False, True], ids=["seen", "unseen"])
@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
def test_a_copy_holds_what_was_there(copy_of: Callable[[Tensor], Tensor], unseen: bool) -> None:
    """What it was made of may change before backward."""
    eager, ours = pair(Function(lambda s, x: s.l(x) @ copy_of(s.held).detach(), l=nn.Linear(4, 4)))
    held = torch.randn(4, 8)
    x = torch.randn(5, 4)
    for m in (eager, ours):
        m.register_buffer("held", held.clone())
        loss = m(x).pow(2).sum()
        with torch.no_grad():
            (m.held.data if unseen else m.held).mul_(0.5)
        loss.backward()
    assert_same_state(ours, eager)
