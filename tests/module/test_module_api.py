"""A wrapped module is the module: same names, state, attributes, methods."""

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule_c import ORTModule
from wrapped import assert_same_step, close, mlp


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(1))
        self.tag = "net"
        self.calls = 0

    def forward(self, x: torch.Tensor, *, double: bool = False) -> torch.Tensor:
        """Doc of forward."""
        return self.linear(x) * self.scale * (2 if double else 1)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).sum()

    def kind(self) -> type:
        return type(self)

    def described(self) -> str:
        return super().extra_repr() + self.tag

    @property
    def width(self) -> int:
        return self.linear.in_features


class Overriding(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["more"] = torch.ones(1)
        return state


def test_names_and_state() -> None:
    net = Net()
    ours = ORTModule(net)
    for listing in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert [n for n, _ in getattr(ours, listing)()] == [n for n, _ in getattr(net, listing)()]
    assert list(ours.state_dict()) == list(net.state_dict())
    other = ORTModule(Net())
    other.load_state_dict(net.state_dict())
    close(other.linear.weight, net.linear.weight)
    Net().load_state_dict(ours.state_dict())
    assert "more" in ORTModule(Overriding(2, 2)).state_dict()


def test_inside_another_module() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    plain, wrapped = Outer(Net()), Outer(ORTModule(Net()))
    assert list(plain.state_dict()) == list(wrapped.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    close(wrapped.inner.linear.weight, plain.inner.linear.weight)
    wrapped.train(False)
    assert not wrapped.inner.module.training
    wrapped.double()
    assert wrapped.inner.linear.weight.dtype == torch.float64


def test_attributes() -> None:
    net = Net()
    ours = ORTModule(net)
    assert (ours.tag, ours.width, ours.module) == ("net", 4, net)
    ours.tag = "other"
    ours.fresh = 1
    ours.linear = nn.Linear(4, 4, bias=False)
    assert (net.tag, net.fresh) == ("other", 1) and net.linear.bias is None
    del ours.fresh
    assert not hasattr(net, "fresh") and not hasattr(ours, "fresh")
    with pytest.raises(AttributeError, match="nothing"):
        _ = ours.nothing
    assert "tag" in dir(ours) and "Net" in repr(ours)
    x = torch.randn(2, 4)
    close(ours(x), net(x))


def test_methods_see_the_wrapper() -> None:
    ours = ORTModule(Net())
    assert ours.kind() is ORTModule
    assert ours.described() == "net"
    ours.loss(torch.randn(2, 4)).backward()
    assert len(ours._ort_graphs._graphs) == 1
    assert ours.linear.weight.grad is not None


def test_signature() -> None:
    ours = ORTModule(Net())
    assert inspect.signature(ours.forward) == inspect.signature(Net().forward)
    assert ours.forward.__doc__ == "Doc of forward."


def test_modes_and_moves() -> None:
    ours = ORTModule(Net())
    assert ours.eval() is ours and not ours.training and not ours.linear.training
    assert ours.train() is ours and ours.module.training
    assert ours.to(torch.float64) is ours and ours.linear.weight.dtype == torch.float64
    assert ours.requires_grad_(False) is ours and not ours.linear.weight.requires_grad
    assert ours.apply(lambda m: None) is ours
    assert isinstance(ours.float(), ORTModule)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies(way: str) -> None:
    ours = ORTModule(mlp())
    x = torch.randn(2, 6)
    ours(x).sum().backward()
    if way == "deepcopy":
        twin = copy.deepcopy(ours)
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert isinstance(twin, ORTModule)
    with torch.no_grad():
        twin.get_parameter("0.weight").zero_()
    assert bool(ours.get_parameter("0.weight").any())
    assert_same_step(copy.deepcopy(twin.module), twin, x)


def test_hooks_on_the_wrapper_run() -> None:
    ours = ORTModule(mlp())
    seen: list[str] = []
    ours.register_forward_pre_hook(lambda m, a: seen.append("pre"))
    ours.register_forward_hook(lambda m, a, out: seen.append("post"))
    ours(torch.randn(2, 6))
    assert seen == ["pre", "post"] and not ours.fallback_report()


def test_export_leaves_no_trace() -> None:
    class Caching(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            self.last = x * 2
            self.calls += 1
            return super().forward(x)

    net = Caching()
    net.linear.weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(net.state_dict())
    attributes = set(net.__dict__)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    ours = ORTModule(net)
    for _ in range(3):
        ours(torch.ones(2, 4))
    assert torch.equal(torch.rand(2), expected)
    assert set(net.__dict__) == attributes
    assert torch.equal(net.linear.weight.grad, torch.ones(4, 4))
    close(dict(net.state_dict()), dict(before))
    assert len(ours._ort_graphs._graphs) == 1
