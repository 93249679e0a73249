"""For every rewrite rule a generator of graphs around its pattern: forms it rewrites and forms it must not."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from graph_draw import DTYPES, FLOATS, LONGEST, NUMBERS, ONNX, REALS, Draw, Shape, Value

Pattern = Callable[[Draw], Value]


def any_value(d: Draw, dtypes: tuple[str, ...] = NUMBERS, rank: int | None = None) -> Value:
    return d.input(d.rng.choice(dtypes), d.shape(rank))


def partner(d: Draw, x: Value) -> Value:
    """Another operand of x's dtype in any form that broadcasts with it, or x itself."""
    return x if d.chance(0.1) else d.input(x.dtype, d.part(x.shape))


# ---- movement ----


def squeeze(d: Draw) -> Value:
    x = any_value(d, rank=d.rng.randint(1, 3))
    ones = [i for i, n in enumerate(x.shape) if n == 1]
    axes = d.rng.sample(ones, d.rng.randint(0, len(ones)))
    shape = tuple(n for i, n in enumerate(x.shape) if i not in axes)
    return d.node("Squeeze", [x, d.ints(*axes)], x.dtype, shape)


def unsqueeze(d: Draw) -> Value:
    x = any_value(d)
    axis = d.rng.randint(0, len(x.shape))
    return d.node("Unsqueeze", [x, d.ints(axis)], x.dtype, (*x.shape[:axis], 1, *x.shape[axis:]))


def flatten(d: Draw) -> Value:
    x = any_value(d)
    axis = d.rng.randint(0, len(x.shape))
    return d.node("Flatten", [x], x.dtype, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])), f"axis={axis}")


def reshape_same(d: Draw) -> Value:
    x = any_value(d)
    return d.reshape(x, x.shape if d.chance(0.7) else d.reshaped(x.shape))


def reshape_reshape(d: Draw) -> Value:
    x = any_value(d)
    y = d.reshape(x, d.reshaped(x.shape))
    return d.reshape(y, d.reshaped(x.shape))


def transpose_view(d: Draw) -> Value:
    x = any_value(d, rank=d.rng.randint(1, 4))
    return d.transpose(x)


def transpose_transpose(d: Draw) -> Value:
    x = any_value(d, rank=d.rng.randint(1, 4))
    return d.transpose(d.transpose(x))


def expand_same(d: Draw) -> Value:
    x = any_value(d)
    shape = x.shape if d.chance(0.7) else d.part(x.shape) if d.chance(0.5) else (2, *x.shape)
    return d.expand(x, shape)


def expand_broadcast(d: Draw) -> Value:
    full = d.shape(d.rng.randint(1, 3))
    x = d.input(d.rng.choice(REALS), d.part(full))
    wide = d.expand(x, d.part(full))
    y = x if d.chance(0.1) else d.input(x.dtype, d.part(full))
    if d.chance(0.3):
        c = d.input("bool", d.part(full))
        return d.ew("Where", c, wide, y) if d.chance(0.5) else d.ew("Where", c, y, wide)
    op = d.rng.choice(["Add", "Sub", "Mul", "Div", "Max"])
    out = d.pair(op, wide, y)
    return d.ew("Add", out, wide) if d.chance(0.2) else out


def slice_full(d: Draw) -> Value:
    x = any_value(d, rank=d.rng.randint(1, 3))
    axis = d.rng.randrange(len(x.shape))
    n, step = x.shape[axis], d.rng.choice([1, 1, 1, -1, 2])
    start = d.rng.choice([0, 0, -n, 1]) if step > 0 else -1
    end = d.rng.choice([n, n + 5, 2**62, n - 1]) if step > 0 else -n - 1
    size = len(range(n)[slice(start, None if step < 0 else end, step)])
    ins = [x, *(d.ints(i) for i in (start, end, axis, step))]
    return d.node("Slice", ins, x.dtype, (*x.shape[:axis], size, *x.shape[axis + 1 :]))


def pad_nothing(d: Draw) -> Value:
    x = any_value(d, REALS, rank=d.rng.randint(1, 3))
    pads = [0 if d.chance(0.9) else 1 for _ in range(2 * len(x.shape))]
    rank = len(x.shape)
    return d.node(
        "Pad", [x, d.ints(*pads)], x.dtype, tuple(n + pads[i] + pads[i + rank] for i, n in enumerate(x.shape))
    )


def tile_once(d: Draw) -> Value:
    x = any_value(d, rank=d.rng.randint(1, 3))
    repeats = [1 if d.chance(0.8) else d.rng.choice([0, 2]) for _ in x.shape]
    return d.node("Tile", [x, d.ints(*repeats)], x.dtype, tuple(n * r for n, r in zip(x.shape, repeats, strict=True)))


