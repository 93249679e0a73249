"""Layers of ONNX that are several ops of the core, in other floats than float32: near what they are in float64."""

from __future__ import annotations

import pytest
import torch
from onnx import ModelProto, numpy_helper, parser
from torch import Tensor, nn

import ortmodule_c

NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "double"}
# Dims that coincide: what mixes them up has the right shape.
IMAGE, ROWS = "F[3, 3, 3, 3] x", "F[3, 3, 3] x"
# What a node is given, the node, and the constants that it reads besides.
LAYERS: dict[str, tuple[str, str, dict[str, list[float] | list[int]]]] = {
    "Resize": (IMAGE, 'y = Resize<mode = "linear">(x, , s)', {"s": [1.0, 1.0, 2.0, 0.6]}),
    "cubic": (IMAGE, 'y = Resize<mode = "cubic">(x, , , n)', {"n": [3, 3, 5, 2]}),
    "GridSample": (f"{IMAGE}, F[3, 3, 3, 2] g", "y = GridSample(x, g)", {}),
    "Einsum": (f"{ROWS}, F[3, 3, 3] z", 'y = Einsum<equation = "bij,kjb->ki">(x, z)', {}),
    "LSTM": (f"{ROWS}, F[1, 12, 3] w, F[1, 12, 3] r", "y = LSTM<hidden_size = 3>(x, w, r)", {}),
    "GRU": (f"{ROWS}, F[1, 9, 3] w, F[1, 9, 3] r", "y = GRU<hidden_size = 3>(x, w, r)", {}),
    "RNN": (f"{ROWS}, F[1, 3, 3] w, F[1, 3, 3] r", "y = RNN<hidden_size = 3>(x, w, r)", {}),
    "LRN": (IMAGE, "y = LRN<size = 3, alpha = 0.1>(x)", {}),
    "LpPool": (IMAGE, "y = LpPool<kernel_shape = [2, 2]>(x)", {}),
    "LpNormalization": (ROWS, "y = LpNormalization<axis = 1>(x)", {}),
    "ReverseSequence": (ROWS, "y = ReverseSequence(x, n)", {"n": [3, 1, 2]}),
    "ScatterND": (f"{ROWS}, F[2, 3, 3] u", 'y = ScatterND<reduction = "add">(x, i, u)', {"i": [[2], [0]]}),
    "Pad": (ROWS, 'y = Pad<mode = "reflect">(x, p)', {"p": [1, 0, 2, 0, 1, 1]}),
    "Col2Im": ("F[3, 12, 9] x", "y = Col2Im(x, s, k)", {"s": [4, 4], "k": [2, 2]}),
    "ReduceLogSumExp": (ROWS, "y = ReduceLogSumExp(x, a)", {"a": [1]}),
    "ReduceL2": (ROWS, "y = ReduceL2(x, a)", {"a": [1]}),
    "HardSigmoid": (ROWS, "y = HardSigmoid(x)", {}),
    "InstanceNormalization": (f"{ROWS}, F[3] s, F[3] b", "y = InstanceNormalization(x, s, b)", {}),
}


def made(layer: str, dtype: torch.dtype) -> ModelProto:
    given, node, constants = LAYERS[layer]
    given = given.replace("F[", f"{NAMES[dtype]}[")
    text = f"net ({given}) => ({NAMES[dtype]} y) {{ {node} }}"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 22]> {text}')
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.initializer.extend(
        numpy_helper.from_array(torch.tensor(v).numpy(), name) for name, v in constants.items()
    )
    return model


def outcome(module: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Result and gradients of inputs."""
    given = [t.detach().clone().requires_grad_() for t in inputs]
    y = module(*given)
    (y * torch.arange(y.numel(), dtype=torch.float64).reshape(y.shape).cos().to(y.dtype)).sum().backward()
    return [y.detach(), *[t.grad for t in given]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_halves_are_near_doubles(layer: str, dtype: torch.dtype) -> None:
    exact = made(layer, torch.float64)
    shapes = [[d.dim_value for d in i.type.tensor_type.shape.dim] for i in exact.graph.input]
    inputs = [torch.rand(s, dtype=torch.float64).mul(1.8).sub(0.9).to(dtype) for s in shapes]
    ours = outcome(ortmodule_c.onnx.load(made(layer, dtype)), inputs)
    theirs = outcome(ortmodule_c.onnx.load(exact), [t.double() for t in inputs])
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=0.05, atol=8 * torch.finfo(dtype).eps * float(b.abs().max()))


@pytest.mark.parametrize("layer", LAYERS)
def test_what_surrounds_a_call_changes_no_bits(layer: str) -> None:
    """A file says what is computed in: autocast does not, and neither do modes without gradients."""
    model = made(layer, torch.float64)
    shapes = [[d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input]
    inputs = [torch.rand(s, dtype=torch.float64) for s in shapes]
    module = ortmodule_c.onnx.load(model)
    want = module(*inputs)
    with torch.no_grad():
        assert torch.equal(module(*inputs), want)
    with torch.inference_mode():
        assert torch.equal(module(*inputs), want)
    with torch.autocast("cpu", torch.bfloat16):
        got = module(*inputs)
    assert got.dtype == torch.float64 and torch.equal(got, want)
