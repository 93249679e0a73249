"""ONNX files as modules that can be trained."""

import contextlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

import onnx
import onnx_ir as ir
import torch
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto
from torch import Tensor, nn

from .. import _C
from ..dtypes import DTYPES
from ..errors import NotExportable, Unsupported
from ..function import Runner
from ..lowering.ancestry import Ancestry
from ..lowering.builder import Builder
from ..lowering.draft import Val
from ..lowering.fallback import Callbacks
from ..lowering.lower import Lowered
from ..lowering.to_text import to_text
from ..process import one_thread_after_fork, tracing_lock
from .importer import KNOWN, NOTHING, Importer, Value, bodies, fill_tensor, find, named, schema_of, tensor_of, walk
from .rules import TABLE

_MAX_GRAPHS = 16
_MOST_ELEMENTS = 64  # of an input that a graph may have to know

FIXED = "ai.ortmodule_c.fixed"  # of a model's metadata: names, a line each, of initializers that are not trained

# Inputs that are no weights though they are floats.
_STATISTICS = {"BatchNormalization": (3, 4)}
_NUMBERS = {"Clip": (1, 2), "Dropout": (1,), "OneHot": (2,), "Pad": (2,), "Range": (0, 1, 2), "Resize": (1, 2)}
_NUMBERS |= {"NonMaxSuppression": (0, 1, 3, 4), "RoiAlign": (1,), "Unique": (0,), "Upsample": (1,)}

# What an input or an output is: a tensor, a sequence of so many, or an optional that is not there.
_Form = Literal["tensor", "none"] | int
_Part = tuple[str, int]  # of an input: its name, and the place in a sequence, or -1
_Graph = tuple[Runner, list[_Form]]  # and the forms of its outputs


