"""Gradients that go on as they are there, for hooks that wait for each: an optimizer's steps within the backward."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from ortmodule_c import _C, DebugOptions, ORTModule, nodes
from wrapped import Function, Noting, assert_same_state, close, pair, two_losses

STRICT = DebugOptions(fallback="error")


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers are large enough to go on alone."""
    monkeypatch.setattr(nodes, "_FIRST", 1)
    monkeypatch.setattr(nodes, "_OF_HOOKS", 1)


def stepping(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> list[str]:
    """Have each parameter take its step, and its gradient go, as soon as that is there; the names, as it happens."""
    came: list[str] = []

    def follow(name: str, parameter: nn.Parameter) -> None:
        steps = optimizer([parameter], lr=1e-2)

        def step(p: Tensor) -> None:
            assert p is parameter
            steps.step()
            p.grad = None
            came.append(name)

        parameter.register_post_accumulate_grad_hook(step)

    for name, parameter in model.named_parameters():
        follow(name, parameter)
    return came


def deep() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(7, 7), nn.Tanh())])


def gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 3, "vocab_size": 99, "n_positions": 40}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **sizes))


def settled() -> int:
    gc.collect()
    return _C.pool_stats()["used_bytes"]


def test_hooks_are_called_before_the_rest_is_computed() -> None:
    def forward(s: Function, x: Tensor) -> Tensor:
        return s.last(Noting.apply(s.first(x)).tanh())

    model = Function(forward, first=nn.Linear(6, 6), last=nn.Linear(6, 6))
    model(torch.randn(6, 6)).sum().backward()
    ours = ORTModule(model)
    Noting.seen = stepping(model)
    for _ in range(2):
        Noting.seen.clear()
        ours(torch.randn(6, 6)).sum().backward()
        between = Noting.seen.index("between")
        assert {*Noting.seen[:between]} == {"last.weight", "last.bias"}
        assert {*Noting.seen[between + 1 :]} == {"first.weight", "first.bias"}


def test_gradients_come_in_the_order_of_the_layers() -> None:
    model = deep()
    ours, came = ORTModule(model, STRICT), stepping(model)
    ours(torch.randn(7, 7)).sum().backward()
    assert [int(name.partition(".")[0]) for name in came] == [8, 8, 6, 6, 4, 4, 2, 2, 0, 0]


def losses() -> tuple[nn.Module, tuple[Any, ...]]:
    net = two_losses()
    return Function(lambda s, x: [s.net(x)[0] + s.net(x)[1], s.net(x)[2]], net=net), (torch.randn(4, 4),)


def images() -> tuple[nn.Module, tuple[Any, ...]]:
    parts = [nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 5, 1), nn.Flatten(), nn.Linear(80, 3)]
    return nn.Sequential(*parts), (torch.randn(3, 3, 6, 6),)


def tied() -> tuple[nn.Module, tuple[Any, ...]]:
    def forward(s: Function, x: Tensor) -> Tensor:
        return s.a((s.a(x).tanh() @ s.a.weight).sin())

    return Function(forward, a=nn.Linear(5, 5)), (torch.randn(5, 5),)


def language() -> tuple[nn.Module, tuple[Any, ...]]:
    ids = torch.randint(99, (3, 19))
    return Function(lambda s, ids: s.net(ids, labels=ids).loss, net=gpt2()), (ids,)


def recurrent() -> tuple[nn.Module, tuple[Any, ...]]:
    return Function(lambda s, x: s.lstm(x)[0].tanh(), lstm=nn.LSTM(4, 4, 2)), (torch.randn(4, 4, 4),)


def empty() -> tuple[nn.Module, tuple[Any, ...]]:
    return nn.Sequential(nn.Linear(3, 0), nn.Tanh(), nn.Linear(0, 1)), (torch.randn(1, 3),)


NETS = [losses, images, tied, language, recurrent, empty]


