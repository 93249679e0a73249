"""Images with channels last on the emulated GPU: pools of them, and graphs that are laid out so or not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def text(op: str, x: Tensor, attributes: str) -> str:
    outputs = "%y, %i, %t" if op == "MaxPool" else "%y"
    return f"input %x : {type_text(x)} grad\n{outputs} = {op}(%x) {{{attributes}}}\nreturn {outputs}\n"


def last(t: Tensor) -> Tensor:
    return t.movedim(1, -1).contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("op", "attributes"), POOLS)
def test_a_pool_has_the_cpus_results_of_channels_second(
    gpu: Gpu, op: str, attributes: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = normal(*shape, dtype=dtype)
    rest = [False] * (2 if op == "MaxPool" else 0)
    plan = _C.Session(text(op, x, attributes), {}).plan([x], [True], [True, *rest])
    want, run = plan.forward([x], 0)
    dy = normal(*want[0].shape, dtype=dtype, seed=1)
    (dx,) = plan.backward(run, [x], want, [dy, *([None] * len(rest))])
    given, grad = gpu.put(last(x)), gpu.put(last(dy))
    session = gpu.core.Session(text(op, last(x), f"{attributes}, channels_last=1"), {}, provider="gpu")
    plan = session.plan([given], [True], [True, *rest])
    got, run = plan.forward([given], 0)
    grads = plan.backward(run, [given], got, [grad, *([None] * len(rest))])
    for ours, theirs in zip([*got, *grads], [*want, dx], strict=True):
        torch.testing.assert_close(gpu.get(ours), last(theirs))


def test_dropout_goes_by_the_order_of_elements_that_the_module_has(gpu: Gpu) -> None:
    x, w = normal(2, 4, 5, 6, dtype=torch.bfloat16).abs(), torch.ones(4, 4, 1, 1, dtype=torch.bfloat16)
    graph = (
        f"input %x : {type_text(x)}\ninput %w : {type_text(w)}\n%y = Conv(%x, %w)\n%z = Relu(%y)\n"
        "%d = Dropout(%z) {p=0.5}\n%s = Conv(%d, %w)\nreturn %d, %s\n"
    )
    got, want = gpu.forward(graph, [x, w], outputs=2), gpu.on_the_cpu(graph, [x, w], outputs=2)
    assert torch.equal(got[0] == 0, want[0] == 0)
    torch.testing.assert_close(got, want)


def test_the_cpu_has_no_kernels_of_them() -> None:
    x = normal(2, 7, 9, 3, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match=r"MaxPool.*: cpu has no kernel for channels_last=1"):
        _C.Session(text("MaxPool", x, "kernel_shape=[2, 2], channels_last=1"), {}).plan([x], [False], [False] * 3)


class Named(NamedTuple):
    name: str
    shape: tuple[int, ...]


class Program:
    """A graph of images drawn at random, of small integers: sums of any order are the same bits."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.lines: list[str] = []
        self.inputs: list[Tensor] = []
        self.images = {self.given(self.shape()): None for _ in range(2)}  # in the order of their making
        for _ in range(self.chance.randint(4, 10)):
            self.add(self.chance.choice(self.ops))
        made = [*self.images]
        self.outputs = [*dict.fromkeys(f"%{v.name}" for v in (made[-1], *self.chance.sample(made, 2)))]

    def shape(self) -> tuple[int, ...]:
        return tuple(self.chance.choice((1, 2, 4, 4)) for _ in range(4))

    def image(self) -> Named:
        return self.chance.choice([*self.images])

    def given(self, shape: tuple[int, ...]) -> Named:
        name, numbers = f"x{len(self.inputs)}", [self.chance.randint(-1, 1) for _ in range(math.prod(shape))]
        self.inputs.append(torch.tensor(numbers, dtype=torch.bfloat16).view(shape))
        return Named(name, shape)

    def integers(self, values: Sequence[int]) -> str:
        name = f"%c{len(self.lines)}"
        self.lines.append(f"const {name} : i64[{len(values)}] = {[*values]}")
        return name

    def node(
        self, op: str, given: Sequence[object], shape: Sequence[int], more: int = 0, **attributes: object
    ) -> Named:
        name = f"v{len(self.lines)}"
        outputs = ", ".join(f"%{name}{'_' * k}" for k in range(1 + more))
        operands = ", ".join(f"%{v.name}" if isinstance(v, Named) else str(v) for v in given)
        text = ", ".join(f"{name}={value}" for name, value in attributes.items())
        self.lines.append(f"{outputs} = {op}({operands}) {text and '{' + text + '}'}")
        made = Named(name, tuple(shape))
        if len(shape) == 4 and math.prod(shape) < 2000:
            self.images[made] = None
        return made

    def conv(self, x: Named) -> None:
        (n, c, h, w), out, k, groups = x.shape, self.chance.choice((1, 4)), self.chance.choice((1, 3)), 1
        if self.chance.random() < 0.3:
            out = groups = c
        how = {"pads": [k // 2] * 4, "strides": [1, self.chance.choice((1, 2))], "group": groups}
        given = [x, self.given((out, c // groups, k, k)), self.given((out,))][: self.chance.randint(2, 3)]
        self.node("Conv", given, (n, out, h, (w - 1) // how["strides"][1] + 1), **how)

    def spread(self, x: Named) -> None:
        n, c, h, w = x.shape
        self.node("ConvTranspose", [x, self.given((c, 2, 2, 1))], (n, 2, 2 * h, w), strides=[2, 1])

    def largest(self, x: Named) -> None:
        n, c, h, w = x.shape
        made = (n, c, (h - 1) // 2 + 1, w)
        self.node("MaxPool", [x], made, 2, kernel_shape=[3, 1], strides=[2, 1], pads=[1, 0, 1, 0])

    def average(self, x: Named) -> None:
        shape = (*x.shape[:2], x.shape[2], 1)
        self.node("AdaptiveAvgPool", [x], shape, output_size=[*shape[2:]])

    def unary(self, x: Named) -> None:
        self.node(self.chance.choice(("Relu", "Neg", "Abs")), [x], x.shape)

    def binary(self, x: Named) -> None:
        other = self.chance.choice([v for v in self.images if v.shape == x.shape])
        self.node(self.chance.choice(("Add", "Sub", "Max")), self.chance.sample([x, other], 2), x.shape)

    def repeated(self, x: Named) -> None:
        keep = self.chance.randint(0, 4)
        dims = tuple(self.chance.choice((1, n)) for n in x.shape)[4 - keep :]
        self.node(self.chance.choice(("Add", "Mul")), self.chance.sample([x, self.given(dims)], 2), x.shape)

    def joined(self, x: Named) -> None:
        axis = self.chance.randrange(4)
        shape = tuple(2 * n if d == axis else n for d, n in enumerate(x.shape))
        other = self.chance.choice([v for v in self.images if v.shape == x.shape])
        self.node("Concat", [x, other], shape, axis=axis - self.chance.choice((0, 4)))

    def split(self, x: Named) -> None:
        axis = self.chance.randrange(4)
        rest = self.chance.randint(0, x.shape[axis] - 1)
        shape = [n - rest if d == axis else n for d, n in enumerate(x.shape)]
        self.node("Split", [x, self.integers([shape[axis], rest])], shape, 1, axis=axis)

    def sliced(self, x: Named) -> None:
        axes = self.chance.sample(range(4), 2)
        shape = tuple((n + 1) // 2 if d in axes else n for d, n in enumerate(x.shape))
        ends = [x.shape[a] for a in axes]
        self.node("Slice", [x, *map(self.integers, ([0, 0], ends, axes, [2, 2]))], shape)

    def padded(self, x: Named) -> None:
        pads = [self.chance.randint(0, 1) for _ in range(8)]
        self.node("Pad", [x, self.integers(pads)], [n + pads[d] + pads[4 + d] for d, n in enumerate(x.shape)])

    def reduced(self, x: Named) -> None:
        axes = sorted(self.chance.sample(range(4), self.chance.randint(1, 3)))
        kept = [1 if d in axes else n for d, n in enumerate(x.shape)]
        op = self.chance.choice(("ReduceSum", "ReduceMax", "ReduceMean"))
        if self.chance.random() < 0.5:
            self.node(op, [x, self.integers(axes)], kept, keepdims=1)
            return
        left = [n for d, n in enumerate(x.shape) if d not in axes]
        y = self.node(op, [x, self.integers(axes)], left, keepdims=0)
        y = self.node("Reshape", [y, self.integers(kept)], kept)
        self.node("Expand", [y, self.integers(x.shape)], x.shape)

    def turned(self, x: Named) -> None:
        perm = self.chance.choice(([0, 2, 3, 1], [0, 3, 1, 2], [0, 1, 3, 2], [1, 0, 2, 3]))
        self.node("Transpose", [x], [x.shape[d] for d in perm], perm=perm)

    def flattened(self, x: Named) -> None:
        n, c, h, w = x.shape
        y = self.node("Reshape", [x, self.integers([n, c * h, w])], [n, c * h, w])
        self.node("Reshape", [self.node("Neg", [y], y.shape), self.integers([n, h, c, w])], [n, h, c, w])

    def widened(self, x: Named) -> None:
        y = self.node("Cast", [x], [], to=1)
        self.node("Cast", [self.node("Add", [y, y], [])], x.shape, to=16)

    ops = (conv, conv, conv, spread, largest, average, unary, binary, repeated, joined, split, sliced, padded, reduced)
    ops += (turned, flattened, widened, binary)

    def add(self, op: Callable[[Program, Named], None]) -> None:
        op(self, self.image())

    @property
    def text(self) -> str:
        given = [f"input %x{i} : {type_text(t)} grad" for i, t in enumerate(self.inputs)]
        return "\n".join([*given, *self.lines, f"return {', '.join(self.outputs)}", ""])

    def step(self, core: Any, provider: str, put: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Outputs, and gradients of two backwards: of all outputs, and of the first."""
        given, n = [put(t) for t in self.inputs], len(self.outputs)
        masks = [True] * n, [True] + [False] * (n - 1)
        plan = core.Session(self.text, {}, provider=provider).plan(
            given, [True] * len(given), *masks, retain_graph=True
        )
        outputs, run = plan.forward(given, 0)
        results = [*outputs]
        for mask in masks:
            ones = [torch.ones(y.shape, dtype=torch.bfloat16) for y in outputs]
            grads = [put(t) if is_given else None for t, is_given in zip(ones, mask, strict=True)]
            results += plan.backward(run, given, outputs, grads, keep=True)
        return [t for t in results if t is not None]


@pytest.mark.parametrize("seed", range(60))
def test_a_random_program_has_the_cpus_bits(gpu: Gpu, seed: int) -> None:
    program = Program(seed)
    want = program.step(_C, "cpu", lambda t: t)
    got = [gpu.get(t) for t in program.step(gpu.core, "gpu", gpu.put)]
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs), program.text
