"""Outputs that are computed of different inputs: a backward comes to what its outputs are computed of, and no other."""

import contextlib
import copy
import gc
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from ortmodule_c import ORTModule, ORTModuleError

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Heads(nn.Module):
    """A trunk, two heads on it, and a head beside it; `z` is for that alone."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.a(h), self.b(h), self.c(x if z is None else z)


class Regularized(torch.autograd.Function):
    """Adds to the gradient of whatever goes through it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor:
        (y,) = ctx.saved_tensors
        return 0.1 * y if grad is None else grad + 0.1 * y


def both() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    eager, ours = Heads(), ORTModule(Heads())
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def same(act: Callable[[nn.Module], Sequence[Any]]) -> None:
    """What is done with the module, and all gradients after it, are those of eager."""
    found: list[list[Any]] = []
    for model in both():
        results = act(model)
        found.append([*results, *[p.grad for p in model.parameters()]])
    for got, expected in zip(found[1], found[0], strict=True):
        if isinstance(expected, Tensor):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        else:
            assert got == expected


SETS = [picked for n in (1, 2, 3) for picked in itertools.combinations(range(3), n)]


@pytest.mark.parametrize("picked", SETS, ids=str)
def test_hooks_are_called_where_a_backward_comes(picked: tuple[int, ...]) -> None:
    def act(model: nn.Module) -> list[Any]:
        called: list[str] = []

        def hook(name: str) -> Callable[[Tensor], Tensor]:
            def clamp(grad: Tensor) -> Tensor:
                called.append(name)
                return grad.clamp(-0.1, 0.1)

            return clamp

        z = torch.ones(3, 4, requires_grad=True) * 2
        outputs = model(X, z)
        for name, t in [*model.named_parameters(), ("z", z), *zip("pqr", outputs, strict=True)]:
            t.register_hook(hook(name))
        sum(outputs[i].square().sum() for i in picked).backward()
        return [sorted(called)]

    same(act)