def first_of(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs[0]


@pytest.mark.parametrize("make", NETS)
def test_an_optimizer_within_the_backward_trains_as_in_pytorch(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, args = make()
    eager, ours = pair(model)
    came = [stepping(eager), stepping(ours)]
    for _ in range(3):
        for net in (eager, ours):
            first_of(net(*args)).square().sum().backward()
    assert sorted(came[0]) == sorted(came[1]) and came[0]
    for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert p.grad is None and q.grad is None
        close(q, p, name)


def spoil(p: Tensor) -> None:
    """Keep the gradient elsewhere; it, and what it is of, are nobody else's from here on."""
    assert p.grad is not None
    p.kept = p.grad.clone()  # type: ignore[attr-defined]
    p.grad.fill_(torch.nan)
    p.data.fill_(torch.nan)


@pytest.mark.parametrize("budget", [None, 0.0])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("make", NETS)
def test_nothing_reads_what_has_gone_on(make: Callable[[], Any], precision: Any, budget: float | None) -> None:
    torch.manual_seed(0)
    model, args = make()
    apart, together = (ORTModule(copy.deepcopy(model), precision=precision, memory_budget=budget) for _ in range(2))
    for p in apart.parameters():
        p.register_post_accumulate_grad_hook(spoil)
    for step in range(2):
        for p, q in zip(apart.parameters(), together.parameters(), strict=True):
            p.data.copy_(q)
            p.grad = q.grad = None
        for net in (apart, together):
            torch.manual_seed(step)
            first_of(net(*args)).float().square().sum().backward()
        for p, q in zip(apart.parameters(), together.parameters(), strict=True):
            assert torch.equal(p.kept, q.grad)


def test_what_is_read_later_must_not_change() -> None:
    said = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = deep()
        net = ORTModule(model, STRICT) if wrapped else model

        def change(_p: Tensor, model: nn.Module = model) -> None:
            with torch.no_grad():
                model.get_parameter("2.weight").add_(1)

        model.get_parameter("8.weight").register_post_accumulate_grad_hook(change)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as info:
            net(torch.randn(7, 7)).sum().backward()
        said.append(str(info.value).partition(";")[0])
        assert model.get_parameter("8.weight").grad is not None and model.get_parameter("0.weight").grad is None
    assert "[7, 7]" in said[1] and "version" in said[1]


def test_what_was_read_may_change() -> None:
    """As that of a layer whose gradients are there."""
    torch.manual_seed(0)
    eager, ours = pair(deep())
    for net in (eager, ours):

        def change(_p: Tensor, net: nn.Module = net) -> None:
            with torch.no_grad():
                for name in ("6.weight", "8.weight"):
                    net.get_parameter(name).mul_(0.5)

        net.get_parameter("4.bias").register_post_accumulate_grad_hook(change)
        net(torch.ones(7, 7)).sum().backward()
    assert_same_state(ours, eager)


def hooked(model: nn.Module, name: str, change: Callable[[nn.Module], None]) -> None:
    """Have a hook of one parameter change something."""

    def hook(_p: Tensor) -> None:
        with torch.no_grad():
            change(model)

    model.get_parameter(name).register_post_accumulate_grad_hook(hook)


def test_what_is_read_later_may_lie_elsewhere() -> None:
    """Also where that it was is gone."""

    def move(net: nn.Module) -> None:
        for name in ("2.weight", "4.weight", "6.weight"):
            p = net.get_parameter(name)
            p.data = p.data * 1.0
        net.fill = [torch.full((7, 7), torch.nan) for _ in range(9)]

    torch.manual_seed(0)
    eager, ours = pair(deep())
    for net in (eager, ours):
        hooked(net, "8.weight", move)
        net(torch.ones(7, 7)).sum().backward()
    assert_same_state(ours, eager)


def test_nothing_may_change_either_where_a_gradient_takes_no_step() -> None:
    """As that of what is masked wholly, which is known to be 0."""

    def forward(s: Function, x: Tensor) -> Tensor:
        return s.b(s.a(x).tanh()) + s.p.masked_fill(torch.ones(5, 5, dtype=torch.bool), 0.0)

    model = Function(forward, a=nn.Linear(5, 5), b=nn.Linear(5, 5), p=nn.Parameter(torch.ones(5, 5)))
    for net in pair(model):
        hooked(net, "p", lambda net: net.get_parameter("b.weight").mul_(100))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            net(torch.ones(5, 5)).sum().backward()


def test_gradients_of_outputs_may_change_once_they_are_read() -> None:
    torch.manual_seed(0)
    eager, ours = pair(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)))
    for net in (eager, ours):
        grad = torch.ones(5, 5)
        hooked(net, "2.weight", lambda _net, grad=grad: grad.zero_())
        net(torch.ones(5, 5)).backward(grad)
    assert_same_state(ours, eager)


def test_what_is_only_written_later_may_change() -> None:
    """A gradient may come later than what reads its tensor."""

    def forward(s: Function, x: Tensor) -> Tensor:
        return s.norm(s.lstm(x)[0].mT).sin()

    torch.manual_seed(0)
    eager, ours = pair(Function(forward, lstm=nn.LSTM(4, 4), norm=nn.GroupNorm(2, 4)))
    for net in (eager, ours):
        hooked(net, "norm.bias", lambda net: net.get_parameter("norm.weight").mul_(2))
        hooked(net, "lstm.weight_hh_l0", lambda net: net.get_parameter("lstm.bias_ih_l0").mul_(2))
        net(torch.linspace(-1, 1, 64).view(4, 4, 4)).sum().backward()
    assert_same_state(ours, eager)


