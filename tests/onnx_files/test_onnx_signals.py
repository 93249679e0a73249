"""Signals, determinants and powers: numbers and gradients are PyTorch's."""

from __future__ import annotations

import pytest
import torch
from test_onnx_layers import compare, made
from torch import Tensor

import ortmodule_c
from ortmodule_c import NotExportable


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("windowed", [False, True])
def test_transforms_of_frames(windowed: bool, onesided: int) -> None:
    given = "x, step, w" if windowed else "x, step, , n"
    text = (
        f"net (float[2, 23, 1] x, float[8] w) => (float[2, A, B, 2] y) {{ y = STFT<onesided = {onesided}>({given}) }}"
    )

    def eager(x: Tensor, w: Tensor) -> Tensor:
        window = w if windowed else torch.ones_like(w)
        y = torch.stft(x[..., 0], 8, 3, window=window, center=False, onesided=bool(onesided), return_complex=True)
        return torch.view_as_real(y).transpose(1, 2)

    constants = {"step": torch.tensor(3), "n": torch.tensor(8)}
    compare(made(text, constants), eager, {"x": torch.randn(2, 23, 1), "w": torch.rand(8)}, 1e-4)


def test_transforms_of_frames_of_complex_numbers() -> None:
    text = "net (float[2, 23, 2] x, float[8] w) => (float[2, A, 8, 2] y) { y = STFT<onesided = SIDE>(x, step, w) }"

    def eager(x: Tensor, w: Tensor) -> Tensor:
        y = torch.stft(torch.view_as_complex(x), 8, 5, window=w, center=False, onesided=False, return_complex=True)
        return torch.view_as_real(y).transpose(1, 2)

    inputs, constants = {"x": torch.randn(2, 23, 2), "w": torch.rand(8)}, {"step": torch.tensor(5)}
    compare(made(text.replace("SIDE", "0"), constants), eager, inputs, 1e-4)
    with pytest.raises(NotExportable, match=r"STFT of domain ai.onnx, .*: frames of 8 of a signal"):
        ortmodule_c.onnx.load(made(text.replace("SIDE", "1"), constants))(*inputs.values())


def test_bands_rise_to_their_centre_and_fall() -> None:
    """Which is where the next begins."""
    numbers = {"bands": torch.tensor(5), "length": torch.tensor(64), "rate": torch.tensor(8000)}
    numbers |= {"low": torch.tensor(20.0), "high": torch.tensor(3800.0)}
    bands = "w = MelWeightMatrix(bands, length, rate, low, high) y = MatMul(x, w)"
    module = ortmodule_c.onnx.load(made(f"net (float[33] x) => (float[5] y) {{ {bands} }}", numbers))
    weights = torch.stack([module(row) for row in torch.eye(33)])
    centres = weights.argmax(0)
    assert torch.equal(weights.amax(0), torch.ones(5)) and (centres.diff() > 0).all()
    for i in range(4):
        between = torch.arange(int(centres[i]), int(centres[i + 1]) + 1)
        torch.testing.assert_close(weights[between, i] + weights[between, i + 1], torch.ones(len(between)))


@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 5, 5), (3, 1, 1)])
def test_determinants(shape: tuple[int, ...]) -> None:
    text = f"net (double{list(shape)} x) => (double y) {{ y = Det(x) }}"
    model = made(text, {})
    model.graph.output[0].type.tensor_type.ClearField("shape")
    compare(model, torch.linalg.det, {"x": torch.randn(shape).double()}, 1e-8)


def test_determinants_of_matrices_that_have_no_inverse() -> None:
    """Their gradient is made of minors, all of which are 0 from a rank of two less on."""
    columns, rows = torch.randn(4, 4).double(), torch.randn(4, 4).double()
    module = ortmodule_c.onnx.load(made("net (double[4, 4] x) => (double y) { y = Det(x) }", {}))
    for rank in range(4):
        x = (columns[:, :rank] @ rows[:rank]).requires_grad_()
        module(x).backward()
        minors = torch.tensor(
            [[(-1) ** (i + j) * torch.linalg.det(_without(x.detach(), i, j)) for j in range(4)] for i in range(4)]
        ).double()
        torch.testing.assert_close(x.grad, minors, rtol=1e-6, atol=1e-6)


def _without(x: Tensor, row: int, column: int) -> Tensor:
    rows, columns = ([k for k in range(4) if k != i] for i in (row, column))
    return x[rows][:, columns]


def test_powers_of_whole_numbers_are_exact() -> None:
    x, e = torch.tensor([[3, -7], [2**31 + 1, 10]]), torch.tensor([0, 3])
    text = "net (int64[2, 2] x, int64[2] e) => (int64[2, 2] y) { y = Pow(x, e) }"
    module = ortmodule_c.onnx.load(made(text, {}))
    assert torch.equal(module(x, e), x**e) and torch.equal(module(x, torch.tensor([2, 18])), x ** torch.tensor([2, 18]))
    with pytest.raises(NotExportable, match=r"Pow of domain ai.onnx, .*: a negative exponent"):
        module(x, torch.tensor([1, -1]))


@pytest.mark.parametrize(("op", "expected"), [("Max", -torch.inf), ("Min", torch.inf), ("LogSumExp", -torch.inf)])
def test_reductions_of_nothing(op: str, expected: float) -> None:
    text = f"net (float[2, N, 3] x) => (float[2, 3] y) {{ y = Reduce{op}<keepdims = 0>(x, a) }}"
    module = ortmodule_c.onnx.load(made(text, {"a": torch.tensor([1])}))
    assert torch.equal(module(torch.ones(2, 0, 3)), torch.full((2, 3), expected))
