"""What becomes of each op of ONNX: a table by domain, op and the version from which a row holds.

An op without a row is taken as ONNX itself defines it, if it does so by other ops.
"""

import math
from functools import reduce
from typing import Any

import torch

from .. import _C
from ..errors import Unsupported
from ..lowering.draft import OWN_DOMAIN, Val
from . import (
    classical,
    control,
    counting,
    detection,
    determinant,
    draws,
    einsum,
    gradients,
    indexing,
    movement,
    older,
    optimizers,
    quantization,
    recurrent,
    sampling,
    sequences,
    transforms,
    windows,
)
from .importer import Given, Importer, Results, Rule, Value, tensor_of, torch_dtype
from .windows import by_channel, root

# Attributes that the core does not know, at the values at which they say nothing.
_SAY_NOTHING: dict[str, Any] = {
    "saturate": 1,
    "select_last_index": 0,
    "stash_type": 1,
    "round_mode": "up",
}


def same(t: Importer, node: Given, *inputs: Val | None) -> Results:
    """The core has the op, as ONNX has it."""
    said = {k: v for k, v in node.attributes.items() if k not in _SAY_NOTHING or _SAY_NOTHING[k] != v}
    return t.emit(node.op, *inputs, outputs=node.outputs, **said)


def _identity(t: Importer, node: Given, x: Value) -> Results:
    return t.emit("Identity", x) if isinstance(x, Val) else x


def _attribute_as_input(name: str) -> Rule:
    """An attribute, a list of integers, that later became the second input."""

    def rule(t: Importer, node: Given, x: Val, *_: Val) -> Results:
        return t.emit(node.op, x, t.const(node.attributes[name]))

    return rule


def _with_default_axes(t: Importer, node: Given, x: Val, axes: Val | None = None) -> Results:
    if axes is None and node.op == "Squeeze":
        axes = t.const([i for i, d in enumerate(x.dims) if d == 1])
    return t.emit(node.op, x, axes)


def _squeeze_1(t: Importer, node: Given, x: Val) -> Results:
    axes = node.attributes.get("axes")
    return _with_default_axes(t, node, x, None if axes is None else t.const(axes))


def _folded(t: Importer, node: Given, first: Val, *others: Val) -> Results:
    """Of any number of operands."""
    op = {"Sum": "Add", "Mean": "Add"}.get(node.op, node.op)
    total = reduce(lambda a, b: t.emit(op, a, b), others, first)
    if node.op == "Mean":
        total = t.emit("Div", total, t.like(total, len(others) + 1))
    return total if others else t.emit("Identity", first)


def _shape(t: Importer, node: Given, x: Val) -> Results:
    start, end = node.attributes.get("start", 0), node.attributes.get("end")
    return t.const([int(d) for d in x.dims][slice(start, end)])


def _size(t: Importer, node: Given, x: Val) -> Results:
    return t.const(math.prod(int(d) for d in x.dims))


def _constant(t: Importer, node: Given) -> Results:
    ((name, value),) = node.attributes.items()
    if name == "value":
        return t.tensor(tensor_of(value))
    dtypes = {"value_float": torch.float32, "value_floats": torch.float32}
    dtypes |= {"value_int": torch.int64, "value_ints": torch.int64}
    if name not in dtypes:
        raise Unsupported(f"{name} is not known to the C core")
    return t.const(value, dtypes[name])


def _constant_of_shape(t: Importer, node: Given, shape: Val) -> Results:
    value = node.attributes.get("value")
    element = torch.zeros(1) if value is None else tensor_of(value)
    return t.tensor(element.reshape(()).expand(t.known(shape, "the shape").tolist()).clone())


def _cast(t: Importer, node: Given, x: Val) -> Results:
    return t.cast(x, torch_dtype(node.attributes["to"]))


