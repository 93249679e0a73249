"""From the nodes of an ONNX model to a graph of the C core, for inputs of known types."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, helper
from torch import Tensor

from .. import _C
from ..dtypes import BY_TEXT, DTYPES
from ..errors import NotExportable, Unsupported
from ..lowering.draft import ONNX_TYPES, OWN_DOMAIN, Draft, Val, dtype_text
from ..lowering.to_text import to_text

_OPS = _C.ops()
# By ONNX's code.
KNOWN = {TensorProto.DataType.Value(name): dtype for dtype, (_, name) in DTYPES.items()}

# Outputs that a gradient rule reads, and nobody else may.
_FOR_GRADIENTS = {"Attention": 2, "BatchNorm": 3, "CrossEntropy": 4, "GroupNorm": 3, "LayerNormalization": 3}
_FOR_GRADIENTS |= {"MaxPool": 3, "NegativeLogLikelihoodLoss": 2, "RmsNorm": 2}
_FOR_GRADIENTS |= {"LstmCells": 5, "GruCells": 4, "RnnCells": 2}


class Nothing:
    """An optional without an element."""


NOTHING = Nothing()
Value = Val | list[Val] | Nothing  # a tensor, a sequence of them, or what an optional may be besides
Results = Value | tuple[Value | None, ...]


def torch_dtype(code: int) -> torch.dtype:
    """The dtype of that ONNX code; Unsupported if the core has no such."""
    if code not in KNOWN:
        raise Unsupported(f"dtype {TensorProto.DataType.Name(code)} is not known to the C core")
    return KNOWN[code]


def tensor_of(proto: TensorProto) -> Tensor:
    """The elements of an ONNX tensor."""
    dtype = torch_dtype(proto.data_type)
    array = onnx.numpy_helper.to_array(proto)
    if dtype == torch.bfloat16:  # NumPy has no such of its own
        return torch.from_numpy(array.view("int16").copy()).view(dtype).reshape(array.shape)
    return torch.from_numpy(array.copy()).reshape(array.shape)


def fill_tensor(proto: TensorProto, name: str, t: Tensor) -> None:
    """Make an ONNX tensor one of a name and of a tensor's elements."""
    elements = t.detach().cpu().contiguous()
    proto.Clear()
    proto.name = name
    proto.data_type = TensorProto.DataType.Value(DTYPES[elements.dtype][1])
    proto.dims.extend(elements.shape)
    proto.raw_data = elements.reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class Given:
    """What a node says.

    Attributes
    ----------
    op, since
        Its op, and the opset in which that got its present meaning.
    attributes
        Those given, or else ONNX's defaults.
    outputs
        How many, without those left out at the end.
    """

    op: str
    since: int
    attributes: dict[str, Any]
    outputs: int


Rule = Callable[..., Results]
# Values by name, opsets by domain, what the attributes of the function around are given as, and the nodes.
_Scope = tuple[dict[str, Value], Mapping[str, int], Mapping[str, AttributeProto], Sequence[NodeProto]]
Table = Mapping[tuple[str, str], Mapping[int, Rule]]  # by domain and op: from which version on


