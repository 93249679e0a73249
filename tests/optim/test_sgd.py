"""FusedSGD beside torch.optim.SGD."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from beside import FLOATS, assert_close, assert_same_state, give_gradients, parameters, train
from ortmodule_c.optim import FusedSGD

OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": torch.tensor(0.1, dtype=torch.float64)},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
    {"maximize": True},
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_computes_what_pytorch_does(options: dict[str, Any], dtype: torch.dtype) -> None:
    options = {"lr": 0.1, **options}
    ours, theirs = parameters(dtype), parameters(dtype)
    a, b = FusedSGD(ours, **options), torch.optim.SGD(theirs, fused=dtype.itemsize > 2, **options)
    train(a, 20)
    train(b, 20)
    if dtype.itemsize > 2:
        assert_close(ours, theirs)
        assert_same_state(a, b)
    for x, y in zip(ours, theirs, strict=True):  # op by op, PyTorch rounds to 16 bits after each
        torch.testing.assert_close(x, y, rtol=(2 * torch.finfo(dtype).eps) ** 0.75, atol=20 * torch.finfo(dtype).eps)


def plain_of(params: list[Tensor], **options: Any) -> Optimizer:
    return torch.optim.SGD(params, fused=True, **options)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str)
@pytest.mark.parametrize("ways", [(plain_of, FusedSGD), (FusedSGD, plain_of)], ids=["from torch", "to torch"])
def test_states_are_interchangeable(ways: Any, options: dict[str, Any]) -> None:
    before, after = ways
    changed, kept = parameters(), parameters()
    a, b = before(changed, lr=0.1, **options), before(kept, lr=0.1, **options)
    train(a, 5), train(b, 5)
    other = after(changed, lr=0.5)
    other.load_state_dict(copy.deepcopy(a.state_dict()))
    assert set(plain_of(parameters()).param_groups[0]) <= set(other.param_groups[0])
    train(other, 5, seed=9), train(b, 5, seed=9)
    assert_close(changed, kept)
    assert_same_state(other, b)


def test_momentum_starts_with_each_parameters_first_gradient() -> None:
    ours, theirs = parameters(), parameters()
    a, b = FusedSGD(ours, momentum=0.9, dampening=0.5), torch.optim.SGD(theirs, momentum=0.9, dampening=0.5)
    for given in (3, len(ours)):
        give_gradients(ours[:given], theirs[:given], seed=given)
        a.step(), b.step()
    assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("options", [{}, {"dampening": 0.5}, {"nesterov": True}], ids=str)
@pytest.mark.parametrize("columns", [3, 5], ids=["copied", "in place"])
def test_a_parameter_that_is_there_twice(options: dict[str, Any], columns: int) -> None:
    ours, theirs = (torch.ones(4, 5)[:, :columns].requires_grad_() for _ in range(2))
    a = FusedSGD([ours, ours], lr=0.1, momentum=0.9, **options)
    b = torch.optim.SGD([theirs, theirs], lr=0.1, momentum=0.9, foreach=False, **options)
    train(a, 3), train(b, 3)
    assert_close([ours], [theirs])
    assert_same_state(a, b)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fused": False}, "fused=False"),
    ({"foreach": True}, "foreach=True"),
    ({"differentiable": True}, "differentiable=True"),
    ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    ({"momentum": -1.0}, "Invalid momentum value: -1.0"),
    ({"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
    ({"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
    ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "Nesterov momentum requires"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=lambda x: str(x)[:40])
def test_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FusedSGD(parameters(), **options)


def test_sparse_gradients_are_refused() -> None:
    p = torch.zeros(4, 2, requires_grad=True)
    p.grad = torch.eye(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="`FusedSGD` does not support sparse gradients"):
        FusedSGD([p]).step()


def test_a_step_that_is_refused_leaves_no_momentum() -> None:
    p, q = (torch.ones(4, requires_grad=True) for _ in range(2))
    optimizer = FusedSGD([p, q], lr=0.1, momentum=0.9)
    p.grad, q.grad = torch.ones(4), torch.sparse_coo_tensor([[0]], [1.0], (4,))
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert "momentum_buffer" not in optimizer.state[p]
    q.grad = None
    optimizer.step()
    torch.testing.assert_close(p, torch.full((4,), 0.9))


def test_pytorch_takes_over_where_a_parameter_has_not_been_stepped() -> None:
    p, q = (torch.ones(4, requires_grad=True) for _ in range(2))
    optimizer = FusedSGD([p, q], lr=0.1, momentum=0.9)
    p.grad = torch.ones(4)
    optimizer.step()
    other = torch.optim.SGD([p, q], lr=1.0)
    other.load_state_dict(optimizer.state_dict())
    q.grad = torch.ones(4)
    other.step()
    torch.testing.assert_close(q, torch.full((4,), 0.9))
