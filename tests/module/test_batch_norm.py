"""BatchNorm with what comes after it, a sum, Relu, or both, stored at once and differentiated at once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import DebugOptions, ORTModule

# By dtype how far results may be from PyTorch's, of the largest of them.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = [(5, 3, 7, 9), (4, 4, 4, 4), (6, 17, 1, 1), (6, 5), (24, 67), (3, 4, 9), (1, 3, 2, 5)]
FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda y, x: y.relu(),
    "sum": lambda y, x: y + x,
    "sum_from_the_left": lambda y, x: x.neg() + y,
    "sum_then_relu": lambda y, x: torch.relu(y + x),
    "in_place": lambda y, x: y.add_(x).relu_(),
    "relu_then_sum": lambda y, x: y.relu() + x,
    "sum_of_both": lambda y, x: y + y,
    "both_read": lambda y, x: y.relu() * y,
    "row_added": lambda y, x: (y + x[:1]).relu(),
}
# Of 16 bits, whether a sum is above 0 depends on how y, within a unit in the last place of PyTorch's, is rounded.
RELU_OF_SUMS = {"sum_then_relu", "in_place", "row_added"}
CASES = [(form, dtype) for form in FORMS for dtype in TOLERANCE if form not in RELU_OF_SUMS or dtype.itemsize > 2]


class Net(nn.Module):
    """BatchNorm of what another op makes, and some form of what comes after it."""

    def __init__(self, shape: tuple[int, ...], form: Callable[[Tensor, Tensor], Tensor], **options: bool) -> None:
        super().__init__()
        kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
        self.norm = kinds[len(shape)](shape[1], **options)
        self.form = form
        if self.norm.affine:
            nn.init.uniform_(self.norm.weight, -1.5, 1.5)
            nn.init.uniform_(self.norm.bias, -0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        return self.form(self.norm(x), x)


def both(net: Net, x: Tensor, between: Callable[[nn.Module], None] = lambda net: None) -> None:
    """Two steps of the net and of a wrapped copy: outputs, gradients and running statistics."""
    eager, ours = copy.deepcopy(net), ORTModule(copy.deepcopy(net))
    for _ in range(2):
        results = []
        for model, inner in ((eager, eager), (ours, ours.module)):
            model.zero_grad()
            given = x.clone().requires_grad_()
            y = model(given)
            between(inner)
            (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
            results.append([y, given.grad, *(p.grad for p in inner.parameters()), *inner.buffers()])
        for a, b in zip(*results, strict=True):
            if a.is_floating_point():
                largest = max(1.0, a.detach().abs().nan_to_num(0, 0, 0).max().item())
                torch.testing.assert_close(b, a, rtol=0, atol=TOLERANCE[a.dtype] * largest, equal_nan=True)
            else:
                assert torch.equal(b, a)


@pytest.mark.parametrize(("form", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_in_eager(shape: tuple[int, ...], form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = Net(shape, FORMS[form]).to(dtype)
    both(net, torch.randn(shape, dtype=dtype))


def test_without_gradients_and_under_autocast() -> None:
    torch.manual_seed(0)
    eager, x = Net((4, 4, 4, 4), FORMS["sum_then_relu"]), torch.randn(4, 4, 4, 4)
    ours = ORTModule(copy.deepcopy(eager))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours(x), eager(x))
    for a, b in zip(eager.buffers(), ours.module.buffers(), strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}], ids=str)
def test_without_parameters_or_statistics(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    both(Net((4, 3, 5), FORMS["relu"], **options), torch.randn(4, 3, 5))


def test_a_bias_that_changes_before_the_backward() -> None:
    """PyTorch's gradient does not read it."""
    torch.manual_seed(0)

    def change(net: nn.Module) -> None:
        with torch.no_grad():
            net.norm.bias.add_(0.25)

    both(Net((4, 3, 5), FORMS["relu"]), torch.randn(4, 3, 5), change)


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), float("inf")])
def test_channels_of_one_value(value: float) -> None:
    """Of a scale of 0 every y is the bias, of which 0 is on the edge."""
    torch.manual_seed(0)
    net = Net((4, 3, 5), FORMS["relu"])
    with torch.no_grad():
        net.norm.weight[:2] = 0
        net.norm.bias[0] = value
    both(net, torch.randn(4, 3, 5))


@pytest.mark.parametrize("shape", [(8, 3, 5), (9, 67)], ids=str)
def test_what_is_rounded_to_0_is_not_above_it(shape: tuple[int, ...]) -> None:
    """Of float16, y below half of the least number there is, whose gradient is 0."""
    torch.manual_seed(0)
    net = Net(shape, FORMS["relu"])
    with torch.no_grad():
        net.norm.weight.fill_(2.0**-24)
        net.norm.bias.zero_()
    x = torch.randn(shape, dtype=torch.float16)
    both(net.to(torch.float16), x)
    y = F.batch_norm(torch.tanh(x).float(), None, None, training=True)
    assert ((y > 0) & (y < 0.5)).any()  # what is above 0 and is rounded to it


def test_a_gradient_that_is_one_number_for_many() -> None:
    torch.manual_seed(0)
    for of in (lambda y: y.relu().mean(), lambda y: y.relu().sum(-1), lambda y: y.relu().mean((0, 2))):
        net = Net((4, 3, 5), lambda y, x, of=of: of(y))
        both(net, torch.randn(4, 3, 5))


def test_sums_that_are_larger_than_float32_has() -> None:
    """As PyTorch's, which are of doubles."""
    torch.manual_seed(0)
    n, x = nn.BatchNorm1d(1), torch.randn(5000, 1, 2)
    ours, dy = ORTModule(copy.deepcopy(n)), torch.full((5000, 1, 2), 1e36)
    for model in (n, ours):
        given = x.clone().requires_grad_()
        model(given).backward(dy)
        assert given.grad.isfinite().all()


def test_in_less_memory() -> None:
    """What is made again is not brought up to date again."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(3)]
    net = nn.Sequential(*layers).double()
    eager, x = copy.deepcopy(net), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    ours = ORTModule(net, DebugOptions(fallback="error"), memory_budget=0.0)
    whole = ORTModule(copy.deepcopy(net))
    whole(x).square().sum().backward()
    for model in (eager, ours):
        model(x).square().sum().backward()
    for a, b in zip([*eager.parameters(), *eager.buffers()], [*net.parameters(), *net.buffers()], strict=True):
        pairs = [(a, b)] if a.grad is None else [(a, b), (a.grad, b.grad)]
        assert all(torch.allclose(x, y) for x, y in pairs)
    assert ours.stats()["arena_bytes"] < whole.stats()["arena_bytes"]
