"""What ONNX composes ops of, where it has no op of the same meaning: a table by op.

Rows of PORTABLE are for files that other programs run; the others are for all.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from onnx import TensorProto, TypeProto

from ..dtypes import DTYPES
from .description import Attribute, Node, Type

_KINDS = {int: "INT", float: "FLOAT", str: "STRING", list: "INTS"}
GATES = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}  # the place in ONNX's order of each of ours
CODES: dict[str, int] = {text: TensorProto.DataType.Value(name) for text, name in DTYPES.values()}
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def _kind(value: Any) -> str:
    return "STRINGS" if isinstance(value, list) and isinstance(value[0], str) else _KINDS[type(value)]


class Values(Protocol):
    """What is known of values, and a place for constants."""

    def type_of(self, value: str | None) -> TypeProto | None:
        """The type of a value, if that is known."""

    def source_of(self, value: str | None) -> Node | None:
        """The node that gives a value."""

    def number(self, value: str | None) -> float | None:
        """The number that a value is, if it is a constant of one element."""

    def add_constant(self, name: str, dtype: int, dims: tuple[int, ...], values: list[Any]) -> None:
        """Add a constant under a name."""


class Parts:
    """Nodes of ONNX that stand for one of ours.

    Parameters
    ----------
    node
        Ours.
    used
        Which of its results are.
    values
        Those around it.

    Attributes
    ----------
    given
        Its attributes.
    nodes
        Those that stand for it so far.
    """

    def __init__(self, node: Node, used: Sequence[int], values: Values) -> None:
        self.node, self.used = node, used
        self.given: dict[str, Any] = {a.name: a.value for a in node.attributes}
        self.nodes: list[Node] = []
        self._values = values
        self._made = 0

    def emit(self, op: str, *inputs: str | None, **attributes: Any) -> str:
        """Add a node; the name of its result."""
        return self.emit_all(op, 1, *inputs, **attributes)[0]

    def emit_all(self, op: str, outputs: int, *inputs: str | None, **attributes: Any) -> list[str]:
        """Add a node of several results; their names."""
        names = [self._fresh() for _ in range(outputs)]
        said = [Attribute(k, _kind(v), v) for k, v in attributes.items()]
        results: list[tuple[str, Type | None] | None] = [(name, None) for name in names]
        self.nodes.append(Node(op, self.node.name, self.node.phase, list(inputs), results, said))
        return names

    def give(self, op: str, *inputs: str | None, result: int = 0, **attributes: Any) -> "Parts":
        """Add the node that gives one of the results, if that is used."""
        if result in self.used:
            self.emit(op, *inputs, **attributes)
            self.nodes[-1].outputs[0] = self.node.outputs[result]
        return self

    def source(self, value: str | None) -> Node | None:
        """The node of ours that gives a value."""
        return self._values.source_of(value)

    def number(self, value: str | None) -> float | None:
        """The number that a value is, if it is a constant of one element."""
        return self._values.number(value)

    def const(self, values: Any, dtype: int = TensorProto.INT64) -> str:
        """A number or a list of them."""
        name, data = self._fresh(), np.asarray(values)
        self._values.add_constant(name, dtype, data.shape, data.reshape(-1).tolist())
        return name

    @property
    def result_dtype(self) -> int | None:
        """ONNX's code of the dtype of our first result, if that is known."""
        first = self.node.outputs[0]
        return None if first is None or first[1] is None else CODES[first[1][0]]

    def dtype(self, value: str | None) -> int | None:
        """ONNX's code of a value's dtype, if that is known."""
        kind = self._values.type_of(value)
        return None if kind is None else kind.tensor_type.elem_type

    def dims(self, value: str | None) -> list[int | None] | None:
        """A value's sizes, None where they are open, if its rank is known."""
        kind = self._values.type_of(value)
        if kind is None or not kind.tensor_type.HasField("shape"):
            return None
        return [d.dim_value if d.HasField("dim_value") else None for d in kind.tensor_type.shape.dim]

    def rank(self, value: str | None) -> int | None:
        """How many dims a value has, if that is known."""
        dims = self.dims(value)
        return None if dims is None else len(dims)

    def _fresh(self) -> str:
        self._made += 1
        first = self.node.outputs[self.used[0]]
        assert first is not None
        return f"{first[0]}:{self._made}"


