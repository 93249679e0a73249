"""Interpolation between neighbours runs in C, as PyTorch's: places, weights, gradients, rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import DebugOptions, ORTModule
from wrapped import Function, n_graphs

SIZES = {"linear": (7,), "bilinear": (5, 7), "bicubic": (6, 4), "trilinear": (3, 4, 5)}
HOW: dict[str, dict[str, Any]] = {
    "twice": {"scale_factor": 2},
    "less": {"scale_factor": 0.6},
    "its own scale": {"scale_factor": 1.7},
    "a scale of sizes": {"scale_factor": 1.7, "recompute_scale_factor": True},
    "one": {"size": 1},
    "equal": {"size": 4},
    "much larger": {"size": 23},
}
IN_C = DebugOptions(fallback="error")


def made(mode: str, align_corners: bool, how: dict[str, Any]) -> nn.Module:
    return Function(lambda _, x: F.interpolate(x, mode=mode, align_corners=align_corners, **how))


def step(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
    return y.detach(), x.grad


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", SIZES)
def test_values_and_gradients_are_those_of_eager(mode: str, align_corners: bool, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = made(mode, align_corners, how)
    ours = ORTModule(module, IN_C)
    for batch, sizes in (
        (2, SIZES[mode]),
        (3, SIZES[mode]),
        (4, (4,) * len(SIZES[mode])),
        (1, (1,) * len(SIZES[mode])),
    ):
        if min(sizes) == 1 and how.get("scale_factor", 1) < 1:  # nothing would be left
            continue
        x = torch.randn(batch, 4, *sizes, dtype=torch.float64)
        for got, want in zip(step(ours, x), step(module, x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    x = torch.randn(2, 4, *SIZES[mode])
    for got, want in zip(step(ours, x), step(module, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", SIZES)
def test_halves_are_rounded_once(mode: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = made(mode, False, {"scale_factor": 2})
    x = torch.randn(2, 4, *SIZES[mode]).to(dtype)
    for got, exact in zip(step(ORTModule(module, IN_C), x), step(module, x.double()), strict=True):
        assert got.dtype == dtype
        assert (got.double() - exact).abs().max() <= exact.abs().max() * torch.finfo(dtype).eps


@pytest.mark.parametrize("how", [{"scale_factor": 2}, {"scale_factor": 1.2}, {"size": 4}], ids=str)
@pytest.mark.parametrize("mode", SIZES)
def test_what_is_not_finite_goes_where_it_goes_in_eager(mode: str, how: dict[str, Any]) -> None:
    module = made(mode, False, how)
    ours = ORTModule(module, IN_C)
    for at in range(4):
        x = torch.zeros(1, 1, *(4,) * len(SIZES[mode]))
        x.view(-1)[at], x.view(-1)[-1 - at] = torch.inf, torch.nan
        torch.testing.assert_close(ours(x), module(x), equal_nan=True)


@pytest.mark.parametrize("to", [{"scale_factor": 1.5, "align_corners": True}, {"scale_factor": 2}], ids=str)
def test_open_sizes_have_one_graph_in_which_pytorch_interpolates(to: dict[str, Any]) -> None:
    eager = Function(lambda _, x: F.interpolate(x, mode="linear", **to))
    ours = ORTModule(eager)
    with pytest.warns(UserWarning, match="upsample_linear1d.*between sizes that are open"):
        for shape in ((4, 5, 6), (3, 6, 5), (3, 7, 8), (5, 4, 4), (6, 6, 6)):
            x = torch.randn(shape)
            torch.testing.assert_close(ours(x), eager(x))
    assert n_graphs(ours) == 2  # the first is of one size, and in C


def test_a_net_with_skips_trains_as_in_eager() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(9, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            low = F.interpolate(self.down(x).relu(), x.shape[-2:], mode="bilinear")
            return self.up(torch.cat([low, x], 1))

    torch.manual_seed(0)
    eager, ours = Net(), ORTModule(Net(), IN_C)
    ours.load_state_dict(eager.state_dict())
    for shape in ((2, 3, 9, 12), (5, 3, 9, 12), (2, 3, 8, 8)):
        x = torch.randn(shape)
        for model in (eager, ours):
            model.zero_grad()
            model(x).square().mean().backward()
        for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6)