def _bit_cast(t: Importer, node: Given, x: Val) -> Results:
    """The core has none but from numbers of 8 bits to others of them."""
    dtype = torch_dtype(node.attributes["to"])
    if dtype == torch.bool or dtype.itemsize != x.dtype.itemsize:
        raise Unsupported(f"bits of {x.dtype} as those of {dtype}")
    return t.cast(x, dtype) if dtype.itemsize == 1 else t.tensor(t.known(x, "the operand").view(dtype))


def _cast_like(t: Importer, node: Given, x: Val, like: Val) -> Results:
    return t.cast(x, like.dtype)


def _pow(t: Importer, node: Given, x: Val, exponent: Val) -> Results:
    if x.dtype.is_floating_point:
        return t.emit("Pow", x, t.cast(exponent, x.dtype))
    if exponent.dtype.is_floating_point:
        return t.cast(t.emit("Pow", t.cast(x, torch.float64), t.cast(exponent, torch.float64)), x.dtype)
    times = t.known(exponent, "the exponent of whole numbers")
    if (times < 0).any():
        raise Unsupported("a negative exponent of whole numbers")
    sizes = torch.broadcast_shapes(times.shape, [int(d) for d in x.dims])
    power: Val = t.tensor(torch.ones(sizes, dtype=x.dtype))
    while times.any():
        power = t.emit("Mul", power, t.emit("Where", t.tensor(times % 2 == 1), x, t.like(x, 1)))
        x, times = t.emit("Mul", x, x), times // 2
    return power


def _mod(t: Importer, node: Given, a: Val, b: Val) -> Results:
    fmod = bool(node.attributes.get("fmod"))
    if a.dtype.is_floating_point and not fmod and node.since < 28:
        raise Unsupported("a remainder of floats has the sign of the dividend, and fmod=1")
    return t.emit("Mod", a, b, fmod=fmod)


def _cum_sum(t: Importer, node: Given, x: Val, axis: Val) -> Results:
    wide = torch.int64 if x.dtype == torch.int32 else x.dtype
    return t.cast(t.emit("CumSum", t.cast(x, wide), axis, **node.attributes), x.dtype)


def _cum_prod(t: Importer, node: Given, x: Val, axis: Val) -> Results:
    """From the other end is of what is turned round; without each element itself, of what is moved by one."""
    along = int(t.known(axis, "the axis").item()) % x.rank
    n = int(x.dims[along])
    wide = x.dtype if x.dtype.is_floating_point else torch.int64
    turn = [t.const([v]) for v in (-1, -n - 1, along, -1)]
    y: Val = t.cast(x, wide)
    if node.attributes["reverse"]:
        y = t.emit("Slice", y, *turn)
    if node.attributes["exclusive"] and n > 0:
        one = t.tensor(torch.ones([1 if i == along else int(d) for i, d in enumerate(x.dims)], dtype=wide))
        y = t.emit("Concat", one, t.emit("Slice", y, *[t.const([v]) for v in (0, n - 1, along)]), axis=along)
    y = t.emit("CumProd", y, t.const(along))
    return t.cast(t.emit("Slice", y, *turn) if node.attributes["reverse"] else y, x.dtype)


def _top_k_1(t: Importer, node: Given, x: Val) -> Results:
    return _top_k(t, node, x, t.const([node.attributes["k"]]))


def _top_k(t: Importer, node: Given, x: Val, k: Val) -> Results:
    wide = x.dtype if x.dtype.is_floating_point else torch.int64
    said = {name: v for name, v in node.attributes.items() if name != "k"}
    values, places = t.emit("TopK", t.cast(x, wide), k, outputs=2, **said)
    return t.cast(values, x.dtype), places


def _extreme(t: Importer, node: Given, x: Val) -> Results:
    """The place of the first, or of the last: that is the first from the other end."""
    said = dict(node.attributes)
    if not said.pop("select_last_index", 0):
        return t.emit(node.op, x, **said)
    axis = said["axis"] % x.rank
    turned = t.emit("Slice", x, *[t.const([v]) for v in (-1, -int(x.dims[axis]) - 1, axis, -1)])
    return t.emit("Sub", t.const(int(x.dims[axis]) - 1), t.emit(node.op, turned, **said))