def concat_one(d: Draw) -> Value:
    x = any_value(d, rank=d.rng.randint(1, 3))
    axis, n = d.rng.randrange(len(x.shape)), d.rng.choice([1, 1, 2])
    return d.node(
        "Concat", [x] * n, x.dtype, (*x.shape[:axis], n * x.shape[axis], *x.shape[axis + 1 :]), f"axis={axis}"
    )


def split_one(d: Draw) -> Value:
    x = any_value(d, rank=d.rng.randint(1, 3))
    axis = d.rng.randrange(len(x.shape))
    return d.node("Split", [x, d.ints(x.shape[axis])], x.dtype, x.shape, f"axis={axis}")


# ---- arithmetic ----


def neutral(op: str, element: float, *others: float, first: bool = False) -> Pattern:
    """x op constant: the neutral element, its neighbours, its negative, in all broadcast forms."""

    def draw(d: Draw) -> Value:
        x = any_value(d)
        c = d.filled(x, d.rng.choice([element, *others]), near=True)
        y = d.ew(op, c, x) if first and d.chance(0.5) else d.ew(op, x, c)
        return d.ew("Neg", y) if d.chance(0.3) else y

    return draw


def twice(op: str, dtypes: tuple[str, ...]) -> Pattern:
    return lambda d: d.ew(op, d.ew(op, any_value(d, dtypes)))


def with_neg(op: str) -> Pattern:
    def draw(d: Draw) -> Value:
        x = any_value(d)
        y = d.ew("Neg", partner(d, x))
        return d.pair(op, x, y)

    return draw


def cast_same(d: Draw) -> Value:
    x = any_value(d, tuple(ONNX))
    return d.cast(x, x.dtype)


def cast_cast(d: Draw) -> Value:
    x = any_value(d, tuple(ONNX))
    return d.cast(d.cast(x, d.rng.choice(list(ONNX))), d.rng.choice(list(ONNX)))


def where_constant(d: Draw) -> Value:
    x = any_value(d)
    full = d.shape(d.rng.randint(len(x.shape), 3))
    full = full[: len(full) - len(x.shape)] + x.shape
    shape = d.part(full) if math.prod(full) <= LONGEST else ()
    n, bit = math.prod(shape), d.rng.randint(0, 1)
    mixed = n > 1 and d.chance(0.2)
    c = d.const("bool", [1 - bit if mixed and i == n - 1 else bit for i in range(n)], shape)
    return d.ew("Where", c, x, d.input(x.dtype, d.part(full)))


def dropout_nothing(d: Draw) -> Value:
    x = any_value(d, REALS)
    return d.ew("Dropout", x, attrs="p=0.0, subsequence=1")


# ---- layers written out ----


def times_half(d: Draw, x: Value, tail: Value) -> Value:
    half = d.filled(Value("", x.dtype, ()), 0.5, near=True)
    form = d.rng.randrange(3)
    if form == 0:
        return d.pair("Mul", d.pair("Mul", x, half), tail)
    if form == 1:
        return d.pair("Mul", x, d.pair("Mul", half, tail))
    return d.pair("Mul", half, d.pair("Mul", x, tail))


def scalar(d: Draw, like: Value, x: float) -> Value:
    return d.const(like.dtype, [x], ())


def scaled(d: Draw, op: str, x: Value, by: float) -> Value:
    """`x` and a number; of 16 bits perhaps computed in f32, as PyTorch computes with numbers of Python's."""
    if x.dtype not in ("bf16", "f16") or d.chance(0.5):
        return d.pair(op, x, scalar(d, x, by)) if op == "Mul" else d.ew(op, x, scalar(d, x, by))
    wide = d.cast(x, "f32")
    return d.cast(d.ew(op, wide, scalar(d, wide, by)), x.dtype)


def gelu_tanh(d: Draw) -> Value:
    x = any_value(d, FLOATS)
    one = scalar(d, x, 1.0)
    if d.chance(0.5):
        cube = d.ew("Pow", x, scalar(d, x, 3.0)) if d.chance(0.5) else d.ew("Mul", d.ew("Mul", x, x), x)
        u = scaled(d, "Mul", d.pair("Add", x, scaled(d, "Mul", cube, 0.044715)), 0.7978845608028654)
    else:
        inner = d.pair("Add", one, d.pair("Mul", scaled(d, "Mul", x, 0.044715), x))
        u = d.ew("Mul", scaled(d, "Mul", x, 0.7978845608028654), inner)
    return times_half(d, x, d.pair("Add", one, d.ew("Tanh", u)))


