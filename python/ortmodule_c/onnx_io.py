"""Writes graphs in the text form of the C core as ONNX files."""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from torch import Tensor

from . import _C
from .dtypes import DTYPES
from .lowering.draft import ONNX_TYPES, OPSET, OWN_DOMAIN, OWN_OPSET
from .lowering.lower import Lowered
from .lowering.to_text import to_text
from .options import DebugOptions, logger
from .report import FallbackReport

_CODES = {DTYPES[dtype][0]: int(code) for dtype, code in ONNX_TYPES.items()}
_NUMPY = {
    "f32": np.float32,
    "f64": np.float64,
    "i64": np.int64,
    "i32": np.int32,
    "i16": np.int16,
    "i8": np.int8,
    "u8": np.uint8,
    "bool": np.bool_,
}
_TYPE = r"(\w+)\[([^\]]*)\]"
_NODE = re.compile(r"^(?P<out>.+?) = (?P<op>\w+)\((?P<in>[^)]*)\)(?: \{(?P<attr>.*?)\})?(?: name=\"(?P<name>.*)\")?$")
_STRING = r'"(?:[^"\\]|\\.)*"'
_ATTRIBUTE = re.compile(rf'(\w+)=({_STRING}|\[(?:{_STRING}|[^\]"])*\]|[^,\s]+)')
_ELEMENT = re.compile(rf"{_STRING}|[^,\s]+")

_numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))  # by the beginning of the names


class Files:
    """The ONNX files of one module's graphs; where one cannot be written that is told and changes nothing.

    Parameters
    ----------
    options
        Whether there are files, and their place and names.
    report
        Where is told what could not be written.
    """

    def __init__(self, options: DebugOptions, report: FallbackReport) -> None:
        self._wanted = options.save_onnx
        self._beginning = str(options.directory / options.onnx_prefix)
        self._report = report
        self._written: set[str] = set()

    def watcher(
        self, lowered: Lowered, text: str, constants: dict[str, Tensor], numbered: bool = False
    ) -> Callable[[_C.Plan], None] | None:
        """What writes a graph once a plan of it is known, if it has to be written.

        Of graphs without numbers, which stand for the whole module, the first is written in each mode. One with a
        number is one of several, and each is; of a graph that has no gradient there is no mode but inference.
        """
        if not self._wanted:
            return None
        beginning = f"{self._beginning}_{next(_numbers[self._beginning])}" if numbered else self._beginning
        exported = to_text(lowered.model, typed=True)[0]

        def write(plan: _C.Plan, mode: str) -> None:
            stages = {"exported": exported, "optimized": plan.text()}
            if mode == "training":
                stages["joint"] = _C.transform(
                    text,
                    "differentiate",
                    types=input_types(plan.text()),
                    out_grads=plan.out_grads[0],
                    in_grads=plan.in_grads,
                    constants=constants,
                    callbacks=lowered.callbacks,
                )
            for stage, graph in stages.items():
                save(graph, constants, Path(f"{beginning}_{stage}_{mode}.onnx"))

        def write_once(plan: _C.Plan) -> None:
            mode = "training" if any(map(any, plan.out_grads)) else "inference"
            if f"{beginning}_{mode}" in self._written:
                return
            self._written.add(f"{beginning}_{mode}")
            try:
                write(plan, mode)
            except Exception as error:
                logger.debug("no ONNX files", exc_info=True)
                self._report.tell(f"the {mode} graphs could not be written: {type(error).__name__}: {error}")

        return write_once


def input_types(text: str) -> list[str]:
    """Types of the inputs of a graph, such as ``f32[2,3]``."""
    return re.findall(r"^input %\S+ : (\S+)", text, re.M)


def save(text: str, constants: Mapping[str, Tensor], path: Path) -> None:
    """Write a graph as an ONNX file."""
    onnx.save(to_model(text, constants), str(path))


def to_model(text: str, constants: Mapping[str, Tensor]) -> onnx.ModelProto:
    """The ONNX model of a graph given as text, in which `constants` supplies large constants by name.

    Ops of our own, and standard ones with attributes or operands that ONNX does not know, are in
    the domain ``ai.ortmodule_c``. Gradients given to a joint graph are inputs, those it gives outputs.
    """
    writer = _Writer(constants)
    for line in text.splitlines():
        writer.line(line.split("#")[0].strip() if not line.lstrip().startswith("const") else line.strip())
    return writer.model()


