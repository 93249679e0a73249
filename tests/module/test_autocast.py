"""Autocast inside a forward: what it casts, and what runs in PyTorch because it reaches only its parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import DebugOptions, ORTModule, ORTModuleError
from ortmodule_c.capture import regions
from ortmodule_c.capture.export import Captured
from wrapped import Function, float_sum, pair, skip_without_onednns_bfloat16

pytestmark = pytest.mark.filterwarnings("ignore:ortmodule_c")


def written_over(m: nn.Module, x: Tensor) -> Tensor:
    """What a composite op gives, of which autocast reaches the parts."""
    y = torch.einsum("bac,dc->bad", x, m.layer.weight)
    y.view(-1).add_(1)
    return y * 2


class Product(torch.autograd.Function):
    """A product that PyTorch knows nothing of: in which dtype it is computed, the region says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = (t.to(grad.dtype) for t in ctx.saved_tensors)
        return grad @ w.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


def product_without(m: nn.Module, x: Tensor) -> Tensor:
    """A function in a region that autocast is turned off in."""
    with torch.autocast("cpu", enabled=False):
        return Product.apply(x, m.layer.weight)


BODIES: dict[str, tuple[Callable[..., Tensor], dict[str, nn.Module]]] = {
    "linear": (lambda m, x: m.layer(x).relu().softmax(-1), {"layer": nn.Linear(4, 4)}),
    "loss": (lambda m, x: F.cross_entropy(m.layer(x[0]), torch.arange(4)), {"layer": nn.Linear(4, 4)}),
    "attention": (lambda m, x: F.scaled_dot_product_attention(m.layer(x), x, x), {"layer": nn.Linear(4, 4)}),
    "multi-head attention": (lambda m, x: m.layer(x, x, x)[0], {"layer": nn.MultiheadAttention(4, 2)}),
    "einsum": (lambda m, x: torch.einsum("bac,dc->bad", x, m.layer.weight), {"layer": nn.Linear(4, 4)}),
    "einsum, wide": (lambda m, x: torch.einsum("bac,dc->bad", x, m.layer.weight).float(), {"layer": nn.Linear(4, 4)}),
    "tensordot": (lambda m, x: torch.tensordot(x, m.layer.weight, 1), {"layer": nn.Linear(4, 4)}),
    "lstm": (lambda m, x: m.layer(x)[0], {"layer": nn.LSTM(4, 4)}),
    "lstm cell": (lambda m, x: m.layer(x[0])[0], {"layer": nn.LSTMCell(4, 4)}),
    "squared error": (lambda m, x: F.mse_loss(m.layer(x), x), {"layer": nn.Linear(4, 4)}),
    "likelihood": (
        lambda m, x: F.nll_loss(F.log_softmax(m.layer(x[0]), -1), torch.arange(4)),
        {"layer": nn.Linear(4, 4)},
    ),
    "padding": (lambda m, x: F.pad(m.layer(x), (1, 2), mode="reflect"), {"layer": nn.Linear(4, 4)}),
    "outer product": (lambda m, x: torch.outer(m.layer(x)[0, 0], x[0, 0]), {"layer": nn.Linear(4, 4)}),
    "in place": (lambda m, x: F.relu(F.silu(m.layer(x), inplace=True), inplace=True), {"layer": nn.Linear(4, 4)}),
    "region without": (
        lambda m, x: torch.autocast("cpu", enabled=False)(F.linear)(x, m.layer.weight) * m.layer(x),
        {"layer": nn.Linear(4, 4)},
    ),
    "region in another": (
        lambda m, x: torch.autocast("cpu", torch.float16)(m.inner)(x) + m.layer(x),
        {"layer": nn.Linear(4, 4), "inner": nn.Linear(4, 4)},
    ),
    "numbers": (lambda m, x: (m.layer(x) * 2.5 + 1) ** 2 / 3, {"layer": nn.Linear(4, 4)}),
    "norms": (
        lambda m, x: m.second(m.first(m.layer(x))),
        {"layer": nn.Linear(4, 4), "first": nn.LayerNorm(4), "second": nn.BatchNorm1d(4)},
    ),
    "results": (lambda m, x: torch.mul(*m.layer(x).chunk(2, -1)), {"layer": nn.Linear(4, 4)}),
    "written over through a view": (written_over, {"layer": nn.Linear(4, 4)}),
    "without gradients": (lambda m, x: torch.no_grad()(m.layer)(x) * m.layer(x), {"layer": nn.Linear(4, 4)}),
    "region in one without gradients": (
        lambda m, x: torch.no_grad()(torch.autocast("cpu", torch.bfloat16)(m.layer))(x).relu_() + m.layer(x),
        {"layer": nn.Linear(4, 4)},
    ),
    "custom function": (lambda m, x: Product.apply(x, m.layer.weight), {"layer": nn.Linear(4, 4)}),
    "custom function in a region without": (product_without, {"layer": nn.Linear(4, 4)}),
    "bilinear": (lambda m, x: m.layer(x, x), {"layer": nn.Bilinear(4, 4, 3)}),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_region_of_autocast_gives_what_it_gives_in_pytorch(name: str) -> None:
    body, members = BODIES[name]
    if name == "lstm":
        skip_without_onednns_bfloat16()

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return body(module, x)

    torch.manual_seed(0)
    eager, ours = pair(Function(forward, **members))
    x = torch.randn(4, 4, 4)
    want, got = eager(x), ours(x)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    for out in (want, got):
        float_sum(out).backward()
    for (parameter, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), parameter
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", ["custom function", "custom function in a region without"])
@pytest.mark.parametrize("capture", ["export", "dynamo"])
def test_a_custom_function_knows_its_region(name: str, capture: Any) -> None:
    """Around a call as well, and it alone runs in PyTorch."""
    body, members = BODIES[name]
    eager = Function(body, **members)
    ours = ORTModule(eager, DebugOptions(capture=capture))
    x = torch.randn(4, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = eager(x), ours(x)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert len(ours.fallback_report()) == 1


@pytest.mark.parametrize("enabled", [False, True])
def test_a_region_of_one_device_leaves_that_of_another(enabled: bool) -> None:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16, enabled=enabled):
            return F.linear(x, module.w).float()

    w = nn.Parameter(torch.tensor([[1 + 2**-12, 1]]))  # of bfloat16 both are 1
    x = torch.tensor([[1.0, -1]])
    with torch.autocast("cpu", torch.bfloat16):
        assert float(ORTModule(Function(forward, w=w))(x)) == 0


@pytest.mark.parametrize(
    "name", ["linear", "loss", "squared error", "likelihood", "in place", "einsum", "norms", "lstm"]
)
def test_it_runs_in_c(name: str) -> None:
    body, members = BODIES[name]
    ours = ORTModule(Function(body, **members))
    with torch.autocast("cpu", torch.bfloat16):
        ours(torch.randn(4, 4, 4)).sum().backward()
    assert not ours.fallback_report()


@torch.library.custom_op("ortmodule_tests::asking", mutates_args=())
def asking(x: Tensor) -> Tensor:
    return x * (2 if torch.is_autocast_enabled("cpu") else 3)


@torch.library.custom_op("ortmodule_tests::multiplying", mutates_args=())
def multiplying(x: Tensor) -> Tensor:
    return (x @ x).clone()  # of 16 bits in a region, whatever the stand-in says


@asking.register_fake
@multiplying.register_fake
def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("op", [asking, multiplying])
@pytest.mark.parametrize("capture", ["export", "dynamo"])
@pytest.mark.filterwarnings("ignore:ortmodule_c")
def test_an_op_of_the_users_own_knows_its_region(op: Any, capture: Any) -> None:
    eager = Function(lambda m, x: op(x))
    ours = ORTModule(eager, DebugOptions(capture=capture))
    x = torch.randn(4, 4)
    for enabled in (True, False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            want, got = eager(x), ours(x)
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_what_cannot_be_taken_apart_runs_in_pytorch_in_its_region() -> None:
    """Alone: what is around it runs in C."""
    ours = ORTModule(Function(lambda m, x: m.layer(x)[0], layer=nn.LSTM(4, 4, proj_size=2)))
    with torch.autocast("cpu", torch.bfloat16):
        ours(torch.randn(4, 4, 4)).sum().backward()
    (record,) = ours.fallback_report()
    assert record.name == "aten.lstm.input"


@pytest.mark.parametrize("name", ["linear", "attention", "results"])
@pytest.mark.parametrize("capture", ["export", "dynamo"])
def test_a_region_is_put_in_place_where_it_stands(name: str, capture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no second trace, as what makes a graph functional is."""

    def refuse(_captured: Captured) -> None:
        pytest.fail("made functional")

    body, members = BODIES[name]
    ours = ORTModule(Function(body, **members), DebugOptions(capture=capture))
    monkeypatch.setattr(Captured, "functionalise", refuse)
    with torch.autocast("cpu", torch.bfloat16):
        ours(torch.randn(4, 4, 4)).sum().backward()
    assert ours.stats()["graphs"] == 1


@pytest.mark.parametrize("around", [contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_dropout_in_place_runs_in_c(around: Callable[[], Any]) -> None:
    ours = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5, inplace=True), nn.Linear(4, 4)))
    with around():
        ours(torch.randn(4, 4)).sum().backward()
    assert not ours.fallback_report()


@pytest.mark.parametrize("name", ["linear", "without gradients"])
def test_a_pytorch_without_the_passes_that_are_exchanged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes of regions is refused in its words; TorchDynamo leaves them as they are."""
    monkeypatch.setattr(regions, "_PASSES", ("replace_what_no_pytorch_has",))
    body, members = BODIES[name]

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return body(module, x)

    eager, ours = pair(Function(forward, **members))
    x = torch.randn(4, 4, 4)
    torch.testing.assert_close(ours(x), eager(x), rtol=1e-2, atol=1e-2)
    with pytest.raises(ORTModuleError, match="makes a graph of a region"):
        ORTModule(eager, DebugOptions(capture="export", fallback="error"))(x)
