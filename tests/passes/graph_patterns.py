"""For every rewrite rule a generator of graphs around its pattern: forms it rewrites and forms it must not."""

from __future__ import annotations

import math

import torch
from graph_draw import DTYPES, FLOATS, LONGEST, NUMBERS, ONNX, REALS, Draw, Pattern, Value, any_value
from layer_patterns import (
    attention,
    attention_of_split,
    batch_norm_added,
    batch_norm_relu,
    batch_norm_relu_grad,
    conv_pad,
    gelu_erf,
    gelu_tanh,
    gelu_tanh_of_halves,
    layer_norm_written,
    log_softmax_written,
    nll,
    norm_affine,
    relu_after_pool,
    rms_norm_written,
    softmax_written,
)


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


def _repeated_ids(d: Draw) -> tuple[Value, int, tuple[int, ...]]:
    """Ids of elements along an axis, repeated along some others, and the shape of a table that they fit."""
    rank = d.rng.randint(1, 3)
    axis = d.rng.randrange(rank)
    table = tuple(d.rng.choice((2, 3) if i == axis else (1, 2, 3)) for i in range(rank))
    picked = tuple(d.rng.randint(1, 4) if i == axis else n if d.chance(0.8) else 1 for i, n in enumerate(table))
    given = tuple(n if i == axis or d.chance(0.1) else 1 for i, n in enumerate(picked))
    ids = d.node("Cast", [d.input("bool", given)], "i64", given, "to=7")
    return d.expand(ids, picked), axis, table


def gather_rows(d: Draw) -> Value:
    ids, axis, table = _repeated_ids(d)
    x = d.input(d.rng.choice(REALS), table)
    return d.node("GatherElements", [x, ids], x.dtype, ids.shape, f"axis={axis}")


def add_rows(d: Draw) -> Value:
    ids, axis, table = _repeated_ids(d)
    x = d.input(d.rng.choice(REALS), ids.shape)
    if d.chance(0.5):
        return d.node("GatherElementsGrad", [x, ids, d.input(x.dtype, table)], x.dtype, table, f"axis={axis}")
    shape = f"axis={axis}, shape=[{', '.join(map(str, table))}]"
    return d.node("GatherElementsGrad", [x, ids], x.dtype, table, shape)


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


def _slice(d: Draw, x: Value, axis: int) -> Value:
    """Mostly a stretch of one axis, with a step if drawn so."""
    n, step = x.shape[axis], d.rng.choice([1, 1, 1, 1, 1, 1, 1, 1, 2, -1])
    start = d.rng.randint(0, max(n - 2, 0)) if d.chance(0.9) else d.rng.randint(0, n)
    end = d.rng.randint(min(start + 1, n), n) if step > 0 else d.rng.randint(-n - 1, -1)
    size = len(range(n)[slice(start, end, step)])
    shape = tuple(size if i == axis else m for i, m in enumerate(x.shape))
    return d.node("Slice", [x, *(d.ints(i) for i in (start, end, axis, step))], x.dtype, shape)


def _concat(d: Draw, axis: int, parts: list[Value]) -> Value:
    shape = tuple(sum(p.shape[i] for p in parts) if i == axis else n for i, n in enumerate(parts[0].shape))
    return d.node("Concat", parts, parts[0].dtype, shape, f"axis={axis if d.chance(0.8) else axis - len(shape)}")


def _joined(d: Draw) -> tuple[Value, int]:
    """What is put together of a few parts, and along which axis."""
    shape = d.shape(d.rng.randint(1, 3))
    axis, dtype = d.rng.randrange(len(shape)), d.rng.choice(NUMBERS)
    sizes = [d.rng.choice((0, 1, 1, 2, 3)) for _ in range(d.rng.randint(1, 4))]
    parts = [d.input(dtype, tuple(size if i == axis else n for i, n in enumerate(shape))) for size in sizes]
    return _concat(d, axis, parts), axis