def gelu_tanh_of_halves(d: Draw) -> Value:
    """As autocast of a GPU has it: powers are of f32, half of x is of 16 bits."""
    half = any_value(d, ("bf16", "f16"))
    x, other = d.cast(half, "f32"), any_value(d, ("bf16",)) if d.chance(0.1) else half
    cube = d.ew("Pow", x, scalar(d, x, 3.0)) if d.chance(0.5) else d.ew("Mul", d.ew("Mul", x, x), x)
    u = scaled(d, "Mul", d.pair("Add", x, scaled(d, "Mul", cube, 0.044715)), 0.7978845608028654)
    rounded = d.cast(scaled(d, "Mul", other, d.rng.choice((0.5, 0.5, 0.5, 0.25))), "f32")
    try:
        return d.pair("Mul", rounded, d.pair("Add", scalar(d, x, 1.0), d.ew("Tanh", u)))
    except RuntimeError:
        return rounded


def gelu_erf(d: Draw) -> Value:
    x = any_value(d, FLOATS)
    op, by = ("Div", 1.4142135623730951) if d.chance(0.5) else ("Mul", 0.7071067811865476)
    return times_half(d, x, d.pair("Add", scalar(d, x, 1.0), d.ew("Erf", scaled(d, op, x, by))))


def softmax_axes(d: Draw, x: Value) -> tuple[list[int], list[int], bool, bool]:
    """Axes of the maximum and of the sum, and whether they are kept: mostly alike."""
    axes = [d.rng.randrange(len(x.shape))] if d.chance(0.8) else d.axes(len(x.shape))
    other = [d.rng.randrange(len(x.shape))] if d.chance(0.15) else axes
    return axes, other, d.chance(0.9), d.chance(0.9)


def nonempty(d: Draw, rank: int) -> Shape:
    return d.shape(rank, dims=(1, 2, 2, 3, 3))


def softmax_written(d: Draw) -> Value:
    x = d.input(d.rng.choice(REALS), nonempty(d, d.rng.randint(1, 3)))
    of_max, of_sum, keep_max, keep_sum = softmax_axes(d, x)
    try:
        e = d.ew("Exp", d.ew("Sub", x, d.reduce("ReduceMax", x, of_max, keep_max)))
        return d.ew("Div", e, d.reduce("ReduceSum", e, of_sum, keep_sum))
    except RuntimeError:  # does not broadcast
        return x


def log_softmax_written(d: Draw) -> Value:
    x = d.input(d.rng.choice(REALS), nonempty(d, d.rng.randint(1, 3)))
    of_max, of_sum, keep_max, keep_sum = softmax_axes(d, x)
    try:
        z = d.ew("Sub", x, d.reduce("ReduceMax", x, of_max, keep_max))
        return d.ew("Sub", z, d.ew("Log", d.reduce("ReduceSum", d.ew("Exp", z), of_sum, keep_sum)))
    except RuntimeError:
        return x


def nll(d: Draw, dtypes: tuple[str, ...], casts: bool) -> Value:
    """Of logarithms of probabilities over classes, which are mostly axis 1."""
    x = d.input(d.rng.choice(dtypes), nonempty(d, d.rng.randint(2, 3)))
    axis = d.rng.choice((1, 1, 1, 1 - len(x.shape), 0))
    logs = d.ew("LogSoftmax", x, attrs=f"axis={axis}")
    taken = d.cast(logs, d.rng.choice(("f32", "f32", "f32", "f64"))) if casts else logs
    shape = (x.shape[0], *x.shape[2:])
    classes = [d.rng.choice((d.rng.randrange(x.shape[1]), -100)) for _ in range(math.prod(shape))]
    weight = d.input(taken.dtype, (x.shape[1],)) if d.chance(0.3) else None
    attrs = f'reduction="{d.rng.choice(("mean", "sum", "none"))}"'
    by_row = shape if "none" in attrs else ()
    loss = d.node(
        "NegativeLogLikelihoodLoss", [taken, d.const("i64", classes, shape), weight], taken.dtype, by_row, attrs
    )
    d.lines[-1] = d.lines[-1].replace(" =", ", %sum_of_weights =", 1)  # what its gradient needs
    return loss


