"""Whole graphs at random for the chain of passes: what fusion gathers, what is merged, sums of what was repeated."""

from __future__ import annotations

from collections.abc import Callable

from graph_draw import ONNX, Draw, Value

ALL = tuple(ONNX)
FLOATS = ("f32", "f64", "f16", "bf16")
SMOOTH = [
    "Acos",
    "Asinh",
    "Atan",
    "Ceil",
    "Cos",
    "Erf",
    "Exp",
    "Expm1",
    "Floor",
    "Gelu",
    "HardSwish",
    "Log",
    "Log1p",
    "Reciprocal",
    "Round",
]
SMOOTH += ["Rsqrt", "Sigmoid", "Silu", "Sin", "Sinh", "Softplus", "Sqrt", "Tan", "Tanh"]
UNARY = dict.fromkeys(SMOOTH, FLOATS)
NUMBERS = tuple(t for t in ONNX if t != "bool")
UNARY |= {"Abs": NUMBERS, "Neg": NUMBERS, "Sign": NUMBERS, "Relu": NUMBERS, "Not": ("bool",)}
BINARY = {op: NUMBERS for op in ("Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Max", "Min")}
BINARY |= {"Pow": FLOATS, "Atan2": FLOATS, "And": ("bool",), "Or": ("bool",), "Xor": ("bool",)}
COMPARE = ("Equal", "NotEqual", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")


def elementwise(d: Draw) -> list[Value]:
    """A program of many dtypes: casts there and back, comparisons and choices between arithmetic."""
    full = (d.rng.choice([3, 17, 530]),) if d.chance(0.3) else d.shape(d.rng.randint(0, 3))
    if len(full) == 1 and full[0] > 3 and d.chance(0.5):
        full = (3, *full)
    values = [d.input(d.rng.choice(ALL), d.part(full)) for _ in range(d.rng.randint(1, 4))]

    def like(dtypes: tuple[str, ...]) -> Value:
        """One of the values, of one of these dtypes: cast if it has another."""
        recent = values[max(d.rng.randrange(len(values)), d.rng.randrange(len(values)))]
        if recent.dtype in dtypes:
            return recent
        values.append(d.cast(recent, d.rng.choice(dtypes)))
        return values[-1]

    def operand(x: Value) -> Value:
        same = [v for v in values if v.dtype == x.dtype]
        if d.chance(0.2):
            return d.filled(x, d.rng.choice([0, 1, 2, 3]))
        return d.rng.choice(same)

    for _ in range(d.rng.randint(2, 16)):
        kind = d.rng.randrange(7)
        if kind == 0:
            op = d.rng.choice(list(UNARY))
            values.append(d.ew(op, like(UNARY[op])))
        elif kind == 1:
            x = like(NUMBERS)
            values.append(d.ew(d.rng.choice(COMPARE), x, operand(x), dtype="bool"))
        elif kind == 2:
            x = like(ALL)
            values.append(d.ew("Where", like(("bool",)), x, operand(x)))
        elif kind == 3:
            values.append(d.cast(like(ALL), d.rng.choice(ALL)))
        elif kind == 4:
            x = like(NUMBERS)
            values.append(d.ew("Clip", x, *[None if d.chance(0.3) else operand(x) for _ in range(2)], dtype=x.dtype))
        else:
            op = d.rng.choice(list(BINARY))
            x = like(BINARY[op])
            y = operand(x)
            values.append(d.ew(op, x, d.divisor(y) if op in DIVISIONS else y))
    return d.rng.sample(values, min(len(values), d.rng.randint(1, 3))) + values[-1:]


DIVISIONS = ("Div", "FloorDiv", "Mod")
ARITHMETIC = ("Add", "Sub", "Mul", "Div")
WIDTHS = ("f32", "f64", "bf16", "i64", "i32")


def islands(d: Draw) -> list[Value]:
    """Arithmetic in one dtype between casts from another and to a third: what outside dtypes do not tell."""
    full = d.shape(d.rng.randint(0, 2), dims=(1, 2, 3))
    outer = d.rng.choice(WIDTHS)
    values = [d.input(outer, d.part(full)) for _ in range(3)]
    for _ in range(d.rng.choice((1, 1, 2))):
        inner = d.rng.choice(WIDTHS)
        values = [d.cast(v, inner) for v in values]
        for _ in range(d.rng.randint(1, 3)):
            x, y = d.rng.sample(values, 2)
            op = d.rng.choice(ARITHMETIC)
            values = [*values, d.ew(op, x, d.divisor(y) if op in DIVISIONS else y)][-3:]
    return [d.cast(values[-1], outer if d.chance(0.6) else d.rng.choice(NUMBERS))]


def sums_of_repeated(d: Draw) -> list[Value]:
    """Reductions over some axes of what was repeated along others."""
    full = d.shape(d.rng.randint(1, 4))
    x = d.input(d.rng.choice(("f32", "f64")), d.part(full))
    y = d.expand(x, full)
    if d.chance(0.5):
        y = d.ew(d.rng.choice(["Add", "Mul"]), y, d.input(x.dtype, d.part(full)))
    op = d.rng.choice(["ReduceSum", "ReduceSum", "ReduceMean"])
    z = d.reduce(op, y, d.axes(len(y.shape)), d.chance(0.5))
    return [d.ew("Mul", z, d.input(x.dtype, d.part(z.shape)))]


def repeated_nodes(d: Draw) -> list[Value]:
    """The same node more than once, operands crossed, attributes and constants alike or nearly."""
    x = d.input(d.rng.choice(("f32", "f64", "i64", "i32")), d.shape())
    y = d.input(x.dtype, d.part(x.shape))
    ops = ["Add", "Sub", "Mul", "Max", "Min"]
    picked = [d.rng.choice(ops) for _ in range(2)] * 2
    made = [d.ew(op, *d.rng.sample([x, y], 2)) for op in picked]
    near = [d.ew("Mul", x, d.filled(x, d.rng.choice([1, 2, 0]), near=True)) for _ in range(3)]
    return [*made, *near, d.cast(x, "f32"), d.cast(x, "f32"), d.cast(x, "f64")]


PROGRAMS: dict[str, Callable[[Draw], list[Value]]] = {
    "elementwise": elementwise,
    "islands": islands,
    "sums_of_repeated": sums_of_repeated,
    "repeated_nodes": repeated_nodes,
}