def _softplus(t: Importer, node: Given, x: Val) -> Results:
    return t.emit("Softplus", x, threshold=36.0)


def _clip_6(t: Importer, node: Given, x: Val) -> Results:
    most = torch.finfo(torch.float32).max
    low, high = (t.like(x, v) if abs(v := node.attributes[k]) < most else None for k in ("min", "max"))
    return _clip(t, node, x, low, high)


def _clip(t: Importer, node: Given, x: Val, low: Val | None = None, high: Val | None = None) -> Results:
    return t.emit("Identity", x) if low is None and high is None else t.emit("Clip", x, low, high)


def _is_inf(t: Importer, node: Given, x: Val) -> Results:
    wanted = [math.inf] * node.attributes["detect_positive"] + [-math.inf] * node.attributes["detect_negative"]
    hits = [t.emit("Equal", x, t.like(x, number)) for number in wanted]
    return reduce(lambda a, b: t.emit("Or", a, b), hits) if hits else t.emit("And", *[t.emit("IsNaN", x)] * 2)


def _hard_sigmoid(t: Importer, node: Given, x: Val) -> Results:
    scaled = t.emit("Mul", x, t.like(x, node.attributes["alpha"]))
    line = t.emit("Add", scaled, t.like(x, node.attributes["beta"]))
    return t.emit("Clip", line, t.like(x, 0.0), t.like(x, 1.0))


def _selu(t: Importer, node: Given, x: Val) -> Results:
    return t.emit("Elu", x, alpha=node.attributes["alpha"], scale=node.attributes["gamma"])


def _softsign(t: Importer, node: Given, x: Val) -> Results:
    return t.emit("Div", x, t.emit("Add", t.emit("Abs", x), t.like(x, 1)))


def _prelu_6(t: Importer, node: Given, x: Val, slope: Val) -> Results:
    return _prelu(t, node, x, older.by_channel(t, slope, x))


def _prelu(t: Importer, node: Given, x: Val, slope: Val) -> Results:
    return t.emit("Where", t.emit("Less", x, t.like(x, 0)), t.emit("Mul", x, slope), x)


# Reductions


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else int(dtype != torch.bool and torch.iinfo(dtype).min)


def _highest(dtype: torch.dtype) -> float:
    return math.inf if dtype.is_floating_point else int(dtype == torch.bool or torch.iinfo(dtype).max)


# What is made of no elements, where the core says nothing.
_OF_NONE = {"ReduceMax": _lowest, "ReduceMin": _highest, "ReduceLogSumExp": _lowest}


def _without(t: Importer, x: Val, axes: Val | None, keep: int, noop: int) -> list[int] | None:
    """The sizes of a result of which each element is made of none."""
    given = [] if axes is None else t.known(axes, "the axes").tolist()
    chosen = {a % x.rank for a in given} if given or noop else set(range(x.rank))
    if all(int(x.dims[a]) for a in chosen):
        return None
    return [1 if a in chosen else int(d) for a, d in enumerate(x.dims) if keep or a not in chosen]


