"""Whole models, wrapped and plain, trained by the fused optimizers and by PyTorch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ortmodule_c import ORTModule
from ortmodule_c.optim import FusedAdam, FusedLamb, FusedSGD


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )


def train(model: nn.Module, make: Callable[[Any], Optimizer], steps: int = 6) -> list[float]:
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    g = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(4, 3, 6, 6, generator=g), torch.randint(5, (4,), generator=g)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


PAIRS: dict[str, tuple[Callable[[Any], Optimizer], Callable[[Any], Optimizer]]] = {
    "adamw": (lambda p: FusedAdam(p, lr=1e-2, eps=1e-4), lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4)),
    "sgd": (
        lambda p: FusedSGD(p, lr=0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "lamb": (lambda p: FusedLamb(p, lr=1e-2), lambda p: FusedLamb(p, lr=1e-2)),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_wrapped_and_plain_models_train_alike(name: str, channels_last: bool) -> None:
    fused, plain = PAIRS[name]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    expected = train(network().to(memory_format=layout), plain)
    for model in (network(), ORTModule(network())):
        torch.testing.assert_close(train(model.to(memory_format=layout), fused), expected, rtol=1e-3, atol=1e-4)


def test_the_wrapper_sees_what_the_optimizer_wrote() -> None:
    """No matter what it keeps of parameters: after a step, in evaluation and in training."""
    model = ORTModule(network())
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 3, 6, 6)
    for _ in range(3):
        model.train()
        model(x).square().mean().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(x), model.module(x))


def test_tied_parameters_take_one_step() -> None:
    def tied() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11, bias=False))
        model[1].weight = model[0].weight
        return model

    ends = []
    for model, make in ((ORTModule(tied()), FusedAdam), (tied(), torch.optim.AdamW)):
        optimizer = make(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.arange(11)), torch.arange(11)).backward()
            optimizer.step()
        ends.append(dict(model.state_dict()))
    for key, value in ends[1].items():
        torch.testing.assert_close(ends[0][key], value)


def test_bf16_model_with_masters_follows_the_model_in_fp32() -> None:
    wide = train(network(), lambda p: FusedAdam(p, lr=1e-3), 20)
    torch.manual_seed(0)
    model = network().to(torch.bfloat16)

    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return model(x.bfloat16()).float()

    half = Cast()
    half.model = model
    got = train(half, lambda p: FusedAdam(p, lr=1e-3, master_weights=True), 20)
    torch.testing.assert_close(got, wide, rtol=0.1, atol=0.05)


def test_compiled_around_a_step() -> None:
    """TorchDynamo leaves the step to Python."""
    model, other = network(), network()
    x = torch.randn(4, 3, 6, 6)
    for m, compiled in ((model, True), (other, False)):
        optimizer = FusedAdam(m.parameters())
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(2):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)
