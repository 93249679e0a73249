"""Ten AdamW steps of the benchmark models, small and of sizes that are not round, beside eager."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

from ortmodule_c import ORTModule

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from models import SMALL


@pytest.mark.parametrize("name", SMALL)
def test_ten_steps_follow_eager(name: str) -> None:
    work = SMALL[name]
    torch.manual_seed(0)
    eager = work.build(0.0).train()
    ours = ORTModule(copy.deepcopy(eager), None)
    inputs = work.data(torch.Generator().manual_seed(1))
    models = (eager, ours)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in models]
    for step in range(10):
        losses = [m(*inputs) for m in models]
        for loss in losses:
            loss.backward()
        if step == 0:
            check_gradients(eager, ours)
            check_buffers(eager, ours)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-4), f"loss of step {step}"
    assert ours.fallback_report() == []


def check_gradients(eager: torch.nn.Module, ours: torch.nn.Module) -> None:
    """Every gradient within 1e-3 of its largest element.

    A gradient that is zero in exact arithmetic (the bias of attention keys, a bias before a batch
    norm) is rounding noise in both; it is held to 1e-6 of the largest of all gradients.
    """
    largest = max(float(p.grad.abs().max()) for p in eager.parameters())
    for (name, a), (other, b) in zip(eager.named_parameters(), ours.named_parameters(), strict=True):
        assert name == other
        error = float((a.grad - b.grad).abs().max())
        assert error <= max(1e-3 * float(a.grad.abs().max()), 1e-6 * largest), name


def check_buffers(eager: torch.nn.Module, ours: torch.nn.Module) -> None:
    for (name, a), (other, b) in zip(eager.named_buffers(), ours.named_buffers(), strict=True):
        assert name == other
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
