"""Several backwards of one forward: what is computed, what is kept, what is refused."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import _C, ORTModule
from ortmodule_c.errors import ORTModuleError
from ortmodule_c.function import Call
from wrapped import Function, assert_same_state, close, float_sum, pair, two_losses


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
def test_no_backward_repeats_a_forward(habit: Callable[[Any, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = pair(two_losses())
    with count_forwards(monkeypatch) as count:
        for step in range(9):
            x = torch.randn(5, 4)
            for m in (eager, ours):
                habit(m(x), step)
            assert_same_state(ours, eager)
        assert count[0] == 9


def planned(ours: ORTModule) -> tuple[tuple[tuple[bool, ...], ...], bool]:
    (graph,) = ours._ort_graphs._graphs.values()
    return graph.runner.habits.expected


def test_a_plan_has_a_backward_for_each_output_alone_and_for_those_that_were_met_together() -> None:
    ours = ORTModule(two_losses())
    out = ours(torch.randn(5, 4))
    alone = [(True, False, False), (False, True, False), (False, False, True)]
    assert set(planned(ours)[0]) == {*alone, (True, True, False)}, "two losses may well be added"
    (out[0] + out[2].sum()).backward()
    assert set(planned(ours)[0]) == {*alone, (True, False, True)}
    assert not planned(ours)[1]


def test_what_was_met_once_is_expected_from_then_on() -> None:
    ours = ORTModule(two_losses())
    retained(ours(torch.randn(5, 4)), 0)
    for _ in range(20):
        ours(torch.randn(5, 4))[0].backward()
    assert planned(ours)[1]


@pytest.mark.parametrize("read", [lambda x, i: x[i], lambda x, i: x[:, i], lambda x, i: x[i, i]], ids=range(3))
def test_what_is_read_by_index_is_differentiated_once(read: Callable[[Tensor, Tensor], Tensor]) -> None:
    for m in pair(Function(lambda _, x, i: read(x, i))):
        out = m(torch.randn(3, 3, requires_grad=True), torch.tensor([0, 2]))
        out.sum().backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            out.sum().backward()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_parameters_that_change_after_the_forward_do_not_change_its_losses(first: int) -> None:
    """Not at the first step either, and not where no version tells of it."""

    def forward(s: Function, x: Tensor) -> list[Tensor]:
        h = torch.tanh(s.l(x))
        outputs = [h, s.head(h).sum(), (s.l.weight * x.sum()).sum()]
        return outputs[first:] + outputs[:first]

    eager, ours = pair(Function(forward, l=nn.Linear(3, 3), head=nn.Linear(3, 3)))
    x = torch.randn(5, 3)
    for step in range(20):
        for m in (eager, ours):
            losses = [t for t in m(x) if t.dim() == 0]
            losses[step % 2].backward(retain_graph=True)
            m.l.weight.data.mul_(1.5 if step % 2 else 0.5)
            m.head.weight.data.add_(step % 2 - 0.5)
            if step in (0, 19):
                losses[1 - step % 2].sum().backward()
        assert_same_state(ours, eager)


@pytest.mark.parametrize("which", [(0, 1), (0, 2), (1, 2), (2,), (0, 1, 2)])
def test_a_backward_met_for_the_first_time_uses_what_forward_saved(which: tuple[int, ...]) -> None:
    """Parameters, buffers and the seed may be others by then, and no version tells of it."""

    def forward(s: Function, x: Tensor) -> tuple[Tensor, ...]:
        h = s.norm(s.l(x)).tanh() * s.scale
        return h.square().sum(), h.exp(), s.head(h).sum()

    layers = {"l": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4), "head": nn.Linear(4, 2)}
    eager, ours = pair(Function(forward, **layers, scale=nn.Parameter(torch.ones(4))))
    for step in range(8):
        x = torch.randn(5, 4)
        for m in (eager, ours):
            out = m(x)
            m.l.weight.data.mul_(3)
            m.l.bias.data.sub_(1)
            m.norm.running_mean.data.add_(1)
            sum(out[i].sum() for i in (which if step == 7 else [0])).backward()
        assert_same_state(ours, eager)


def test_a_backward_met_for_the_first_time_has_the_mask_of_its_forward() -> None:
    ours = ORTModule(Function(lambda s, x: (s.d(s.l(x)).mean(), s.d(s.l(x))), l=nn.Linear(4, 8), d=nn.Dropout(0.5)))
    x = torch.randn(6, 4)
    ours(x)[0].backward()
    ours.zero_grad()
    out = ours(x)[1]
    out.sum().backward()
    close(ours.l.weight.grad, ((out != 0).float() * 2).T @ x)


class Clipped(torch.autograd.Function):
    """Its backward of a sum is not the sum of its backwards."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1, 1)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_a_custom_function_behind_several_outputs_goes_back_once() -> None:
    def forward(s: Function, x: Tensor) -> tuple[Tensor, ...]:
        h = Clipped.apply(s.l(x))
        return h.sum(), h.exp(), h.sin()

    eager, ours = pair(Function(forward, l=nn.Linear(4, 4)))
    for which in [(0,), (0,), (0, 1), (1, 2), (0, 1, 2), (2,)]:
        for m in (eager, ours):
            out = m(torch.ones(3, 4))
            sum(out[i].sum() for i in which).backward()
        assert_same_state(ours, eager)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_outputs_beside_those_of_a_custom_function_go_back_with_any_of_them() -> None:
    def forward(s: Function, x: Tensor) -> tuple[Tensor, ...]:
        y = s.l(x)
        h, k = Clipped.apply(y), Clipped.apply(y * 2)
        return h.sum(), y.sin(), h.exp(), y.cos(), k.exp(), k.sin()

    eager, ours = pair(Function(forward, l=nn.Linear(4, 4)))
    for which in [(0, 1), (1, 2, 3), (0, 2, 4, 5), (0, 3, 4), (1, 5)]:
        for m in (eager, ours):
            out = m(torch.ones(3, 4))
            sum(out[i].sum() for i in which).backward()
        assert_same_state(ours, eager)


