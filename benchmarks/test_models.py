"""The small models as pytest-benchmark groups: ``pytest benchmarks/``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from models import SMALL
from ortmodule_c import ORTModule


@pytest.mark.parametrize("arm", ["eager", "ours"])
@pytest.mark.parametrize("model", SMALL)
def test_step(benchmark, model: str, arm: str) -> None:
    benchmark.group = SMALL[model].title
    torch.manual_seed(0)
    net = SMALL[model].build(0.1).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    inputs = SMALL[model].data(torch.Generator().manual_seed(1))
    call = ORTModule(net) if arm == "ours" else net

    def step() -> None:
        call(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    benchmark(step)