def _reduced(t: Importer, node: Given, x: Val, axes: Val | None) -> Results:
    """Some are of functions of the elements, some give a function of the result."""
    keep, noop = node.attributes.get("keepdims", 1), node.attributes.get("noop_with_empty_axes", 0)

    def over(op: str, v: Val, keepdims: int = keep) -> Val:
        return t.emit(op, v, axes, keepdims=keepdims, noop_with_empty_axes=noop)

    if node.op in _OF_NONE and not all(x.dims) and (sizes := _without(t, x, axes, keep, noop)) is not None:
        return t.tensor(torch.full(sizes, _OF_NONE[node.op](x.dtype), dtype=x.dtype))
    if x.dtype == torch.bool:
        return t.cast(over(node.op, t.cast(x, torch.int64)), torch.bool)
    if node.op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
        return over(node.op, x)
    if node.op == "ReduceL1":
        return over("ReduceSum", t.emit("Abs", x))
    if node.op == "ReduceLogSum":
        return t.emit("Log", over("ReduceSum", x))
    if node.op == "ReduceLogSumExp":
        highest = over("ReduceMax", x, 1)
        finite = t.emit("Less", t.emit("Abs", highest), t.like(x, math.inf))
        highest = t.emit("Detach", t.emit("Where", finite, highest, t.like(x, 0)))
        total = t.emit("Log", over("ReduceSum", t.emit("Exp", t.emit("Sub", x, highest))))
        return t.emit("Add", total, t.emit("Reshape", highest, t.const([int(d) for d in total.dims])))
    squares = over("ReduceSum", t.emit("Mul", x, x))
    return squares if node.op == "ReduceSumSquare" else root(t, squares, 0.5)


def _reduce(t: Importer, node: Given, x: Val, axes: Val | None = None) -> Results:
    return _reduced(t, node, x, axes)


def _reduce_1(t: Importer, node: Given, x: Val) -> Results:
    axes = node.attributes.get("axes")
    return _reduced(t, node, x, None if axes is None else t.const(axes))


def _global_pool(t: Importer, node: Given, x: Val) -> Results:
    op = "ReduceMean" if node.op == "GlobalAveragePool" else "ReduceMax"
    return t.emit(op, x, t.const(list(range(2, x.rank))), keepdims=1)


def _flattened(t: Importer, node: Given, x: Val) -> Results:
    """Before version 13 all dims from the axis on are one."""
    rows = t.emit("Flatten", x, axis=node.attributes["axis"])
    given = Given(node.op, node.since, {"axis": 1}, 1)
    out: Any = _hardmax(t, given, rows) if node.op == "Hardmax" else t.emit(node.op, rows, axis=1)
    return t.emit("Reshape", out, t.const([int(d) for d in x.dims]))


def _hardmax(t: Importer, node: Given, x: Val) -> Results:
    axis = node.attributes["axis"] % x.rank
    first = t.emit("ArgMax", x, axis=axis, keepdims=1)
    return t.cast(t.emit("Equal", first, _positions(t, int(x.dims[axis]), axis, x.rank)), x.dtype)


def _positions(t: Importer, n: int, axis: int, rank: int, dtype: torch.dtype = torch.int64) -> Val:
    return t.tensor(torch.arange(n).to(dtype).reshape([n if i == axis else 1 for i in range(rank)]))


def _one_hot(t: Importer, node: Given, ids: Val, depth: Val, values: Val) -> Results:
    n, rank = int(t.known(depth, "the depth").item()), ids.rank + 1
    axis = node.attributes["axis"] % rank
    ids = t.cast(ids, torch.int64)
    wrapped = t.emit("Where", t.emit("Less", ids, t.const(0)), t.emit("Add", ids, t.const(n)), ids)
    hits = t.emit("Equal", t.emit("Unsqueeze", wrapped, t.const([axis])), _positions(t, n, axis, rank))
    off, on = (t.emit("Gather", values, t.const(i), axis=0) for i in (0, 1))
    return t.emit("Where", hits, on, off)


# Linear algebra and networks


def _batch_norm_6(t: Importer, node: Given, x: Val, *others: Val) -> tuple[Val | None, ...]:
    if not node.attributes["is_test"]:
        raise Unsupported("training before version 7")
    return _batch_norm(t, node, x, *others)


