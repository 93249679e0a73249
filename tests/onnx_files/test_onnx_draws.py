"""Random numbers of ONNX: as they are said to be spread, and from PyTorch's generator."""

from __future__ import annotations

import pytest
import torch
from test_onnx_layers import made
from torch import Tensor

import ortmodule_c
from ortmodule_c import NotExportable

N = 100_000
CODES = {torch.float32: 1, torch.float16: 10, torch.float64: 11, torch.bfloat16: 16}


def drawn(node: str, *inputs: Tensor, text: str = "") -> Tensor:
    """What a model of one node gives, the generator beginning anew."""
    module = ortmodule_c.onnx.load(made(f"net ({text}) => (y) {{ y = {node} }}", {}))
    torch.manual_seed(0)
    return module(*inputs)


@pytest.mark.parametrize("dtype", CODES)
def test_numbers_between_two(dtype: torch.dtype) -> None:
    y = drawn(f"RandomUniform<shape = [{N}], dtype = {CODES[dtype]}>()")
    assert y.dtype == dtype and y.min() >= 0 and y.max() < 1
    parts = y.double().histc(8, 0, 1) / N
    torch.testing.assert_close(parts, torch.full((8,), 1 / 8).double(), rtol=0, atol=5e-3)
    y = drawn(f"RandomUniform<shape = [{N}], dtype = 11, low = -3.0, high = 5.0>()")
    assert -3 <= y.min() < -2.99 and 4.99 < y.max() < 5 and y.unique().numel() == N


def test_numbers_around_one() -> None:
    y = drawn(f"RandomNormal<shape = [{N}], mean = 2.0, scale = 3.0>()").double()
    z = (y - 2) / 3
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs((z**power).mean() - moment) < 0.1, power
    assert abs((z[:-1] * z[1:]).mean()) < 0.02


def test_they_come_from_the_generator() -> None:
    module = ortmodule_c.onnx.load(made("net (float[20] x) => (float[20] y) { y = RandomNormalLike(x) }", {}))
    x = torch.zeros(20)
    torch.manual_seed(3)
    first, second = module(x), module(x)
    torch.manual_seed(3)
    assert torch.equal(module(x), first) and not torch.equal(first, second)


def test_ones_as_often_as_is_said_have_no_gradient() -> None:
    p = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0]).expand(N // 5, 5).requires_grad_()
    y = drawn("Bernoulli(x)", p, text="float[A, 5] x")
    assert set(y.unique().tolist()) == {0, 1} and not y.requires_grad
    torch.testing.assert_close(y.mean(0), p[0].detach(), rtol=0, atol=0.015)
    assert not y[:, 0].any() and y[:, 4].all()


def test_classes_as_often_as_is_said() -> None:
    odds = torch.tensor([[0.1, 0.2, 0.7, 0.0], [0.5, 0.0, 0.25, 0.25]])
    y = drawn(f"Multinomial<sample_size = {N}, dtype = 7>(x)", odds.log(), text="float[2, 4] x")
    assert y.dtype == torch.int64 and y.shape == (2, N)
    often = torch.stack([row.bincount(minlength=4) / N for row in y])
    torch.testing.assert_close(often, odds, rtol=0, atol=5e-3)


def test_random_whole_numbers_are_refused() -> None:
    with pytest.raises(NotExportable, match=r"RandomUniformLike of domain ai.onnx, .*: random numbers of torch.int64"):
        drawn("RandomUniformLike(x)", torch.ones(3).long(), text="int64[3] x")