class Importer:
    """A graph under construction.

    Parameters
    ----------
    table
        What becomes of an op.
    functions
        Of the model: ops that it defines itself.
    trains
        Whether a node with a mode of its own for training is in it, by what the node says of that.
    """

    def __init__(self, table: Table, functions: Sequence[FunctionProto], trains: Callable[[bool], bool]) -> None:
        self.draft = Draft()
        self.trains = trains
        self.updates: dict[Val, Val] = {}  # new values of inputs
        self._table = table
        self._functions = {(f.domain, f.name): f for f in functions}
        self._known: dict[Val, Tensor] = {}
        self._source = ""
        self._scope: _Scope = ({}, {}, {}, [])

    # What rules are made of

    def tensor(self, data: Tensor) -> Val:
        """A constant."""
        val = self.draft.tensor(data)
        self._known[val] = data.contiguous()
        return val

    def const(self, data: Any, dtype: torch.dtype = torch.int64) -> Val:
        """A small constant: a number or a list of numbers."""
        return self.tensor(torch.tensor(data, dtype=dtype))

    def like(self, x: Val, number: float) -> Val:
        """A number of the dtype of `x`."""
        return self.const(number, x.dtype)

    def known(self, val: Val | None, what: str) -> Tensor:
        """The elements of a value that a graph cannot do without; Unsupported if they come only with the call."""
        if val is None or val not in self._known:
            raise Unsupported(f"{what} must be known before it runs")
        return self._known[val]

    def cast(self, x: Val, dtype: torch.dtype) -> Val:
        """The same numbers in another dtype."""
        return x if x.dtype == dtype else self.emit("Cast", x, to=int(ONNX_TYPES[dtype]))

    def body(self, graph: GraphProto, inputs: Sequence[Value | None]) -> list[Any]:
        """What a graph that the node has as an attribute makes of inputs of its own; it sees the values around it."""
        env, opsets, bound, _ = self._scope
        names = [i.name for i in graph.input]
        inner = env | {i.name: self.tensor(tensor_of(i)) for i in graph.initializer}
        inner |= {name: v for name, v in zip(names, inputs, strict=False) if v is not None}
        self.nodes(graph.node, inner, opsets, bound)
        return [_valued(inner, o.name) for o in graph.output]

    def apart(self, given: Mapping[str, Val], result: str) -> tuple["Importer", dict[str, Val], Value]:
        """A graph of its own of what makes a value around the node of those given, and of others that it needs.

        It comes with what its inputs are here, of which those given may have gradients, and with the value.
        """
        env, opsets, bound, nodes = self._scope
        needed, made_by = {result}, []
        for node in reversed(nodes):
            if needed.intersection(node.output) - set(given):
                made_by.append(node)
                needed |= {name for each in walk([node]) for name in each.input}
        inner = Importer(self._table, list(self._functions.values()), self.trains)
        inputs, values = dict(given), dict[str, Value]()
        for name in sorted(needed - {name for node in made_by for name in node.output} - set(given)):
            outer = env.get(name)
            if isinstance(outer, Val) and outer in self._known:
                values[name] = inner.tensor(self._known[outer])
            elif isinstance(outer, Val):
                inputs[name] = outer
        for name, outer in inputs.items():
            values[name] = inner.draft.input(name, outer.dtype, _sizes(outer), name in given)
        inner.nodes(made_by[::-1], values, opsets, bound)
        return inner, inputs, _valued(values, result)

    def emit(self, op: str, *inputs: Val | None, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node of the core; its output, or as many as `outputs`. What follows from constants is computed."""
        said = {k: v for k, v in attributes.items() if v is not None and v != []}
        types = [None if v is None else (dtype_text(v.dtype), _sizes(v)) for v in inputs]
        known = {i: self._known[v] for i, v in enumerate(inputs) if v in self._known}
        found = _C.infer(op, types, said, known, max(outputs, _FOR_GRADIENTS.get(op, 1)))
        given = [v for v in inputs if v is not None]
        if all(v in self._known for v in given) and "Dropout" not in op:
            return self._computed(op, inputs, said, outputs)
        grad = 0 if op == "Detach" else reduce(or_, [v.grad for v in given], 0)
        results = [self.draft.value(self._source or op, BY_TEXT[text], shape, shape, grad) for text, shape in found]
        self._append(self.draft, op, inputs, results, said)
        return results[0] if outputs == 1 else tuple(results[:outputs])

    def _append(
        self, draft: Draft, op: str, inputs: Sequence[Val | None], results: Sequence[Val], said: dict[str, Any]
    ) -> None:
        node = ir.Node(
            "" if _OPS[op][1] else OWN_DOMAIN,
            op,
            [None if v is None else v.ir for v in inputs],
            [ir.convenience.convert_attribute(k, v) for k, v in said.items()],
            outputs=[v.ir for v in results],
            name=self._source or None,
        )
        draft.graph.append(node)

    def _computed(self, op: str, inputs: Sequence[Val | None], said: dict[str, Any], outputs: int) -> Any:
        draft = Draft()
        given = [None if v is None else draft.tensor(self._known[v]) for v in inputs]
        results = [draft.value("y", torch.float32, ()) for _ in range(outputs)]
        self._append(draft, op, given, results, said)
        draft.graph.outputs.extend([v.ir for v in results])
        text, constants = to_text(ir.Model(draft.graph, ir_version=10))
        tensors, _ = _C.Session(text, constants).plan([], []).forward([], 0)
        vals = [self.tensor(t) for t in tensors]
        return vals[0] if outputs == 1 else tuple(vals)

    # Nodes of the model

    def nodes(
        self,
        nodes: Sequence[NodeProto],
        env: dict[str, Value],
        opsets: Mapping[str, int],
        bound: Mapping[str, AttributeProto] | None = None,
    ) -> None:
        """Translate nodes; `bound` is what the attributes of the function that they are in are given as."""
        for node in nodes:
            outer, self._source = self._source, self._source or node.name
            around, self._scope = self._scope, (env, opsets, bound or {}, nodes)
            try:
                inputs = [_valued(env, v) if v else None for v in node.input]
                results = self._node(node, inputs, opsets, bound or {})
            except NotExportable:
                raise
            except Unsupported as error:
                raise NotExportable(f"{named(node, opsets)}: {error}") from error
            except Exception as error:
                why = str(error) if isinstance(error, (NotImplementedError, ValueError)) else repr(error)
                raise NotExportable(f"{named(node, opsets)}: {why}") from error
            finally:
                self._source, self._scope = outer, around
            env.update({name: v for name, v in zip(node.output, results, strict=False) if name and v is not None})

    def _node(
        self,
        node: NodeProto,
        inputs: Sequence[Value | None],
        opsets: Mapping[str, int],
        bound: Mapping[str, AttributeProto],
    ) -> Sequence[Value | None]:
        attributes = {a.name: a for a in map(_resolved(bound), node.attribute) if a is not None}
        outputs = len(node.output)
        while outputs and not node.output[outputs - 1]:
            outputs -= 1
        rule, since = find(self._table, node, opsets)
        if rule is not None:
            given = Given(node.op_type, since, _values(node, attributes, opsets), outputs)
            results = rule(self, given, *inputs)
            return results if isinstance(results, tuple) else (results,)
        body = self._functions.get((node.domain, node.op_type)) or self._definition(node, inputs, opsets)
        if body is None:
            raise Unsupported("there is no translation")
        env = {name: v for name, v in zip(body.input, inputs, strict=False) if v is not None}
        filled = {a.name: a for a in body.attribute_proto} | _defaults(node, opsets) | attributes
        versions = dict(opsets) | {o.domain: o.version for o in body.opset_import}
        self.nodes(_without_missing(body, env), env, versions, filled)
        return [env.get(name) for name in body.output]

    def _definition(
        self, node: NodeProto, inputs: Sequence[Value | None], opsets: Mapping[str, int]
    ) -> FunctionProto | None:
        """What ONNX itself defines the op by."""
        schema: Any = schema_of(node, opsets)
        if schema is None:
            return None
        if schema.has_function:
            return schema.function_body
        if schema.has_context_dependent_function:
            made = schema.get_context_dependent_function(
                node.SerializeToString(), [_type(v).SerializeToString() for v in inputs]
            )
            return FunctionProto.FromString(made) if made else None
        return None


def find(table: Table, node: NodeProto, opsets: Mapping[str, int]) -> tuple[Rule | None, int]:
    """The rule for a node, if there is one, and since which version its op is what it is."""
    domain = _domain(node)
    schema = schema_of(node, opsets)
    since = schema.since_version if schema is not None else opsets.get(domain, 1)
    rows = table.get((domain, node.op_type), {})
    first = max((v for v in rows if v <= since), default=None)
    return (None if first is None else rows[first]), since


def _valued(env: Mapping[str, Value], name: str) -> Value:
    if name not in env:
        raise Unsupported(f"there is no value {name!r}")
    return env[name]


def walk(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Nodes, and those of the graphs that they have as attributes."""
    for node in nodes:
        yield node
        for graph in bodies(node):
            yield from walk(graph.node)


def bodies(node: NodeProto) -> list[GraphProto]:
    """Graphs that are attributes of a node."""
    return [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]


def named(node: NodeProto, opsets: Mapping[str, int]) -> str:
    """A node for messages."""
    schema = schema_of(node, opsets)
    since = f"version {schema.since_version}" if schema is not None else f"opset {opsets.get(_domain(node), '?')}"
    return f"node {node.name or node.output[0]!r}: {node.op_type} of domain {_domain(node) or 'ai.onnx'}, {since}"


def schema_of(node: NodeProto, opsets: Mapping[str, int]) -> onnx.defs.OpSchema | None:
    """ONNX's definition of the op in the opset that the model is written for, if it has one."""
    domain = _domain(node)
    try:
        return onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), domain)
    except onnx.defs.SchemaError:
        return None


