"""Optimizers as nodes of a model: their steps are those of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, optim

import ortmodule_c

Optimizer = Callable[[Iterable[Tensor]], optim.Optimizer]
DOMAIN = "ai.onnx.preview.training"
CASES: dict[str, tuple[str, int, dict[str, object], Optimizer, int]] = {  # op, states, attributes, and of PyTorch
    "adagrad": (
        "Adagrad",
        1,
        {"decay_factor": 0.1, "norm_coefficient": 0.01, "epsilon": 1e-5},
        lambda p: optim.Adagrad(p, 0.05, lr_decay=0.1, weight_decay=0.01, eps=1e-5),
        0,
    ),
    "adam": (
        "Adam",
        2,
        {"alpha": 0.8, "beta": 0.95, "epsilon": 0.0, "norm_coefficient": 0.01},
        lambda p: optim.Adam(p, 0.05, betas=(0.8, 0.95), eps=0, weight_decay=0.01),
        1,
    ),
    "momentum": (
        "Momentum",
        1,
        {"alpha": 0.9, "beta": 0.7, "norm_coefficient": 0.01, "mode": "standard"},
        lambda p: optim.SGD(p, 0.05, 0.9, dampening=0.3, weight_decay=0.01),
        0,
    ),
    "nesterov": (
        "Momentum",
        1,
        {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.0, "mode": "nesterov"},
        lambda p: optim.SGD(p, 0.05, 0.9, nesterov=True),
        0,
    ),
}


def made(op: str, states: int, said: dict[str, object], shapes: list[tuple[int, ...]]) -> torch.nn.Module:
    """A step over tensors of these shapes, as a module."""
    kinds = ["x", "g", *"vh"[:states]]
    names = [f"{kind}{i}" for kind in kinds for i in range(len(shapes))]
    news = [f"{kind}{i}_new" for kind in (kinds[0], *kinds[2:]) for i in range(len(shapes))]

    def info(name: str) -> object:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[int(name[1])])

    rates = [helper.make_tensor_value_info("r", 1, []), helper.make_tensor_value_info("t", 7, [])]
    node = helper.make_node(op, ["r", "t", *names], news, domain=DOMAIN, **said)
    graph = helper.make_graph([node], "step", [*rates, *map(info, names)], list(map(info, news)))
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    return ortmodule_c.onnx.load(helper.make_model(graph, opset_imports=imports))


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_pytorch(case: str) -> None:
    op, states, said, theirs, first = CASES[case]
    shapes = [(3, 4), (5,)]
    xs = [torch.randn(s) for s in shapes]
    values, kept = xs, [torch.zeros(s) for _ in range(states) for s in shapes]
    params = [x.clone().requires_grad_() for x in xs]
    optimizer, module = theirs(params), made(op, states, said, shapes)
    for step in range(4):
        grads = [torch.randn(s) for s in shapes]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        results = module(torch.tensor(0.05), torch.tensor(step + first), *values, *grads, *kept)
        values, kept = list(results[:2]), list(results[2:])
        torch.testing.assert_close(values, [p.detach() for p in params], rtol=1e-5, atol=1e-6)


def test_before_the_first_update_nothing_is_made_up_for() -> None:
    """Adam at 0 updates takes the rate as it is; what is left of the tensor after is said."""
    said = {"epsilon": 0.5, "norm_coefficient_post": 0.25}
    x, g, v, h = torch.randn(4, 3).abs().unbind()
    new, mean, squares = made("Adam", 2, said, [(3,)])(torch.tensor(0.1), torch.tensor(0), x, g, v, h)
    torch.testing.assert_close(mean, 0.9 * v + 0.1 * g)
    torch.testing.assert_close(squares, 0.999 * h + 0.001 * g * g)
    torch.testing.assert_close(new, 0.75 * (x - 0.1 * mean / (squares.sqrt() + 0.5)))