def _gemm(t: Importer, node: Given, a: Val, b: Val, c: Val | None = None) -> Results:
    said = node.attributes
    turned = [t.emit("Transpose", v, perm=[1, 0]) if said[k] else v for v, k in ((a, "transA"), (b, "transB"))]
    out: Val = t.emit("MatMul", *turned)
    if said["alpha"] != 1:
        out = t.emit("Mul", out, t.like(out, said["alpha"]))
    if c is None or said["beta"] == 0:
        return out
    return t.emit("Add", out, c if said["beta"] == 1 else t.emit("Mul", c, t.like(c, said["beta"])))


def _batch_norm(t: Importer, node: Given, x: Val, scale: Val, bias: Val, mean: Val, var: Val) -> tuple[Val | None, ...]:
    epsilon, momentum = node.attributes["epsilon"], node.attributes["momentum"]
    if not t.trains(bool(node.attributes.get("training_mode", 0))):
        rate = t.emit("Rsqrt", t.emit("Add", var, t.like(var, epsilon)))
        rate, centre = (by_channel(t, t.cast(v, x.dtype), x.rank) for v in (rate, mean))
        scaled = t.emit("Mul", t.emit("Mul", t.emit("Sub", x, centre), rate), by_channel(t, scale, x.rank))
        return (t.emit("Add", scaled, by_channel(t, bias, x.rank)),)
    y, batch_mean, rate = t.emit("BatchNorm", x, scale, bias, outputs=3, epsilon=epsilon, momentum=1 - momentum)
    # ONNX's running variance is not that of a sample: it is that of the elements.
    batch_var = t.emit("Sub", t.emit("Reciprocal", t.emit("Mul", rate, rate)), t.like(rate, epsilon))
    running = []
    for old, new in ((mean, batch_mean), (var, batch_var)):
        share = t.emit("Mul", t.emit("Detach", t.cast(new, old.dtype)), t.like(old, 1 - momentum))
        running.append(t.emit("Add", t.emit("Mul", old, t.like(old, momentum)), share))
        t.updates[old] = running[-1]
    return (y, *running)


def _instance_norm(t: Importer, node: Given, x: Val, scale: Val, bias: Val) -> Results:
    axes = t.const(list(range(2, x.rank)))
    centred = t.emit("Sub", x, t.emit("ReduceMean", x, axes, keepdims=1))
    var = t.emit("ReduceMean", t.emit("Mul", centred, centred), axes, keepdims=1)
    rate = t.emit("Rsqrt", t.emit("Add", var, t.like(x, node.attributes["epsilon"])))
    scaled = t.emit("Mul", t.emit("Mul", centred, rate), by_channel(t, scale, x.rank))
    return t.emit("Add", scaled, by_channel(t, bias, x.rank))


def _local_response_norm(t: Importer, node: Given, x: Val) -> Results:
    """By the squares of channels around each."""
    said, n = node.attributes, int(x.dims[1])
    before, size = (said["size"] - 1) // 2, said["size"]
    pads = [[side if i == 1 else 0 for i in range(x.rank)] for side in (before, size - 1 - before)]
    squares = t.emit("Pad", t.emit("Mul", x, x), t.const(pads[0] + pads[1]))
    windows = [t.emit("Slice", squares, *[t.const([v]) for v in (i, i + n, 1)]) for i in range(size)]
    total = t.emit("Mul", reduce(lambda a, b: t.emit("Add", a, b), windows), t.like(x, said["alpha"] / size))
    return t.emit("Div", x, t.emit("Pow", t.emit("Add", total, t.like(x, said["bias"])), t.like(x, said["beta"])))


def _lp_norm(t: Importer, node: Given, x: Val) -> Results:
    axes = t.const([node.attributes["axis"]])
    if node.attributes["p"] == 1:
        length = t.emit("ReduceSum", t.emit("Abs", x), axes, keepdims=1)
    else:
        length = root(t, t.emit("ReduceSum", t.emit("Mul", x, x), axes, keepdims=1), 0.5)
    none = t.emit("Equal", length, t.like(x, 0))
    return t.emit("Where", none, t.like(x, 0), t.emit("Div", x, t.emit("Where", none, t.like(x, 1), length)))


