"""From an ONNX graph to what the C core reads: text and the tensors it names."""

from collections.abc import Iterator

import onnx_ir as ir
from torch import Tensor

from ..dtypes import DTYPES
from .draft import GRAD, ONNX_TYPES, OVER, TORCH_DTYPES

_MOST_ELEMENTS = 16  # of a constant written into the text
_TEXT = {onnx: DTYPES[dtype][0] for dtype, onnx in ONNX_TYPES.items()}


def to_text(model: ir.Model, typed: bool = False) -> tuple[str, dict[str, Tensor]]:
    """Write the graph of `model` as text (csrc/graph/text.h) and collect its larger constants by name.

    `typed` adds the types of nodes' outputs that are known, for other readers than the C core.
    """
    graph = model.graph
    constants: dict[str, Tensor] = {}
    used = {id(v) for node in graph for v in node.inputs} | {id(v) for v in graph.outputs}
    lines = [f"input %{v.name} : {_type(v)}{' grad' if GRAD in v.metadata_props else ''}" for v in graph.inputs]
    for value in graph.initializers.values():
        if id(value) in used:
            lines.append(_constant(value, constants))
    lines.extend(_node(node, typed) for node in graph)
    lines.append("return " + ", ".join(_result(v) for v in graph.outputs))
    return "\n".join(lines) + "\n", constants


def _result(value: ir.Value) -> str:
    over = value.metadata_props.get(OVER)
    return f"%{value.name} over %{over}" if over else f"%{value.name}"


def _type(value: ir.Value) -> str:
    assert value.dtype is not None and value.shape is not None
    return f"{_TEXT[value.dtype]}[{','.join(str(d) if isinstance(d, int) else '?' for d in value.shape)}]"


def _constant(value: ir.Value, constants: dict[str, Tensor]) -> str:
    assert value.const_value is not None and value.name is not None and value.dtype is not None
    data: Tensor = value.const_value.raw
    head = f"const %{value.name} : {_type(value)} = "
    if data.numel() > _MOST_ELEMENTS:
        constants[value.name] = data.contiguous()
        return head + "@"
    if TORCH_DTYPES[value.dtype].is_floating_point:
        return head + f"[{', '.join(_float(x) for x in data.flatten().tolist())}]"
    return head + f"[{', '.join(str(int(x)) for x in data.flatten().tolist())}]"


def _float(x: float) -> str:
    return repr(float(x))


def _quoted(text: str) -> str:
    """A string as the C core reads it: on one line, in UTF-8."""
    plain = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _output(value: ir.Value, typed: bool) -> str:
    if not value.name:
        return "_"
    return f"%{value.name} : {_type(value)}" if typed and value.shape is not None else f"%{value.name}"


def _node(node: ir.Node, typed: bool) -> str:
    outputs = ", ".join(_output(v, typed) for v in node.outputs)
    inputs = ", ".join("_" if v is None else f"%{v.name}" for v in node.inputs)
    attributes = ", ".join(_attributes(node))
    name = f" name={_quoted(node.name)}" if node.name else ""
    return f"{outputs} = {node.op_type}({inputs}){' {' + attributes + '}' if attributes else ''}{name}"


def _attributes(node: ir.Node) -> Iterator[str]:
    for name, attribute in node.attributes.items():
        value = attribute.value
        if isinstance(value, str):
            yield f"{name}={_quoted(value)}"
        elif isinstance(value, (list, tuple)):
            yield f"{name}=[{', '.join(_float(v) if isinstance(v, float) else str(v) for v in value)}]"
        else:
            yield f"{name}={_float(value) if isinstance(value, float) else value}"