def _other_axis(d: Draw, x: Value, axis: int) -> int:
    return axis if d.chance(0.85) else d.rng.randrange(len(x.shape))


def slice_slice(d: Draw) -> Value:
    x = d.input(d.rng.choice(NUMBERS), d.shape(d.rng.randint(1, 3), dims=(3, 4, 5)))
    axis = d.rng.randrange(len(x.shape))
    inner = _slice(d, x, axis)
    outer = _slice(d, inner, _other_axis(d, x, axis))
    return _concat(d, axis, [outer, inner]) if outer.shape == inner.shape and d.chance(0.3) else outer


def slice_concat(d: Draw) -> Value:
    x, axis = _joined(d)
    if d.chance(0.5):
        return _slice(d, x, _other_axis(d, x, axis))
    slices = [_slice(d, x, axis) for _ in range(d.rng.choice((2, 2, 3)))]
    return _concat(d, axis, [*slices, x] if d.chance(0.2) else slices)


def gather_concat(d: Draw) -> Value:
    x, axis = _joined(d)
    along = _other_axis(d, x, axis)
    n = x.shape[along]
    if n == 0:
        return x
    ids = d.const("i64", [d.rng.randrange(-n, n) for _ in range(d.rng.choice((1, 1, 1, 2)))])
    if ids.shape == (1,) and d.chance(0.7):
        ids = d.reshape(ids, ())
    shape = (*x.shape[:along], *ids.shape, *x.shape[along + 1 :])
    return d.node("Gather", [x, ids], x.dtype, shape, f"axis={along}")


def concat_concat(d: Draw) -> Value:
    inner, axis = _joined(d)
    like = [d.input(inner.dtype, inner.shape) for _ in range(d.rng.randint(0, 2))]
    parts = [inner, *like, *([inner] if d.chance(0.1) else [])]
    d.rng.shuffle(parts)
    return _concat(d, _other_axis(d, inner, axis), parts)


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


# ---- products ----


def matrices(d: Draw) -> tuple[Value, Value]:
    """x and y whose product is defined, batched in any way, each maybe through a transposition."""
    m, k, n = d.shape(3)
    dtype, batch = d.rng.choice(FLOATS), d.shape(d.rng.randint(0, 2))

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
    wide = x.dtype not in REALS and d.chance(0.5)
    attrs = f"alpha={d.rng.choice([1.0, 0.5])}" + (f", to={ONNX['f32']}" if wide else "")
    return d.node("FusedMatMul", [x, y], "f32" if wide else x.dtype, shape, attrs)


def grouped_product(d: Draw) -> Value:
    rows, k, n, groups = d.rng.randint(1, 5), *d.shape(3)
    dtype = d.rng.choice(REALS)
    perm = [0, 2, 1] if d.chance(0.8) else [1, 0, 2]
    w = d.transpose(d.input(dtype, tuple((groups, k, n)[perm.index(i)] for i in range(3))), perm)
    ends = d.const("i64", sorted(d.rng.randint(0, rows) for _ in range(groups)))
    return d.node("GroupedMatMul", [d.input(dtype, (rows, k)), w, ends], dtype, (rows, n))


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


def sum_cast(d: Draw) -> Value:
    x = d.input(d.rng.choice(("bf16", "bf16", "f16", *FLOATS)), d.shape(d.rng.randint(1, 3)))
    y = d.node("ReduceSum", [x], x.dtype, (1,) * len(x.shape))
    z = d.cast(y, d.rng.choice(("f32", "f32", *FLOATS)))
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