def _dropout(t: Importer, node: Given, x: Val, ratio: Val | None = None, training: Val | None = None) -> Results:
    if "ratio" in node.attributes:  # before version 12, and training is not the node's business
        p, asked = node.attributes["ratio"], False
    else:
        p = 0.5 if ratio is None else float(t.known(ratio, "the ratio"))
        asked = training is not None and bool(t.known(training, "training_mode"))
    mask = x.dtype if node.since < 10 else torch.bool
    if not t.trains(asked) or p == 0:
        return t.emit("Identity", x), t.tensor(torch.ones([int(d) for d in x.dims], dtype=mask))
    if node.outputs > 1:  # the mask is what is left of ones
        ones = t.tensor(torch.ones([int(d) for d in x.dims], dtype=x.dtype))
        kept = t.emit("Dropout", ones, p=p, subsequence=t.draft.subsequence())
        return t.emit("Mul", x, kept), t.cast(t.cast(kept, torch.bool), mask)
    return t.emit("Dropout", x, p=p, subsequence=t.draft.subsequence())


def _layer_norm(t: Importer, node: Given, x: Val, scale: Val, bias: Val | None = None) -> Results:
    said = {k: node.attributes[k] for k in ("axis", "epsilon")}
    return t.emit("LayerNormalization", x, scale, bias, outputs=node.outputs, **said)


def _group_norm(t: Importer, node: Given, x: Val, scale: Val, bias: Val) -> Results:
    said = {k: node.attributes[k] for k in ("num_groups", "epsilon")}
    return t.emit("GroupNorm", x, scale, bias, **said)


def _nll(t: Importer, node: Given, x: Val, target: Val, weight: Val | None = None) -> Results:
    said = {k: v for k, v in node.attributes.items() if v is not None}
    said.setdefault("ignore_index", -(2**31))  # no class, as none is given
    return t.emit(node.op, x, target, weight, **said)


def _own(op: str) -> Rule:
    def rule(t: Importer, node: Given, *inputs: Val | None) -> Results:
        return t.emit(op, *inputs, outputs=node.outputs, **node.attributes)

    return rule


def _rows(first: int, rule: Rule, *ops: str) -> dict[tuple[str, str], dict[int, Rule]]:
    return {("", op): {first: rule} for op in ops}


