"""Writes graphs of the C core as ONNX models."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper

from .. import _C
from ..dtypes import DTYPES
from ..lowering.draft import OPSET, OVER, OWN_DOMAIN, OWN_OPSET
from .compose import CODES, COMPOSED, PORTABLE, SEVERAL, Composition, Parts
from .description import Attribute, Description, Node, Raw, Type, described

_IMPORTS = [helper.make_opsetid("", OPSET), helper.make_opsetid(OWN_DOMAIN, OWN_OPSET)]

# Attributes of the core that ONNX does not know, at the values at which they say nothing.
_SAY_NOTHING = {
    ("AveragePool", "divisor_override"): 0,
    ("Elu", "input_scale"): 1,
    ("Elu", "scale"): 1,
    ("Gather", "strict"): 0,
    ("GatherElements", "strict"): 0,
    ("GatherND", "axis"): 0,
    ("ReduceMax", "nan_ties"): 0,
    ("ReduceMin", "nan_ties"): 0,
    ("Softplus", "beta"): 1,
    ("Softplus", "threshold"): 20,
}

# Ops of our own that ONNX can express: files bring along what they mean, for other readers.
FUNCTIONS = {
    "Detach": "(x) => (y) { y = Identity(x) }",
    "Embedding": "<padding_idx: int = -1, scale_grad_by_freq: int = 0>(table, ids) => (y) { y = Gather(table, ids) }",
    "Exp2": "(x) => (y) { c = Constant<value_float=2.0>() two = CastLike(c, x) y = Pow(two, x) }",
    # By the roundings of 1 + x and of exp(x), which their logarithms share: Kahan's way.
    "Expm1": "(x) => (y) { c = Constant<value_float=1.0>() one = CastLike(c, x) u = Exp(x) d = Sub(u, one) n = Neg(one)"
    " l = Log(u) q = Div(x, l) r = Mul(d, q) all = Equal(d, u) none = Equal(d, n) far = Or(all, none)"
    " s = Where(far, d, r) small = Equal(u, one) y = Where(small, x, s) }",
    "Log10": "(x) => (y) { l = Log(x) c = Constant<value_float=2.302585>() t = CastLike(c, x) y = Div(l, t) }",
    "Log1p": "(x) => (y) { c = Constant<value_float=1.0>() one = CastLike(c, x) u = Add(x, one) d = Sub(u, one)"
    " l = Log(u) q = Div(x, d) r = Mul(l, q) far = Equal(d, x) s = Where(far, l, r) small = Equal(u, one)"
    " y = Where(small, x, s) }",
    "Log2": "(x) => (y) { l = Log(x) c = Constant<value_float=0.6931472>() t = CastLike(c, x) y = Div(l, t) }",
    "LogSigmoid": "(x) => (y) { n = Neg(x) s = Softplus(n) y = Neg(s) }",
    "MulAdd": "(a, b, c) => (y) { p = Mul(a, b) y = Add(p, c) }",
    "NotEqual": "(a, b) => (y) { e = Equal(a, b) y = Not(e) }",
    "Rsqrt": "(x) => (y) { s = Sqrt(x) y = Reciprocal(s) }",
    "Silu": "(x) => (y) { s = Sigmoid(x) y = Mul(x, s) }",
}


def save(graph: Raw, path: Path) -> None:
    """Write a graph as an ONNX file."""
    onnx.save(to_model(graph), str(path))


def to_model(graph: Raw, portable: bool = False, types: Mapping[str, Type] | None = None) -> onnx.ModelProto:
    """The ONNX model of a graph, as :func:`_C.describe` gives it.

    A node is in ONNX's own domain if ONNX's checker takes it there and it means the same; all others are in the
    domain ``ai.ortmodule_c``. Gradients given to a joint graph are inputs after the others, those it gives are outputs
    after the others. With `portable` nodes are in ONNX's terms wherever it can compose them, for other programs.
    `types` are those of results, as far as the graph itself does not say them.
    """
    found = described(graph)
    if types is not None:
        found = found._replace(nodes=[_typed(node, types) for node in found.nodes])
    return _Writer(found, {**COMPOSED, **(PORTABLE if portable else {})}).model()


def _typed(node: Node, types: Mapping[str, Type]) -> Node:
    return node._replace(outputs=[o and (o[0], o[1] or types.get(o[0])) for o in node.outputs])


class _Writer:
    def __init__(self, graph: Description, composed: Mapping[str, Composition]) -> None:
        self._composed = composed
        self._graph = graph
        self._used = {v for node in graph.nodes for v in node.inputs} | {*graph.outputs, *graph.gradients}
        self._sources = {o[0]: node for node in graph.nodes for o in node.outputs if o is not None}
        self._types: dict[str, TypeProto] = {}
        self._initializers: list[TensorProto] = []
        self._nodes: list[NodeProto] = []

    def model(self) -> onnx.ModelProto:
        graph = self._graph
        inputs = self._given([(name, kind) for name, kind, _ in [*graph.inputs, *graph.grads]])
        for name, kind, data in graph.constants:
            self._constant(name, kind, data)
        values = [info for node in graph.nodes for part in self._parts(node) for info in self._node(part)]
        outputs = self._outputs([*graph.outputs, *[g for g in graph.gradients if g is not None]])
        names = {o.name for o in outputs}
        proto = helper.make_graph(
            self._nodes,
            "main",
            inputs,
            outputs,
            self._initializers,
            value_info=[info for info in values if info.name not in names],
        )
        ours = {node.op_type for node in self._nodes if node.domain}
        return helper.make_model(
            proto,
            opset_imports=_IMPORTS,
            functions=[_function(op, body) for op, body in FUNCTIONS.items() if op in ours],
            ir_version=10,
            producer_name="ortmodule_c",
        )

    def _given(self, values: Iterable[tuple[str, Type | None]]) -> list[ValueInfoProto]:
        infos = []
        for name, kind in values:
            if kind is not None:
                self._types[name] = _type(kind)
            infos.append(helper.make_value_info(name, self._types.get(name, _UNKNOWN)))
        return infos

    def _constant(self, name: str, kind: Type, data: bytes) -> None:
        dtype, dims = kind
        self._types[name] = _type(kind)
        self._initializers.append(helper.make_tensor(name, CODES[dtype], dims, data, raw=True))

    def _outputs(self, names: Iterable[str]) -> list[ValueInfoProto]:
        """A name is that of one output, and of no input."""
        taken = {name for name, *_ in [*self._graph.inputs, *self._graph.grads]}
        infos = []
        for i, name in enumerate(names):
            output = name
            if name in taken:
                output = f"{name}:{i}"
                self._nodes.append(helper.make_node("Identity", [name], [output]))
            taken.add(output)
            infos.append(helper.make_value_info(output, self._types.get(name, _UNKNOWN)))
        for info, over in zip(infos, self._graph.over, strict=False):
            if over is not None:
                info.metadata_props.add(key=OVER, value=over)
        return infos

    def _parts(self, node: Node) -> list[Node]:
        """What ONNX composes a node of, if it has other ops for it; any other node as it is."""
        composed = self._composed.get(node.op)
        used = [i for i, o in enumerate(node.outputs) if o is not None and o[0] in self._used]
        gives = composed is not None and used and used[-1] < SEVERAL.get(node.op, 1)
        parts = composed(Parts(node, used, self)) if composed is not None and gives else None
        if parts is None:
            return [node]
        self._used |= {name for part in parts.nodes for name in part.inputs}
        return parts.nodes

    def type_of(self, value: str | None) -> TypeProto | None:
        """The type of a value, if that is known."""
        return self._types.get(value or "")

    def source_of(self, value: str | None) -> Node | None:
        """The node that gives a value."""
        return self._sources.get(value or "")

    def number(self, value: str | None) -> float | None:
        """The number that a value is, if it is a constant of one element."""
        stored = next((t for t in self._initializers if t.name == value), None)
        if stored is None or math.prod(stored.dims) != 1:
            return None
        return float(onnx.numpy_helper.to_array(stored).reshape(()))

    def add_constant(self, name: str, dtype: int, dims: tuple[int, ...], values: list[Any]) -> None:
        """Add a constant under a name."""
        self._types[name] = helper.make_tensor_type_proto(dtype, dims)
        self._initializers.append(helper.make_tensor(name, dtype, dims, values))

    def _node(self, node: Node) -> list[ValueInfoProto]:
        """Add a node; the types of its outputs."""
        found = {o[0]: _type(o[1]) for o in node.outputs if o is not None and o[1] is not None}
        outputs = [o[0] if o is not None and o[0] in self._used else "" for o in node.outputs]
        written = self._standard(node, outputs, found)
        if written is None:
            written = _node(node, node.inputs, outputs, node.attributes, OWN_DOMAIN)
        self._types.update(found)
        self._nodes.append(written)
        return [helper.make_value_info(o, found[o]) for o in written.output if o in found]

    def _standard(self, node: Node, outputs: list[str], types: dict[str, TypeProto]) -> NodeProto | None:
        """The node in ONNX's terms, if it has any; what ONNX finds of types not known yet goes into `types`."""
        ours = _C.ops().get(node.op)  # none of an op that ours are composed of alone
        if (ours is not None and not ours[1]) or self._means_more(node, outputs):
            return None
        schema = onnx.defs.get_schema(node.op, OPSET)
        initializers = len(self._initializers)
        attributes: Sequence[Attribute] = [a for a in node.attributes if _SAY_NOTHING.get((node.op, a.name)) != a.value]
        inputs: Sequence[str | None] = node.inputs
        if node.op == "ConstantOfShape":
            attributes = _filled(attributes)
        written = _node(node, inputs, outputs, attributes, "")
        try:
            known = {v: self._types[v] for v in written.input if v}
            inferred = onnx.shape_inference.infer_node_outputs(schema, written, known, opset_imports=_IMPORTS[:1])
        except KeyError:  # a type that is not known
            inferred = {}
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
            inferred = None
        if inferred is None or any(o in types and not _agree(types[o], inferred[o]) for o in inferred):
            del self._initializers[initializers:]
            return None
        for name, kind in inferred.items():
            if name:
                types.setdefault(name, kind)
        return written

    def _means_more(self, node: Node, outputs: list[str]) -> bool:
        """Whether ONNX's op of that name, where it takes these operands, is another function."""
        if node.op == "Mod" and not any(a.name == "fmod" and a.value for a in node.attributes):  # of floats
            kind = self._types.get(node.inputs[0] or "")
            return kind is None or kind.tensor_type.elem_type not in _INTEGERS
        if node.op == "MaxPool":  # indices within a plane, and taps
            return any(outputs[1:])
        return False


