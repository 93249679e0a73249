"""Pools of images with channels last, which the emulated GPU has kernels for, and what is in the order of elements."""

from __future__ import annotations

import pytest
import torch
from emulated_gpu import Gpu
from torch import Tensor

from case import type_text
from ortmodule_c import _C

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
POOLS = (
    ("MaxPool", "kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1]"),
    ("MaxPool", "kernel_shape=[2, 3], dilations=[2, 3], ceil_mode=1"),
    ("AveragePool", "kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1], count_include_pad=1"),
    ("AveragePool", "kernel_shape=[2, 2], strides=[1, 3], ceil_mode=1, divisor_override=3"),
    ("AveragePool", "kernel_shape=[7, 9]"),
    ("AdaptiveAvgPool", "output_size=[3, 4]"),
    ("AdaptiveAvgPool", "output_size=[1, 1]"),
)
SHAPES = ((2, 3, 7, 9), (1, 8, 7, 9), (3, 17, 7, 9), (2, 1, 7, 9), (0, 3, 7, 9))


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def text(op: str, x: Tensor, attributes: str) -> str:
    outputs = "%y, %i" if op == "MaxPool" else "%y"
    return f"input %x : {type_text(x)} grad\n{outputs} = {op}(%x) {{{attributes}}}\nreturn {outputs}\n"


def last(t: Tensor) -> Tensor:
    return t.movedim(1, -1).contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("op", "attributes"), POOLS)
def test_a_pool_has_the_cpus_results_of_channels_second(
    gpu: Gpu, op: str, attributes: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = random(*shape, dtype=dtype)
    rest = [False] * (op == "MaxPool")
    plan = _C.Session(text(op, x, attributes), {}).plan([x], [True], [True, *rest])
    want, run = plan.forward([x], 0)
    dy = random(*want[0].shape, dtype=dtype, seed=1)
    (dx,) = plan.backward(run, [x], want, [dy, *([None] * len(rest))])
    given, grad = gpu.put(last(x)), gpu.put(last(dy))
    session = gpu.core.Session(text(op, last(x), f"{attributes}, channels_last=1"), {}, provider="gpu")
    plan = session.plan([given], [True], [True, *rest])
    got, run = plan.forward([given], 0)
    grads = plan.backward(run, [given], got, [grad, *([None] * len(rest))])
    for ours, theirs in zip([*got, *grads], [*want, dx], strict=True):
        torch.testing.assert_close(gpu.get(ours), last(theirs))


def test_dropout_goes_by_the_order_of_elements_that_the_module_has(gpu: Gpu) -> None:
    x, w = random(2, 4, 5, 6, dtype=torch.bfloat16).abs(), torch.ones(4, 4, 1, 1, dtype=torch.bfloat16)
    graph = (
        f"input %x : {type_text(x)}\ninput %w : {type_text(w)}\n%y = Conv(%x, %w)\n%z = Relu(%y)\n"
        "%d = Dropout(%z) {p=0.5}\n%s = Conv(%d, %w)\nreturn %d, %s\n"
    )
    got, want = gpu.forward(graph, [x, w], outputs=2), gpu.on_the_cpu(graph, [x, w], outputs=2)
    assert torch.equal(got[0] == 0, want[0] == 0)
    torch.testing.assert_close(got, want)


def test_the_cpu_has_no_kernels_of_them() -> None:
    x = random(2, 7, 9, 3, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match=r"MaxPool.*: cpu has no kernel for channels_last=1"):
        _C.Session(text("MaxPool", x, "kernel_shape=[2, 2], channels_last=1"), {}).plan([x], [False], [False, False])