def layer_norm_written(rsqrt: bool) -> Pattern:
    def draw(d: Draw) -> Value:
        x = d.input(d.rng.choice(REALS), nonempty(d, d.rng.randint(1, 3)))
        rank = len(x.shape)
        axes = list(range(d.rng.randrange(rank), rank)) if d.chance(0.8) else d.axes(rank)
        other = d.axes(rank) if d.chance(0.1) else axes
        keep = d.chance(0.9)
        epsilon = d.rng.choice([1e-5, 1e-5, 1e-12, 0.0, 0.1])
        d.condition = 4 / math.sqrt(epsilon) if epsilon else math.inf
        try:
            c = d.ew("Sub", x, d.reduce("ReduceMean", x, axes, keep))
            square = d.ew("Mul", c, c) if d.chance(0.5) else d.ew("Pow", c, scalar(d, x, 2.0))
            eps = d.const(x.dtype, [epsilon], (1,) * d.rng.randint(0, rank + 1))
            v = d.pair("Add", d.reduce("ReduceMean", square, other, d.chance(0.95)), eps)
            if not rsqrt:
                return d.ew("Div", c, d.ew("Sqrt", v))
            r = d.ew("Rsqrt", v) if d.chance(0.5) else d.ew("Reciprocal", d.ew("Sqrt", v))
            return d.pair("Mul", c, r)
        except RuntimeError:
            return x

    return draw


def rms_norm_written(d: Draw) -> Value:
    x = d.input(d.rng.choice(REALS), nonempty(d, d.rng.randint(1, 3)))
    rank = len(x.shape)
    axes = list(range(d.rng.randrange(rank), rank)) if d.chance(0.8) else d.axes(rank)
    epsilon = d.rng.choice([1e-5, 1e-5, 1e-12, 0.0, 0.1])
    d.condition = 4 / math.sqrt(epsilon) if epsilon else math.inf
    try:
        square = d.ew("Mul", x, x) if d.chance(0.5) else d.ew("Pow", x, scalar(d, x, 2.0))
        eps = d.const(x.dtype, [epsilon], (1,) * d.rng.randint(0, rank + 1))
        v = d.pair("Add", d.reduce("ReduceMean", square, axes, d.chance(0.9)), eps)
        return d.pair("Mul", x, d.ew("Rsqrt", v) if d.chance(0.5) else d.ew("Reciprocal", d.ew("Sqrt", v)))
    except RuntimeError:
        return x


def norm_affine(op: str, norm: str) -> Pattern:
    def draw(d: Draw) -> Value:
        x = d.input(d.rng.choice(REALS), nonempty(d, d.rng.randint(1, 3)))
        d.condition = 4e3
        axis = d.rng.randrange(len(x.shape))
        normalized = x.shape[axis:]
        gamma = d.input(x.dtype, normalized) if d.chance(0.3) else None
        y = d.node(norm, [x, gamma], x.dtype, x.shape, f"axis={axis}, epsilon=1e-5")
        kept = "".join(f", {y.name}.{k}" for k in ("r" if norm == "RmsNorm" else "mr"))
        d.lines[-1] = d.lines[-1].replace(y.name, y.name + kept, 1)
        shape = (1,) * d.rng.randint(0, axis) + normalized if d.chance(0.7) else d.part(x.shape)
        return d.pair(op, y, d.input(x.dtype, shape))

    return draw


# ---- convolutions ----


