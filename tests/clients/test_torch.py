"""What PyTorch itself builds on a module: averages of its weights, and calls with other weights than its own."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from ortmodule_c import ORTModule
from side_by_side import assert_ran_in_core, batches, classifier, close, loss_of


def with_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)], ids=["equal", "exponential"])
def test_averaged_model(average: Any) -> None:
    plain, ours = with_batch_norm(), ORTModule(with_batch_norm())
    averages = []
    for model in (plain, ours):
        mean = AveragedModel(model, multi_avg_fn=average)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = SWALR(optimizer, swa_lr=0.01)
        for x, y in batches():
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            mean.update_parameters(model)
        update_bn(batches(), mean)
        averages.append(mean.eval())
    assert isinstance(averages[1].module, ORTModule) and averages[1].module.module is not ours.module
    close(dict(averages[1].state_dict()), dict(averages[0].state_dict()))
    x = torch.randn(4, 6)
    close(averages[1](x), averages[0](x))
    assert_ran_in_core(ours)


def inner_steps(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The weights after two steps that are themselves part of the graph, as first-order MAML takes them."""
    weights = dict(model.named_parameters())
    for _ in range(2):
        loss = nn.functional.cross_entropy(functional_call(model, weights, (x,)), y)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return weights


def test_learning_to_learn_by_functional_call() -> None:
    plain, ours = classifier(), ORTModule(classifier())
    for model in (plain, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for x, y in batches():
            loss = nn.functional.cross_entropy(
                functional_call(model, inner_steps(model, x[:2], y[:2]), (x[2:],)), y[2:]
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    close(dict(ours.state_dict()), dict(plain.state_dict()))
    close(ours(torch.ones(1, 6)), plain(torch.ones(1, 6)))
    assert_ran_in_core(ours)


def test_functional_call_of_a_model_that_holds_a_wrapped_one() -> None:
    plain, ours = nn.Sequential(classifier(), nn.Tanh()), nn.Sequential(ORTModule(classifier()), nn.Tanh())
    x = torch.randn(4, 6)
    weights = {name: torch.randn_like(w).requires_grad_() for name, w in plain.named_parameters()}
    results = []
    for model in (plain, ours):
        mine = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
        out = functional_call(model, copy.copy(mine), (x,))
        out.pow(2).sum().backward()
        results.append([out, *[w.grad for w in mine.values()]])
    close(results[1], results[0])
    assert_ran_in_core(ours[0])
