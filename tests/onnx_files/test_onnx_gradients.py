"""Gradients as nodes of a model: they are those of autograd, of which there may be others."""

from __future__ import annotations

import pytest
import torch
from onnx import ModelProto, helper
from test_onnx_layers import compare, made
from torch import Tensor
from torch.nn import functional as F

import ortmodule_c
from ortmodule_c import NotExportable

DOMAIN = "ai.onnx.preview.training"


def with_gradient(text: str, y: str, xs: list[str], zs: list[str]) -> ModelProto:
    """The model, whose outputs are gradients of `y` instead."""
    model = made(text, {})
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    names = [f"d{x}" for x in xs]
    said = {"xs": xs, "y": y} | ({"zs": zs} if zs else {})
    model.graph.node.append(helper.make_node("Gradient", [*xs, *zs], names, domain=DOMAIN, **said))
    del model.graph.output[:]
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    return model


NET = """net (float[4, 3] x, float[3, 5] w, float[5] b) => (float loss) {
  h = MatMul(x, w)
  a = Add(h, b)
  t = Tanh(a)
  s = Mul(t, t)
  loss = ReduceSum<keepdims = 0>(s)
}"""


def given() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 3), "w": torch.randn(3, 5), "b": torch.randn(5)}


def test_a_gradient_is_that_of_autograd() -> None:
    inputs = given()
    module = ortmodule_c.onnx.load(with_gradient(NET, "loss", ["w", "b"], ["x"]))
    w, b = (inputs[k].clone().requires_grad_() for k in ("w", "b"))
    (inputs["x"] @ w + b).tanh().square().sum().backward()
    torch.testing.assert_close(list(module(**inputs)), [w.grad, b.grad])


def test_of_what_is_in_between() -> None:
    inputs = given()
    found = ortmodule_c.onnx.load(with_gradient(NET, "loss", ["a"], []))(**inputs)
    a = (inputs["x"] @ inputs["w"] + inputs["b"]).requires_grad_()
    a.tanh().square().sum().backward()
    torch.testing.assert_close(found, a.grad)


def test_a_gradient_has_a_gradient() -> None:
    def eager(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        loss = (x @ w + b).tanh().square().sum()
        return torch.autograd.grad(loss, w, create_graph=True)[0]

    compare(with_gradient(NET, "loss", ["w"], ["x", "b"]), eager, given(), 1e-4)


def test_what_is_not_named_is_taken_as_it_is() -> None:
    """Weights of the model among it."""
    model = with_gradient(NET, "loss", ["x"], [])
    inputs = given()
    x = inputs["x"].clone().requires_grad_()
    (x @ inputs["w"] + inputs["b"]).tanh().square().sum().backward()
    torch.testing.assert_close(ortmodule_c.onnx.load(model)(**inputs), x.grad)


def test_no_gradient_is_one_of_zeros() -> None:
    model = with_gradient(NET, "loss", ["x", "w"], [])
    model.graph.node[0].input[1] = "x2"
    model.graph.input[1].name = "x2"
    model.graph.node.insert(0, helper.make_node("Identity", ["x2"], ["w"]))
    x, w, b = given().values()
    assert torch.equal(ortmodule_c.onnx.load(model)(x, w, b)[1], torch.zeros(3, 5))


CURVE = "net (float[5] x) => (float[5] y) { y = Gelu(x) }"


def test_a_gradient_of_a_gradient_that_there_is_not_is_refused() -> None:
    module = ortmodule_c.onnx.load(with_gradient(CURVE, "y", ["x"], []))
    x = torch.randn(5)
    given = x.clone().requires_grad_()
    F.gelu(given).sum().backward()
    torch.testing.assert_close(module(x), given.grad)
    with pytest.raises(NotExportable, match=r"Gradient of domain .*: the gradient of GeluGrad, which is one itself"):
        module(given)


def test_a_step_of_an_optimizer_is_a_model() -> None:
    model = with_gradient(NET, "loss", ["w", "b"], ["x"])
    model.graph.input.extend([helper.make_tensor_value_info("r", 1, []), helper.make_tensor_value_info("n", 7, [])])
    model.graph.input.extend(helper.make_empty_tensor_value_info(v) for v in ("vw", "vb"))
    said = {"alpha": 0.9, "beta": 1.0, "mode": "standard", "norm_coefficient": 0.0}
    names = ["r", "n", "w", "b", "dw", "db", "vw", "vb"]
    news = ["w_new", "b_new", "vw_new", "vb_new"]
    model.graph.node.append(helper.make_node("Momentum", names, news, domain=DOMAIN, **said))
    del model.graph.output[:]
    model.graph.output.extend(helper.make_empty_tensor_value_info(v) for v in news)
    step, (x, *weights) = ortmodule_c.onnx.load(model), given().values()
    params = [v.clone().requires_grad_() for v in weights]
    optimizer, velocities = torch.optim.SGD(params, 0.1, 0.9), [torch.zeros_like(v) for v in weights]
    for count in range(3):
        optimizer.zero_grad()
        (x @ params[0] + params[1]).tanh().square().sum().backward()
        optimizer.step()
        *weights, a, b = step(x, *weights, torch.tensor(0.1), torch.tensor(count), *velocities)
        velocities = [a, b]
    torch.testing.assert_close(weights, [p.detach() for p in params])
