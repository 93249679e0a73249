"""Gradient: the backward of a part of the graph, as the core makes it, in the graph."""

import onnx_ir as ir
import torch

from .. import _C
from ..dtypes import BY_TEXT
from ..errors import Unsupported
from ..lowering.draft import Val
from ..lowering.to_text import to_text
from .description import Node, described, type_text
from .importer import Given, Importer, Results


def gradient(t: Importer, node: Given, *inputs: Val) -> Results:
    """Of the sum of a value by those of which `xs` has the names, where they and those of `zs` are the inputs."""
    xs, result = node.attributes["xs"], node.attributes["y"]
    given = dict(zip([*xs, *node.attributes.get("zs", [])], inputs, strict=True))
    inner, taken, y = t.apart(given, result)
    if not isinstance(y, Val):
        raise Unsupported(f"the gradient of {result!r}, which is no tensor")
    inner.draft.graph.outputs.append(y.ir)
    text, constants = to_text(ir.Model(inner.draft.graph, ir_version=10))
    graph = described(
        _C.describe(
            text,
            "differentiate",
            types=[type_text(v.type) for v in taken.values()],
            out_grads=[True],
            in_grads=[name in xs for name in taken],
            constants=constants,
        )
    )
    values = {
        name: t.tensor(torch.frombuffer(bytearray(data), dtype=BY_TEXT[dtype]).reshape(dims))
        for name, (dtype, dims), data in graph.constants
    }
    values |= {name: v for (name, *_), v in zip(graph.inputs, taken.values(), strict=True)}
    values |= {name: t.tensor(torch.ones(y.example, dtype=y.dtype)) for name, *_ in graph.grads}
    for each in graph.nodes:
        _add(t, each, values)
    found = dict(zip(taken, graph.gradients, strict=True))
    return tuple(_or_zeros(t, given[x], values, found[x]) for x in xs)


def _add(t: Importer, node: Node, values: dict[str, Val]) -> None:
    if node.op in ("Dropout", "TorchCall"):
        raise Unsupported(f"the gradient of {node.op}")
    given = [None if name is None else values[name] for name in node.inputs]
    said = {a.name: a.value for a in node.attributes}
    results = t.emit(node.op, *given, outputs=len(node.outputs), **said)
    for output, val in zip(node.outputs, [results] if isinstance(results, Val) else results, strict=True):
        if output is not None:
            values[output[0]] = val
        if val.grad and node.op != "Detach" and not _C.ops()[node.op][2]:
            raise Unsupported(f"the gradient of {node.op}, which is one itself")


def _or_zeros(t: Importer, x: Val, values: dict[str, Val], name: str | None) -> Val:
    return values[name] if name is not None else t.tensor(torch.zeros(x.example, dtype=x.dtype))