@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_many_outputs_of_a_custom_function_are_refused_together_until_they_were_met() -> None:
    def forward(s: Function, x: Tensor) -> tuple[Tensor, ...]:
        h = Clipped.apply(s.l(x))
        return h.sum(), h.exp(), h.sin(), h.cos()

    eager, ours = pair(Function(forward, l=nn.Linear(4, 4)))

    def step(m: nn.Module) -> None:
        out = m(torch.ones(3, 4))
        (out[1] + out[2]).sum().backward()

    with pytest.raises(ORTModuleError, match="call the module again"):
        step(ours)
    step(ours)
    step(eager)
    assert_same_state(ours, eager)


def test_several_backwards_in_any_order_are_those_of_eager() -> None:
    def forward(s: Function, x: Tensor) -> tuple[Tensor, ...]:
        h = s.a(x)
        return h.mean(), h.exp().sum(), s.b(x).relu().sum(), (s.w + x).sum(), s.b(h).sum()

    for seed in range(30):
        dice = random.Random(seed)
        torch.manual_seed(seed)
        eager, ours = pair(Function(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), w=nn.Parameter(torch.ones(4))))
        out = [m(torch.ones(5, 4)) for m in (eager, ours)]
        for _ in range(6):
            which, retain = dice.sample(range(5), dice.randint(1, 2)), dice.random() < 0.3
            raised = []
            for mine in out:
                try:
                    sum(mine[i] for i in which).backward(retain_graph=retain)
                    raised.append("")
                except RuntimeError as error:
                    raised.append(str(error))
            assert raised[1] == raised[0]
            if raised[0]:
                break
            assert_same_state(ours, eager)