def halve(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


@pytest.mark.parametrize("picked", SETS, ids=str)
def test_hooks_after_accumulation_too(picked: tuple[int, ...]) -> None:
    def act(model: nn.Module) -> list[Any]:
        sum(t.sum() for t in model(X)).backward()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(halve)
        outputs = model(X)
        sum(outputs[i].square().sum() for i in picked).backward()
        return []

    same(act)


@pytest.mark.parametrize("before", ["function", "checkpoint", "module"])
@pytest.mark.parametrize("picked", SETS, ids=str)
def test_what_comes_before_the_module_is_called_where_a_backward_comes(before: str, picked: tuple[int, ...]) -> None:
    def act(model: nn.Module) -> list[Any]:
        torch.manual_seed(1)
        up = nn.Linear(4, 4)
        made = ORTModule(up) if before == "module" and isinstance(model, ORTModule) else up
        leaf = torch.ones(3, 4, requires_grad=True)
        z = checkpoint(made, leaf, use_reentrant=True) if before == "checkpoint" else made(leaf)
        outputs = model(X, Regularized.apply(z) if before == "function" else z)
        sum(outputs[i].square().sum() for i in picked).backward()
        return [up.weight.grad, up.bias.grad, leaf.grad]

    same(act)


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("picked", SETS, ids=str)
def test_sizes_and_autocast(picked: tuple[int, ...], half: bool, rows: int) -> None:
    """With 4 rows all sizes coincide."""
    found = []
    for model in both():
        x = torch.linspace(-1, 1, 4 * rows).reshape(rows, 4).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            outputs = model(x)
            loss = sum(outputs[i].float().square().sum() for i in picked)
        loss.backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            found.append([*model(x), x.grad, *[p.grad for p in model.parameters()]])
    for got, expected in zip(found[1], found[0], strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            size = float(expected.abs().max()) if expected.numel() else 0.0
            torch.testing.assert_close(got, expected, rtol=0, atol=(2e-2 if half else 1e-5) * size)


def test_what_others_saved_may_be_changed() -> None:
    def act(model: nn.Module) -> list[Any]:
        w, v = torch.ones(3, 4, requires_grad=True), torch.full((3, 4), 2.0)
        outputs = model(X, w * v)
        v.add_(1)
        outputs[0].sum().backward()
        return [w.grad]

    same(act)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
@pytest.mark.parametrize("retain_graph", [False, True])
def test_backwards_one_after_another(order: tuple[int, ...], retain_graph: bool) -> None:
    def act(model: nn.Module) -> list[Any]:
        outputs, said = model(X), []
        for i in (*order, order[0]):
            try:
                outputs[i].square().sum().backward(retain_graph=retain_graph)
                said.append("")
            except RuntimeError as error:  # PyTorch has gone a part of the way
                said.append(str(error))
                model.zero_grad()
        return said

    same(act)


@pytest.mark.parametrize("asked", ["trunk", "a", "c", "trunk a", "a b c", "trunk c"])
@pytest.mark.parametrize("picked", SETS, ids=str)
def test_some_gradients(asked: str, picked: tuple[int, ...]) -> None:
    def act(model: Any) -> list[Any]:
        parameters = [p for name in asked.split() for p in getattr(model, name).parameters()]
        outputs = model(X)
        loss = sum(outputs[i].square().sum() for i in picked)
        return list(torch.autograd.grad(loss, parameters, allow_unused=True))

    same(act)


@pytest.mark.parametrize("others", [0, 1, 2])
def test_gradients_of_outputs_may_come_late(others: int) -> None:
    """Autograd calls nodes of another thread's later: those of inputs then come before all outputs have gradients."""

    def act(model: nn.Module) -> list[Any]:
        outputs = list(model(X))
        losses = [t.square().sum() for t in outputs]

        def elsewhere() -> None:
            losses[others] = outputs[others].square().sum()

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        sum(losses).backward()
        return []

    same(act)


@pytest.mark.parametrize("n", [1, 70])
@pytest.mark.parametrize("fails", [False, True])
def test_backwards_within_a_backward(fails: bool, n: int) -> None:
    """However many there are, and however they end, the one that waits for them goes on."""

    def act(model: nn.Module) -> list[Any]:
        x = X.clone().requires_grad_()
        outputs = model(x, X)

        def others(grad: Tensor) -> None:
            hook.remove()
            failing = outputs[2].register_hook(fail if fails else lambda g: None)
            with torch.enable_grad():
                for _ in range(n):
                    with contextlib.suppress(ArithmeticError):
                        torch.autograd.grad(outputs[0].sum() + outputs[2].sum(), [x, outputs[2]], retain_graph=True)
            failing.remove()

        hook = outputs[0].register_hook(others)
        sum(t.square().sum() for t in outputs).backward()
        return [x.grad]

    same(act)


def fail(grad: Tensor) -> Tensor:
    raise ArithmeticError


def test_an_output_whose_gradient_is_asked_for_is_not_waited_for() -> None:
    """Autograd does not call its node, and frees what the others are computed of."""

    def act(model: nn.Module) -> list[Any]:
        x = X.clone().requires_grad_()
        a, _, c = model(x, X)
        found = torch.autograd.grad(a.square().sum() + c.square().sum(), [x, c])
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(a.sum(), [x])
        return [*found, *torch.autograd.grad(c.sum(), [model.c.weight])]

    same(act)


@pytest.mark.parametrize("reentrant", [False, True])
def test_late_gradients_through_a_checkpoint(reentrant: bool) -> None:
    def act(model: nn.Module) -> list[Any]:
        x = X.clone().requires_grad_()
        outputs = checkpoint(model, x, use_reentrant=reentrant)
        losses = [t.square().sum() for t in outputs]
        thread = threading.Thread(target=lambda: losses.append(outputs[1].sin().sum()))
        thread.start()
        thread.join()
        sum(losses).backward()
        return [x.grad]

    same(act)


def test_the_nodes_of_inputs_are_no_place_to_begin() -> None:
    _, model = both()
    (mark, number), *_ = model(X)[0].grad_fn.next_functions
    with pytest.raises(ORTModuleError, match="computed from those of outputs only"):
        torch.autograd.backward([GradientEdge(mark, number)], [torch.zeros(0)])


def test_nothing_of_a_backward_is_kept() -> None:
    _, model = both()
    for _ in range(2):
        outputs = model(X)
        (outputs[0].sum() + outputs[2].sum()).backward(retain_graph=True)
        held = outputs[0].grad_fn.held
        assert held._now() is None and held.result is None and all(b() is None for b in held._backwards.values())
        (outputs[1].sum() + outputs[0].sum() + outputs[2].sum()).backward()
        assert held._call is None and len(held._backwards) == 1
    assert model.stats()["runs_live"] == 0


@pytest.mark.parametrize("retain_graph", [False, True])
def test_nothing_is_kept_of_a_backward_that_ends_in_an_error(retain_graph: bool) -> None:
    _, model = both()
    gc.disable()
    try:
        for _ in range(3):
            outputs = model(X)
            hook = outputs[0].register_hook(fail)
            with pytest.raises(ArithmeticError):
                (outputs[0].sum() + outputs[1].sum()).backward(retain_graph=retain_graph)
            hook.remove()
            del outputs
        assert model.stats()["runs_live"] <= 1  # by the queue of autograd, until it goes on
        model.zero_grad()
        sum(t.sum() for t in model(X)).backward()
        assert model.stats()["runs_live"] == 0 and model.c.bias.grad.eq(3).all()
    finally:
        gc.enable()


class Alike(nn.Module):
    """Outputs that are computed of the same inputs, and views of one that is not given."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.trunk(x)
        return h * 2, h.tanh(), x.view(3, 2, 2), x.view(3, 2, 2).square().mean()


@pytest.mark.parametrize("picked", SETS, ids=str)
def test_hooks_of_outputs_that_are_computed_of_the_same(picked: tuple[int, ...]) -> None:
    found = []
    torch.manual_seed(0)
    eager = Alike()
    for model in (eager, ORTModule(copy.deepcopy(eager))):
        called: list[Any] = []
        x = X.clone().requires_grad_()
        outputs = model(x)
        for i in range(3):
            outputs[i].register_hook(lambda grad, i=i, called=called: called.append(i) or 0.5 * grad)
        sum(outputs[i].square().sum() for i in picked).backward()
        found.append([sorted(called), x.grad, model.trunk.weight.grad])
    assert found[1][0] == found[0][0]
    torch.testing.assert_close(found[1][1:], found[0][1:])


class Views(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        v = x.view(3, 2, 2)
        return v, v.transpose(1, 2), v[0], x * 2


@pytest.mark.parametrize("root", [1, 2])
def test_a_view_of_a_view_leads_through_it(root: int) -> None:
    found = []
    for model in (Views(), ORTModule(Views())):
        x = X.clone().requires_grad_()
        outputs = model(x)
        outputs[0].register_hook(lambda grad: grad * 100)
        outputs[0].retain_grad()
        outputs[root].sum().backward(retain_graph=True)
        found.append([x.grad, outputs[0].grad, *torch.autograd.grad(outputs[root].sum(), outputs[0])])
    torch.testing.assert_close(found[1], found[0])


def test_of_threads() -> None:
    """Backwards of several threads through the nodes of one call are each their own."""
    eager, ours = both()
    found: list[list[Tensor]] = []
    for model in (eager, ours):
        outputs = model(X)
        gradients: dict[int, Tensor] = {}

        def go(i: int, outputs: Sequence[Tensor] = outputs, gradients: dict[int, Tensor] = gradients) -> None:
            for _ in range(20):
                (gradients[i],) = torch.autograd.grad(outputs[i].square().sum(), model.trunk.weight, retain_graph=True)  # noqa: B023

        threads = [threading.Thread(target=go, args=(i,)) for i in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        found.append([gradients[i] for i in range(2)])
    torch.testing.assert_close(found[1], found[0])


def test_gradients_are_not_differentiated_again() -> None:
    _, model = both()
    outputs = model(X)
    (grad,) = torch.autograd.grad(outputs[0].square().sum(), model.a.weight, create_graph=True)
    with pytest.raises(ORTModuleError, match="differentiate its gradients again"):
        grad.sum().backward()
    outputs = model(X)
    with pytest.raises(ORTModuleError, match="batch of gradients"):
        torch.autograd.grad(outputs[0], model.a.weight, torch.ones(2, 3, 4), is_grads_batched=True)


class Chain(nn.Module):
    """An output that another one is made of; that comes first, or last."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), last

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        y = self.second(torch.tanh(h))
        return (y, h) if self.last else (h, y)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("root", ["second", "both"])
@pytest.mark.parametrize("by", ["tensor", "edge", "inputs", "hook", "retain_grad"])
def test_the_gradient_of_an_output_that_another_is_made_of_is_refused(by: str, root: str, last: bool) -> None:
    model = ORTModule(Chain(last))
    y, h = model(X) if last else reversed(model(X))
    loss = y.sum() + (h.sum() if root == "both" else 0)
    if by == "hook":
        h.register_hook(lambda grad: grad * 2)
    if by == "retain_grad":
        h.retain_grad()
    with pytest.raises(ORTModuleError, match="where other outputs are computed from it"):
        if by in ("tensor", "edge"):
            torch.autograd.grad(loss, [h if by == "tensor" else get_gradient_edge(h)], allow_unused=True)
        else:
            loss.backward(inputs=[h] if by == "inputs" else None)
    fresh = model(X)[1 if last else 0]
    assert torch.autograd.grad(fresh.sum(), fresh)[0].eq(1).all()
    fresh.sum().backward()
    assert model.second.weight.grad is None