_INTEGERS = {code for dtype, (text, _) in DTYPES.items() for code in [CODES[text]] if not dtype.is_floating_point}
_UNKNOWN = helper.make_tensor_type_proto(TensorProto.UNDEFINED, None)


def _filled(attributes: Sequence[Attribute]) -> Sequence[Attribute]:
    """ONNX has the element, with its type, as a tensor."""
    given = {a.name: a.value for a in attributes}
    dtype = helper.tensor_dtype_to_np_dtype(given.get("dtype", TensorProto.FLOAT))
    value = onnx.numpy_helper.from_array(np.asarray([given.get("value", 0)]).astype(dtype))
    return [Attribute("value", "TENSOR", value)]


def _type(kind: Type) -> TypeProto:
    dtype, dims = kind
    return helper.make_tensor_type_proto(CODES[dtype], [None if d < 0 else d for d in dims])


def _agree(a: TypeProto, b: TypeProto) -> bool:
    """Whether two types, some of whose dims may be open, may be that of one value."""
    t, u = a.tensor_type, b.tensor_type
    if t.elem_type != u.elem_type or not (t.HasField("shape") and u.HasField("shape")):
        return t.elem_type == u.elem_type
    dims = list(zip(t.shape.dim, u.shape.dim, strict=False))
    return len(t.shape.dim) == len(u.shape.dim) and all(
        d.dim_value == e.dim_value for d, e in dims if d.HasField("dim_value") and e.HasField("dim_value")
    )


def _node(
    node: Node, inputs: Sequence[str | None], outputs: Sequence[str], attributes: Sequence[Attribute], domain: str
) -> NodeProto:
    proto = NodeProto(op_type=node.op, name=node.name or "", domain=domain)
    proto.input.extend(_trimmed(inputs))
    proto.output.extend(_trimmed(outputs) or [""])
    for name, kind, value in sorted(attributes):
        code = AttributeProto.AttributeType.Value(kind)
        proto.attribute.append(helper.make_attribute(name, value, attr_type=code))
    return proto


def _function(op: str, body: str) -> onnx.FunctionProto:
    return onnx.parser.parse_function(f'<domain: "{OWN_DOMAIN}", opset_import: ["": {OPSET}]> {op} {body}')


def _trimmed(names: Sequence[str | None]) -> list[str]:
    """Without what is left out at the end."""
    given = [name or "" for name in names]
    while given and not given[-1]:
        given.pop()
    return given