def between(s: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    h = s.trunk(x)
    return h, h.exp()


@pytest.mark.parametrize("ask", ["hook", "hook of a result that is gone", "retain_grad"])
def test_the_gradient_of_a_result_that_others_are_made_of_is_refused(ask: str) -> None:
    """All results come from one node, so it would lack what comes from the others."""
    ours = ORTModule(Function(between, trunk=nn.Linear(4, 8)))
    first, second = ours(torch.randn(5, 4))
    if ask == "retain_grad":
        first.retain_grad()
    else:
        first.register_hook(lambda grad: grad)
    if ask == "hook of a result that is gone":
        (2 * first).sum().backward(retain_graph=True)
        del first
    with pytest.raises(ORTModuleError, match="where other outputs are computed from it"):
        (second.sum() if ask == "hook of a result that is gone" else second.sum() + first.sum()).backward()


@pytest.mark.parametrize("also", ["nothing else", "a parameter"])
@pytest.mark.parametrize("call", ["grad", "backward"])
def test_the_gradient_of_one_result_by_another_is_refused(call: str, also: str) -> None:
    ours = ORTModule(Function(between, trunk=nn.Linear(4, 8)))
    first, second = ours(torch.randn(5, 4))
    inputs = [first, ours.trunk.weight] if also == "a parameter" else [first]
    with pytest.raises(ORTModuleError, match="where other outputs are computed from it"):
        if call == "grad":
            torch.autograd.grad(second.sum(), inputs, allow_unused=True)
        else:
            second.sum().backward(inputs=inputs)


def test_the_gradient_by_a_result_of_what_comes_after_the_module() -> None:
    eager, ours = pair(Function(between, trunk=nn.Linear(4, 8)))
    x = torch.randn(5, 4)
    found = []
    for m in (eager, ours):
        first, second = m(x)
        loss = first.square().sum() + second.detach().sum()
        found.append(torch.autograd.grad(loss, [first, second, m.trunk.weight], allow_unused=True, retain_graph=True))
        found[-1] += torch.autograd.grad(second.square().sum(), [second])
        second.sum().backward()
    assert [g is None for g in found[1]] == [g is None for g in found[0]] == [False, True, False, False]
    close([g for g in found[1] if g is not None], [g for g in found[0] if g is not None])
    assert_same_state(ours, eager)


def test_a_hook_that_was_removed_asks_for_nothing() -> None:
    eager, ours = pair(Function(between, trunk=nn.Linear(4, 8)))
    x = torch.randn(5, 4)
    for m in (eager, ours):
        first, second = m(x)
        first.register_hook(torch.zeros_like).remove()
        (first.sum() + second.sum()).backward()
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


class _Mixed(nn.Module):
    """Layers of many kinds: a convolution, norms, attention, a tied table, a product by an op that runs in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.norm = nn.Embedding(11, 8), nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)
        self.scale, self.lstm = nn.Parameter(torch.rand(8)), nn.LSTM(8, 8, batch_first=True)

    def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.table(ids) + self.norm(self.conv(x.mT)).mT.relu()
        h = self.lstm(h + self.attention(h, h, h, need_weights=False)[0])[0]
        h = nn.functional.dropout(self.last(h), 0.0) * self.scale.logcumsumexp(0)
        return h @ self.table.weight.T, h.square()


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
@pytest.mark.parametrize("seed", range(12))
def test_any_gradients_of_any_outputs(seed: int) -> None:
    rng = random.Random(seed)
    eager, ours = pair(_Mixed().double())  # sums of small differences
    names = rng.sample([n for n, _ in eager.named_parameters()], rng.randint(1, 5))
    which = rng.sample((0, 1), rng.randint(1, 2))
    ids, data = torch.randint(0, 11, (3, 5)), torch.randn(3, 5, 8, dtype=torch.float64)
    got = []
    for m in (eager, ours):
        x = data.clone().requires_grad_()
        chosen = [*[m.get_parameter(n) for n in names], *([x] if seed % 2 else [])]
        outputs = m(ids, x)
        total = float_sum([outputs[k] for k in which])
        some = torch.autograd.grad(total, chosen, allow_unused=True, retain_graph=True)
        total.backward(inputs=chosen, retain_graph=True)
        accumulated = [p.grad for p in chosen]
        more = torch.autograd.grad(total, [*m.parameters(), x], allow_unused=True)
        got.append([*some, *accumulated, *more])
    assert [g is None for g in got[0]] == [g is None for g in got[1]]
    close([g for g in got[1] if g is not None], [g for g in got[0] if g is not None])


@pytest.mark.parametrize("rows", [0, 1, 8])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_some_gradients_have_the_bits_that_they_have_among_all(rows: int, dtype: torch.dtype | None) -> None:
    layers = [nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)]
    ours = ORTModule(nn.Sequential(*layers))
    x = torch.randn(rows, 8, requires_grad=True)

    def gradients(asked: list[Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = ours(x).float().square().sum()
        return torch.autograd.grad(loss, asked)

    everything = [x, *ours.parameters()]
    for first in range(len(everything)):
        some = everything[first::3]
        for a, b in zip(gradients(some), gradients(everything)[first::3], strict=True):
            assert torch.equal(a, b)


def test_what_no_gradient_that_is_asked_for_needs_may_have_changed() -> None:
    eager, ours = pair(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    x = torch.randn(3, 4)
    for m in (eager, ours):
        loss = m(x).square().sum()
        loss.backward(inputs=list(m[2].parameters()), retain_graph=True)
        with torch.no_grad():
            for p in m[2].parameters():
                p.sub_(p.grad, alpha=0.1)
        loss.backward(inputs=list(m[4].parameters()), retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward(inputs=list(m[0].parameters()))
    assert_same_state(ours, eager)
    grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (eager, ours)]
    assert len(grads[0]) == len(grads[1]) == 4
    close(grads[1], grads[0])


def test_no_more_is_computed_than_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ORTModule(nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]))
    x = torch.randn(3, 4, requires_grad=True)
    ours(x).sum().backward()
    met: list[Any] = []
    check = Call.check
    monkeypatch.setattr(Call, "check", lambda call, back: (met.append(back.needed), check(call, back))[1])
    for ask in (lambda y: torch.autograd.grad(y, x), lambda y: y.backward(inputs=[ours[5].weight])):
        ask(ours(x).sum())
    ours(x).sum().backward()
    of_input, of_last, of_all = met
    assert of_all is None
    assert 0 < sum(of_last) < sum(of_input) < len(of_input) / 3


def test_copies_are_trained_apart() -> None:
    ours = ORTModule(two_losses())
    other = copy.deepcopy(ours)
    retained(ours(torch.randn(5, 4)), 0)
    assert all(p.grad is None for p in other.parameters())


def test_an_input_changed_by_the_module_and_a_retained_graph() -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        x.addcmul_(x, x)
        v = x + s.p
        return ((v.abs() + 0.1) ** v.tanh()).sum()

    eager, ours = pair(Function(forward, p=nn.Parameter(torch.tensor(0.3))))
    x = torch.randn(3)
    for m in (eager, ours):
        loss = m(x.clone())
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_state(ours, eager)


class Fails(torch.autograd.Function):
    """Fails where it is told to."""

    where = ""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if Fails.where == "forward":
            raise KeyError("forward")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Fails.where == "backward":
            raise KeyError("backward")
        return grad * 2


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failure_midway_leaves_nothing_behind(where: str) -> None:
    eager, ours = pair(Function(lambda s, x: Fails.apply(s.l(x)).square().sum(), l=nn.Linear(4, 4)))
    x = torch.randn(3, 4)
    for m in (eager, ours):
        m(x).backward()
        Fails.where = where
        try:
            with pytest.raises(KeyError, match=where):
                m(x).backward()
        finally:
            Fails.where = ""
        m(x).backward()
    assert_same_state(ours, eager)
    assert ours.stats()["runs_live"] == 0


def test_threads_train_one_module_and_go_back_through_one_graph() -> None:
    eager, ours = pair(two_losses())
    xs = [torch.randn(n, 4) for n in (2, 3, 2, 5)]
    kept = [m(xs[0]) for m in (eager, ours)]
    failures: list[BaseException] = []

    def work(x: Tensor) -> None:
        try:
            for step in range(6):
                leaves = [ours.trunk.weight, ours.head.bias]
                for out, m in ((kept[1], ours), (ours(x), ours)):
                    got = torch.autograd.grad(out[step % 2], leaves, retain_graph=True, allow_unused=True)
                    again = torch.autograd.grad(out[step % 2], leaves, retain_graph=True, allow_unused=True)
                    assert m is ours and all(a is b or torch.equal(a, b) for a, b in zip(got, again, strict=True))
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(x,)) for x in xs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    for out in kept:
        (out[0] + out[1]).backward()
    assert_same_state(ours, eager)