def conv_pad(d: Draw) -> Value:
    space, group = d.rng.randint(1, 2), d.rng.choice([1, 1, 2])
    batch, outer, inner = d.rng.choice([0, 1, 2]), group * d.rng.choice([1, 2]), d.rng.choice([1, 2])
    size, kernel = ([d.rng.choice([1, 2, 3]) for _ in range(space)] for _ in range(2))
    dtype = d.rng.choice(FLOATS)

    def pads(least: int) -> tuple[list[int], list[int]]:
        before, after = ([d.rng.choice([least, 0, 1, 2]) for _ in range(space)] for _ in range(2))
        return before, after

    def joined(n: list[int], sides: tuple[list[int], list[int]]) -> list[int]:
        return [sum(v) for v in zip(n, *sides, strict=True)]

    around, own = pads(-1 if d.chance(0.1) else 0), pads(0)
    channels = 1 if d.chance(0.1) and group * inner > 1 else 0  # that are added
    x = d.input(dtype, (batch, group * inner - channels, *size))
    w = d.input(dtype, (outer, inner, *kernel))
    padded = joined(size, around)
    ins: list[Value | None] = [x, d.ints(0, channels, *around[0], 0, 0, *around[1])]
    if d.chance(0.3):
        ins.append(d.const(dtype, [d.rng.choice([0.0, 0.0, -0.0, 1.0])], ()))
    y = d.node("Pad", ins, dtype, (batch, group * inner, *(max(n, 0) for n in padded)))
    room = [n - k for n, k in zip(joined(padded, own), kernel, strict=True)]
    if min(room) < 0 or min(padded) < 0:
        return y
    stride = [d.rng.choice([1, 1, 2]) for _ in range(space)]
    given = [y, w, d.input(dtype, (outer,))] if d.chance(0.5) else [y, w]
    attrs = f"pads={[*own[0], *own[1]]}, strides={stride}, group={group}"
    out = (batch, outer, *(n // s + 1 for n, s in zip(room, stride, strict=True)))
    return d.node("Conv", given, dtype, out, attrs)


def relu_after_pool(d: Draw) -> Value:
    space = d.rng.randint(1, 2)
    size = [d.rng.choice([1, 2, 3, 5]) for _ in range(space)]
    kernel, stride, dilation = (
        [d.rng.choice(some) for _ in range(space)] for some in ([1, 2, 3], [1, 2], [1, 1, 1, 2])
    )
    pads = [d.rng.choice([0, k // 2]) for k in kernel]
    room = [n + 2 * p - t * (k - 1) - 1 for n, p, t, k in zip(size, pads, dilation, kernel, strict=True)]
    x = d.input(d.rng.choice(FLOATS), (d.rng.choice([0, 1, 2]), d.rng.choice([1, 3]), *size))
    y = d.node("Relu", [x], x.dtype, x.shape)
    if min(room) < 0:
        return y
    attrs = f"kernel_shape={kernel}, pads={pads * 2}, strides={stride}, dilations={dilation}"
    out = (*x.shape[:2], *(n // s + 1 for n, s in zip(room, stride, strict=True)))
    z = d.node("MaxPool", [y], x.dtype, out, attrs)
    d.lines[-1] = d.lines[-1].replace(z.name, f"{z.name}, {z.name}.at", 1)
    return z


# ---- attention ----


def attention(d: Draw, masks: tuple[str, ...] = ()) -> Value:
    batch, heads, size, width = (d.rng.choice((1, 2, 2, 3)) for _ in range(4))
    keys = size if d.chance(0.8) else d.rng.choice((1, 2, 3))
    dtype = d.rng.choice(REALS)
    swaps = [d.chance(0.5) for _ in range(4)]
    if not d.chance(0.6):
        swaps[:3] = [False] * 3

    def operand(n: int, swap: bool) -> Value:
        if not swap:
            return d.input(dtype, (batch, heads, n, width))
        return d.transpose(d.input(dtype, (batch, n, heads, width)), (0, 2, 1, 3))

    q, k, v = operand(size, swaps[0]), operand(keys, swaps[1]), operand(keys, swaps[2])
    ins: list[Value | None] = [q, k, v]
    if masks:
        kind = d.rng.choice(["bool", dtype])
        seen, hidden = (1, 0) if kind == "bool" else (d.rng.choice([0.0, -0.0]), -math.inf)
        shapes = [(size, keys), (1, 1, size, keys), (batch, heads, size, keys)]
        shape = d.rng.choice([s for s in shapes if math.prod(s) <= LONGEST])
        form = d.rng.choice(masks)
        rows = [[seen if form == "all" or j <= i else hidden for j in range(keys)] for i in range(size)]
        if form == "other":
            rows[-1][0] = hidden if keys > 1 else seen
        elements = [e for row in rows for e in row] * math.prod(shape[:-2])
        ins.append(d.const(kind, elements, shape))
    y = d.node("Attention", ins, dtype, (batch, heads, size, width), f"scale={d.rng.choice([0.5, 1.0])}")
    d.lines[-1] = d.lines[-1].replace(y.name, f"{y.name}, {y.name}.lse", 1)
    return d.transpose(y, (0, 2, 1, 3)) if swaps[3] else y


def attention_of_split(d: Draw) -> Value:
    """q, k and v as a projection has them side by side, or nearly so."""
    batch, size, kv_heads, group, width = (d.rng.choice((1, 2, 2, 3)) for _ in range(5))
    dtype = d.rng.choice(FLOATS)
    heads = [kv_heads * group, kv_heads, kv_heads]
    rows = (batch, size) if d.chance(0.7) else (batch * size,)
    x = d.input(dtype, (*rows, sum(heads) * width))
    axis = d.rng.choice((-1, len(rows)))
    names = [d.name() for _ in heads]
    d.lines.append(f"{', '.join(names)} = Split({x.name}, {d.ints(*(h * width for h in heads)).name}) {{axis={axis}}}")
    parts = [Value(name, dtype, (*rows, h * width)) for name, h in zip(names, heads, strict=True)]
    if d.chance(0.2):  # keys may be values
        parts[1], parts[2] = d.rng.choice([(parts[2], parts[1]), (parts[1], parts[1])])
    q, k, v = (d.reshape(part, (batch, size, h, width)) for part, h in zip(parts, heads, strict=True))
    mask = d.input("bool" if d.chance(0.7) else dtype, (size, size)) if d.chance(0.3) else None
    ends = d.rng.choice((1, 2))
    shape = (batch, heads[0], size, width) if ends == 1 else (batch, size, heads[0], width)
    attrs = f"scale=0.5, is_causal={int(d.chance(0.3))}, head_axes=[2, 2, 2, {ends}]"
    y = d.node("Attention", [q, k, v, mask], dtype, shape, attrs)
    d.lines[-1] = d.lines[-1].replace(y.name, f"{y.name}, {y.name}.lse", 1)
    return y


# ---- products ----


def matrices(d: Draw) -> tuple[Value, Value]:
    """x and y whose product is defined, batched in any way, each maybe through a transposition."""
    m, k, n = d.shape(3)
    dtype, batch = d.rng.choice(REALS), d.shape(d.rng.randint(0, 2))

    def operand(rows: int, columns: int) -> Value:
        lead = d.part(batch)
        if not d.chance(0.6):
            return d.input(dtype, (*lead, rows, columns))
        perm = [*range(len(lead)), len(lead) + 1, len(lead)]
        return d.transpose(d.input(dtype, (*lead, columns, rows)), perm)

    return operand(m, k), operand(k, n)


def product(d: Draw, fused: bool | None = None) -> Value:
    x, y = matrices(d)
    lead = tuple(torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]))
    shape = (*lead, x.shape[-2], y.shape[-1])
    if fused is None:
        fused = d.chance(0.3)
    if not fused:
        return d.node("MatMul", [x, y], x.dtype, shape)
    return d.node("FusedMatMul", [x, y], x.dtype, shape, f"alpha={d.rng.choice([1.0, 0.5])}")


def transposed_product(d: Draw) -> Value:
    p = product(d)
    rank = len(p.shape)
    swap = [*range(rank - 2), rank - 1, rank - 2]
    return d.transpose(p, swap if d.chance(0.8) else None)


def product_and_bias(d: Draw) -> Value:
    p = product(d)
    if d.chance(0.4):
        p = d.reshape(p, (*d.reshaped(p.shape[:-1]), p.shape[-1]) if d.chance(0.7) else d.reshaped(p.shape))
    columns = p.shape[-1:]
    shape = (1,) * d.rng.randint(0, len(p.shape)) + columns if d.chance(0.7) else d.part(p.shape)
    return d.pair("Add", p, d.input(p.dtype, shape))


def product_of_halves(d: Draw, fused: bool, wide: bool = False) -> Value:
    """The left operand is of 16 bits, the right one cast from an input, which is that of another product too at times.

    The result may be `wide`.
    """
    half = d.rng.choice(("bf16", "f16"))
    m, k, n = d.shape(3)
    y = d.input("f32" if d.chance(0.8) else "f64", (k, n))
    if d.chance(0.1):
        y = d.ew("Neg", y)
    y = d.node("Cast", [y], half, y.shape, f"to={ONNX[half]}")
    alone = d.chance(0.8)
    result = "f32" if wide and alone and d.chance(0.5) else half
    attrs = f"alpha={d.rng.choice([1.0, 0.5])}" + (f", to={ONNX[result]}" if result != half else "")
    bias = d.input(result, (n,)) if fused and d.chance(0.3) else None
    op = "FusedMatMul" if fused else "MatMul"
    z = d.node(
        op,
        [d.input(half, (m, k)), y, bias] if fused else [d.input(half, (m, k)), y],
        result if fused else half,
        (m, n),
        attrs if fused else "",
    )
    return z if alone else d.pair("Mul", z, d.node("ReduceSum", [y, d.ints(0, 1)], half, (1, 1), "keepdims=1"))


def cast_view(d: Draw) -> Value:
    x = any_value(d, FLOATS)
    y = d.ew("Relu", x) if d.chance(0.8) else x
    view = d.reshape(y, d.reshaped(y.shape))
    z = d.cast(view, d.rng.choice(FLOATS))
    return d.pair("Mul", z, d.cast(view, z.dtype)) if d.chance(0.1) else z


def norm(d: Draw, op: str, x: Value) -> Value:
    """y of a norm of the last axis."""
    n = x.shape[-1:]
    params = [d.input(x.dtype, n) if d.chance(0.7) else None for _ in range(2 if op == "LayerNormalization" else 1)]
    y = d.node(op, [x, *params], x.dtype, x.shape)
    kept = [f"{y.name}.mean", f"{y.name}.rstd"] if op == "LayerNormalization" else [f"{y.name}.rstd"]
    d.lines[-1] = d.lines[-1].replace(y.name, ", ".join([y.name, *kept]), 1)
    return y


def norm_cast(d: Draw) -> Value:
    x = d.input(d.rng.choice(("f32", "f32", "f32", *FLOATS)), d.shape(d.rng.randint(1, 3)))
    y = norm(d, d.rng.choice(("LayerNormalization", "RmsNorm")), x)
    z = d.cast(y, d.rng.choice(FLOATS))
    return d.pair("Mul", z, d.cast(y, z.dtype)) if d.chance(0.1) else z


def norm_grad(d: Draw, op: str, statistics: int) -> Value:
    """The gradient of a norm's x, of a gradient of y that is widened, and maybe viewed, before it is read."""
    dtype, shape = d.rng.choice(("f32", "f32", "f64")), d.shape(d.rng.randint(1, 3))
    dy = d.input(d.rng.choice(("bf16", "f16", "f32")), shape if d.chance(0.6) else d.reshaped(shape))
    dy = d.reshape(d.cast(dy, dtype), shape)
    gamma = d.input(dtype, shape[-1:]) if d.chance(0.7) else None
    kept = [d.input(dtype, (*shape[:-1], 1)) for _ in range(statistics)]
    dx = d.node(op, [dy, d.input(dtype, shape), gamma, *kept], dtype, shape)
    return d.pair("Mul", dx, dy) if d.chance(0.1) else dx


def product_cast(d: Draw) -> Value:
    half = d.rng.choice(("bf16", "bf16", "bf16", "f16"))
    m, k, n = d.shape(3)
    x, y = d.input(half, (m, k)), d.input(half, (k, n))
    bias = d.input(half, (n,)) if d.chance(0.1) else None
    z = d.node("FusedMatMul", [x, y, bias], half, (m, n)) if d.chance(0.5) else d.node("MatMul", [x, y], half, (m, n))
    if d.chance(0.5):
        z = d.reshape(z, d.reshaped(z.shape))
    to = d.rng.choice(("f32", "f32", "f32", "f64"))
    wide = d.node("Cast", [z], to, z.shape, f"to={ONNX[to]}")
    return d.ew("Relu", wide) if d.chance(0.2) else wide


def head_and_loss(d: Draw) -> Value:
    """A loss of logits, many enough or too few; some rows do not count, and now and then the logits are read again."""
    dtype = d.rng.choice(REALS)
    n, k, repeats = d.rng.randint(1, 3), d.rng.randint(1, 3), 2048 if d.chance(0.7) else 1
    classes = 512 * repeats
    d.condition = math.sqrt(repeats)  # of sums of so many terms, each rounded
    lead = (n,) if d.chance(0.5) else (1, n)
    w = d.node("Tile", [d.input(dtype, (512, k)), d.ints(repeats, 1)], dtype, (classes, k))
    bias = d.input(dtype, (classes // 512,)) if d.chance(0.3) else None
    if bias is not None:
        bias = d.node("Tile", [bias, d.ints(512)], dtype, (classes,))
    logits = d.node("FusedMatMul", [d.input(dtype, (*lead, k)), w, bias], dtype, (*lead, classes), "transB=1")
    if d.chance(0.3):
        dtype = d.rng.choice(REALS)
        logits = d.node("Cast", [logits], dtype, logits.shape, f"to={ONNX[dtype]}")
    logits = d.reshape(logits, (n, classes))
    target = d.const("i64", [d.rng.choice((d.rng.randrange(classes), -100)) for _ in range(n)])
    weight = d.input(dtype, (classes // 512,)) if d.chance(0.2) else None
    if weight is not None:
        weight = d.node("Tile", [weight, d.ints(512)], dtype, (classes,))
    attrs = f'reduction="{d.rng.choice(("mean", "sum", "sum"))}", label_smoothing={d.rng.choice((0.0, 0.1))}'
    loss = d.node("CrossEntropy", [logits, target, weight], dtype, (), attrs)
    d.lines[-1] = d.lines[-1].replace(" =", ", %top, %log_sum, %total =", 1)  # what its gradient needs
    return d.pair("Mul", loss, logits) if d.chance(0.1) and repeats == 1 else loss


def product_times(d: Draw) -> Value:
    p = product(d)
    factors = [0.5, 0.125, 3.0, 1.0, 0.0, math.inf, -2.0]
    return d.pair("Mul", p, d.filled(p, d.rng.choice(factors)))


def embedding_grad(d: Draw) -> Value:
    rows, width = d.rng.choice((1, 2, 3)), d.rng.choice((1, 2, 3))
    ids = d.rng.randint(0, 4)
    dtype = d.rng.choice(REALS)
    at = d.const("i64", [d.rng.randrange(rows) for _ in range(ids)])
    y = d.node("EmbeddingGrad", [d.input(dtype, (ids, width)), at], dtype, (rows, width), f"shape=[{rows}, {width}]")
    other = d.input(dtype, (rows, width) if d.chance(0.7) else d.part((rows, width)))
    return d.pair("Add", y, other)


def detach(d: Draw) -> Value:
    x = any_value(d, REALS)
    return d.node("Detach", [x], x.dtype, x.shape)


def with_gradient_of(d: Draw) -> Value:
    x = any_value(d, REALS)
    return d.node("WithGradientOf", [x, d.input(x.dtype, x.shape)], x.dtype, x.shape)


PATTERNS: dict[str, Pattern] = {
    "identity": lambda d: d.ew("Identity", any_value(d, tuple(DTYPES))),
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    "flatten": flatten,
    "reshape_same": reshape_same,
    "reshape_reshape": reshape_reshape,
    "transpose_view": transpose_view,
    "transpose_transpose": transpose_transpose,
    "expand_same": expand_same,
    "expand_broadcast": expand_broadcast,
    "slice_full": slice_full,
    "pad_nothing": pad_nothing,
    "tile_once": tile_once,
    "concat_one": concat_one,
    "split_one": split_one,
    "add_zero": neutral("Add", 0.0, -0.0, -0.0, first=True),
    "sub_zero": neutral("Sub", 0.0, -0.0, first=True),
    "mul_one": neutral("Mul", 1.0, -1.0, first=True),
    "div_one": neutral("Div", 1.0, -1.0, first=True),
    "neg_neg": twice("Neg", NUMBERS),
    "not_not": twice("Not", ("bool",)),
    "add_neg": with_neg("Add"),
    "sub_neg": with_neg("Sub"),
    "cast_same": cast_same,
    "cast_cast": cast_cast,
    "where_constant": where_constant,
    "dropout_nothing": dropout_nothing,
    "gelu_tanh": gelu_tanh,
    "gelu_tanh_of_halves": gelu_tanh_of_halves,
    "gelu_erf": gelu_erf,
    "softmax_written": softmax_written,
    "log_softmax_written": log_softmax_written,
    "layer_norm_sqrt": layer_norm_written(rsqrt=False),
    "layer_norm_rsqrt": layer_norm_written(rsqrt=True),
    "layer_norm_scale": norm_affine("Mul", "LayerNormalization"),
    "layer_norm_shift": norm_affine("Add", "LayerNormalization"),
    "rms_norm_written": rms_norm_written,
    "rms_norm_scale": norm_affine("Mul", "RmsNorm"),
    "nll_of_log_softmax": lambda d: nll(d, REALS, casts=False),
    "nll_of_cast_log_softmax": lambda d: nll(d, ("bf16", "f16"), casts=True),
    "conv_pad": conv_pad,
    "relu_after_pool": relu_after_pool,
    "attention_no_mask": lambda d: attention(d, ("all", "all", "other")),
    "attention_causal": lambda d: attention(d, ("all", "causal", "causal", "other")),
    "attention_transpose": attention,
    "transpose_attention": attention,
    "attention_split": attention_of_split,
    "matmul_transpose": lambda d: product(d, fused=False),
    "fused_matmul_transpose": lambda d: product(d, fused=True),
    "transpose_matmul": transposed_product,
    "matmul_bias": product_and_bias,
    "matmul_alpha": product_times,
    "linear_cross_entropy": head_and_loss,
    "embedding_grad_base": embedding_grad,
    "matmul_cast": lambda d: product_of_halves(d, fused=False),
    "fused_matmul_cast": lambda d: product_of_halves(d, fused=True, wide=True),
    "cast_view": cast_view,
    "cast_norm": norm_cast,
    "layer_norm_grad_cast": lambda d: norm_grad(d, "LayerNormGrad", 2),
    "rms_norm_grad_cast": lambda d: norm_grad(d, "RmsNormGrad", 1),
    "cast_matmul": product_cast,
    "detach": detach,
    "with_gradient_of": with_gradient_of,
}
