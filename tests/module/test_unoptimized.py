"""With every rewrite and fusion off, a step gives the same numbers: in float32, and under autocast in 16 bits."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortmodule_c import ORTModule
from ortmodule_c.function import Call, Mask

# Of the largest element: a few roundings of a sum, or of what lies between two fused ops.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Text(nn.Module):
    """Attention, norms, an activation and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(50, 32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm, self.wide, self.narrow = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(96, 32)
        self.head, self.drop = nn.Linear(32, 50), nn.Dropout(0.1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(ids)
        h = self.norm(h + self.attend(h, h, h, need_weights=False)[0])
        h = h + self.narrow(self.drop(F.gelu(self.wide(h))))
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


class Image(nn.Module):
    """Convolutions, batch norms, pooling and what is added to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.first(x)), 2)
        y = F.relu(self.norm(self.second(y)) + y).mean((2, 3))
        return F.cross_entropy(self.head(y), labels)


STEPS = {
    "text": (Text, lambda: (torch.randint(50, (3, 17)), torch.randint(50, (3, 17)))),
    "image": (Image, lambda: (torch.randn(4, 3, 18, 14), torch.randint(10, (4,)))),
}


def plan_plainly(call: Call, out_grads: Sequence[Mask], retain_graph: bool = False) -> None:
    """As :meth:`Call.plan_for`, but of the graph as it is."""
    call.plan = call.runner.session.plan(call.dense, call.in_grads, *out_grads, retain_graph=retain_graph, plain=True)
    assert "FusedElementwise" not in call.plan.text()
    if call.plan.random:
        call.seed = int(torch.randint(1, 2**63 - 1, ()))


def step(net: nn.Module, given: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The loss and the gradients of a step."""
    ours = ORTModule(copy.deepcopy(net))
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        loss = ours(*given)
    loss.backward()
    assert not ours.fallback_report()
    return [loss.detach(), *[p.grad for p in ours.parameters() if p.grad is not None]]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_without_rewrites_is_the_same(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    build, inputs = STEPS[name]
    torch.manual_seed(0)
    net, given = build(), inputs()
    optimized = step(net, given, dtype)
    monkeypatch.setattr(Call, "plan_for", plan_plainly)
    plain = step(net, given, dtype)
    assert len(plain) == len(optimized)
    for a, b in zip(optimized, plain, strict=True):
        assert a.dtype is b.dtype
        assert (a - b).abs().max() <= TOLERANCES[dtype] * b.abs().max().clamp(min=1e-3)
