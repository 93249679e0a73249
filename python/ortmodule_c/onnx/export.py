"""Modules as ONNX files that other programs run."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import GraphProto, ModelProto
from torch import Tensor, nn

from .. import _C
from ..errors import NotExportable
from ..lowering.draft import OWN_DOMAIN
from ..lowering.to_text import to_text
from ..ortmodule import ORTModule
from ..terms import Terms
from ..whole import Example, WholeGraph, unknown_argument, whole_graph
from .importer import tensor_proto
from .module import OnnxModule
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
    dynamic_axes: Mapping[str, Sequence[int]],
    training: bool = False,
    names: Names = Names(),
) -> ModelProto:
    """The ONNX model of a module; see :func:`ortmodule_c.onnx.save`."""
    module, terms = (model.module, model._ort_terms) if isinstance(model, ORTModule) else (model, Terms())
    if isinstance(module, OnnxModule):
        return module.to_model()
    mode = "training" if training else "evaluation"
    graph = whole_graph(mode, module, terms, example, dynamic_axes)
    mistake = unknown_argument(dynamic_axes, graph.arguments)
    if mistake:
        raise ValueError(mistake)
    found = graph.output_names()
    inputs = list(graph.arguments if names.inputs is None else names.inputs)
    outputs = list(found if names.outputs is None else names.outputs)
    if len(outputs) != len(found) or len({*inputs, *outputs}) != len(inputs) + len(outputs):
        raise ValueError(f"output_names are {outputs}, expected {len(found)} that are no names of inputs, each once")
    text, constants = to_text(graph.lowered.model, typed=True)
    proto = to_model(_C.describe(text, "parse", constants=constants), portable=True)
    del proto.graph.output[len(outputs) :]  # what a training step writes into buffers
    _drop_unused(proto.graph)
    unknown = sorted({n.op_type for n in proto.graph.node if n.domain} - {f.name for f in proto.functions})
    if unknown:
        raise NotExportable(f"in {mode} ONNX has no {', '.join(unknown)} ({OWN_DOMAIN})")
    weights = [names.weight(name) for name in graph.weights]
    _rename(proto.graph, [*inputs, *weights], outputs)
    _fill(proto.graph, graph, weights, module)
    onnx.checker.check_model(proto)
    return proto


def write(model: ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a model to a file, its tensors to another one beside it if it is too large for one."""
    place = os.fspath(path)
    large = sum(len(t.raw_data) for t in model.graph.initializer) > _MOST_BYTES
    beside = f"{os.path.basename(place)}.data" if large else None
    onnx.save_model(model, place, save_as_external_data=large, location=beside)


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


def _fill(graph: GraphProto, whole: WholeGraph, weights: Sequence[str], module: nn.Module) -> None:
    """Put weights where they are inputs, and names where sizes of arguments are open."""
    n = len(whole.arguments)
    for value, sizes in zip(graph.input[:n], whole.sizes, strict=True):
        for dim, size in zip(value.type.tensor_type.shape.dim, sizes, strict=True):
            if isinstance(size, str):
                dim.dim_param = size
    tensors: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    graph.initializer.extend(
        [tensor_proto(name, tensors[own]) for name, own in zip(weights, whole.weights, strict=True)]
    )
    del graph.input[n:]
