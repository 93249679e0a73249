"""Random sequences of forwards and backwards of one module, with changes in between, beside eager."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from wrapped import pair


class Net(nn.Module):
    """Batch statistics, a counter that is read, an argument that is trained, four outputs of one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.b, self.c = nn.Linear(5, 3), nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.norm(self.a(x)))
        self.seen += 1
        y = self.b(h) * self.seen
        return y.square().mean(), y, (self.c(h) * w).exp().sum(), h


class Pending:
    """One forward of both modules, and what may be done to it."""

    def __init__(self, modules: tuple[nn.Module, nn.Module]) -> None:
        x, w = torch.randn(6, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
        self.modules = modules
        self.given = [(x.clone(), w.clone().requires_grad_()) for _ in modules]
        self.outputs = [m(*given) for m, given in zip(modules, self.given, strict=True)]
        torch.testing.assert_close(self.outputs[1], self.outputs[0], rtol=1e-9, atol=1e-11)

    def backward(self, which: list[int], retain: bool) -> bool:
        """Whether it went through. Ours never fails where eager, on unchanged tensors, does not."""
        errors = []
        for out in self.outputs:
            try:
                sum((i + 1) * out[i].sum() for i in which).backward(retain_graph=retain)
                errors.append("")
            except RuntimeError as error:
                errors.append(str(error))
        if errors[1] and not errors[0]:
            assert "modified by an inplace operation" in errors[1]
        return not any(errors)

    def change(self, what: str) -> None:
        for m, (x, w) in zip(self.modules, self.given, strict=True):
            with torch.no_grad():
                {"x": x, "w": w, "weight": m.b.weight, "mean": m.norm.running_mean, "seen": m.seen}[what].mul_(1.1)

    def compare(self) -> None:
        eager, ours = self.modules
        found = [
            [w.grad for _, w in self.given][k : k + 1] + [p.grad for p in m.parameters()] + list(m.buffers())
            for k, m in enumerate((eager, ours))
        ]
        assert [t is None for t in found[1]] == [t is None for t in found[0]]
        for b, a in zip(found[1], found[0], strict=True):
            if a is not None:
                torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_random_sequences_of_forwards_and_backwards(seed: int) -> None:
    """Interleaved, retained, dropped, with changes in between: gradients and buffers are those of eager."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    modules = pair(Net().double())
    pending: list[Pending] = []
    for _ in range(25):
        act = dice.choice(["forward", "forward", "backward", "backward", "backward", "drop", "change", "mode"])
        if act == "forward" or not pending:
            pending.append(Pending(modules))
        one = dice.choice(pending)
        if act == "backward":
            if not one.backward(dice.sample(range(4), dice.randint(1, 3)), dice.random() < 0.5):
                pending.remove(one)
                for m in modules:
                    m.zero_grad()
                for p in (*pending, one):
                    for _, w in p.given:
                        w.grad = None
        elif act == "drop":
            pending.remove(one)
        elif act == "change" and dice.random() < 0.5:
            one.change(dice.choice(["x", "w", "weight", "mean", "seen"]))
        elif act == "mode":
            pending.clear()  # eager reads statistics in backward that a forward in training mode has changed unseen
            training = dice.random() < 0.5
            for m in modules:
                m.train(training)
        one.compare()
