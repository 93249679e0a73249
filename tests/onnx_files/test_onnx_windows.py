"""Poolings and convolutions of ONNX that PyTorch has by several ops, or only for other paddings."""

from __future__ import annotations

import math

import pytest
import torch
from test_onnx_layers import compare, made
from torch import Tensor
from torch.nn import functional as F

import ortmodule_c

IMAGE = "net (float[2, 3, 7, 8] x) => (float[A, B, C, D] y) {{ y = {node}(x) }}"


def windows(x: Tensor, said: dict[str, tuple[int, ...]], beyond: float) -> Tensor:
    """Elements of each window in a last dim, of an image with padding."""
    (top, left, bottom, right), (kh, kw), (sh, sw), (dh, dw) = (said[k] for k in ("pads", "kernel", "strides", "apart"))
    x = F.pad(x, (left, right, top, bottom), value=beyond)
    rows = x.unfold(2, (kh - 1) * dh + 1, sh)[..., ::dh]
    return rows.unfold(3, (kw - 1) * dw + 1, sw)[..., ::dw].flatten(4)


CASES = {
    "apart": {"pads": (1, 0, 1, 1), "kernel": (3, 2), "strides": (2, 1), "apart": (2, 3)},
    "far": {"pads": (2, 1, 2, 3), "kernel": (3, 3), "strides": (1, 2), "apart": (1, 1)},
}


def node(op: str, said: dict[str, tuple[int, ...]], more: str = "") -> str:
    """As text."""
    names = {"pads": "pads", "kernel": "kernel_shape", "strides": "strides", "apart": "dilations"}
    return f"{op}<{', '.join(f'{names[k]} = {list(v)}' for k, v in said.items())}{more}>"


@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_averages(case: str, counted: int) -> None:
    said = CASES[case]

    def eager(x: Tensor) -> Tensor:
        there = windows(torch.ones_like(x), said, counted).sum(-1)
        return windows(x, said, 0).sum(-1) / there

    text = IMAGE.format(node=node("AveragePool", said, f", count_include_pad = {counted}"))
    compare(made(text, {}), eager, {"x": torch.randn(2, 3, 7, 8)})


@pytest.mark.parametrize("case", CASES)
def test_maxima(case: str) -> None:
    text = IMAGE.format(node=node("MaxPool", CASES[case]))
    compare(made(text, {}), lambda x: windows(x, CASES[case], -math.inf).amax(-1), {"x": torch.randn(2, 3, 7, 8)})


@pytest.mark.parametrize("case", CASES)
def test_powers(case: str) -> None:
    text = IMAGE.format(node=node("LpPool", CASES[case], ", p = 3"))
    eager = lambda x: windows(x.abs() ** 3, CASES[case], 0).sum(-1) ** (1 / 3)  # noqa: E731
    compare(made(text, {}), eager, {"x": torch.randn(2, 3, 7, 8)}, 1e-4)


def test_powers_of_whole_planes() -> None:
    text = IMAGE.format(node="GlobalLpPool<p = 3>")
    eager = lambda x: (x.abs() ** 3).sum((2, 3), keepdim=True) ** (1 / 3)  # noqa: E731
    compare(made(text, {}), eager, {"x": torch.randn(2, 3, 7, 8)}, 1e-4)


@pytest.mark.parametrize("apart", [1, 2])
def test_a_window_beyond_the_end_has_fewer_elements(apart: int) -> None:
    """The sum is of those that are there, and the average is theirs."""
    said = f"kernel_shape = [3], strides = [2], dilations = [{apart}], ceil_mode = 1"
    x, reach = torch.randn(2, 3, 8), 2 * apart + 1

    def cut(x: Tensor) -> Tensor:
        return F.pad(x, (0, 2)).unfold(2, reach, 2)[..., ::apart]

    head = "net (float[2, 3, 8] x) => (float[A, B, C] y)"
    compare(made(f"{head} {{ y = LpPool<{said}, p = 1>(x) }}", {}), lambda x: cut(x.abs()).sum(-1), {"x": x})
    there = cut(torch.ones_like(x)).sum(-1)
    compare(made(f"{head} {{ y = AveragePool<{said}>(x) }}", {}), lambda x: cut(x).sum(-1) / there, {"x": x})


@pytest.mark.parametrize("columns", [0, 1])
@pytest.mark.parametrize("pads", [(1, 1, 1, 1), (2, 0, 2, 2)])
def test_places_of_maxima_are_counted_along_rows_or_columns(columns: int, pads: tuple[int, ...]) -> None:
    said = {**CASES["far"], "pads": pads}
    results = f"y, i = {node('MaxPool', said, f', storage_order = {columns}')}(x)"
    text = f"net (float[2, 3, 7, 8] x) => (float[A, B, C, D] y, int64[A, B, C, D] i) {{ {results} }}"
    y, i = ortmodule_c.onnx.load(made(text, {}))(x := torch.randn(2, 3, 7, 8))
    torch.testing.assert_close(y, windows(x, said, -math.inf).amax(-1))
    planes = x.transpose(2, 3) if columns else x
    torch.testing.assert_close(planes.flatten()[i], y)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_maxima_of_whole_numbers(dtype: torch.dtype) -> None:
    x = torch.randint(-128, 128, (2, 3, 7, 8)).to(dtype)
    text = IMAGE.format(node=node("MaxPool", CASES["apart"])).replace("float", str(dtype).removeprefix("torch."))
    expected = windows(x.float(), CASES["apart"], -math.inf).amax(-1).to(dtype)
    assert torch.equal(ortmodule_c.onnx.load(made(text, {}))(x), expected)


def test_what_no_element_reaches_is_the_bias() -> None:
    head = "net (float[2, 3, 4, 5] x, float[3, 2, 3, 3] w, float[2] b) => (float[2, 2, 11, 12] y)"
    text = f"{head} {{ y = ConvTranspose<strides = [2, 2], output_shape = [11, 12]>(x, w, b) }}"

    def eager(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = F.pad(F.conv_transpose2d(x, w, stride=2), (0, 1, 1, 1))
        return y + b[:, None, None]

    inputs = {"x": torch.randn(2, 3, 4, 5), "w": torch.randn(3, 2, 3, 3), "b": torch.randn(2)}
    compare(made(text, {}), eager, inputs)
