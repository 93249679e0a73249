"""Random graphs: results and gradients of the whole chain of passes equal PyTorch's, node by node."""

from __future__ import annotations

import random

import pytest
import reference
import torch

from ortmodule_c import _C

SHAPES = [(4, 6), (6,), (1, 6), (4, 1), (), (2, 4, 6), (6, 4), (2, 1, 6)]
UNARY = ["Relu", "Tanh", "Sigmoid", "Neg", "Silu", "Gelu", "Identity", "Abs", "Sin", "Detach", "Softplus"]
BINARY = ["Add", "Sub", "Mul", "Max", "Min"]
COMPARE = ["Greater", "LessOrEqual", "Equal"]
REDUCE = ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"]


def axes(rng: random.Random, rank: int) -> list[int]:
    return sorted(rng.sample(range(rank), rng.randint(1, rank)))


class Writer:
    """Grows a graph text one random node at a time."""

    def __init__(self, seed: int, dtype: str) -> None:
        self.rng, self.dtype = random.Random(seed), dtype
        self.lines: list[str] = []
        self.shapes: dict[str, tuple[int, ...]] = {}

    def name(self) -> str:
        return f"%v{len(self.lines)}"

    def constant(self, kind: str, elements: list[float] | list[int]) -> str:
        name = self.name()
        self.lines.append(f"const {name} : {kind} = {elements}")
        return name

    def ints(self, values: list[int]) -> str:
        return self.constant(f"i64[{len(values)}]", values)

    def input(self) -> None:
        name, shape = self.name(), self.rng.choice(SHAPES)
        grad = " grad" if self.rng.random() < 0.8 else ""
        self.lines.append(f"input {name} : {self.dtype}[{','.join(map(str, shape))}]{grad}")
        self.shapes[name] = shape

    def node(self, op: str, ins: list[str], shape: tuple[int, ...], attrs: str = "") -> None:
        name = self.name()
        self.lines.append(f"{name} = {op}({', '.join(ins)})" + (f" {{{attrs}}}" if attrs else ""))
        self.shapes[name] = shape

    def value(self, min_rank: int = 0) -> str:
        fitting = [name for name, shape in self.shapes.items() if len(shape) >= min_rank]
        # Late values more often than early ones, so that graphs are deep.
        return fitting[max(self.rng.randrange(len(fitting)), self.rng.randrange(len(fitting)))]

    def unary(self, x: str) -> None:
        self.node(self.rng.choice(UNARY), [x], self.shapes[x])

    def binary(self, x: str, y: str) -> None:
        try:
            shape = torch.broadcast_shapes(self.shapes[x], self.shapes[y])
        except RuntimeError:
            return
        self.node(self.rng.choice(BINARY), [x, y], tuple(shape))

    def scalar(self, x: str) -> None:
        op, c = self.rng.choice([("Add", 0.0), ("Mul", 1.0), ("Mul", 0.5), ("Pow", 2.0), ("Div", 4.0), ("Sub", 1.5)])
        self.node(op, [x, self.constant(f"{self.dtype}[]", [c])], self.shapes[x])

    def reduce(self, x: str) -> None:
        over, keep = axes(self.rng, len(self.shapes[x])), self.rng.randint(0, 1)
        shape = [1 if i in over else d for i, d in enumerate(self.shapes[x]) if keep or i not in over]
        self.node(
            self.rng.choice(REDUCE[: 2 if 0 in self.shapes[x] else 4]),
            [x, self.ints(over)],
            tuple(shape),
            f"keepdims={keep}",
        )

    def reshape(self, x: str) -> None:
        same = [s for s in SHAPES if torch.Size(s).numel() == torch.Size(self.shapes[x]).numel()]
        if not same:
            return
        shape = self.rng.choice(same)
        self.node("Reshape", [x, self.ints(list(shape))], shape)

    def transpose(self, x: str) -> None:
        perm = self.rng.sample(range(len(self.shapes[x])), len(self.shapes[x]))
        self.node("Transpose", [x], tuple(self.shapes[x][p] for p in perm), f"perm={perm}")

    def expand(self, x: str) -> None:
        fits = [s for s in SHAPES if self.broadcasts(self.shapes[x], s)]
        if not fits:
            return
        shape = self.rng.choice(fits)
        self.node("Expand", [x, self.ints(list(shape))], shape)

    @staticmethod
    def broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
        try:
            return torch.broadcast_shapes(a, b) == torch.Size(b)
        except RuntimeError:
            return False

    def norm(self, x: str) -> None:
        self.node(self.rng.choice(["Softmax", "LogSoftmax"]), [x], self.shapes[x], f"axis={self.axis(x)}")

    def layer_norm(self, x: str) -> None:
        name = self.name()
        norm, kept = self.rng.choice([("LayerNormalization", f"{name}.mean, {name}.rstd"), ("RmsNorm", f"{name}.rstd")])
        self.lines.append(f"{name}, {kept} = {norm}({x}) {{axis={self.axis(x)}}}")
        self.shapes[name] = self.shapes[x]

    def axis(self, x: str) -> int:
        return self.rng.randrange(len(self.shapes[x]))

    def resized(self, x: str, axis: int, size: int) -> tuple[int, ...]:
        shape = self.shapes[x]
        return (*shape[:axis], size, *shape[axis + 1 :])

    def slice(self, x: str) -> None:
        axis, step = self.axis(x), self.rng.choice([1, 1, 2, -1, -2])
        start = -1 if step < 0 else self.rng.choice([0, 1, -1, -2])
        end = self.rng.choice([-1, 2, 3, 100, -100])
        size = len(range(self.shapes[x][axis])[start:end:step])
        ins = [x, *(self.ints([i]) for i in (start, end, axis, step))]
        self.node("Slice", ins, self.resized(x, axis, size))

    def concat(self, x: str) -> None:
        alike = [name for name, shape in self.shapes.items() if shape == self.shapes[x]]
        parts, axis = self.rng.choices(alike, k=self.rng.randint(1, 3)), self.axis(x)
        self.node("Concat", parts, self.resized(x, axis, len(parts) * self.shapes[x][axis]), f"axis={axis}")

    def split(self, x: str) -> None:
        axis = self.axis(x)
        cut = self.rng.randint(0, self.shapes[x][axis])
        sizes = [cut, self.shapes[x][axis] - cut]
        at = self.ints(sizes)
        names = [f"{self.name()}.{k}" for k in range(2)]
        self.lines.append(f"{', '.join(names)} = Split({x}, {at}) {{axis={axis}}}")
        self.shapes |= {name: self.resized(x, axis, size) for name, size in zip(names, sizes, strict=True)}

    def pad(self, x: str) -> None:
        before, after = ([self.rng.choice([0, 0, 1]) for _ in self.shapes[x]] for _ in range(2))
        shape = tuple(b + d + a for b, d, a in zip(before, self.shapes[x], after, strict=True))
        self.node("Pad", [x, self.ints([*before, *after])], shape)

    def gather(self, x: str) -> None:
        axis = self.axis(x)
        n = self.shapes[x][axis]
        at = [self.rng.randrange(-n, n) for _ in range(self.rng.randint(1, 4) if n else 0)]
        self.node("Gather", [x, self.ints(at)], self.resized(x, axis, len(at)), f"axis={axis}")

    def where(self, x: str, y: str) -> None:
        try:
            shape = torch.broadcast_shapes(self.shapes[x], self.shapes[y])
        except RuntimeError:
            return
        condition = self.name()
        self.lines.append(f"{condition} = {self.rng.choice(COMPARE)}({x}, {y})")
        self.node("Where", [condition, *self.rng.sample([x, y], 2)], tuple(shape))

    def matmul(self, x: str, y: str) -> None:
        try:
            shape = torch.matmul(
                torch.empty(self.shapes[x], device="meta"), torch.empty(self.shapes[y], device="meta")
            ).shape
        except RuntimeError:
            return
        self.node("MatMul", [x, y], tuple(shape))

    def text(self, n: int) -> str:
        for _ in range(self.rng.randint(2, 4)):
            self.input()
        one = [self.unary, self.scalar, self.reshape, self.expand]
        one_axis = [
            self.reduce,
            self.transpose,
            self.norm,
            self.layer_norm,
            self.slice,
            self.concat,
            self.split,
            self.pad,
            self.gather,
        ]
        while len(self.shapes) < n:
            kind = self.rng.randrange(4)
            if kind == 0:
                self.rng.choice(one)(self.value())
            elif kind == 1 and any(self.shapes.values()):
                self.rng.choice(one_axis)(self.value(min_rank=1))
            elif kind == 2 and any(self.shapes.values()):
                self.matmul(self.value(min_rank=1), self.value(min_rank=1))
            else:
                self.rng.choice([self.binary, self.binary, self.where])(self.value(), self.value())
        outs = [*self.rng.sample(list(self.shapes), 2), list(self.shapes)[-1]]
        return "\n".join([*self.lines, f"return {', '.join(outs)}"]) + "\n"