_CLASSICAL, _TRAINING = "ai.onnx.ml", "ai.onnx.preview.training"
_REDUCTIONS = [f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum")]
_REDUCTIONS += ["ReduceSumSquare"]
_SINCE_18 = [op for op in _REDUCTIONS if op != "ReduceSum"]

TABLE: dict[tuple[str, str], dict[int, Rule]] = {
    **_rows(1, same, "And", "Concat", "Cos", "IsNaN", "MatMul", "Not", "Or", "Sin"),
    **_rows(1, same, "Flatten", "GatherElements", "GatherND", "Range", "Trilu", "Where", "Xor"),
    **_rows(6, same, "Abs", "Ceil", "Elu", "Exp", "Floor", "LeakyRelu", "Log", "Neg", "Reciprocal", "Relu", "Sigmoid"),
    **_rows(6, same, "Sqrt", "Tanh", "Tile"),
    **_rows(7, same, "Acos", "Asin", "Atan", "Tan"),
    **_rows(9, same, "Acosh", "Asinh", "Atanh", "Cosh", "Sinh"),
    **_rows(7, same, "Equal", "Greater", "Less"),
    **_rows(8, same, "Erf", "Expand", "Gelu", "GreaterOrEqual", "HardSwish", "LessOrEqual", "Mish", "Round", "Sign"),
    **_rows(11, same, "BitShift"),
    **_rows(18, same, "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"),
    **_rows(1, _cast_like, "CastLike"),
    **_rows(1, windows.conv, "Conv"),
    **_rows(1, windows.conv_transpose, "ConvTranspose"),
    **_rows(1, _constant, "Constant"),
    **_rows(1, _constant_of_shape, "ConstantOfShape"),
    **_rows(1, movement.eye_like, "EyeLike"),
    **_rows(1, movement.gather, "Gather"),
    **_rows(1, _global_pool, "GlobalAveragePool", "GlobalMaxPool"),
    **_rows(21, _group_norm, "GroupNormalization"),
    **_rows(1, _is_inf, "IsInf"),
    **_rows(1, _layer_norm, "LayerNormalization"),
    **_rows(1, _mod, "Mod"),
    **_rows(1, _nll, "NegativeLogLikelihoodLoss"),
    **_rows(1, _one_hot, "OneHot"),
    **_rows(1, movement.blocks, "DepthToSpace", "SpaceToDepth"),
    **_rows(1, _shape, "Shape"),
    **_rows(1, _size, "Size"),
    **_rows(1, _softplus, "Softplus"),
    **_rows(1, _softsign, "Softsign"),
    **_rows(1, movement.split, "Split"),
    **_rows(1, movement.transpose, "Transpose"),
    **_rows(1, windows.average, "AveragePool"),
    **_rows(1, windows.maximum, "MaxPool"),
    **_rows(6, _cast, "Cast"),
    **_rows(1, _bit_cast, "BitCast"),
    **_rows(6, _hard_sigmoid, "HardSigmoid"),
    **_rows(6, _instance_norm, "InstanceNormalization"),
    **_rows(6, _selu, "Selu"),
    **_rows(6, _folded, "Sum", "Mean", "Max", "Min"),
    **_rows(7, _dropout, "Dropout"),
    **_rows(1, _gemm, "Gemm"),
    **_rows(1, _extreme, "ArgMax", "ArgMin"),
    **_rows(26, _cum_prod, "CumProd"),
    **_rows(1, _cum_sum, "CumSum"),
    **_rows(1, windows.lp, "LpPool"),
    **_rows(1, windows.global_lp, "GlobalLpPool"),
    **_rows(1, quantization.dequantize, "DequantizeLinear"),
    **_rows(1, quantization.quantize, "QuantizeLinear"),
    **_rows(10, quantization.convolution, "ConvInteger"),
    **_rows(10, quantization.convolution_between, "QLinearConv"),
    **_rows(10, quantization.matmul, "MatMulInteger"),
    **_rows(10, quantization.matmul_between, "QLinearMatMul"),
    **_rows(1, indexing.col2im, "Col2Im"),
    ("", "BatchNormalization"): {6: _batch_norm_6, 7: _batch_norm},
    ("", "DFT"): {17: transforms.dft_17, 20: transforms.dft},
    ("", "Pow"): {1: older.broadcast, 7: _pow},
    ("", "PRelu"): {6: _prelu_6, 7: _prelu},
    **{("", op): {6: older.broadcast, 7: same} for op in ("Add", "Div", "Mul", "Sub")},
    **{("", op): {1: _reduce_1, 18: _reduce} for op in _SINCE_18},
    ("", "ReduceSum"): {1: _reduce_1, 13: _reduce},
    **_rows(11, sequences.construct, "SequenceConstruct", "SequenceEmpty"),
    **_rows(11, sequences.erase, "SequenceErase"),
    **_rows(11, sequences.insert, "SequenceInsert"),
    **_rows(11, sequences.item, "SequenceAt"),
    **_rows(11, sequences.joined, "ConcatFromSequence"),
    **_rows(11, sequences.length, "SequenceLength"),
    **_rows(11, sequences.split, "SplitToSequence"),
    **_rows(1, _identity, "Identity"),
    **_rows(1, control.condition, "If"),
    **_rows(1, control.loop, "Loop"),
    ("", "Scan"): {8: control.scan_8, 9: control.scan},
    **_rows(11, control.mapped, "SequenceMap"),
    **_rows(15, sequences.element, "OptionalGetElement"),
    **_rows(15, sequences.has_element, "OptionalHasElement"),
    **_rows(15, sequences.optional, "Optional"),
    **_rows(7, recurrent.recurrent, "GRU", "LSTM", "RNN"),
    **_rows(1, indexing.compress, "Compress"),
    **_rows(1, counting.tf_idf, "TfIdfVectorizer"),
    **_rows(1, counting.unique, "Unique"),
    **_rows(1, movement.tensor_scatter, "TensorScatter"),
    **_rows(1, detection.non_max_suppression, "NonMaxSuppression"),
    ("", "RoiAlign"): {10: detection.roi_align_10, 16: detection.roi_align},
    **_rows(1, sampling.deform_conv, "DeformConv"),
    **_rows(1, draws.bernoulli, "Bernoulli"),
    **_rows(1, draws.multinomial, "Multinomial"),
    **_rows(1, draws.normal, "RandomNormal", "RandomNormalLike"),
    **_rows(1, draws.uniform, "RandomUniform", "RandomUniformLike"),
    **_rows(1, determinant.det, "Det"),
    **_rows(1, einsum.einsum, "Einsum"),
    **_rows(1, transforms.mel_weights, "MelWeightMatrix"),
    **_rows(1, transforms.stft, "STFT"),
    **_rows(1, sampling.grid_sample, "GridSample"),
    **_rows(1, indexing.max_unpool, "MaxUnpool"),
    **_rows(1, indexing.non_zero, "NonZero"),
    **_rows(1, indexing.reverse_sequence, "ReverseSequence"),
    **_rows(1, indexing.scatter_elements, "Scatter", "ScatterElements"),
    **_rows(1, indexing.scatter_nd, "ScatterND"),
    **_rows(1, _local_response_norm, "LRN"),
    **_rows(1, _lp_norm, "LpNormalization"),
    ("", "Upsample"): {7: sampling.upsample_7, 9: sampling.resize_10},
    ("", "Resize"): {10: sampling.resize_10, 11: sampling.resize},
    ("", "Clip"): {6: _clip_6, 11: _clip},
    ("", "Pad"): {2: movement.pad_2, 11: movement.pad},
    ("", "Reshape"): {1: _attribute_as_input("shape"), 5: same},
    ("", "Slice"): {1: movement.slice_1, 10: same},
    ("", "TopK"): {1: _top_k_1, 10: _top_k},
    ("", "Squeeze"): {1: _squeeze_1, 13: _with_default_axes},
    ("", "Unsqueeze"): {1: _attribute_as_input("axes"), 13: _with_default_axes},
    ("", "Softmax"): {1: _flattened, 13: same},
    ("", "LogSoftmax"): {1: _flattened, 13: same},
    ("", "Hardmax"): {1: _flattened, 13: _hardmax},
    (_CLASSICAL, "ArrayFeatureExtractor"): {1: classical.features},
    (_CLASSICAL, "Binarizer"): {1: classical.binarizer},
    (_CLASSICAL, "LinearRegressor"): {1: classical.linear_regressor},
    (_CLASSICAL, "Scaler"): {1: classical.scaler},
    (_CLASSICAL, "TreeEnsemble"): {5: classical.tree_ensemble},
    (_TRAINING, "Adagrad"): {1: optimizers.adagrad},
    (_TRAINING, "Gradient"): {1: gradients.gradient},
    (_TRAINING, "Adam"): {1: optimizers.adam},
    (_TRAINING, "Momentum"): {1: optimizers.momentum},
    # Ours, as files of ours have them: also ops of ONNX's names where ONNX does not know what they say.
    **{(OWN_DOMAIN, op): {1: _own(op)} for op in _C.ops() if not op.startswith("TorchCall")},
}
