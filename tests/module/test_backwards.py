"""Several backwards of one forward: what is computed, what is repeated, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import _C, ORTModule
from wrapped import Function, assert_same_state, close, pair


@contextmanager
def count_forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the forwards that the C core runs."""
    count = [0]

    class Counting:
        def __init__(self, plan: _C.Plan) -> None:
            self.plan = plan

        def __getattr__(self, name: str) -> Any:
            return getattr(self.plan, name)

        def forward(self, *args: Any) -> Any:
            count[0] += 1
            return self.plan.forward(*args)

    from ortmodule_c import function

    original = function.Call.plan_for

    def plan_for(self: Any, *args: Any) -> None:
        original(self, *args)
        self.plan = Counting(self.plan)

    with monkeypatch.context() as patch:
        patch.setattr(function.Call, "plan_for", plan_for)
        yield count


def two_losses(**more: Any) -> nn.Module:
    def forward(s: Function, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(s.trunk(x))
        y = s.head(h)
        return y.square().mean(), s.other(h).exp().sum(), y

    return Function(forward, trunk=nn.Linear(4, 8), head=nn.Linear(8, 3), other=nn.Linear(8, 2), **more)


def retained(out: tuple[Tensor, ...], _step: int) -> None:
    out[0].backward(retain_graph=True)
    out[1].backward()


def in_turn(out: tuple[Tensor, ...], step: int) -> None:
    out[step % 2].backward()


def four_in_turn(out: tuple[Tensor, ...], step: int) -> None:
    (out[0], out[1], out[0] + out[1], out[2].sum())[step % 4].backward()


def twice(out: tuple[Tensor, ...], _step: int) -> None:
    out[0].backward(retain_graph=True)
    out[0].backward()


@pytest.mark.parametrize("habit", [retained, in_turn, four_in_turn, twice])
def test_a_habit_repeats_no_forward(habit: Callable[[Any, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = pair(two_losses())
    with count_forwards(monkeypatch) as count:
        for step in range(16):
            x = torch.randn(5, 4)
            before = count[0]
            for m in (eager, ours):
                habit(m(x), step)
            assert_same_state(ours, eager)
            assert step < 4 or count[0] == before + 1
        assert count[0] <= 16 + 3, "once for each backward that was not foreseen"


def test_the_common_case_has_one_backward() -> None:
    ours = ORTModule(two_losses())
    for _ in range(2):
        ours(torch.randn(5, 4))[0].backward()
    (graph,) = ours._ort_graphs._graphs.values()
    masks, retain = graph.runner.habits.expected()
    assert masks == ((True, False, False),) and not retain


def test_a_habit_is_forgotten() -> None:
    ours = ORTModule(two_losses())
    retained(ours(torch.randn(5, 4)), 0)
    for _ in range(20):
        ours(torch.randn(5, 4))[0].backward()
    (graph,) = ours._ort_graphs._graphs.values()
    assert graph.runner.habits.expected() == (((True, False, False),), False)


class Normed(nn.Module):
    """Reads buffers that it also brings up to date."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.seen.clone()
        self.seen += 1
        h = self.norm(self.l(x)) * scale
        return h.square().mean(), h * (x + self.norm.running_mean)


def test_a_repeated_forward_begins_with_the_buffers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = pair(Normed())
    with count_forwards(monkeypatch) as count:
        for which in (0, 1, 0):
            x = torch.randn(5, 4)
            for m in (eager, ours):
                m(x)[which].sum().backward()
            assert_same_state(ours, eager)
        assert count[0] == 4, "the second backward was not foreseen"


def test_a_repeated_forward_draws_the_same_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ORTModule(Function(lambda s, x: (s.d(s.l(x)).mean(), s.d(s.l(x))), l=nn.Linear(4, 8), d=nn.Dropout(0.5)))
    x = torch.randn(6, 4)
    with count_forwards(monkeypatch) as count:
        out = ours(x)[1]
        out.sum().backward()
        assert count[0] == 2
    close(ours.l.weight.grad, ((out != 0).float() * 2).T @ x)


def test_a_changed_input_is_an_error_also_where_forward_would_be_repeated() -> None:
    ours = ORTModule(two_losses())
    out = ours(torch.randn(5, 4))
    with torch.no_grad():
        ours.trunk.weight.mul_(2)
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


def test_hooks_and_retained_gradients_of_outputs() -> None:
    eager, ours = pair(two_losses())
    x = torch.randn(5, 4)
    seen = []
    for m in (eager, ours):
        out = m(x)
        out[2].retain_grad()
        out[1].register_hook(lambda g: 3 * g)
        (out[1] + out[2].square().sum() + out[2].sum()).backward()
        seen.append(out[2].grad)
    close(seen[1], seen[0])
    assert_same_state(ours, eager)


def test_gradients_of_chosen_inputs() -> None:
    eager, ours = pair(two_losses(idle=nn.Linear(2, 2)))
    got = []
    for m in (eager, ours):
        torch.manual_seed(0)
        x = torch.randn(5, 4, requires_grad=True)
        chosen = [x, m.idle.weight, m.head.bias, m.other.weight]
        got.append(torch.autograd.grad(m(x)[0], chosen, allow_unused=True, retain_graph=True))
        got.append(torch.autograd.grad(m(x)[1], chosen, allow_unused=True, materialize_grads=True))
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(m(x)[0], [m.idle.weight])
        m(x)[1].backward(inputs=[m.trunk.weight, x])
        got.append((x.grad,))
    for a, b in zip(got[:3], got[3:], strict=True):
        assert [g is None for g in a] == [g is None for g in b]
        close([g for g in b if g is not None], [g for g in a if g is not None])
    assert_same_state(ours, eager)


def test_copies_are_trained_apart() -> None:
    ours = ORTModule(two_losses())
    other = copy.deepcopy(ours)
    retained(ours(torch.randn(5, 4)), 0)
    assert all(p.grad is None for p in other.parameters())