def _domain(node: NodeProto) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _type(v: Value | None) -> onnx.TypeProto:
    if isinstance(v, Val):
        return helper.make_tensor_type_proto(int(v.ir.dtype or 0), list(_sizes(v)))
    return helper.make_sequence_type_proto(_type(v[0])) if isinstance(v, list) and v else onnx.TypeProto()


def _sizes(v: Val) -> tuple[int, ...]:
    return tuple(int(d) for d in v.dims)


def _resolved(bound: Mapping[str, AttributeProto]) -> Callable[[AttributeProto], AttributeProto | None]:
    def resolve(attribute: AttributeProto) -> AttributeProto | None:
        if not attribute.ref_attr_name:
            return attribute
        if attribute.ref_attr_name not in bound:
            return None
        given = AttributeProto()
        given.CopyFrom(bound[attribute.ref_attr_name])
        given.name = attribute.name
        return given

    return resolve


def _defaults(node: NodeProto, opsets: Mapping[str, int]) -> dict[str, AttributeProto]:
    schema = schema_of(node, opsets)
    if schema is None:
        return {}
    return {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}


def _values(node: NodeProto, given: Mapping[str, AttributeProto], opsets: Mapping[str, int]) -> dict[str, Any]:
    """Attributes as Python has them, with defaults."""
    return {name: _value(a) for name, a in (_defaults(node, opsets) | dict(given)).items()}


def _value(attribute: AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (list, tuple)) or attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS):
        return [v.decode() if isinstance(v, bytes) else v for v in value]
    return value


def _without_missing(body: FunctionProto, env: Mapping[str, Value]) -> list[NodeProto]:
    """The nodes of a function, optional operands that are not given being left out of theirs."""
    missing = {name for name in body.input if name not in env}
    if not missing:
        return list(body.node)
    nodes = []
    for node in body.node:
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = ["" if name in missing else name for name in node.input]
        nodes.append(copy)
    return nodes
