"""Buffers and parameters that become other tensors, between calls or in the forward, as in PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import ORTModule
from wrapped import Function, assert_same_state, assert_same_step, close, n_graphs, pair


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 4), forward
        self.register_buffer("buf", torch.linspace(0, 1, 4))
        self.register_buffer("hidden", torch.full((4,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def reading(s: Any, x: Tensor) -> Tensor:
    y = s.b(s.a(x))
    for name in ("buf", "hidden", "later"):
        t = getattr(s, name, None)
        y = y if t is None else y * (t.sum(-1) if t.dim() > 1 else t)
    return y


def set_to(name: str, *shape: int, **kwargs: Any) -> Callable[[Any], None]:
    return lambda m: setattr(m, name, torch.full(shape, 0.5, **kwargs))


def tie(m: Any) -> None:
    m.b.weight = m.a.weight


def tie_buffers(m: Any) -> None:
    m.hidden = m.buf


def widen(m: Any) -> None:
    m.a, m.b.weight = nn.Linear(4, 6), nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6))
    m.a.weight.data.fill_(0.1)
    m.a.bias.data.fill_(0.2)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another shape": set_to("buf", 4, 3),
    "another number of dims": set_to("buf"),
    "the first shape again": set_to("buf", 4),
    "another dtype": set_to("buf", 4, dtype=torch.float64),
    "integers": lambda m: setattr(m, "buf", torch.tensor([2, 1, 3, 1])),
    "none": lambda m: setattr(m, "buf", None),
    "a tensor again": set_to("buf", 4),
    "none, not persistent": lambda m: setattr(m, "hidden", None),
    "a tensor again, not persistent": set_to("hidden", 4, 5),
    "a new one": lambda m: m.register_buffer("later", torch.full((4,), 3.0)),
    "a new one replaced": set_to("later", 4),
    "a new one deleted": lambda m: delattr(m, "later"),
    "tied buffers": tie_buffers,
    "tied parameters": tie,
    "untied parameters": lambda m: setattr(m.b, "weight", nn.Parameter(torch.eye(4))),
    "other parameters": widen,
    "repeated elements": lambda m: setattr(m, "buf", torch.ones(1).expand(4)),
    "every second element": lambda m: setattr(m, "buf", torch.arange(8.0)[::2]),
    "other data": lambda m: setattr(m.buf, "data", torch.full((4,), 7.0)),
    "other data of another shape": lambda m: setattr(m.buf, "data", torch.full((1,), 7.0)),
    "a buffer that requires grad": lambda m: setattr(m, "buf", torch.ones(4, requires_grad=True)),
}


def test_changes_between_calls() -> None:
    """One after the other, each with calls of the same and of another size."""
    eager, ours = pair(Net(reading))
    for what, change in {"nothing": lambda _: None, **CHANGES}.items():
        for m in (eager, ours):
            change(m)
        for n in (3, 3, 5):
            for m in (eager, ours):
                m.zero_grad()
                if m.buf is not None:
                    m.buf.grad = None
            assert_same_step(eager, ours, torch.randn(n, 4))
            if eager.buf is not None and eager.buf.requires_grad:
                close(ours.buf.grad, eager.buf.grad, what)
        assert list(ours.state_dict()) == list(eager.state_dict()), what
    assert not ours.fallback_report()


def setting(value: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        s.buf = value(s, x, y)
        return y * 1.0 + s.buf.sum()

    return forward


def swapped(s: Any, x: Tensor) -> Tensor:
    s.buf, s.hidden = s.hidden + 1, s.buf * 2
    return s.a(x) * s.buf


def changed_then_set(s: Any, x: Tensor) -> Tensor:
    s.buf.mul_(0.5)
    s.buf = s.buf + 1
    return s.a(x) * s.buf


def of_the_tied(s: Any, x: Tensor) -> Tensor:
    s.hidden = s.hidden + 1
    return s.a(x) * s.hidden + s.buf


SET: dict[str, Callable[..., Any]] = {
    "the same shape": setting(lambda s, x, y: 0.9 * s.buf + 0.1 * y.detach().mean(0)),
    "a shape of the batch": setting(lambda s, x, y: y.detach() * 2),
    "longer each time": setting(lambda s, x, y: torch.cat([s.buf, x.mean(0)])),
    "another dtype": setting(lambda s, x, y: s.buf.double()),
    "integers": setting(lambda s, x, y: torch.ones(4, dtype=torch.int64)),
    "with a gradient": setting(lambda s, x, y: y.mean(0)),
    "the argument": setting(lambda s, x, y: x),
    "a constant": setting(lambda s, x, y: torch.zeros(4)),
    "another buffer": setting(lambda s, x, y: s.hidden),
    "two of each other": swapped,
    "one that was changed in place": changed_then_set,
    "one of two names": of_the_tied,
}


@pytest.mark.parametrize("forward", SET.values(), ids=SET)
def test_set_in_the_forward(forward: Callable[..., Any]) -> None:
    """The old tensor keeps its values, as whoever holds it expects."""
    eager, ours = pair(Net(forward))
    if forward is of_the_tied:
        eager.hidden, ours.hidden = eager.buf, ours.buf
    for n in (3, 3, 5, 4):
        before = eager.buf, ours.buf
        x = torch.randn(n, 4)
        for m in (eager, ours):
            m.zero_grad()
            m.buf = m.buf.detach()
        assert_same_step(eager, ours, x)
        assert ours.buf.requires_grad == eager.buf.requires_grad
        close(before[1].detach(), before[0].detach(), "the old tensor")
        assert (ours.buf is x) == (eager.buf is x) and (ours.buf is ours.hidden) == (eager.buf is eager.hidden)
    assert not ours.fallback_report()


def set_data(s: Any, x: Tensor) -> Tensor:
    s.buf.data = x.mean(0)
    return s.a(x) * s.buf


def resized(s: Any, x: Tensor) -> Tensor:
    s.buf.resize_(len(x)).fill_(1.0)
    return s.a(x) * s.buf.sum()


def reshaped(s: Any, x: Tensor) -> Tensor:
    s.hidden.unsqueeze_(0)
    return s.a(x) * s.hidden


def none_and_back(s: Any, x: Tensor) -> Tensor:
    s.buf = torch.ones(4) if s.buf is None else None
    return s.a(x)


def new_parameter(s: Any, x: Tensor) -> Tensor:
    s.a.weight = nn.Parameter(s.a.weight * 0.9)
    return s.a(x)


def deleted(s: Any, x: Tensor) -> Tensor:
    if hasattr(s, "hidden"):
        del s.hidden
    return s.a(x)


def reshaped_argument(s: Any, x: Tensor) -> Tensor:
    return s.a(x.clone().unsqueeze_(0) if x.dim() < 2 else x.unsqueeze_(0))


@pytest.mark.parametrize("forward", [set_data, resized, reshaped, none_and_back, new_parameter, reshaped_argument])
@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.usefixtures("export_only")
def test_what_no_graph_can_give_back_runs_in_pytorch(forward: Callable[..., Any]) -> None:
    eager, ours = pair(Net(forward))
    for n in (3, 3, 4):
        x = torch.randn(n, 4)
        for m in (eager, ours):
            m.zero_grad()
        expected, got = eager(x.clone()), ours(x.clone())
        close(got, expected)
        expected.sum().backward()
        got.sum().backward()
        assert_same_state(ours, eager)
    assert any(r.name == "Net" for r in ours.fallback_report())


def test_what_is_deleted_once_is_no_part_of_the_graphs_after_it() -> None:
    eager, ours = pair(Net(deleted))
    for n in (3, 3, 4):
        x = torch.randn(n, 4)
        close(ours(x), eager(x))
        assert_same_state(ours, eager)
    assert n_graphs(ours) == 1 and not hasattr(ours, "hidden")


@pytest.mark.parametrize("change", [lambda m, x: m.train()(x + 1), lambda m, _x: m.reset_running_stats()])
def test_statistics_that_an_evaluation_has_used_are_as_they_were_or_its_backward_raises(
    change: Callable[[nn.Module, torch.Tensor], object],
) -> None:
    ours = ORTModule(nn.BatchNorm1d(4).eval())
    x = torch.randn(5, 4, requires_grad=True)
    loss = ours(x).square().sum()
    ours(x)
    loss.backward(retain_graph=True)
    change(ours, x.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_cache_of_keys_and_values_is_written_where_no_gradient_is_asked_for() -> None:
    def attend(s: Any, x: Tensor, at: Tensor) -> Tensor:
        q, s.keys[:, at], s.values[:, at] = s.qkv(x).chunk(3, -1)
        seen = torch.arange(s.keys.shape[1])[None] <= at[:, None]
        return F.scaled_dot_product_attention(q, s.keys, s.values, attn_mask=seen)

    module = Function(attend, qkv=nn.Linear(8, 24)).eval()
    for name in ("keys", "values"):
        module.register_buffer(name, torch.zeros(2, 16, 8))
    eager, ours = pair(module)
    with torch.no_grad():
        for at in ([0, 1, 2, 3], [4], [5], [6]):
            x = torch.randn(2, len(at), 8)
            torch.testing.assert_close(ours(x, torch.tensor(at)), eager(x, torch.tensor(at)))
            assert_same_state(eager, ours)
    assert n_graphs(ours) == 2 and not ours.stats()["dynamo_graphs"]


# Of what lies otherwise than as its shape says these are copies.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda b: b.reshape(-1),
    "contiguous": Tensor.contiguous,
    "in a memory format": lambda b: b.contiguous(memory_format=torch.contiguous_format),
    "contiguous, of a view": lambda b: b[1:].contiguous(),
    "torch.Tensor.contiguous": lambda b: torch.Tensor.contiguous(b.detach()),
}


@pytest.mark.filterwarnings("ignore:ortmodule_c")
@pytest.mark.parametrize("name", VIEWS)
def test_a_buffer_in_whose_place_one_lies_otherwise_is_written_as_in_eager(name: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        VIEWS[name](s.b).add_(1)
        return x + s.b

    eager, ours = pair(Function(forward))
    for m in (eager, ours.module):
        m.register_buffer("b", torch.arange(6.0).view(2, 3))
    for step in range(4):
        if step == 2:
            for m in (eager, ours.module):
                m.b = m.b.t().contiguous().t()
        torch.testing.assert_close(ours(torch.ones(2, 3)), eager(torch.ones(2, 3)))
        torch.testing.assert_close(ours.module.b, eager.b)
