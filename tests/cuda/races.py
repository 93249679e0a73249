"""Kernels of every family that has a block's threads wait for one another, as the provider launches them.

test_races.py runs them under ThreadSanitizer, as they are and without each of their barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import test_attention
import torch
from emulated_gpu import Gpu
from test_lines import graph, random, reduced
from test_moves import node
from test_optimizers import RULES, Optimizer
from torch import Tensor


class Case(NamedTuple):
    """What is launched, and the barriers that it needs: for each file their numbers in it."""

    run: Callable[[Gpu], object]
    needs: dict[str, tuple[int, ...]]


def of(call: str, *inputs: Tensor | tuple[int, ...], outputs: int = 1, constants: str = "") -> Callable[[Gpu], object]:
    """An op of tensors, of which some have these shapes."""
    given = [random(*x, seed=i).abs() if isinstance(x, tuple) else x for i, x in enumerate(inputs)]
    text = node(call, given, constants) if outputs == 1 else f"{constants}\n{graph(call, given, outputs)}"
    return lambda gpu: gpu.forward(text, given, outputs=outputs)


def reductions(gpu: Gpu) -> None:
    """By a block of a line, by columns, and both in groups."""
    for shape, axes in (((2, 1100), [1]), ((70, 3), [0]), ((3, 4, 16, 8), [0, 2, 3]), ((9, 2, 6, 3), [0, 2])):
        reduced(gpu, "ReduceSum", random(*shape), axes)


def steps(rule: str, norm_type: float) -> Callable[[Gpu], object]:
    def take(gpu: Gpu) -> None:
        Optimizer(gpu, True, *RULES[rule], torch.float32).step_with_norm(max_norm=0.5, norm_type=norm_type)

    return take


def attention(dtype: torch.dtype, dim: int, how: str) -> Callable[[Gpu], object]:
    """Forward and backward, several tiles each way, none of the last whole; the last keys are seen by no query."""
    inputs, dy = test_attention.operands((1, 2, 1, 70, 140, dim, dim), dtype)
    return lambda gpu: test_attention.step(gpu, "gpu", inputs, dy, how)


LINES, BOXES, PREFIX, DIGITS, UPDATES = (
    f"cuda/gpu/{name}.h" for name in ("lines", "boxes", "prefix", "digits", "updates")
)
SCAN, FIRST, TILES, MMA = (f"cuda/ops/{name}.h" for name in ("scan", "topk", "attention", "attention_mma"))
ROW, COLUMN, CHANNELS = (2, 1100), (70, 3), (9, 2, 6, 3)
IDS = torch.arange(600) * 7 % 200  # several tiles
ONCE, TWICE = {LINES: (1,)}, {LINES: (0, 1)}  # that a kernel joins what its threads have

CASES = {
    "reduction": Case(reductions, ONCE),
    "softmax": Case(of("Softmax(%x0)", ROW), ONCE),
    "softmax of columns": Case(of("LogSoftmax(%x0) {axis=0}", COLUMN), ONCE),
    "norm": Case(of("LayerNormalization(%x0)", ROW, outputs=3), ONCE),
    "gradient of a norm": Case(
        of("LayerNormGrad(%x0, %x1, %x2, %x3, %x4)", ROW, ROW, (1100,), (2, 1), (2, 1), outputs=3), ONCE
    ),
    "gradients of a norm at once": Case(
        of("LayerNormGrad(%x0, %x1, %x2, %x3, %x4)", (9, 256), (9, 256), (256,), (9, 1), (9, 1), outputs=3), TWICE
    ),
    "loss": Case(
        of("CrossEntropy(%x0, %x1, %x2) {label_smoothing=0.25}", ROW, torch.tensor([0, 9]), (1100,), outputs=4), TWICE
    ),
    "batch norm": Case(of("BatchNorm(%x0, _, _, _, _, %x0) {relu=1}", CHANNELS, outputs=3), ONCE),
    "gradient of batch norm": Case(
        of("BatchNormGrad(%x0, %x1, %x2, %x3, %x4)", CHANNELS, CHANNELS, (2,), (2,), (2,), outputs=3), ONCE
    ),
    "transpose": Case(of("Transpose(%x0) {perm=[1, 0]}", (70, 131)), {BOXES: (0,)}),
    "sort": Case(of("EmbeddingGrad(%x0, %x1) {shape=[200, 2]}", (600, 2), IDS), {DIGITS: (0, 1, 2), PREFIX: (0,)}),
    "running sums": Case(of("CumSum(%x0, %d)", (2, 2500), constants="const %d : i64[] = [1]"), {PREFIX: (0, 1)}),
    "place of the largest": Case(of("ArgMax(%x0) {axis=1}", ROW), {SCAN: (0, 1)}),
    "first of lines": Case(
        of("TopK(%x0, %k)", (2, 2500), outputs=2, constants="const %k : i64[1] = [700]"), {FIRST: tuple(range(6))}
    ),
    "lamb": Case(steps("lamb", 2.0), {UPDATES: (0, 1, 2)}),
    "adam": Case(steps("adam", torch.inf), {UPDATES: (0, 1)}),
    "attention": Case(attention(torch.float32, 20, "is_causal=1,p=0.4"), {TILES: tuple(range(18))}),
    "attention of 16": Case(attention(torch.bfloat16, 16, "is_causal=0"), {MMA: (0, 1, 2, 3)}),
    "attention of 16 with dropout": Case(attention(torch.bfloat16, 20, "is_causal=1,p=0.4"), {}),
}