class _Writer:
    def __init__(self, constants: Mapping[str, Tensor]) -> None:
        self._constants = constants
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._values: list[onnx.ValueInfoProto] = []
        self._types: dict[str, tuple[int, list[Any] | None]] = {}
        self._initializers: list[onnx.TensorProto] = []
        self._nodes: list[onnx.NodeProto] = []

    def line(self, line: str) -> None:
        """Take in one statement."""
        word = line.split(" ", 1)[0]
        if word in ("input", "grad"):
            self._input(line)
        elif word == "const":
            self._const(line)
        elif word == "return":
            self._return(line[len("return") :])
        elif line and not line.endswith(":"):
            self._node(line)

    def model(self) -> onnx.ModelProto:
        """The model made of the statements so far."""
        graph = helper.make_graph(
            self._nodes, "main", self._inputs, self._outputs, self._initializers, value_info=self._values
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(OWN_DOMAIN, OWN_OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="ortmodule_c")

    def _info(self, name: str, dtype: str, dims: str) -> onnx.ValueInfoProto:
        shape = [None if d.strip() == "?" else int(d) for d in dims.split(",") if d.strip()]
        self._types[name] = (_CODES[dtype], shape)
        return helper.make_tensor_value_info(name, _CODES[dtype], shape)

    def _input(self, line: str) -> None:
        found = re.match(rf"\w+ %(\S+)(?: of \d+)? : {_TYPE}", line)
        assert found is not None
        self._inputs.append(self._info(*found.groups()))

    def _const(self, line: str) -> None:
        found = re.match(rf"const %(\S+) : {_TYPE} = (.*)", line)
        assert found is not None
        name, dtype, dims, data = found.groups()
        self._info(name, dtype, dims)
        shape = [int(d) for d in dims.split(",") if d.strip()]
        if data.strip() != "@":
            elements = np.array(
                [float(x) if "f" in dtype else int(x) for x in data.strip("[] ").split(",") if x.strip()]
            )
            array: Any = elements.astype(_NUMPY.get(dtype, np.float32)).reshape(shape)
        elif name in self._constants:
            array = self._constants[name].detach().numpy()
        else:  # made by a pass, and not at hand
            self._inputs.append(helper.make_tensor_value_info(name, _CODES[dtype], shape))
            return
        self._initializers.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(shape), name))

    def _node(self, line: str) -> None:
        found = _NODE.match(line)
        assert found is not None, line
        outputs = []
        for name, dtype, dims in re.findall(rf"(%\S+|_)(?: : {_TYPE})?(?:, |$)", found["out"]):
            outputs.append("" if name == "_" else name[1:].rstrip(","))
            if dtype:
                self._values.append(self._info(outputs[-1], dtype, dims))
        inputs = ["" if v.strip() == "_" else v.strip()[1:] for v in found["in"].split(",") if v.strip()]
        attributes = {k: _attribute(v) for k, v in _ATTRIBUTE.findall(found["attr"] or "")}
        op, domain = _in_onnx_terms(found["op"], inputs, attributes)
        if op == "Clip":
            inputs = self._clip_inputs(inputs, attributes)
        while outputs and not outputs[-1]:
            outputs.pop()
        while inputs and not inputs[-1]:
            inputs.pop()
        node = helper.make_node(op, inputs, outputs, name=found["name"] or "", domain=domain)
        for k, v in sorted(attributes.items()):
            node.attribute.append(helper.make_attribute(k, v, attr_type=None if v != [] else AttributeProto.INTS))
        self._nodes.append(node)

    def _clip_inputs(self, inputs: list[str], attributes: dict[str, Any]) -> list[str]:
        """ONNX has the bounds as inputs."""
        dtype = self._types.get(inputs[0], (TensorProto.FLOAT, None))[0]
        names = [inputs[0]]
        for bound in ("min", "max"):
            names.append("")
            if bound in attributes:
                names[-1] = f"clip_{len(self._initializers)}_{bound}"
                self._initializers.append(helper.make_tensor(names[-1], dtype, [], [attributes.pop(bound)]))
        return names

    def _return(self, values: str) -> None:
        for name in re.findall(r"%([^\s,]+)", values):
            dtype, shape = self._types.get(name, (TensorProto.UNDEFINED, None))
            self._outputs.append(helper.make_tensor_value_info(name, dtype, shape))


def _attribute(text: str) -> Any:
    if text.startswith('"'):
        return text[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    if text.startswith("["):
        return [_attribute(v) for v in _ELEMENT.findall(text[1:-1])]
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def _in_onnx_terms(op: str, inputs: list[str], attributes: dict[str, Any]) -> tuple[str, str]:
    """Name and domain of a node; attributes at values that say nothing are dropped."""
    if op == "AveragePool" and not attributes.get("divisor_override"):
        attributes.pop("divisor_override", None)
    standard = (
        onnx.defs.has(op, OPSET)
        and all(k in onnx.defs.get_schema(op, OPSET).attributes or op == "Clip" for k in attributes)
        and all(i or not _required(op, n) for n, i in enumerate(inputs))
    )
    return op, "" if standard else OWN_DOMAIN


def _required(op: str, index: int) -> bool:
    formal = onnx.defs.get_schema(op, OPSET).inputs
    return index < len(formal) and formal[index].option == onnx.defs.OpSchema.FormalParameterOption.Single
