"""Small modules and comparisons shared by the tests of this folder."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ortmodule_c import ORTModule
from ortmodule_c.flatten import flatten


class Function(nn.Module):
    """`function(self, ...)` as a module with the given submodules and parameters."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def pair(module: nn.Module) -> tuple[nn.Module, ORTModule]:
    """The module for PyTorch, and a copy of it wrapped."""
    return module, ORTModule(copy.deepcopy(module))


def float_sum(outputs: Any) -> Tensor:
    """A scalar that depends differently on every element of every differentiable output."""
    tensors = [t for t in flatten(outputs)[0] if t.requires_grad]
    tensors = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    return sum(
        (t.double() * torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64).view(t.shape)).sum() for t in tensors
    )


# In a region of autocast what is fused is rounded to 16 bits once, where eager rounds at every operator.
BFLOAT16 = torch.finfo(torch.bfloat16).eps


def close(ours: Any, eager: Any, what: str = "", rtol: float = 1e-4) -> None:
    torch.testing.assert_close(ours, eager, rtol=rtol, atol=rtol / 10, msg=lambda m: f"{what}: {m}")


def assert_same_state(ours: nn.Module, eager: nn.Module, rtol: float = 1e-4) -> None:
    """Names and values of gradients and buffers."""
    for (name, p), (other, q) in zip(eager.named_parameters(), ours.named_parameters(), strict=True):
        assert name == other
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            close(q.grad, p.grad, name, rtol)
    for (name, b), (other, c) in zip(eager.named_buffers(), ours.named_buffers(), strict=True):
        assert name == other
        close(c, b, name, rtol)


def assert_same_step(eager: nn.Module, ours: ORTModule, *args: Any, rtol: float = 1e-4, **kwargs: Any) -> Any:
    """One forward and backward of each, compared; returns our outputs."""
    expected, got = eager(*args, **kwargs), ours(*args, **kwargs)
    (a, a_spec), (b, b_spec) = flatten(expected), flatten(got)
    assert b_spec == a_spec
    for x, y in zip(a, b, strict=True):
        assert y.requires_grad == x.requires_grad
        close(y, x, "output", rtol)
    if any(x.requires_grad for x in a):
        float_sum(expected).backward()
        float_sum(got).backward()
    assert_same_state(ours, eager, rtol)
    return got


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def two_losses(**more: Any) -> nn.Module:
    """Two losses of one trunk, and what the first is made of."""

    def forward(s: Function, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(s.trunk(x))
        y = s.head(h)
        return y.square().mean(), s.other(h).exp().sum(), y

    return Function(forward, trunk=nn.Linear(4, 8), head=nn.Linear(8, 3), other=nn.Linear(8, 2), **more)


class Branching(nn.Module):
    """Two layers, between them a branch that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        if h.sum() > 3:
            h = h * 2
        return self.second(h)


def graphs(model: ORTModule) -> Iterator[Any]:
    """Graphs exported so far."""
    return iter(model._ort_graphs._graphs.values())


def n_graphs(model: ORTModule) -> int:
    return len(list(graphs(model)))


def skip_without_onednns_bfloat16() -> None:
    """An LSTM under autocast raises in PyTorch where oneDNN has no bfloat16."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("eager PyTorch has no LSTM under autocast on this CPU")


def assert_same_steps(module: nn.Module, *calls: tuple[torch.Tensor, ...]) -> ORTModule:
    """One step for each call, with gradients of its own."""
    eager, ours = pair(module)
    for call in calls:
        for m in (eager, ours):
            m.zero_grad()
        assert_same_step(eager, ours, *call)
    return ours


class Noting(torch.autograd.Function):
    """The identity; notes that its backward ran."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        Noting.seen.append("between")
        return grad.clone()
