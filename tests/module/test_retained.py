"""What a backward frees, and what a second one needs: what has to be retained is what eager PyTorch retains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import ORTModule
from wrapped import Function, assert_same_state, close, pair, two_losses


def test_backward_twice_is_refused_as_eager_does() -> None:
    for m in pair(two_losses()):
        loss = m(torch.randn(5, 4))[0]
        loss.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            loss.backward()


def test_backward_again_where_nothing_is_saved() -> None:
    eager, ours = pair(Function(lambda s, x: (x + s.w).sum(), w=nn.Parameter(torch.ones(4))))
    for m in (eager, ours):
        loss = m(torch.randn(5, 4))
        loss.backward()
        loss.backward()
    assert_same_state(ours, eager)


def apart(**more: Any) -> nn.Module:
    """Two results that share nothing but the argument, which needs no gradient."""
    return Function(lambda s, x: (s.a(x).tanh(), s.b(x).exp()), a=nn.Linear(4, 4), b=nn.Linear(4, 4), **more)


@pytest.mark.parametrize("module", ["scalars", "tensors"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_losses_that_share_nothing_need_no_retained_graph(module: str, order: tuple[int, int]) -> None:
    """As the two of a GAN do: the first optimizer steps before the second backward."""
    inner = apart()
    if module == "scalars":
        inner.function = lambda s, x: (s.a(x).tanh().mean(), s.b(x).exp().mean())
    eager, ours = pair(inner)
    for _ in range(4):
        x = torch.randn(5, 4)
        for m in (eager, ours):
            out = m(x)
            for which, part in zip(order, [(m.a, m.b)[i] for i in order], strict=True):
                part.zero_grad()
                out[which].mean().backward()
                torch.optim.SGD(part.parameters(), 0.1).step()
        assert_same_state(ours, eager)
        for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
            close(q, p)


def test_such_losses_let_go_of_everything_at_the_end() -> None:
    ours = ORTModule(apart())
    for _ in range(3):
        for out in ours(torch.randn(5, 4)):
            out.mean().backward()
    assert ours.stats()["runs_live"] == 0


def test_a_loss_behind_which_all_others_lie_frees_the_arena() -> None:
    """Nobody can come back for them."""

    def forward(s: Function, x: Tensor) -> tuple[Tensor, ...]:
        h = s.second(s.first(x).tanh()).tanh()
        return h.square().mean(), h, h.exp()

    ours = ORTModule(Function(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4)))
    for _ in range(3):
        out = ours(torch.randn(5, 4))
        assert ours.stats()["runs_live"] == 1
        out[0].backward()
        assert ours.stats()["runs_live"] == 0


def over(trunk: Callable[..., Any], *heads: Callable[..., Any]) -> Callable[..., Any]:
    def forward(s: Function, x: Tensor) -> tuple[Any, ...]:
        h = trunk(s, x)
        return tuple(head(s, h) for head in heads)

    return forward


SHARING: dict[str, tuple[Callable[..., Any], bool]] = {
    "nothing": (lambda s, x: (s.a(x).tanh(), s.b(x).exp()), False),
    "a parameter": (lambda s, x: (s.a(x).tanh(), s.a(x).exp()), False),
    "a sum": (over(lambda s, x: s.w + x, lambda s, h: h.sum(1), lambda s, h: h + 2 * s.b.weight[0]), False),
    "a product with a number": (
        over(lambda s, x: 2 * (s.w + x), lambda s, h: h.sum(1), lambda s, h: h + s.b.bias),
        True,
    ),
    "a layer": (over(lambda s, x: s.a(x).tanh(), lambda s, h: h.sum(1), lambda s, h: s.b(h)), True),
    "a layer, detached": (
        over(lambda s, x: s.a(x).tanh(), lambda s, h: h.sum(1), lambda s, h: s.b(h.detach())),
        False,
    ),
    "two results of one op": (
        over(lambda s, x: s.a(x).exp().split(2, 1), lambda s, h: h[0], lambda s, h: h[1] + s.w[:2]),
        True,
    ),
}


@pytest.mark.parametrize("what", SHARING)
def test_a_second_backward_is_refused_where_it_meets_freed_tensors(what: str) -> None:
    function, refused = SHARING[what]
    eager, ours = pair(Function(function, a=nn.Linear(4, 4), b=nn.Linear(4, 4), w=nn.Parameter(torch.ones(4))))
    for _ in range(3):
        x = torch.randn(5, 4)
        for m in (eager, ours):
            first, second = m(x)
            first.sum().backward()
            if refused:
                with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
                    second.sum().backward()
                m.zero_grad()  # a part of it may have run
            else:
                second.sum().backward()
        assert_same_state(ours, eager)
