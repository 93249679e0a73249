"""Graphs drawn at random in their text form, with inputs that hold the special values of each dtype."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DIMS = (0, 1, 2, 2, 3, 3)  # drawn from these, dims coincide more often than not
LONGEST = 16  # constants of more elements are not part of a text
DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
ONNX = {"f32": 1, "f64": 11, "f16": 10, "bf16": 16, "i64": 7, "i32": 6, "i16": 5, "i8": 3, "u8": 2, "bool": 9}
REALS = ("f32", "f64")
FLOATS = ("f32", "f64", "f16", "bf16")
NUMBERS = ("f32", "f64", "i64", "i32", "u8")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Value:
    name: str
    dtype: str
    shape: Shape


def special_values(dtype: str, values: str) -> list[float] | list[int]:
    """Zeros, ones, neighbours of one, denormals; "special": infinities and NaN too; "most": also the largest."""
    kind = DTYPES[dtype]
    if kind == torch.bool:
        return [0, 1]
    if not kind.is_floating_point:
        info = torch.iinfo(kind)
        return [0, 1, 2, 3, 7, *([info.max, info.max - 1, info.min, info.min + 1] if values == "most" else [])]
    fi = torch.finfo(kind)
    positive = [0.0, 1.0, 1.0 + fi.eps, 0.5, 3.0, fi.tiny, fi.smallest_normal / 4]
    positive += [] if values == "finite" else [math.inf, math.nan]
    positive += [fi.max] if values == "most" else []
    return [*positive, *(-v for v in positive)]


class Draw:
    """A graph under construction and the generator of random numbers that everything in it is drawn from."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self.values: list[Value] = []
        self.n_names = 0
        self.condition = 1.0  # what a layer, or a sum of many, multiplies rounding errors with

    # ---- choices ----

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def shape(self, rank: int | None = None, dims: Sequence[int] = DIMS) -> Shape:
        rank = self.rng.randint(0, 3) if rank is None else rank
        return tuple(self.rng.choice(dims) for _ in range(rank))

    def part(self, shape: Shape) -> Shape:
        """A shape that broadcasts to `shape`: any of its axes of length 1, leading ones left out."""
        cut = tuple(1 if self.chance(0.3) else d for d in shape)
        return cut[self.rng.randint(0, len(cut)) :] if self.chance(0.5) else cut

    def axes(self, rank: int, at_least: int = 1) -> list[int]:
        """Distinct axes, ascending, some written as negative ones."""
        picked = sorted(self.rng.sample(range(rank), self.rng.randint(min(at_least, rank), rank)))
        return [a - rank if self.chance(0.3) else a for a in picked]

    # ---- lines ----

    def name(self) -> str:
        self.n_names += 1
        return f"%v{self.n_names}"

    def add(self, dtype: str, shape: Shape) -> Value:
        self.values.append(Value(self.name(), dtype, shape))
        return self.values[-1]

    def input(self, dtype: str, shape: Shape) -> Value:
        v = self.add(dtype, shape)
        grad = " grad" if DTYPES[dtype].is_floating_point and self.chance(0.9) else ""
        self.lines.append(f"input {v.name} : {dtype}[{','.join(map(str, shape))}]{grad}")
        return v

    def const(self, dtype: str, elements: Sequence[float | int], shape: Shape | None = None) -> Value:
        shape = (len(elements),) if shape is None else shape
        v = Value(self.name(), dtype, shape)
        self.lines.append(f"const {v.name} : {dtype}[{','.join(map(str, shape))}] = [{', '.join(map(str, elements))}]")
        return v

    def ints(self, *elements: int) -> Value:
        return self.const("i64", elements)

    def filled(self, like: Value, x: float | int, near: bool = False) -> Value:
        """A constant of one value in some form that broadcasts; `near`: or of a neighbour of it."""
        shape = self.part(like.shape) if self.chance(0.5) else (1,) * self.rng.randint(0, len(like.shape) + 1)
        if math.prod(shape) > LONGEST:
            shape = ()
        kind = DTYPES[like.dtype]
        if kind.is_floating_point:
            x = float(x)
            if near and self.chance(0.3):
                x = self.rng.choice([-x, x * (1 + 1e-7), x * (1 + 1e-15), x + 1e-9])
        else:
            x = int(bool(x)) if kind == torch.bool else max(int(x), torch.iinfo(kind).min)
        return self.const(like.dtype, [x] * math.prod(shape), shape)

    def node(self, op: str, ins: Sequence[Value | None], dtype: str, shape: Shape, attrs: str = "") -> Value:
        v = self.add(dtype, shape)
        operands = ", ".join("_" if x is None else x.name for x in ins)
        self.lines.append(f"{v.name} = {op}({operands})" + (f" {{{attrs}}}" if attrs else ""))
        return v

    def ew(self, op: str, *ins: Value | None, attrs: str = "", dtype: str | None = None) -> Value:
        given = [v for v in ins if v is not None]
        shape = tuple(torch.broadcast_shapes(*(v.shape for v in given)))
        return self.node(op, ins, dtype or given[-1].dtype, shape, attrs)

    def pair(self, op: str, x: Value, y: Value) -> Value:
        """A commutative op, operands in either order."""
        return self.ew(op, x, y) if self.chance(0.5) else self.ew(op, y, x)

    def divisor(self, x: Value) -> Value:
        """x, mostly without zeros if it is an integer: one divided by 0 ends the run."""
        if DTYPES[x.dtype].is_floating_point or self.chance(0.02):
            return x
        zero, one = self.const(x.dtype, [0], ()), self.const(x.dtype, [1], ())
        return self.ew("Where", self.ew("Equal", x, zero, dtype="bool"), one, x)

    def cast(self, x: Value, to: str) -> Value:
        return self.node("Cast", [x], to, x.shape, f"to={ONNX[to]}")

    def reduce(self, op: str, x: Value, axes: Sequence[int], keepdims: bool) -> Value:
        at = {a % len(x.shape) for a in axes}
        shape = tuple(1 if i in at else d for i, d in enumerate(x.shape) if keepdims or i not in at)
        return self.node(op, [x, self.ints(*axes)], x.dtype, shape, f"keepdims={int(keepdims)}")

    def transpose(self, x: Value, perm: Sequence[int] | None = None) -> Value:
        if perm is None and self.chance(0.2):
            return self.node("Transpose", [x], x.dtype, x.shape[::-1])
        perm = self.rng.sample(range(len(x.shape)), len(x.shape)) if perm is None else perm
        return self.node("Transpose", [x], x.dtype, tuple(x.shape[p] for p in perm), f"perm={list(perm)}")

    def reshape(self, x: Value, shape: Shape) -> Value:
        return self.node("Reshape", [x, self.ints(*shape)], x.dtype, shape, "allowzero=1")

    def reshaped(self, shape: Shape) -> Shape:
        """Another shape of as many elements."""
        factors = [d for d in shape if d != 1] + [1] * self.rng.randint(0, 2)
        self.rng.shuffle(factors)
        if len(factors) > 1 and self.chance(0.5):
            factors = [factors[0] * factors[1], *factors[2:]]
        return tuple(factors[:5]) if math.prod(factors[:5]) == math.prod(shape) else shape

    def expand(self, x: Value, shape: Shape) -> Value:
        return self.node("Expand", [x, self.ints(*shape)], x.dtype, tuple(torch.broadcast_shapes(x.shape, shape)))

    # ---- the whole ----

    def text(self, *outs: Value) -> str:
        """The graph that returns `outs`, and now and then something on the way to them."""
        more = [self.rng.choice(self.values)] if self.chance(0.25) else []
        names = ", ".join(v.name for v in [*outs, *more])
        return "\n".join([*self.lines, f"return {names}"]) + "\n"


def fill(dtype: str, shape: Sequence[int], values: str, rng: random.Random) -> Tensor:
    pool = special_values(dtype, values)
    elements = [rng.choice(pool) for _ in range(math.prod(shape))]
    if DTYPES[dtype].is_floating_point and rng.random() < 0.4:  # mostly plain numbers
        elements = [e if rng.random() < 0.1 else rng.uniform(-3, 3) for e in elements]
    return (
        torch.tensor(elements, dtype=torch.float64 if DTYPES[dtype].is_floating_point else None)
        .to(DTYPES[dtype])
        .reshape(tuple(shape))
    )


Pattern = Callable[[Draw], Value]


def any_value(d: Draw, dtypes: tuple[str, ...] = NUMBERS, rank: int | None = None) -> Value:
    return d.input(d.rng.choice(dtypes), d.shape(rank))