Composition = Callable[[Parts], Parts | None]  # None: ONNX has nothing that means the same


def _product(p: Parts) -> Parts | None:
    """A product that has transposed operands and a bias."""
    turned = [bool(p.given.get(name)) for name in ("transA", "transB")]
    *operands, bias = [*p.node.inputs, None][:3]
    ranks = [p.rank(v) for v in operands]
    is_open = any(turn and rank is None for turn, rank in zip(turned, ranks, strict=True))
    if p.given.get("alpha", 1) != 1 or is_open or len({p.dtype(v) for v in operands}) > 1:
        return None
    code, to = p.dtype(operands[0]), p.given.get("to")
    is_rounded = bias is not None and to is None and code in _HALVES  # once, behind the sum
    if is_rounded:
        to, bias = int(TensorProto.FLOAT), p.emit("Cast", bias, to=int(TensorProto.FLOAT))
    if to is not None:
        operands = [p.emit("Cast", v, to=to) for v in operands]
    for i, rank in enumerate(ranks):
        if turned[i] and rank is not None and rank > 1:
            operands[i] = p.emit("Transpose", operands[i], perm=[*range(rank - 2), rank - 1, rank - 2])
    if bias is None:
        return p.give("MatMul", *operands)
    if not is_rounded:
        return p.give("Add", p.emit("MatMul", *operands), bias)
    return p.give("Cast", p.emit("Add", p.emit("MatMul", *operands), bias), to=code)


def _gather(p: Parts) -> Parts | None:
    """Picking by index along axes that are not the first."""
    axis = p.given.get("axis", 0)
    x, ids = p.node.inputs[:2]
    rank, dims = p.rank(x), p.dims(ids)
    if not axis or rank is None or not dims or dims[-1] is None:
        return None
    k, last = len(dims) - 1, axis + dims[-1]
    there = p.emit("Transpose", x, perm=[*range(axis, last), *range(axis), *range(last, rank)])
    back = [*range(k, k + axis), *range(k), *range(k + axis, k + rank - dims[-1])]
    return p.give("Transpose", p.emit("GatherND", there, ids), perm=back)


def _attention(p: Parts) -> Parts | None:
    """Products and a softmax, which is 0 where nothing is attended to."""
    q, k, v, mask = [*p.node.inputs, None][:4]
    code, shapes = p.dtype(q), [p.dims(v) for v in (q, k)]
    if p.given.get("p") or p.given.get("kv_heads") or any(a != 1 for a in p.given.get("head_axes", [1])):
        return None
    if code is None or shapes[0] is None or shapes[1] is None or shapes[0][1] != shapes[1][1]:
        return None
    scale = p.given.get("scale")
    if scale is None:
        if shapes[0][3] is None:
            return None
        scale = shapes[0][3] ** -0.5
    scaled = p.emit("Mul", q, p.const(float(scale), code))  # before the product, which 16 bits might not hold
    scores = p.emit("MatMul", scaled, p.emit("Transpose", k, perm=[0, 1, 3, 2]))
    if p.given.get("is_causal"):
        size = p.emit("Concat", p.emit("Shape", q, start=2, end=3), p.emit("Shape", k, start=2, end=3), axis=0)
        below = p.emit("Trilu", p.emit("Expand", p.const(1.0, TensorProto.FLOAT), size), upper=0)
        mask = p.emit("Cast", below, to=int(TensorProto.BOOL))
    if mask is None:
        return p.give("MatMul", p.emit("Softmax", scores, axis=-1), v)
    least = p.const(-np.inf, code)
    if p.given.get("is_causal") or p.dtype(mask) == TensorProto.BOOL:
        mask = p.emit("Where", mask, p.const(0.0, code), least)
    nothing = p.emit("Equal", p.emit("ReduceMax", mask, p.const([-1]), keepdims=1), least)
    weights = p.emit("Softmax", p.emit("Add", scores, mask), axis=-1)
    return p.give("MatMul", p.emit("Where", nothing, p.const(0.0, code), weights), v)


