"""Autocast around a call: dtypes, infinities and gradients are those of eager, on both ways and in both dtypes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ortmodule_c import DebugOptions, ORTModule
from wrapped import Function

pytestmark = pytest.mark.filterwarnings("ignore:ortmodule_c")

TOLERANCE = 2e-2  # of the largest element


class InFloat(torch.autograd.Function):
    """A function that autocast casts the operands of."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.exp()


def without_cache(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return m.a(m.a(x))


def in_float(m: nn.Module, x: Tensor) -> Tensor:
    y = m.a(x)
    with torch.autocast("cpu", enabled=False):
        z = y.float() * 2
    return m.b(z)


def written_over(m: nn.Module, x: Tensor) -> Tensor:
    y = x * 1
    y[:, 0] = 0.25
    with torch.autocast("cpu", enabled=False):
        return m.a(y)


BODIES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "custom function": lambda m, x: InFloat.apply(m.a(x)),
    "no cache": without_cache,
    "region without": in_float,
    "region without, and written over": written_over,
    "dtype asked for": lambda m, x: m.a(x).to(torch.get_autocast_dtype("cpu")) * (
        2 if torch.is_autocast_enabled("cpu") else 3
    ),
    "checkpoint": lambda m, x: checkpoint(lambda y: m.b(m.a(y)).relu(), x, use_reentrant=False),
    "weight used twice": lambda m, x: m.a(m.a(x).relu()),
    "part without gradient": lambda m, x: m.a(x) + m.b(x).detach(),
    "in place": lambda m, x: m.a(x).add_(m.b(x)).mul_(0.5),
    "overflow": lambda m, x: m.a(x * 1e6) * 1e4,
    "softmax": lambda m, x: m.a(x).softmax(-1),
    "numbers": lambda m, x: 1 / (m.a(x) * 2.5 + 1e-3) ** 2,
    "promotion": lambda m, x: m.a(x) + x,
    "cross entropy": lambda m, x: F.cross_entropy(m.a(x), torch.arange(4)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("name", BODIES)
def test_a_step_is_that_of_eager(name: str, capture: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    eager = Function(BODIES[name], a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture))
    x = torch.randn(4, 6)
    given = [x.clone().requires_grad_() for _ in range(2)]
    with torch.autocast("cpu", dtype):
        want, got = eager(given[0]), ours(given[1])
    for out in (want, got):
        out.float().nan_to_num(0, 0, 0).square().mean().backward()
    assert got.dtype is want.dtype
    assert torch.equal(got.isfinite(), want.isfinite())
    pairs = [(got.detach(), want.detach()), (given[1].grad, given[0].grad)]
    pairs += [(q.grad, p.grad) for p, q in zip(eager.parameters(), ours.parameters(), strict=True)]
    for a, b in pairs:
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype is b.dtype
            apart, size = (a - b)[b.isfinite()].float().abs(), b[b.isfinite()].float().abs()
            assert not size.numel() or apart.max() <= TOLERANCE * size.max()


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_what_pytorch_runs_in_a_region_without_is_of_the_dtypes_there(capture: Any) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.conv_tbc(x[None], m.a.weight[None], m.a.bias) * 2

    eager = Function(forward, a=nn.Linear(6, 6))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture))
    x = torch.randn(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = eager(x), ours(x)
    torch.testing.assert_close(got, want)
    assert [record.name for record in ours.fallback_report()] == ["aten.conv_tbc.default"]


def in_a_region_of_the_dtype_there_is(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return m.a(x)


# What a forward asks of autocast besides whether it is on, and what says so.
ASKED: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], Callable[[Any], None], Callable[[], Any], Any]] = {
    "cache": (
        lambda m, x: m.a(x) * (2 if torch.is_autocast_cache_enabled() else 3),
        torch.set_autocast_cache_enabled,
        torch.is_autocast_cache_enabled,
        False,
    ),
    "another device": (
        lambda m, x: m.a(x) * (2 if torch.is_autocast_enabled("xpu") else 3),
        partial(torch.set_autocast_enabled, "xpu"),
        partial(torch.is_autocast_enabled, "xpu"),
        True,
    ),
    "dtype on another device": (
        lambda m, x: m.a(x).to(torch.get_autocast_dtype("mps")),
        partial(torch.set_autocast_dtype, "mps"),
        partial(torch.get_autocast_dtype, "mps"),
        torch.bfloat16,
    ),
    "dtype where it is off": (
        lambda m, x: m.a(x).to(torch.get_autocast_dtype("cpu")),
        partial(torch.set_autocast_dtype, "cpu"),
        partial(torch.get_autocast_dtype, "cpu"),
        torch.float16,
    ),
    "dtype of a region inside": (
        in_a_region_of_the_dtype_there_is,
        partial(torch.set_autocast_dtype, "cpu"),
        partial(torch.get_autocast_dtype, "cpu"),
        torch.float16,
    ),
}


@pytest.mark.parametrize("capture", ["auto", "export", "dynamo"])
@pytest.mark.parametrize(("body", "say", "ask", "other"), ASKED.values(), ids=ASKED)
def test_what_a_forward_asks_of_autocast_is_so_in_each_call(
    body: Callable[[nn.Module, Tensor], Tensor],
    say: Callable[[Any], None],
    ask: Callable[[], Any],
    other: Any,
    capture: Any,
) -> None:
    eager = Function(body, a=nn.Linear(6, 6))
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(capture=capture))
    x, usual = torch.randn(4, 6), ask()
    for now in (usual, other, usual):
        try:
            say(now)
            want, got = eager(x), ours(x)
        finally:
            say(usual)
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