class OnnxModule(nn.Module):
    """A module made of an ONNX model; see :func:`ortmodule_c.onnx.load`.

    Inputs are given by position or by name: a tensor, for a sequence a list of them, for an optional also None; outputs
    are such too. It starts in the mode that the model was written in: in training if any of its nodes is. `train()` and
    `eval()` then say what Dropout and BatchNormalization do; in training those nodes do that the model has in training,
    or if it has none, all.

    Attributes
    ----------
    input_names, output_names
        As the model has them.
    """

    def __init__(self, model: ModelProto) -> None:
        super().__init__()
        self._model = model
        self._opsets = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in model.opset_import}
        newest = onnx.defs.onnx_opset_version()
        if self._opsets.get("", 0) > newest:
            raise NotExportable(f"the model is written for opset {self._opsets['']}, onnx knows those up to {newest}")
        graph = model.graph
        stored = {t.name: t for t in graph.initializer}
        if graph.sparse_initializer:
            raise NotExportable("the model has sparse initializers")
        _check(graph.node, self._opsets, {(f.domain, f.name) for f in model.functions})
        for kind, values in (("input", graph.input), ("output", graph.output)):
            for value in values:
                _check_type(kind, value.name, value.type)
        self.input_names = [i.name for i in graph.input if i.name not in stored]
        self.output_names = [o.name for o in graph.output]
        self._declared = {i.name: i.type for i in graph.input}
        weights, statistics = _roles(graph)
        fixed = {name for p in model.metadata_props if p.key == FIXED for name in p.value.split("\n")}
        self._places: dict[str, tuple[nn.Module, str]] = {}  # where the tensors are
        self._constants: dict[str, Tensor] = {}
        for name, proto in stored.items():
            try:
                tensor = tensor_of(proto)
            except Unsupported as error:
                raise NotExportable(f"the model has an initializer {name!r}: {error}") from error
            is_weight = name in weights and tensor.is_floating_point() and tensor.dim() > 0
            if name in statistics or (is_weight and name in fixed):
                self._add(name, tensor, is_buffer=True)
            elif is_weight:
                self._add(name, nn.Parameter(tensor))
            else:
                self._constants[name] = tensor
        self._has_training = any(_is_training(node, graph, stored) for node in walk(graph.node))
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._pinned: frozenset[_Part] = frozenset()  # small inputs whose values graphs cannot do without
        self.train(self._has_training)

    def _add(self, name: str, tensor: Tensor, is_buffer: bool = False) -> None:
        """Keep a tensor under its name; where that cannot be, what is wrong with it is replaced by ``_``."""
        owner: nn.Module = self
        *path, leaf = [part or "_" for part in name.split(".")]
        for part in path:
            scope = part
            while hasattr(owner, scope) and not isinstance(getattr(owner, scope), _Scope):
                scope += "_"
            if not hasattr(owner, scope):
                owner.add_module(scope, _Scope())
            owner = getattr(owner, scope)
        while hasattr(owner, leaf):
            leaf += "_"
        if is_buffer:
            owner.register_buffer(leaf, tensor)
        else:
            owner.register_parameter(leaf, tensor)  # type: ignore[arg-type]
        self._places[name] = owner, leaf

    @torch._disable_dynamo  # as torch.compiler.disable, but that imports Dynamo at once
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs: one, or a tuple of them."""
        one_thread_after_fork()
        given = self._given(args, kwargs)
        stored = {name: getattr(owner, leaf) for name, (owner, leaf) in self._places.items()}
        with tracing_lock:
            (runner, forms), inputs = self._graph(given, stored)
        tensors = iter(runner.run(runner.prepare(inputs)))
        results = [_formed(form, tensors) for form in forms]
        return results[0] if len(results) == 1 else tuple(results)

    def to_model(self) -> ModelProto:
        """The model, with its weights and statistics as they are now."""
        model = ModelProto()
        model.CopyFrom(self._model)
        for stored in model.graph.initializer:
            if stored.name in self._places:
                owner, leaf = self._places[stored.name]
                if DTYPES[getattr(owner, leaf).dtype][1] != TensorProto.DataType.Name(stored.data_type):
                    raise NotExportable(
                        f"{stored.name} is of {getattr(owner, leaf).dtype}, another dtype than the file's"
                    )
                fill_tensor(stored, stored.name, getattr(owner, leaf))
        return model

    def __getstate__(self) -> dict[str, Any]:
        """Without graphs: a copy makes its own."""
        return {**self.__dict__, "_graphs": OrderedDict()}

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self.input_names):
            raise TypeError(f"{len(args)} inputs are given, the model has {len(self.input_names)}: {self.input_names}")
        given = dict(zip(self.input_names, args, strict=False))
        for name, value in kwargs.items():
            if name not in self.input_names or name in given:
                raise TypeError(f"input {name!r} is {'given twice' if name in given else 'none of the model'}")
            given[name] = value
        missing = [name for name in self.input_names if name not in given]
        if missing:
            raise TypeError(f"inputs {missing} are not given")
        for name in self.input_names:
            _check_value(name, given[name], self._declared[name])
        return {name: given[name] for name in self.input_names}

    def _graph(self, given: dict[str, Any], stored: dict[str, Tensor]) -> tuple[_Graph, list[Tensor]]:
        """A graph for such inputs, and what it is given: all but inputs whose values it cannot do without."""
        forms = {name: _form(value) for name, value in given.items()}
        parts = {part: t for name, value in given.items() for part, t in _parts(name, value)}
        try:
            return self._made(forms, parts, stored, self._pinned)
        except NotExportable:
            small = {part for part, t in parts.items() if _can_be_known(t)} - self._pinned
            if not small:
                raise
        pinned = self._pinned | small
        made = self._made(forms, parts, stored, pinned)
        for part in sorted(small):
            with contextlib.suppress(NotExportable):
                made = self._made(forms, parts, stored, pinned - {part})
                pinned -= {part}
        self._pinned = pinned
        return made

    def _made(
        self, forms: dict[str, _Form], parts: dict[_Part, Tensor], stored: dict[str, Tensor], known: frozenset[_Part]
    ) -> tuple[_Graph, list[Tensor]]:
        pinned = {k: t.detach() for k, t in parts.items() if k in known and _can_be_known(t)}
        tensors = {k: t for k, t in parts.items() if k not in pinned} | {(name, -1): t for name, t in stored.items()}
        key = (
            self.training,
            tuple(forms.values()),
            tuple([(k, tuple(t.shape), t.dtype, t.requires_grad) for k, t in tensors.items()]),
            tuple([(k, t.dtype, tuple(t.shape), repr(t.tolist())) for k, t in pinned.items()]),
        )
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._import(forms, tensors, pinned)
            if len(self._graphs) >= _MAX_GRAPHS:
                self._graphs.popitem(last=False)
            self._graphs[key] = graph
        self._graphs.move_to_end(key)
        return graph, list(tensors.values())

    def _import(self, forms: dict[str, _Form], tensors: dict[_Part, Tensor], pinned: dict[_Part, Tensor]) -> _Graph:
        trains = (lambda asked: asked and self.training) if self._has_training else (lambda _: self.training)
        made = Importer(TABLE, self._model.functions, trains)
        inputs = {
            part: made.draft.input(part[0], t.dtype, tuple(t.shape), t.requires_grad) for part, t in tensors.items()
        }
        parts = inputs | {part: made.tensor(t.clone()) for part, t in pinned.items()}
        env: dict[str, Value] = {name: made.tensor(t.clone()) for name, t in self._constants.items()}
        env |= {name: parts[name, -1] for name in self._places}
        for name, form in forms.items():
            if form == "none":
                env[name] = NOTHING
            else:
                env[name] = parts[name, -1] if form == "tensor" else [parts[name, i] for i in range(form)]
        made.nodes(self._model.graph.node, env, self._opsets)
        outputs = [_computed(name, env.get(name)) for name in self.output_names]
        vals = [v for value in outputs for _, v in _parts("", value)]
        return _runner(made, list(inputs.values()), vals), [_form(value) for value in outputs]


def _form(value: Any) -> _Form:
    if isinstance(value, (list, tuple)):
        return len(value)
    return "none" if value is None or value is NOTHING else "tensor"


def _parts(name: str, value: Any) -> Iterator[tuple[_Part, Any]]:
    """The tensors of an input or an output."""
    if isinstance(value, (list, tuple)):
        yield from (((name, i), t) for i, t in enumerate(value))
    elif value is not None and value is not NOTHING:
        yield (name, -1), value


def _formed(form: _Form, tensors: Iterator[Tensor]) -> Any:
    if form == "none":
        return None
    return next(tensors) if form == "tensor" else [next(tensors) for _ in range(form)]


def _check_value(name: str, value: Any, declared: TypeProto) -> None:
    kind = declared.WhichOneof("value")
    if kind == "optional_type":
        if value is not None:
            _check_value(name, value, declared.optional_type.elem_type)
    elif kind == "sequence_type":
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"input {name!r} is a {type(value).__name__}, not a list of tensors")
        for item in value:
            _check_value(name, item, declared.sequence_type.elem_type)
    elif not isinstance(value, Tensor):
        raise TypeError(f"input {name!r} is a {type(value).__name__}, not a tensor")
    else:
        _check_shape(name, value, declared)


def _check_shape(name: str, t: Tensor, declared: TypeProto) -> None:
    kind = declared.tensor_type
    if not kind.HasField("shape"):
        return
    dims = [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
    if len(dims) != t.dim() or any(d is not None and d != n for d, n in zip(dims, t.shape, strict=False)):
        wanted = "[" + ", ".join("?" if d is None else str(d) for d in dims) + "]"
        raise ValueError(f"input {name!r} has shape {list(t.shape)}, the model takes {wanted}")


def _computed(name: str, value: Value | None) -> Value:
    if value is None:
        raise NotExportable(f"output {name!r} is computed by no node")
    return value


class _Scope(nn.Module):
    """Holds the tensors whose names begin alike."""


def _runner(made: Importer, inputs: list[Val], outputs: list[Val]) -> Runner:
    graph = made.draft.graph
    updates = {i: made.updates[v] for i, v in enumerate(inputs) if v in made.updates}
    values = [*outputs, *updates.values()]
    graph.outputs.extend([v.ir for v in outputs])
    for i, val in updates.items():
        Builder(made.draft).output_over(val, inputs[i])
    ancestry = Ancestry(len(inputs))
    saving = ancestry.saving()
    reaches = [v.grad and v.grad | saving for v in outputs] + [0] * len(updates)
    lowered = Lowered(
        ir.Model(graph, ir_version=10, producer_name="ortmodule_c"),
        Callbacks(),
        [("output", i, ()) for i in range(len(outputs))],
        [r != 0 for r in reaches],
        [v.rank for v in values],
        reaches,
        ancestry,
        [saving] * len(inputs),
        [0] * len(values),
        [0] * len(outputs),
        list(updates),
        [],
    )
    text, constants = to_text(lowered.model)
    return Runner(_C.Session(text, constants), lowered)


def _can_be_known(t: Tensor) -> bool:
    """Whether a graph may be made for its values."""
    return not t.requires_grad and t.numel() <= _MOST_ELEMENTS


def _roles(graph: GraphProto) -> tuple[set[str], set[str]]:
    """Names of what is used as weights, and of running statistics."""
    uses: set[tuple[str, bool]] = set()
    statistics: set[str] = set()
    for node in walk(graph.node):
        for i, name in enumerate(node.input):
            if i in _STATISTICS.get(node.op_type, ()):
                statistics.add(name)
            else:
                uses.add((name, i not in _NUMBERS.get(node.op_type, ())))
    return {name for name, weight in uses if weight}, statistics - {name for name, weight in uses if weight}


def _is_training(node: NodeProto, graph: GraphProto, stored: Mapping[str, Any]) -> bool:
    if node.op_type == "BatchNormalization":
        return any(a.name == "training_mode" and a.i for a in node.attribute)
    if node.op_type != "Dropout" or len(node.input) < 3 or not node.input[2]:
        return False
    name = node.input[2]
    given = [stored[name]] if name in stored else []
    given += [a.t for n in graph.node if name in n.output and n.op_type == "Constant" for a in n.attribute]
    return bool(given and tensor_of(given[0])) or not given


def _check_type(kind: str, name: str, declared: TypeProto) -> None:
    """NotExportable if a value cannot be of tensors of the core; nothing may be known of it."""
    form = declared.WhichOneof("value") or "tensor_type"
    if form in ("sequence_type", "optional_type"):
        return _check_type(kind, name, getattr(declared, form).elem_type)
    if form != "tensor_type":
        raise NotExportable(f"{kind} {name!r} is a {form.removesuffix('_type')}, not a tensor")
    dtype = declared.tensor_type.elem_type
    if dtype not in KNOWN and dtype != TensorProto.UNDEFINED:
        raise NotExportable(f"{kind} {name!r} is of dtype {TensorProto.DataType.Name(dtype)}, unknown to the C core")


def _check(nodes: Sequence[NodeProto], opsets: Mapping[str, int], own: set[tuple[str, str]]) -> None:
    """NotExportable if some node has no translation, or a graph of its own has weights."""
    for node in walk(nodes):
        schema: Any = schema_of(node, opsets)
        defined = schema is not None and (schema.has_function or schema.has_context_dependent_function)
        if find(TABLE, node, opsets)[0] is None and (node.domain, node.op_type) not in own and not defined:
            raise NotExportable(f"{named(node, opsets)}: there is no translation")
        for weight in [w for graph in bodies(node) for w in graph.initializer if w.dims]:
            if weight.data_type in KNOWN and KNOWN[weight.data_type].is_floating_point:
                raise NotExportable(f"{named(node, opsets)}: its graph has weights of its own, {weight.name!r}")
