"""Single layers, forward and backward, wrapped and plain in turn: rates, and per cent of what the machine can do.

Sizes are those that the layers have in the benchmark models. Products, convolutions and attention count their
multiplications and additions, three times those of forward, against the highest GEMM rate of the run; all others count
the tensors that forward and backward cannot help reading and writing, against its copy bandwidth, which what lies in
caches may exceed.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from ceilings import copy_bandwidth, gemm_flops
from machine import machine
from ortmodule_c import ORTModule
from wide import geometric_mean, in_turn, ratio_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS, WIDTH, INNER, VOCABULARY = 1024, 768, 3072, 30522  # BERT-base, 8 sequences of 128


class Function(nn.Module):
    """A layer without parameters."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


class Loss(nn.Module):
    """The vocabulary product and its cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels)


@dataclass(frozen=True)
class Layer:
    """One row: what builds it, the shapes it is given, and the work of forward and backward."""

    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    flops: float = 0.0  # multiplications and additions, of forward
    elements: float = 0.0  # read and written
    labels: int = 0  # classes of the last input, which is then of integers


def product(m: int, n: int, k: int) -> float:
    return 2.0 * m * n * k


def convolution(batch: int, inner: int, outer: int, kernel: int, size: int, stride: int = 1) -> Layer:
    """A layer on square images of `size` pixels a side."""
    flops = product(batch * (size // stride) ** 2, outer, inner * kernel**2)
    build = lambda: nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False)  # noqa: E731
    return Layer(build, ((batch, inner, size, size),), flops)


def attention(batch: int, heads: int, length: int, causal: bool) -> Layer:
    shape, flops = (batch, heads, length, 64), 2 * product(batch * heads * length, length, 64)
    build = lambda: Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal))  # noqa: E731
    return Layer(build, (shape,) * 3, flops / 2 if causal else flops)


def pointwise(function: Callable[..., Tensor], *shapes: tuple[int, ...], tensors: int) -> Layer:
    """A layer that reads and writes `tensors` tensors of the shape of its first input."""
    return Layer(lambda: Function(function), shapes, elements=tensors * math.prod(shapes[0]))


def module(build: Callable[[], nn.Module], shape: tuple[int, ...], tensors: float) -> Layer:
    return Layer(build, (shape,), elements=tensors * math.prod(shape))


LAYERS = {
    "Linear 768-3072": Layer(lambda: nn.Linear(WIDTH, INNER), ((ROWS, WIDTH),), product(ROWS, WIDTH, INNER)),
    "Linear 3072-768": Layer(lambda: nn.Linear(INNER, WIDTH), ((ROWS, INNER),), product(ROWS, WIDTH, INNER)),
    "Linear, GELU": Layer(
        lambda: nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU()), ((ROWS, WIDTH),), product(ROWS, WIDTH, INNER)
    ),
    "vocabulary, loss": Layer(Loss, ((ROWS, WIDTH), (ROWS,)), product(ROWS, WIDTH, VOCABULARY), labels=VOCABULARY),
    "attention 8x12x128": attention(8, 12, 128, causal=False),
    "causal 1x12x1024": attention(1, 12, 1024, causal=True),
    "Conv 3x3, 64 at 56": convolution(16, 64, 64, 3, 56),
    "Conv 3x3, 256 at 14": convolution(16, 256, 256, 3, 14),
    "Conv 3x3, 512 at 7": convolution(16, 512, 512, 3, 7),
    "Conv 3x3/2, 64-128": convolution(16, 64, 128, 3, 56, 2),
    "Conv 1x1/2, 64-128": convolution(16, 64, 128, 1, 56, 2),
    "Conv 7x7/2, 3-64": convolution(16, 3, 64, 7, 224, 2),
    "LayerNorm": module(lambda: nn.LayerNorm(WIDTH), (8 * ROWS, WIDTH), 5),
    "RMSNorm": module(lambda: nn.RMSNorm(WIDTH), (8 * ROWS, WIDTH), 5),
    "BatchNorm 64 at 112": module(lambda: nn.BatchNorm2d(64), (16, 64, 112, 112), 5),
    "MaxPool 3/2": module(lambda: nn.MaxPool2d(3, 2, 1), (16, 64, 112, 112), 2.5),
    "GELU": module(nn.GELU, (ROWS, INNER), 5),
    "ReLU": module(nn.ReLU, (16, 64, 112, 112), 5),
    "Dropout": module(lambda: nn.Dropout(0.1), (ROWS, INNER), 4),
    "softmax": pointwise(lambda x: torch.softmax(x, -1), (8, 12, 128, 128), tensors=5),
    "x * sigmoid(y)": pointwise(lambda x, y: x * torch.sigmoid(y), (ROWS, INNER), (ROWS, INNER), tensors=8),
    "transpose": pointwise(lambda x: x.view(8, 128, 12, 64).transpose(1, 2).contiguous(), (8, 128, 12 * 64), tensors=4),
    "mean of rows": pointwise(lambda x: x.mean(-1), (ROWS, INNER), tensors=2),
    "cross entropy": Layer(
        lambda: Function(F.cross_entropy),
        ((ROWS, VOCABULARY), (ROWS,)),
        elements=3 * ROWS * VOCABULARY,
        labels=VOCABULARY,
    ),
}


def step_of(net: nn.Module, inputs: list[Tensor], gradient: Tensor) -> Callable[[], None]:
    """Forward and backward, into gradients that are made anew."""
    leaves = [t for t in (*inputs, *net.parameters()) if t.requires_grad]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        net(*inputs).backward(gradient)

    return step


def compare(layer: Layer, dtype: torch.dtype, seconds: float) -> dict[str, float]:
    """Median seconds of eager and of ours."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in layer.shapes]
    if layer.labels:
        inputs[-1] = torch.randint(layer.labels, layer.shapes[-1])
    plain, wrapped = (layer.build().to(dtype) for _ in range(2))
    with torch.no_grad():
        gradient = torch.ones_like(plain(*inputs))
    steps = [step_of(net, inputs, gradient) for net in (plain, ORTModule(wrapped))]
    eager, ours = (statistics.median(times) for times in in_turn(steps, seconds))
    return {"eager": eager, "ours": ours}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), metavar="NAME")
    p.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    p.add_argument("--seconds", type=float, default=2.0, help="of each row of the table")
    p.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    a = p.parse_args()
    warnings.simplefilter("ignore")
    bandwidth = copy_bandwidth()
    figures: list[dict] = []
    for dtype in a.dtypes:
        flops = gemm_flops(DTYPES[dtype])
        title = f"{dtype}: GEMM {flops / 1e9:.0f} GFLOP/s, copy {bandwidth / 1e9:.1f} GB/s"
        table = Table(title=title)
        for column in ("", "eager, ms", "ORTModule, ms", "ratio", "rate", "of ceiling"):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        here = []
        for name in a.layers:
            layer = LAYERS[name]
            cell = compare(layer, DTYPES[dtype], a.seconds)
            gc.collect()
            work = 3 * layer.flops or layer.elements * DTYPES[dtype].itemsize
            rate, ceiling = work / cell["ours"], flops if layer.flops else bandwidth
            here.append({"layer": name, "dtype": dtype, **cell, "rate": rate, "ceiling": ceiling})
            unit = "GFLOP/s" if layer.flops else "GB/s"
            times = (f"{1e3 * cell['eager']:.2f}", f"{1e3 * cell['ours']:.2f}", f"{ratio_of(cell):.2f}x")
            table.add_row(name, *times, f"{rate / 1e9:.1f} {unit}", f"{100 * rate / ceiling:.0f} %")
        table.add_section()
        table.add_row("geometric mean", "", "", f"{geometric_mean(ratio_of(cell) for cell in here):.2f}x", "", "")
        Console(width=110).print(table)
        figures += here
    if a.json:
        a.json.write_text(json.dumps({"machine": machine(), "layers": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
