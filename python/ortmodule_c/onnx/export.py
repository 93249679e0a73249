"""Modules as ONNX files that other programs run."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import GraphProto, ModelProto, ValueInfoProto
from torch import Tensor, nn

from .. import _C
from ..dtypes import DTYPES
from ..errors import NotExportable, first_lines
from ..lowering.draft import OWN_DOMAIN
from ..lowering.to_text import to_text
from ..ortmodule import ORTModule
from ..replacing import replacing
from ..terms import Terms
from ..whole import DynamicAxes, Example, WholeGraph, unknown_argument, whole_graph
from .compare import compare
from .description import Type, described, type_text
from .importer import fill_tensor
from .module import FIXED, OnnxModule
from .write import to_model

_MOST_BYTES = 2**31 - 2**20  # of a file in the format of protocol buffers, with some for all but tensors


@dataclass(frozen=True)
class Names:
    """How what a file holds is called; None stands for the names that the module has."""

    inputs: Sequence[str] | None = None
    outputs: Sequence[str] | None = None
    weight: Callable[[str], str] = str


def export(
    model: nn.Module,
    example: Example,
    dynamic_axes: DynamicAxes,
    training: bool = False,
    names: Names = Names(),
) -> ModelProto:
    """The ONNX model of a module; see :func:`ortmodule_c.onnx.save`."""
    module, terms = (model.module, model._ort_terms) if isinstance(model, ORTModule) else (model, Terms())
    if isinstance(module, OnnxModule):
        if dynamic_axes or training or names != Names():
            raise ValueError("a module of an ONNX file is written as it was read, with its names, sizes and mode")
        return module.to_model()
    mode = "training" if training else "evaluation"
    graph = whole_graph(mode, module, terms, example, dynamic_axes, names.inputs)
    mistake = unknown_argument(dynamic_axes, graph.arguments)
    if mistake:
        raise ValueError(mistake)
    results = graph.results()
    inputs = list(graph.arguments if names.inputs is None else names.inputs)
    outputs = [name for name, _ in results] if names.outputs is None else list(names.outputs)
    weights = [names.weight(name) for name in graph.weights]
    if len(outputs) != len(results) or len(inputs) != len(graph.arguments):
        raise ValueError(
            f"there are {len(graph.arguments)} inputs and {len(results)} outputs, and names for {len(inputs)} and "
            f"{len(outputs)}: {', '.join([*inputs, *outputs])}"
        )
    twice = [name for name, n in Counter([*inputs, *outputs, *weights]).items() if n > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} would be the name of two values: input_names and output_names say others")
    text, constants = to_text(graph.lowered.model, typed=True)
    types = _types(text, constants, graph, module)
    proto = to_model(_C.describe(text, "parse", constants=constants), portable=True, types=types)
    _give_results(proto.graph, [position for _, position in results])
    _drop_unused(proto.graph)
    unknown = sorted({n.op_type for n in proto.graph.node if n.domain} - {f.name for f in proto.functions})
    if unknown:
        raise NotExportable(f"in {mode} ONNX has no {', '.join(unknown)} ({OWN_DOMAIN}) of such operands")
    _rename(proto.graph, [*inputs, *weights], outputs)
    trained = _fill(proto.graph, graph, weights, module)
    fixed = [t.name for t in proto.graph.initializer if t.name not in trained]
    proto.metadata_props.add(key=FIXED, value="\n".join(fixed))
    if not _is_large(proto):
        check(proto)
        if not graph.lowered.updates:  # which running it would write
            compare(proto, graph, module, terms)
    return proto


def _types(text: str, constants: dict[str, Tensor], graph: WholeGraph, module: nn.Module) -> dict[str, Type]:
    """Of all results; of open sizes those are known that do not follow what the sizes of the arguments are."""
    tensors = _tensors(module)
    weights = [(DTYPES[t.dtype][0], tuple(t.shape)) for t in map(tensors.__getitem__, graph.weights)]

    def found(more: int) -> dict[str, Type]:
        given = [
            (
                DTYPES[t.dtype][0],
                tuple([n + more if isinstance(s, str) else n for n, s in zip(t.shape, of, strict=True)]),
            )
            for t, of in zip(graph.leaves, graph.sizes, strict=True)
        ]
        types = [type_text(kind) for kind in [*given, *weights]]
        nodes = described(_C.describe(text, "specialize", types=types, constants=constants)).nodes
        return {o[0]: o[1] for node in nodes for o in node.outputs if o is not None and o[1] is not None}

    first = found(0)
    if not graph.ranges:
        return first
    try:
        second = found(1)
    except Exception:  # sizes of which one is a multiple of another: nothing is known beyond the graph's own types
        return {}
    return {
        name: (dtype, tuple([n if n == m else -1 for n, m in zip(dims, second[name][1], strict=True)]))
        for name, (dtype, dims) in first.items()
        if name in second and len(second[name][1]) == len(dims)
    }


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def write(model: ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a model to a file, its tensors to another one beside it if it is too large for one.

    What was there is replaced once all is written.
    """
    place = Path(path)
    large = _is_large(model)
    beside = f"{place.name}.data" if large else None
    with replacing(place) as made:
        onnx.save_model(model, str(made), save_as_external_data=large, location=beside)
        if large:
            check(str(made))