def test_an_error_of_a_hook_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    eager, ours = pair(deep())
    x, faults = torch.randn(7, 7), [True]

    def fail(_p: Tensor) -> None:
        if faults:
            faults.pop()
            raise KeyError("the hook's own")

    ours.get_parameter("4.weight").register_post_accumulate_grad_hook(fail)
    before = settled()
    y = ours(x).sum()
    with pytest.raises(KeyError, match="the hook's own"):
        y.backward()
    del y
    ours.zero_grad()
    assert settled() == before
    eager(x).sum().backward()
    ours(x).sum().backward()
    assert_same_state(ours, eager)


def test_backwards_may_follow_and_be_for_some() -> None:
    torch.manual_seed(0)
    eager, ours = pair(deep())
    x, some = torch.randn(7, 7), ("8.bias", "2.weight")
    came, grads = [stepping(eager), stepping(ours)], []
    for net in (eager, ours):
        y = net(x).sum()
        grads.append(torch.autograd.grad(y, [net.get_parameter(n) for n in some], retain_graph=True))
        y.backward(inputs=[net.get_parameter(n) for n in some])
        with pytest.raises(RuntimeError, match="a second time"):
            y.backward()
    assert came[0] == came[1] == [*some]
    close(grads[1], grads[0])
    for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
        close(q, p, name)


def test_a_hook_may_run_the_module() -> None:
    torch.manual_seed(0)
    eager, ours = pair(deep())
    x = torch.randn(7, 7)
    within: list[list[Tensor]] = []
    for net in (eager, ours):
        found: list[Tensor] = []

        def again(_p: Tensor, net: nn.Module = net, found: list[Tensor] = found) -> None:
            if not found:
                y = net(x)
                found.append(y.detach())
                with torch.enable_grad():
                    found.extend(torch.autograd.grad(net(x).sin().sum(), [net.get_parameter("0.weight")]))

        net.get_parameter("4.bias").register_post_accumulate_grad_hook(again)
        net(x).sum().backward()
        within.append(found)
    close(within[1], within[0])
    assert_same_state(ours, eager)


def test_threads_have_backwards_of_their_own() -> None:
    torch.manual_seed(0)
    model = deep()
    ours = ORTModule(copy.deepcopy(model), STRICT)
    x = torch.randn(7, 7)
    ours(x).sum().backward()
    expected = [p.grad.clone() for p in ours.parameters()]
    came: dict[int, list[Tensor]] = {}
    for p in ours.parameters():
        p.register_hook(lambda g: came.setdefault(threading.get_ident(), []).append(g.clone()))
        p.register_post_accumulate_grad_hook(lambda p: None)

    def steps() -> None:
        for _ in range(20):
            ours(x).sum().backward()

    threads = [threading.Thread(target=steps) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    by_shape_and_sum = sorted((tuple(g.shape), g.sum().item()) for g in expected)
    for found in came.values():
        assert len(found) == 20 * len(expected)
        assert sorted((tuple(g.shape), g.sum().item()) for g in found) == sorted(20 * by_shape_and_sum)


def test_saved_tensors_may_be_elsewhere() -> None:
    torch.manual_seed(0)
    eager, ours = pair(deep())
    stepping(eager), stepping(ours)
    for _ in range(2):
        for net in (eager, ours):
            x = torch.linspace(-1, 1, 49).view(7, 7)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
                y = net(x).sum()
            y.backward()
    for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
        close(q, p, name)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_as_many_go_on_together_as_are_of_that_size(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_FIRST", 60)
    monkeypatch.setattr(nodes, "_OF_HOOKS", 2 * 60)
    model = ORTModule(deep(), STRICT)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: None)
    sizes: list[list[int]] = []
    connected = nodes._Held

    def held(call: Any, sets: Any, n: int) -> Any:
        sizes.append([len(s.inputs) for s in sets])
        return connected(call, sets, n)

    monkeypatch.setattr(nodes, "_Held", held)
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with keep if elsewhere else contextlib.nullcontext():
        model(torch.randn(7, 7)).sum().backward()
    assert sizes == [[1, 2, 2, 2, 2, 1]]


@pytest.mark.host
def test_gradients_that_are_gone_take_no_memory() -> None:
    model = ORTModule(nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)]), STRICT)
    used: list[int] = []

    def drop(p: Tensor) -> None:
        used.append(_C.pool_stats()["used_bytes"])
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(drop)
    before = settled()
    for _ in range(2):
        model(torch.randn(1, 256)).sum().backward()
    assert len(used) == 64 and max(used) - before < 4 * 256 * 256 * 4