@pytest.mark.parametrize("seed", range(200))
def test_random_graph(seed: int) -> None:
    dtype = "f64" if seed % 3 else "f32"
    tolerance = 1e-9 if dtype == "f64" else 2e-4
    text = Writer(seed, dtype).text(8 + seed % 40)
    inputs = reference.random_inputs(text, seed)
    wants = [line.endswith(" grad") for line in text.splitlines() if line.startswith("input")]
    leaves = [x.requires_grad_() if want else x for x, want in zip(inputs, wants, strict=True)]
    want = reference.run(text, leaves)
    g = torch.Generator().manual_seed(seed)
    given = [k <= seed % len(want) for k in range(len(want))]  # not every output has a gradient
    douts = [
        torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype) if gives else None
        for y, gives in zip(want, given, strict=True)
    ]
    pairs = [(y, d) for y, d in zip(want, douts, strict=True) if y.requires_grad and d is not None]
    asked = [x for x in leaves if x.requires_grad]
    grads = iter(
        torch.autograd.grad([y for y, _ in pairs], asked, [d for _, d in pairs], allow_unused=True)
        if pairs and asked
        else [None] * len(asked)
    )

    plain = [x.detach() for x in inputs]
    plan = _C.Session(text, {}).plan(plain, wants, given)
    got, token = plan.forward(plain, 0)
    for a, b in zip(got, want, strict=True):
        close(a, b.detach(), tolerance)
    if token is None:
        return
    results = plan.backward(token, plain, got, douts)
    for a, asks in zip(results, wants, strict=True):
        b = next(grads) if asks else None
        if a is not None and b is not None:
            close(a, b, tolerance)
        else:
            assert b is None or not b.any()
            assert a is None or not a.any()
    check_some_gradients(plan, plain, douts, results, [i for i, asks in enumerate(wants) if asks and (seed + i) % 2])


def check_some_gradients(
    plan: _C.Plan,
    inputs: list[torch.Tensor],
    douts: list[torch.Tensor | None],
    all_results: list[torch.Tensor | None],
    some: list[int],
) -> None:
    """Where some gradients are needed they have the same bits, and nothing is read that is not told."""
    needed, reads, reads_outputs = plan.needed(0, some)
    assert len(needed) >= plan.n_steps
    outputs, token = plan.forward(inputs, 0)
    assert token is not None

    def known(tensors: list[torch.Tensor], which: tuple[int, ...]) -> list[torch.Tensor]:
        return [t if i in which else torch.full_like(t, -1e9) for i, t in enumerate(tensors)]

    results = plan.backward(token, known(inputs, reads), known(outputs, reads_outputs), douts, needed=needed)
    for i in some:
        a, b = results[i], all_results[i]
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a.nan_to_num(), b.nan_to_num())


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    peak = max([1.0, *want.abs().flatten().tolist()])
    torch.testing.assert_close(got, want, atol=tolerance * peak, rtol=tolerance, equal_nan=True)