def check(model: ModelProto | str) -> None:
    """NotExportable with what ONNX's checker says of a model, or of the file that has it."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise NotExportable(f"the graph is none of ONNX: {first_lines(error)}") from error


def _is_large(model: ModelProto) -> bool:
    return sum(len(t.raw_data) for t in model.graph.initializer) > _MOST_BYTES


def _give_results(graph: GraphProto, positions: Sequence[int]) -> None:
    """Have an output for each result of the module, and none for what a training step writes into buffers."""
    outputs = list(graph.output)
    del graph.output[:]
    given: Counter[int] = Counter()
    for position in positions:
        value = ValueInfoProto()
        value.CopyFrom(outputs[position])
        if given[position]:
            value.name = f"{outputs[position].name}:{given[position]}"
            graph.node.append(onnx.helper.make_node("Identity", [outputs[position].name], [value.name]))
        given[position] += 1
        graph.output.append(value)


def _drop_unused(graph: GraphProto) -> None:
    """Leave out nodes and constants that no output is made of."""
    read = {v.name for v in graph.output}
    for node in reversed(graph.node):
        if read.isdisjoint(node.output):
            graph.node.remove(node)
        else:
            read.update(node.input)
    for values in (graph.initializer, graph.value_info):
        for value in [v for v in values if v.name not in read]:
            values.remove(value)


def _rename(graph: GraphProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give inputs and outputs these names, and others to what has one of them."""
    new = {v.name: name for v, name in zip(graph.input, inputs, strict=True)}
    new |= {v.name: name for v, name in zip(graph.output, outputs, strict=True)}
    taken = {*new.values()}
    for name in {name for node in graph.node for name in node.output} | {t.name for t in graph.initializer}:
        if name in taken and name not in new:
            new[name] = next(other for i in range(len(taken) + 1) if (other := f"{name}_{i}") not in taken)
            taken.add(new[name])
    for node in graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
    for value in [*graph.input, *graph.output, *graph.value_info, *graph.initializer]:
        value.name = new.get(value.name, value.name)


def _fill(graph: GraphProto, whole: WholeGraph, weights: Sequence[str], module: nn.Module) -> set[str]:
    """Put weights where they are inputs, and names where sizes of arguments are open; the weights that are trained."""
    n = len(whole.arguments)
    for value, sizes in zip(graph.input[:n], whole.sizes, strict=True):
        for dim, size in zip(value.type.tensor_type.shape.dim, sizes, strict=True):
            if isinstance(size, str):
                dim.dim_param = size
    tensors = _tensors(module)
    named = {name: tensors[own] for name, own in zip(weights, whole.weights, strict=True)}
    for name, t in named.items():  # in place, as no message of more than 2 GiB can be copied
        fill_tensor(graph.initializer.add(), name, t)
    del graph.input[n:]
    return {name for name, t in named.items() if t.requires_grad}
