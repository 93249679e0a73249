"""Captures one of TorchDynamo's graphs as a graph of ATen ops, as :mod:`ortmodule_c.capture.export` does a module."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._export.passes.lift_constants_pass import ConstantAttrMap, lift_constants_pass
from torch._export.verifier import load_verifier
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from ..capture import autocast_region
from ..capture.aliases import find_aliases
from ..capture.custom_function import kept_whole
from ..capture.export import PATH, Captured
from ..capture.history import check_changes
from ..capture.numbers import marked
from ..capture.reach import unhooked
from ..capture.refusals import leaves_alone
from ..capture.regions import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRADIENTS, dissolve_regions
from ..errors import NeedsStatic, NotExportable, first_lines
from ..flatten import Spec, flatten
from ..lowering.translations.registry import aten
from ..stack import AS_PYTORCH
from ..symbolic import memory_of

# Where the functions are that a graph may call: they compute. Others act on PyTorch itself, and in a trace would do so
# once, or hold functions of their own, which a trace would see through.
_COMPUTE = {
    "torch",
    "torch._C._fft",
    "torch._C._linalg",
    "torch._C._nn",
    "torch._C._special",
    "torch._dynamo.utils",
    "torch._refs",
    "torch.functional",
    "torch.nn.functional",
    "_operator",
    "builtins",
    "math",
}
_REGIONS = (SET_GRADIENTS, ENTER_AUTOCAST, EXIT_AUTOCAST)
_ANSWERED = (aten.item.default, aten.promote_types.default)  # of a constant and of dtypes, whose answer is in the trace
# The first tells who counts the uses of PyTorch's interfaces, and no one does; what the second says Dynamo knows.
_WITHOUT_EFFECT = (torch._C._log_api_usage_once, torch._C._are_functorch_transforms_active)
_DATA = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
_IN_USERS_WORDS = {"_lower_version_count_by_1": "the setter of Tensor.data"}
_ACTING_METHODS = {"backward", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"}


class _Traced(fx.Interpreter):
    """Runs a graph of Dynamo, node by node, so that each node of the trace knows where it comes from."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # in the text of errors
        self._regions: list[torch.autocast] = []

    def run(self, *args: Any) -> Any:  # type: ignore[override]
        try:
            return super().run(*args)
        finally:
            while self._regions:
                self._regions.pop().__exit__(None, None, None)

    def run_node(self, n: fx.Node) -> Any:
        stack = n.meta.get("nn_module_stack")
        if stack:
            n.meta["custom"] = {**(n.meta.get("custom") or {}), PATH: _path(next(reversed(stack.values()))[0])}
        return super().run_node(n)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "item" and not isinstance(args[0], Tensor):  # a number that Dynamo gives as a tensor
            return args[0]
        return super().call_method(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is ENTER_AUTOCAST:  # a trace of the function alone does not turn it on
            self._regions.append(torch.autocast(*args).__enter__())
            return None
        if target is EXIT_AUTOCAST:
            self._regions.pop().__exit__(None, None, None)
            return None
        if target is _DATA:  # which no trace sees; what is saved for a gradient may be changed through neither
            return args[0].detach()
        return args[0] if leaves_alone(target, args, kwargs) else super().call_function(target, args, kwargs)


def acts(node: fx.Node) -> str:
    """What a node calls, if it does something besides computing."""
    if node.op == "call_method" and node.target in _ACTING_METHODS:
        return f"Tensor.{node.target}"
    if (
        node.op != "call_function"
        or node.target in (*_REGIONS, *_WITHOUT_EFFECT, _DATA)
        or isinstance(node.target, (OpOverload, OpOverloadPacket))
    ):
        return ""
    name = str(getattr(node.target, "__name__", node.target))
    module = _module(node.target)
    computes = module in _COMPUTE or module.split(".", maxsplit=1)[0] in AS_PYTORCH
    return "" if computes else _IN_USERS_WORDS.get(name, name)


def _module(function: Any) -> str:
    # Methods of the class of all functions of PyTorch have none.
    return getattr(function, "__module__", None) or "torch"


def _path(qualified: str) -> str:
    """Of ``L['self'].encoder.layers[0]`` what names a submodule."""
    return qualified.removeprefix("L['self']").removeprefix("._modules").lstrip(".")


def capture_graph(graph: fx.GraphModule, examples: Sequence[Any]) -> Captured:
    """Trace `graph` on `examples`, which are stand-ins without elements and sizes, symbolic or numbers.

    Raises
    ------
    NotExportable
        With the cause, if the graph must run in PyTorch.
    """
    for what in filter(None, map(acts, graph.graph.nodes)):
        raise NotExportable(f"the graph calls {what}")
    out_specs: list[Spec] = []
    before = [e.detach().requires_grad_(e.requires_grad) if isinstance(e, Tensor) else e for e in examples]
    with autocast_region.none() as region:

        def function(*args: Any) -> list[Any]:
            with autocast_region.within(region, caches=True):
                out, spec = flatten(_Traced(graph).run(*args))
            out_specs.append(spec)
            return [*map(marked, out)]

        grad = torch.is_grad_enabled()
        try:
            with (
                on_stand_ins(examples),
                preserve_node_meta(),
                sdpa_kernel(SDPBackend.MATH),
                kept_whole() as calls,
            ):
                traced = make_fx(function, pre_dispatch=True)(*examples)
        except (NotExportable, NeedsStatic):
            raise
        except Exception as error:
            raise NotExportable(f"the graph cannot be traced: {type(error).__name__}: {first_lines(error)}") from error
        finally:
            torch._C._set_grad_enabled(grad)
    for example, was in zip(examples, before, strict=True):
        if isinstance(example, Tensor) and memory_of(example) != memory_of(was):
            raise NotExportable("the graph changes in place how an input lies in memory")
    program = _program(traced, before)
    dissolve_regions(program.graph_module, grad)
    captured = Captured(program, [], 0, 0, 0, out_specs[-1], calls=calls)
    inputs, _ = captured.placeholders()
    captured.names = [n.name for n in inputs]
    captured.n_user = len(inputs)
    check_changes(program.graph_module)
    captured.aliases, captured.hidden = find_aliases(program.graph, inputs, captured.results()[0], 0)
    return captured


@contextlib.contextmanager
def on_stand_ins(examples: Sequence[Any]) -> Iterator[None]:
    """Makes stand-ins of the tensors that a trace on `examples` meets, which no hook on what autograd saves sees."""
    mode = next((e.fake_mode for e in examples if isinstance(e, FakeTensor)), None) or FakeTensorMode()
    with mode, enable_python_dispatcher(), unhooked():
        yield


def _program(traced: fx.GraphModule, examples: Sequence[Any]) -> ExportedProgram:
    """The traced graph in the form that torch.export gives."""
    for node in reversed(traced.graph.nodes):
        node.meta.setdefault("nn_module_stack", {})  # which the passes want
        if node.target in _ANSWERED and not node.users:
            traced.graph.erase_node(node)
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    for node, example in zip(placeholders, examples, strict=True):
        node.meta["val"] = example  # a tracer notes no more than shape and dtype
    signature: Any = _signature(traced.graph)
    constants = lift_constants_pass(traced, signature, ConstantAttrMap())
    in_spec = pytree.tree_structure((tuple(range(len(placeholders))), {}))
    out_spec = pytree.tree_structure(tuple(range(len(signature.output_specs))))
    call = ModuleCallSignature([], [], in_spec, out_spec)
    return ExportedProgram(
        traced,
        traced.graph,
        signature,
        {},
        {},
        [ModuleCallEntry("", call)],
        constants=constants,
        verifiers=[load_verifier("TRAINING")],
    )


def _signature(graph: fx.Graph) -> ExportGraphSignature:
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    return ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, _argument(n), None) for n in inputs],
        [OutputSpec(OutputKind.USER_OUTPUT, _argument(v), None) for v in output.args[0]],
    )


def _argument(value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return ConstantArgument("", value)
    return (TensorArgument if isinstance(value.meta.get("val"), Tensor) else SymIntArgument)(value.name)
