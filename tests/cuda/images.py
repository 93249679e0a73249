"""Images of 16 bits on the emulated GPU, where they lie with their channels last from one convolution to the next.

``pytest --gpu tests/cuda/images.py``, which test_devices.py calls. Tensors are the host's and copied by a session.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import on_device
import pytest
import torch
from emulated_gpu import Gpu
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import ORTModule

STEPS = 4  # roundings to bfloat16 of the largest element of a tensor that a result may be off
Forward = Callable[[Any, Tensor], object]


class Net(nn.Module):
    """Layers, and what is done with them."""

    def __init__(self, forward: Forward, **layers: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> object:
        return self._forward(self, x)


class Block(nn.Module):
    """Of a residual network."""

    def __init__(self, n: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(n, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.second, self.other_norm = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.down = nn.Sequential(nn.Conv2d(n, out, 1, stride, bias=False), nn.BatchNorm2d(out)) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.other_norm(self.second(F.relu(self.norm(self.first(x)))))
        return F.relu(y + (x if self.down is None else self.down(x)))


def residual() -> nn.Module:
    stem = (nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    blocks = (Block(8, 8, 1), Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


def plain() -> nn.Module:
    """Biases, a pool of windows, a classifier that reads all places."""
    first = (nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(6, 10, 3), nn.ReLU(), nn.AvgPool2d(2, ceil_mode=True, padding=1), nn.AdaptiveAvgPool2d((3, 2)))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Dropout(0.0), nn.Linear(60, 5))


def by_channel() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.hardswish(s.norm(s.wide(x)))
        y = F.relu6(s.other_norm(s.depth(y)))
        y = y * s.gate(F.relu(s.squeeze(F.adaptive_avg_pool2d(y, 1)))).sigmoid()
        return s.head(s.narrow(y).mean([2, 3]))

    layers = {"wide": nn.Conv2d(3, 12, 1, bias=False), "depth": nn.Conv2d(12, 12, 3, 2, 1, groups=12, bias=False)}
    layers |= {"squeeze": nn.Conv2d(12, 3, 1), "gate": nn.Conv2d(3, 12, 1), "narrow": nn.Conv2d(12, 4, 1)}
    return Net(forward, **layers, norm=nn.BatchNorm2d(12), other_norm=nn.BatchNorm2d(12), head=nn.Linear(4, 5))


def u_shaped() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        left = F.relu(s.down(x))
        y = F.silu(s.middle(F.max_pool2d(left, 2)))
        y = torch.cat([left, s.up(y)[:, :, : left.shape[2], : left.shape[3]]], 1)
        a, b = s.out(y).chunk(2, 1)
        return a * b.sigmoid()

    layers = {"down": nn.Conv2d(3, 6, 3, padding=1), "middle": nn.Conv2d(6, 8, 3, padding="same")}
    return Net(
        forward, **layers, up=nn.ConvTranspose2d(8, 6, 2, 2, output_padding=1), out=nn.Conv2d(12, 8, 3, padding=1)
    )


def midway() -> nn.Module:
    def forward(s: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = s.first(x)
        z = s.second(y.relu())
        return y, z.transpose(1, 2), z.amax((2, 3)), (y * 2).sum(1), z.mean(0, keepdim=True), z.flatten(1), y.relu()

    return Net(forward, first=nn.Conv2d(3, 4, 3, padding=1), second=nn.Conv2d(4, 4, 3, padding=1))


def broadcast() -> nn.Module:
    """Operands of fewer axes."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.first(x)
        n = torch.arange(y.shape[3], dtype=y.dtype)
        y = y + n / 4 + n.view(1, -1, 1, 1)[:, : y.shape[1]] - n[:1] / 8 + s.first.weight.sum()
        return s.second(torch.where(y > 0, y, y * n.view(-1, 1)[: y.shape[2]]))

    return Net(forward, first=nn.Conv2d(4, 4, 3, padding=1), second=nn.Conv2d(4, 4, 3, padding=1))


