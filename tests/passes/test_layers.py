"""Layers written out and recognised: values and gradients stand where autograd's of the written form stand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from test_eager import Applied
from torch import Tensor

from ortmodule_c import DebugOptions, ORTModule

INF, NAN = float("inf"), float("nan")
Layer = Callable[[Tensor], Tensor]

C = math.sqrt(2 / math.pi)


def softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def log_softmax(x: Tensor) -> Tensor:
    z = x - x.amax(-1, keepdim=True)
    return z - z.exp().sum(-1, keepdim=True).log()


def layer_norm_sqrt(x: Tensor, epsilon: float = 1e-5) -> Tensor:
    c = x - x.mean(-1, keepdim=True)
    return c / torch.sqrt((c * c).mean(-1, keepdim=True) + epsilon)


def layer_norm_rsqrt(x: Tensor) -> Tensor:
    c = x - x.mean(-1, keepdim=True)
    return c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + 1e-5)


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


LAYERS: dict[str, Layer] = {
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3)))),
    "gelu_tanh_grouped": lambda x: x * 0.5 * (1 + torch.tanh(x * C * (1 + 0.044715 * x * x))),
    "gelu_erf": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "silu": lambda x: x * torch.sigmoid(x),
    "softmax": softmax,
    "log_softmax": log_softmax,
    "log_of_softmax": lambda x: torch.log(torch.softmax(x, -1)),
    "layer_norm_sqrt": layer_norm_sqrt,
    "layer_norm_rsqrt": layer_norm_rsqrt,
    "layer_norm_without_epsilon": lambda x: layer_norm_sqrt(x, 0.0),
    "rms_norm": rms_norm,
}

ROWS = [
    [0.0, -0.0, 1.0, 2.0],
    [3.0, 3.0, 3.0, 3.0],
    [-INF, 1.0, 2.0, 3.0],
    [-INF, -INF, -INF, -INF],
    [INF, 1.0, 2.0, 3.0],
    [INF, INF, 0.0, -INF],
    [NAN, 1.0, 2.0, 3.0],
    [-200.0, 0.0, 200.0, 1.0],
    [1e-40, -1e-40, 1e-38, 0.0],
    [-8.0, -20.0, -90.0, -110.0],
    [1e5, -1e5, 3e8, -1e8],
    [1e15, -1e15, 1.0, 0.0],
]


WRITTEN = [*itertools.product(LAYERS, (torch.float32, torch.float64))]
WRITTEN += itertools.product((name for name in LAYERS if "gelu" in name), (torch.bfloat16, torch.float16))


@pytest.mark.parametrize(("name", "dtype"), WRITTEN, ids=str)
def test_a_layer_written_out(name: str, dtype: torch.dtype) -> None:
    f, module = LAYERS[name], ORTModule(Applied(LAYERS[name]), DebugOptions(fallback="error"))
    ulps = 4e3 if "norm" in name else 8  # 1 / sqrt(1e-5) times the rounding of what is centered
    for row, scale in itertools.product(ROWS, (1.0, -0.5, 2.0, 0.0)):
        if dtype == torch.float16 and any(40 < abs(v) < INF for v in row):  # the cube of which overflows
            continue
        grad = scale * torch.tensor([[1.0, 2.0, -1.0, 0.5]], dtype=dtype)
        mine, theirs = (torch.tensor([row], dtype=dtype, requires_grad=True) for _ in range(2))
        got, want = module(mine), f(theirs)
        got.backward(grad)
        want.backward(grad)
        for a, b in ((got.detach(), want.detach()), (mine.grad, theirs.grad)):
            inputs = row if "gelu" in name else []  # whose tails round to ulps of x
            largest = max([1.0, *(abs(v) for v in [*b.flatten().tolist(), *inputs] if math.isfinite(v))])
            close = torch.isclose(a, b, rtol=0, atol=ulps * torch.finfo(dtype).eps * largest, equal_nan=True)
            assert close.all(), f"of {row} times {scale}: {a} is not {b}"
