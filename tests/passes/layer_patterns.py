"""Layers, convolutions and attention as rewrite rules look for them, and forms that are nearly so."""

from __future__ import annotations

import math

from graph_draw import FLOATS, LONGEST, REALS, Draw, Pattern, Shape, Value, any_value

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
    d.lines[-1] = d.lines[-1].replace(z.name, f"{z.name}, {z.name}.at, {z.name}.tap", 1)
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


# ---- BatchNorm and what comes after it ----


def batch_norm(d: Draw, x: Value, added: Value | None, relu: bool) -> tuple[Value, list[Value | None]]:
    """BatchNorm of x, maybe of more; and its gamma, mean and rstd."""
    of = (x.shape[1],)
    gamma, beta = (d.input(x.dtype, of) if d.chance(0.7) else None for _ in range(2))
    running = [d.input(x.dtype, of), d.input(x.dtype, of)] if d.chance(0.3) else [None, None]
    y = d.add(x.dtype, x.shape)
    kept = [d.add("f64" if x.dtype == "f64" else "f32", of) for _ in range(2)]
    outs = [v.name for v in (y, *kept)] + [d.name() for v in running if v]
    given = [x, gamma, beta, *running, added]
    while given[-1] is None:
        given.pop()
    ins = ["_" if v is None else v.name for v in given]
    attrs = ["epsilon=0.01"] * d.chance(0.5) + ["relu=1"] * relu
    d.lines.append(f"{', '.join(outs)} = BatchNorm({', '.join(ins)})" + f" {{{', '.join(attrs)}}}" * bool(attrs))
    return y, [gamma, *kept]


def batch_norm_input(d: Draw) -> Value:
    channels = d.rng.choice((1, 2, 3, 5))
    shape = (d.rng.choice((2, 3, 5)), channels, *d.shape(d.rng.randint(0, 2), (1, 2, 3)))
    return d.input(d.rng.choice(FLOATS), shape)


def batch_norm_added(d: Draw) -> Value:
    x = batch_norm_input(d)
    early = d.input(x.dtype, x.shape if d.chance(0.9) else d.part(x.shape))
    y, _ = batch_norm(d, x, None, d.chance(0.1))
    late = d.ew("Neg", early) if d.chance(0.5) else early
    if late.shape == x.shape and d.chance(0.3):
        shape = d.reshaped(x.shape)
        y, late = d.reshape(y, shape), d.reshape(late, shape)
    out = d.pair("Add", y, late)
    return d.pair("Mul", out, out) if d.chance(0.2) else out


def batch_norm_relu(d: Draw) -> Value:
    x = batch_norm_input(d)
    y, _ = batch_norm(d, x, d.input(x.dtype, x.shape) if d.chance(0.4) else None, d.chance(0.1))
    y = y if d.chance(0.6) else d.reshape(y, d.reshaped(y.shape))
    out = d.ew("Relu", y)
    return d.pair("Mul", out, y) if d.chance(0.1) else out


def batch_norm_relu_grad(d: Draw) -> Value:
    x = batch_norm_input(d)
    dy = d.input(x.dtype, x.shape)
    y, (gamma, *kept) = batch_norm(d, x, d.input(x.dtype, x.shape) if d.chance(0.1) else None, d.chance(0.9))
    dz = d.node("ReluGrad", [dy, y], x.dtype, x.shape)
    return d.node("BatchNormGrad", [dz, x, gamma, *kept], x.dtype, x.shape)