def turned() -> nn.Module:
    """Convolutions between which the module itself has channels last, or groups of them."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.first(F.pad(x, (1, 2, 0, 1)))
        y = y + s.line(F.layer_norm(y.permute(0, 2, 3, 1), (8,))).permute(0, 3, 1, 2)
        return s.second(F.pad(s.groups(y), (1, -1, 2, 0), value=0.5))

    layers = {"first": nn.Conv2d(3, 8, 2), "second": nn.Conv2d(8, 4, 2), "line": nn.Linear(8, 8)}
    return Net(forward, **layers, groups=nn.GroupNorm(2, 8))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (residual, (3, 3, 33, 29)),
    "u-shaped, a batch of 1": (u_shaped, (1, 3, 8, 8)),
    "plain": (plain, (2, 3, 14, 13)),
    "by channel": (by_channel, (3, 3, 9, 10)),
    "u-shaped": (u_shaped, (2, 3, 9, 7)),
    "midway": (midway, (2, 3, 5, 6)),
    "all sizes are one": (broadcast, (4, 4, 4, 4)),
    "one place": (lambda: nn.Conv2d(4, 5, 1), (2, 4, 1, 1)),
    "one channel": (lambda: nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU(), nn.Conv2d(1, 2, 2)), (2, 1, 6, 5)),
    "no images": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()), (0, 3, 6, 5)),
    "turned": (turned, (2, 3, 6, 5)),
    "wide groups": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Conv2d(6, 2, 3)), (2, 4, 6, 7)),
}


def step(module: nn.Module, x: Tensor, backwards: int = 1) -> list[Tensor]:
    """Results, gradients and statistics; `backwards` of one forward, then a second step on top of them."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    for _ in range(backwards):
        outputs = module(x)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        loss = sum((y.float() * torch.linspace(-1, 1.5, y.numel()).view(y.shape)).sum() for y in outputs)
        for k in range(backwards):
            loss.backward(retain_graph=k + 1 < backwards)
    grads = [p.grad for p in module.parameters()]
    return [*(y.detach() for y in outputs), *grads, x.grad, *(b for b in module.buffers() if b.is_floating_point())]


def assert_near(got: list[Tensor], eager: list[Tensor], exact: list[Tensor]) -> None:
    """As near to what float32 gives as eager, or as numbers of 16 bits can tell."""
    for i, (ours, theirs, want) in enumerate(zip(got, eager, exact, strict=True)):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, i
        if ours.numel() == 0:
            continue
        off, usual = ((t.double() - want.double()).abs().max().item() for t in (ours, theirs))
        allowed = STEPS * (torch.finfo(torch.bfloat16).eps * want.abs().max().item() + usual)
        assert off <= allowed, f"{i}: off by {off}, {allowed} allowed"


@contextmanager
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The texts of those that are made meanwhile."""
    texts: dict[int, str] = {}
    made = on_device.Session.plan

    def plan(self: on_device.Session, *args: object, **how: bool) -> on_device.Plan:
        result = made(self, *args, **how)
        texts[id(result._plan)] = result.text()
        return result

    found: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(on_device.Session, "plan", plan)
        yield found
    found.extend(texts.values())


@pytest.mark.parametrize("how", ["autocast", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NETS)
def test_a_step_is_as_near_to_float32s_as_eagers(gpu: Gpu, name: str, how: str) -> None:
    make, shape = NETS[name]
    torch.manual_seed(3)
    exact, x = make(), torch.randn(shape)
    dtype = torch.float32 if how == "autocast" else getattr(torch, how)
    eager = copy.deepcopy(exact).to(dtype)
    wrapped = ORTModule(copy.deepcopy(eager))
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        got, want = step(wrapped, x.to(dtype)), step(eager, x.to(dtype))
    assert_near(got, want, step(exact, x))
    assert not wrapped.fallback_report()


def test_gradients_of_several_backwards_and_steps_add_up(gpu: Gpu) -> None:
    torch.manual_seed(4)
    exact, x = plain(), torch.randn(2, 3, 14, 13)
    eager, wrapped = copy.deepcopy(exact), ORTModule(copy.deepcopy(exact))
    with torch.autocast("cpu", torch.bfloat16):
        got, want = step(wrapped, x, backwards=2), step(eager, x, backwards=2)
    assert_near(got, want, step(exact, x, backwards=2))


@pytest.mark.parametrize("grad", [True, False])
def test_evaluation(gpu: Gpu, grad: bool) -> None:
    torch.manual_seed(5)
    exact, x = residual().eval(), torch.randn(2, 3, 33, 29)
    eager, wrapped = copy.deepcopy(exact), ORTModule(copy.deepcopy(exact))
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
        got, want = wrapped(x), eager(x)
    assert_near([got.detach()], [want.detach()], [exact(x).detach()])


def test_a_residual_network_turns_its_images_once(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ORTModule(residual())
    with plans(monkeypatch) as texts, torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(3, 3, 33, 29)).sum().backward()
    (text,) = texts
    turned = [line for line in text.splitlines() if " Transpose" in line]
    wide = 9  # kernels of more than one place; of the others a Transpose is a view
    assert len([line for line in turned if "3x33x29" in line.replace(",", "x")]) == 1
    assert len(turned) == 1 + 2 * wide
