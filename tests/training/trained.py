"""A small model, its data and its description, and a loop of PyTorch's that trains it."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

DESCRIPTION = {
    "inputs": [("x", ["batch", 7]), ("y", ["batch"])],
    "outputs": [("loss", [], True), ("scores", ["batch", 5])],
}


class Net(nn.Module):
    """With statistics that are updated."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13, bias=False)
        self.norm = nn.BatchNorm1d(13)
        self.last = nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return scores


def net(seed: int = 0) -> Net:
    """The same weights at each call."""
    torch.manual_seed(seed)
    return Net()


def batch(step: int, n: int = 6) -> tuple[Tensor, Tensor]:
    """The same data for a step at each call."""
    g = torch.Generator().manual_seed(100 + step)
    return torch.randn(n, 7, generator=g), torch.randint(5, (n,), generator=g)


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    clip: float | None = 1.0,
    accumulate: int = 1,
    lr: Callable[[int], float] | None = None,
    region: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[float]:
    """Losses of steps of a loop that is written out."""
    losses = []
    for step in range(steps):
        x, y = batch(step)
        with region():
            loss = nn.functional.cross_entropy(model(x), y)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if (step + 1) % accumulate:
            continue
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr(step // accumulate)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_alike(ours: nn.Module, plain: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, a), b in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def copies(n: int) -> list[Any]:
    """As many models of the same weights."""
    first = net()
    return [first, *[copy.deepcopy(first) for _ in range(n - 1)]]