def _cross_entropy(p: Parts) -> Parts | None:
    if p.given.get("label_smoothing"):
        return None
    said = {name: p.given[name] for name in ("reduction", "ignore_index") if name in p.given}
    return p.give("SoftmaxCrossEntropyLoss", *p.node.inputs, **{"ignore_index": -100, **said})


def _adaptive_pool(p: Parts) -> Parts | None:
    """Windows that lie side by side, if they do."""
    x, wanted = p.node.inputs[0], p.given["output_size"]
    if p.given.get("channels_last"):
        return None
    if all(n == 1 for n in wanted) and p.rank(x) == 2 + len(wanted):
        return p.give("GlobalAveragePool", x)
    sizes = (p.dims(x) or [])[2:]
    if len(sizes) != len(wanted) or any(
        not n or size is None or size % n for size, n in zip(sizes, wanted, strict=True)
    ):
        return None
    windows = [int(size or 0) // n for size, n in zip(sizes, wanted, strict=True)]
    return p.give("AveragePool", x, kernel_shape=windows, strides=windows)


def _rms_norm(p: Parts) -> Parts | None:
    x, scale = [*p.node.inputs, None][:2]
    code, rank = p.dtype(x), p.rank(x)
    if code is None or rank is None or "to" in p.given:
        return None
    wide = int(TensorProto.FLOAT) if code in _HALVES else code
    value = p.emit("Cast", x, to=wide) if wide != code else x
    axes = p.const([*range(p.given.get("axis", -1) % rank - rank, 0)])
    square = p.emit("ReduceMean", p.emit("Mul", value, value), axes, keepdims=1)
    length = p.emit("Sqrt", p.emit("Add", square, p.const(p.given.get("epsilon", 1e-5), wide)))
    result = p.emit("Div", value, length)
    if scale is not None:
        wider = p.emit("Cast", scale, to=wide) if wide != code else scale
        result = p.emit("Mul", result, wider)
    return p.give("Cast", result, to=code) if wide != code else p.give("Identity", result)


def _recurrent(op: str) -> Composition:
    """A layer of the cells, and of the product that gives them its input."""
    places = GATES[op]
    order = [places.index(i) for i in range(len(places))]  # from ours to ONNX's

    def composed(p: Parts) -> Parts | None:
        gates, r, bias, *states = [*p.node.inputs, None][: 6 if op == "LSTM" else 5]
        product, shape = p.source(gates), p.dims(r)
        if product is None or product.op != "FusedMatMul" or shape is None or None in shape:
            return None
        if {a.name: a.value for a in product.attributes}.get("transB") != 1 or len(product.attributes) != 1:
            return None
        x, w, added = [*product.inputs, None][:3]
        hidden = int(shape[1] or 0)
        widths = {v: (p.dims(v) or [None])[-1] for v in (w, r) if v is not None}
        code = p.dtype(r)
        if code is None or None in widths.values():
            return None

        def ordered(v: str | None, *width: int | None) -> str:
            apart = p.emit("Reshape", v, p.const([len(order), hidden, *width]))
            turned = p.emit("Gather", apart, p.const(order), axis=0) if len(order) > 1 else apart
            return p.emit("Reshape", turned, p.const([1, len(order) * hidden, *width]))

        both = None
        if bias is not None or added is not None:
            none = p.const([[0.0] * (len(order) * hidden)], code)
            both = p.emit("Concat", *[none if v is None else ordered(v) for v in (added, bias)], axis=1)
        begun = [p.emit("Unsqueeze", v, p.const([0])) for v in states if v is not None]
        said: dict[str, Any] = {"hidden_size": hidden, "direction": "reverse" if p.given.get("reverse") else "forward"}
        if op == "GRU":
            said["linear_before_reset"] = 1
        if p.given.get("relu"):
            said["activations"] = ["Relu"]
        results = p.emit_all(
            op, 1 + len(begun), x, ordered(w, widths[w or ""]), ordered(r, hidden), both, None, *begun, **said
        )
        p.give("Squeeze", results[0], p.const([1]))
        for i, ended in enumerate(results[1:], start=1):
            p.give("Squeeze", ended, p.const([0]), result=i)
        return p

    return composed


def _layer_norm(p: Parts) -> Parts | None:
    """ONNX's has a scale, and operands of one dtype; ours computes in 32 bits. Of open sizes it has one for images."""
    x, scale, bias = [*p.node.inputs, None, None][:3]
    code, dims, result = p.dtype(x), p.dims(x), p.result_dtype
    mixed = {p.dtype(v) for v in (x, scale, bias) if v is not None} | {result}
    if code is None or dims is None or None in mixed or (scale is not None and len(mixed) == 1):
        return None
    wide = int(TensorProto.FLOAT) if len(mixed) > 1 else code
    op, said = "LayerNormalization", p.given
    if scale is None:
        axis = p.given.get("axis", -1) % len(dims)
        of, rest = dims[axis - 1], dims[axis:]
        if None not in rest:
            scale = p.const(np.ones([int(d or 0) for d in rest]), wide)
        elif axis == 2 and of is not None:  # as groups of channels are
            op, said = "InstanceNormalization", {"epsilon": p.given.get("epsilon", 1e-5)}
            scale, bias = p.const(np.ones(of), wide), p.const(np.zeros(of), wide)
        else:
            return None
    given = [None if v is None else v if p.dtype(v) == wide else p.emit("Cast", v, to=wide) for v in (x, scale, bias)]
    if result == wide:
        return p.give(op, *given, **said)
    return p.give("Cast", p.emit(op, *given, **said), to=result)


def _group_norm(p: Parts) -> Parts | None:
    """By InstanceNormalization, of which groups are the channels: their sizes may be open."""
    x, scale, bias = [*p.node.inputs, None, None][:3]
    code, dims, result, groups = p.dtype(x), p.dims(x), p.result_dtype, p.given["num_groups"]
    if code is None or dims is None or result is None:
        return None
    of_group = -1 if None in dims[1:] else math.prod(int(d or 0) for d in dims[1:]) // groups
    wide = int(TensorProto.FLOAT) if code in _HALVES else code

    def widened(v: str | None) -> str | None:
        return v if p.dtype(v) == wide else p.emit("Cast", v, to=wide)

    rows = p.emit("Reshape", widened(x), p.const([0, groups, of_group]))
    ones, zeros = p.const(np.ones(groups), wide), p.const(np.zeros(groups), wide)
    out = p.emit("InstanceNormalization", rows, ones, zeros, epsilon=p.given["epsilon"])
    out = p.emit("Reshape", out, p.emit("Shape", x))
    for op, v in (("Mul", scale), ("Add", bias)):
        if v is not None:
            out = p.emit(op, out, p.emit("Reshape", widened(v), p.const([-1] + [1] * (len(dims) - 2))))
    return p.give("Identity", out) if result == wide else p.give("Cast", out, to=result)


def _scaled_elu(p: Parts) -> Parts | None:
    """SELU and CELU: ONNX's has one number."""
    (x,) = p.node.inputs
    code, scale, inner = p.dtype(x), p.given.get("scale", 1.0), p.given.get("input_scale", 1.0)
    if (scale == 1 and inner == 1) or code is None:
        return None
    alpha = p.given.get("alpha", 1.0)
    if inner == 1:
        return p.give("Mul", p.emit("Elu", x, alpha=alpha), p.const(scale, code))
    below = p.emit("Sub", p.emit("Exp", p.emit("Mul", x, p.const(inner, code))), p.const(1.0, code))
    below = p.emit("Mul", below, p.const(scale * alpha, code))
    above = p.emit("Mul", x, p.const(scale, code)) if scale != 1 else x
    return p.give("Where", p.emit("Greater", x, p.const(0.0, code)), above, below)


def _batch_norm(p: Parts) -> Parts | None:
    """What BatchNorm is in evaluation: x f + (bias - mean f), with f = scale / sqrt(var + epsilon)."""

    def source(value: str | None) -> tuple[str, list[str | None]]:
        """What a value is made by, and of what, but for a reshape of it."""
        node = p.source(value)
        while node is not None and node.op in ("Reshape", "Unsqueeze"):
            node = p.source(node.inputs[0])
        return ("", []) if node is None else (node.op, [*node.inputs])

    def bare(value: str | None) -> str | None:
        node = p.source(value)
        return bare(node.inputs[0]) if node is not None and node.op in ("Reshape", "Unsqueeze") else value

    def operands(value: str | None, op: str, n: int = 2) -> list[str | None]:
        made_by, inputs = source(value)
        return inputs if made_by == op and len(inputs) == n else [None] * n

    def is_by_channel(value: str | None) -> bool:
        dims, of_x = p.dims(value), p.dims(x)
        if dims is None or of_x is None or len(of_x) < 2:
            return False
        aligned = [1] * (len(of_x) - len(dims)) + dims
        return len(aligned) == len(of_x) and aligned[1] == of_x[1] and all(d == 1 for d in aligned[:1] + aligned[2:])

    scaled, shift = p.node.inputs
    x, f = operands(scaled, "Mul")
    factor = bare(f)
    if not is_by_channel(f) or not is_by_channel(shift):
        return None
    bias, moved = operands(shift, "Sub")
    mean, same = operands(operands(shift, "Neg", 1)[0] if moved is None else moved, "Mul")
    rate, scale = operands(factor, "Mul") if source(factor)[0] == "Mul" else (factor, None)
    var, epsilon = operands(operands(rate, "Rsqrt", 1)[0], "Add")
    number, code, channels = p.number(epsilon), p.dtype(x), (p.dims(x) or [None, None])[1]
    if factor is None or same != factor or number is None or channels is None or code is None:
        return None
    if any(p.dims(v) != [channels] or p.dtype(v) != code for v in (mean, var, bias, scale) if v is not None):
        return None
    scale = p.const(np.ones(channels), code) if scale is None else scale
    bias = p.const(np.zeros(channels), code) if bias is None else bias
    return p.give("BatchNormalization", x, scale, bias, mean, var, epsilon=number)


def _without(attribute: str) -> Composition:
    """The same op without an attribute that refuses what ONNX leaves undefined or wraps."""

    def composed(p: Parts) -> Parts | None:
        if not p.given.get(attribute):
            return None
        said = {name: value for name, value in p.given.items() if name != attribute}
        return p.give(p.node.op, *p.node.inputs, **said)

    return composed


COMPOSED: Mapping[str, Composition] = {"FusedMatMul": _product, "GatherND": _gather}
PORTABLE: Mapping[str, Composition] = {
    "Add": _batch_norm,
    "AdaptiveAvgPool": _adaptive_pool,
    "Attention": _attention,
    "CrossEntropy": _cross_entropy,
    "Elu": _scaled_elu,
    "Gather": _without("strict"),
    "GatherElements": _without("strict"),
    "GroupNorm": _group_norm,
    "GruCells": _recurrent("GRU"),
    "LayerNormalization": _layer_norm,
    "LstmCells": _recurrent("LSTM"),
    "RmsNorm": _rms_norm,
    "RnnCells": _recurrent("RNN"),
}
SEVERAL = {"GruCells": 2, "LstmCells": 3, "RnnCells": 2}  # results that a composition gives; else the first