def _picked_grad(d: Draw, table: tuple[int, int], dtype: str) -> Value:
    """The gradient of what is picked from a table by index: by rows, elements, or a single row."""
    op = d.rng.choice(["EmbeddingGrad", "GatherGrad", "GatherGrad", "GatherNDGrad", "GatherElementsGrad"])
    axis = d.rng.randrange(2) if op in ("GatherGrad", "GatherElementsGrad") else 0
    count, rest = d.rng.choice((0, 1, 1, 3)), table[1 - axis]
    ids = d.const("i64", [d.rng.randrange(table[axis]) for _ in range(count)])
    picked = (count, rest) if axis == 0 else (rest, count)
    if op == "GatherGrad" and count == 1 and d.chance(0.7):
        ids, picked = d.reshape(ids, ()), (rest,)
    elif op == "GatherNDGrad":
        ids = d.reshape(ids, (count, 1))
    elif op == "GatherElementsGrad":
        ids = d.expand(d.reshape(ids, (count, 1) if axis == 0 else (1, count)), picked)
    attrs = f"{f'axis={axis}, ' if axis else ''}shape=[{table[0]}, {table[1]}]"
    return d.node(op, [d.input(dtype, picked), ids], dtype, table, attrs)


def _slice_grad(d: Draw, table: tuple[int, int], dtype: str) -> Value:
    axis = d.rng.randrange(2)
    n = table[axis]
    start = d.rng.randrange(n)
    end, step = d.rng.randint(start + d.chance(0.8), n), d.rng.choice((1, 1, 1, 1, 2))
    shape = tuple(len(range(start, end, step)) if i == axis else m for i, m in enumerate(table))
    ins = [d.input(dtype, shape), *(d.ints(i) for i in (start, end, axis, step))]
    return d.node("SliceGrad", ins, dtype, table, f"shape=[{table[0]}, {table[1]}]")


def placed_gradients(d: Draw) -> Value:
    table = d.rng.choice((1, 2, 3)), d.rng.choice((2, 3))
    narrow, wide = d.rng.choice([("f32", "f32"), ("f64", "f64"), ("bf16", "bf16"), ("bf16", "f32"), ("f16", "f32")])
    sums: list[Value] = []
    for _ in range(d.rng.randint(2, 6)):
        if d.chance(0.2):
            sums.append(d.input(wide, table if d.chance(0.7) else d.part(table)))
            continue
        dtype = narrow if d.chance(0.9) else wide
        y = (_slice_grad if d.chance(0.7) else _picked_grad)(d, table, dtype)
        sums.append(y if dtype == wide else d.node("Cast", [y], wide, table, "to=1"))
        if d.chance(0.1):
            sums.append(sums[-1])
    while len(sums) > 1:  # a tree of any form
        i = d.rng.randrange(len(sums) - 1)
        sums[i : i + 2] = [d.pair("Add", sums[i], sums[i + 1])]
    return sums[0]


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
    "gather_rows": gather_rows,
    "add_rows": add_rows,
    "slice_full": slice_full,
    "pad_nothing": pad_nothing,
    "tile_once": tile_once,
    "concat_one": concat_one,
    "split_one": split_one,
    "slice_slice": slice_slice,
    "slice_concat": slice_concat,
    "gather_concat": gather_concat,
    "concat_concat": concat_concat,
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
    "grouped_transpose": grouped_product,
    "transpose_matmul": transposed_product,
    "matmul_bias": product_and_bias,
    "matmul_alpha": product_times,
    "linear_cross_entropy": head_and_loss,
    "placed_gradients": placed_gradients,
    "matmul_cast": lambda d: product_of_halves(d, fused=False),
    "fused_matmul_cast": lambda d: product_of_halves(d, fused=True, wide=True),
    "cast_view": cast_view,
    "cast_norm": norm_cast,
    "cast_sum": sum_cast,
    "layer_norm_grad_cast": lambda d: norm_grad(d, "LayerNormGrad", 2),
    "rms_norm_grad_cast": lambda d: norm_grad(d, "RmsNormGrad", 1),
    "cast_matmul": product_cast,
    "batch_norm_added": batch_norm_added,
    "batch_norm_relu": batch_norm_relu,
    "batch_norm_relu_grad": batch_norm_relu_grad,
    "detach": detach,
    "with_gradient_of": with_gradient_of,
}
