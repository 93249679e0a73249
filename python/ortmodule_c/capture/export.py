"""Captures a module as a graph of ATen ops whose inputs are all its tensors."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import _symbolic_trace
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.traceback import annotate, preserve_node_meta
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from ..errors import ForwardRaised, NotExportable, NotInitialized, NotRunnable, first_lines
from ..flatten import Spec, plain_leaves, with_numbers
from ..guards.held import Scan, Write, layout, looseness
from ..guards.watch import Watch
from ..stack import forwards_line
from ..symbolic import memory_of
from ..terms import Terms
from . import autocast_region
from . import pooling as _pooling  # noqa: F401  exchanges what PyTorch traces
from .aliases import Alias, find_aliases
from .autocast import WITHIN
from .custom_function import PythonCall, kept_whole
from .history import changed_memory, check_changes, check_functional, laid_out_by, out_of_place
from .numbers import Numbers, to_nodes
from .python_functions import as_python_has_them
from .reach import unhooked
from .recurrent import one_step_for_all
from .regions import dissolve_regions, left_as_traced
from .symbols import let_go, remembered
from .trace import Trace

Layout = tuple[int, Callable[[Tensor], tuple[int, ...]], tuple[int, ...]]
PATH = "ortmodule_c.path"
_TRACER_LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.__trace")


@dataclass
class Captured:
    """A graph as torch.export gives it, before autograd: ops may be composite and change tensors in place.

    Attributes
    ----------
    program
        The exported program.
    names
        Name of each graph input: user tensors, parameters, `outside`, buffers.
    n_user, n_parameters, n_buffers
        How many of them are which.
    out_spec
        How the outputs nest: those of the module, then the values of `writes`, then those of `rebound`.
    writes
        Attributes of submodules that the forward sets.
    rebound
        Buffers for which it sets other tensors.
    watch
        What it reads besides tensors; None if somebody else guards that.
    layouts
        How those of the user's tensors lay in memory of which that matters: which, how that is seen, and what it was.
    outside
        Tensors that it uses besides, which are neither parameters nor buffers.
    calls
        Custom functions in the graph.
    aliases
        For each of the module's results what it shares memory with.
    hidden
        Nodes that count as further results, of which several results are views.
    numbers
        Those of Python's that are open.
    lines
        Whether nodes say which line of the user's they come from.
    """

    program: ExportedProgram
    names: list[str]
    n_user: int
    n_parameters: int
    n_buffers: int
    out_spec: Spec
    writes: list[Write] = field(default_factory=list)
    rebound: list[tuple[nn.Module, str]] = field(default_factory=list)
    watch: Watch | None = None
    layouts: list[Layout] = field(default_factory=list)
    outside: list[Tensor] = field(default_factory=list)
    calls: list[PythonCall] = field(default_factory=list)
    aliases: list[Alias | None] = field(default_factory=list)
    hidden: list[fx.Node] = field(default_factory=list)
    numbers: Numbers | None = None
    lines: bool = True

    @property
    def dynamic(self) -> bool:
        """Whether some size is symbolic."""
        return bool(self.program.range_constraints)

    def functionalise(self) -> None:
        """Replace changes in place by new values; composite ops with an entry of their own stay."""
        for node in self.program.graph.nodes:
            if WITHIN in node.meta:
                raise NotExportable(f"{node.target} runs in a region of autocast, and a tensor is changed in place")
        check_functional(self.program.graph)
        out_of_place(self.program.graph)
        if self.numbers is not None:
            to_nodes(self.program.graph_module)
        self.program._module_call_graph = _Shared(self.program.module_call_graph)
        try:
            with (
                autocast_region.none(),  # as the graph has its casts
                remembered(),
                _stack_traces(self.lines),
            ):
                self.program = self.program.run_decompositions({})
        except Exception as error:
            raise NotExportable(f"it cannot be made functional: {first_lines(error)}") from error

    def placeholders(self) -> tuple[list[fx.Node], dict[fx.Node, Tensor]]:
        """Graph inputs in the order of `names`, and the constants the trace made."""
        nodes = [n for n in self.program.graph.nodes if n.op == "placeholder"]
        given, constants = [], {}
        outside: dict[Any, fx.Node] = {}
        known = {memory_of(t) for t in self.outside}  # PyTorch lifts aliases of parameters
        for node, spec in zip(nodes, self.program.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                if isinstance(node.meta["val"], Tensor):  # else a size
                    given.append(node)
            else:
                assert spec.target is not None
                constant = self.program.constants[spec.target]
                if not isinstance(constant, Tensor):
                    raise NotExportable(f"the module uses a {type(constant).__name__} made outside its forward")
                if memory_of(constant) in known:
                    outside[memory_of(constant)] = node
                else:
                    constants[node] = constant
        first_buffer = len(given) - self.n_buffers
        given[first_buffer:first_buffer] = [outside[memory_of(t)] for t in self.outside]
        return given, constants

    def results(self) -> tuple[list[Any], dict[str, fx.Node]]:
        """The traced function's results, and inputs changed in place (functional form only) with their last value."""
        output = next(n for n in reversed(self.program.graph.nodes) if n.op == "output")
        results, mutated = [], {}
        for value, spec in zip(output.args[0], self.program.graph_signature.output_specs, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                results.append(value)
            elif spec.kind in (OutputKind.USER_INPUT_MUTATION, OutputKind.BUFFER_MUTATION):
                mutated[spec.target] = value
        return results, mutated


class _Shared(list[Any]):
    """How a program's modules are called, which nobody asks here: a copy would warn of classes of PyTorch's own."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> "_Shared":
        return self


class _Lift(nn.Module):
    """The module as a function of one list of tensors; the module is not its child."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, tensors: list[Tensor]) -> list[Any]:
        try:
            return self.function(tensors)
        except GuardOnDataDependentSymNode as error:
            raise NotExportable(f"control flow depends on the values of a tensor at {forwards_line(error)}") from error


class _Here(threading.local):
    quiet = False  # whether what the tracer tells is kept back in this thread


_here = _Here()
for _name in _TRACER_LOGS:
    logging.getLogger(_name).addFilter(lambda _record: not _here.quiet)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps back what PyTorch's tracer tells its own developers in logs of errors that it raises, in this thread."""
    before, _here.quiet = _here.quiet, True
    try:
        yield
    finally:
        _here.quiet = before


@contextlib.contextmanager
def _paths_noted(module: nn.Module) -> Iterator[None]:
    """Notes in each node of the graph, under ``meta["custom"]``, which submodule it comes from."""
    paths = {id(m): n for n, m in module.named_modules()}
    thread = threading.get_ident()
    entered: list[Any] = []

    def enter(m: nn.Module, _args: Any) -> None:
        if id(m) in paths and threading.get_ident() == thread:
            entered.append(annotate({PATH: paths[id(m)]}))
            entered[-1].__enter__()

    def leave(m: nn.Module, _args: Any, _out: Any) -> None:
        if id(m) in paths and threading.get_ident() == thread:
            entered.pop().__exit__(None, None, None)

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        with preserve_node_meta():
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _stack_traces(wanted: bool) -> Iterator[None]:
    """Whether the tracer notes one for each node."""
    config = getattr(fx.config, "do_not_emit_stack_traces", False)  # PyTorch before 2.13 has none
    fx.config.do_not_emit_stack_traces = not wanted
    try:
        yield
    finally:
        fx.config.do_not_emit_stack_traces = config


@contextlib.contextmanager
def _no_code() -> Iterator[None]:
    """Keeps the tracer from writing Python code for each graph, which nobody reads: it is when a graph is called."""
    write_code = fx.GraphModule.recompile

    def write_first(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        write_code(module)
        return module(*args, **kwargs)

    def later(module: fx.GraphModule) -> None:
        type(module).forward = write_first  # each graph has a class of its own

    fx.GraphModule.recompile = later  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        fx.GraphModule.recompile = write_code  # type: ignore[method-assign]


@contextlib.contextmanager
def _functions_left() -> Iterator[None]:
    """Keeps the tracer from exchanging, for this thread, functions that torch.fx was told to keep whole.

    It would find the proxies among their arguments, and there are none: tensors of the trace are tensors.
    """
    exchange, thread = _symbolic_trace._patch_wrapped_functions, threading.get_ident()

    def elsewhere(patcher: Any) -> None:
        if threading.get_ident() != thread:
            exchange(patcher)

    _symbolic_trace._patch_wrapped_functions = elsewhere
    try:
        yield
    finally:
        _symbolic_trace._patch_wrapped_functions = exchange


def _unique_names(module: nn.Module, scan: Scan) -> tuple[list[str], list[str]]:
    """First name of each parameter and buffer, in the order of the scan."""
    parameters = {id(t): n for n, t in module.named_parameters()}
    buffers = {id(t): n for n, t in module.named_buffers()}
    return [parameters[id(t)] for t in scan.parameters], [buffers[id(t)] for t in scan.buffers]


def capture(
    module: nn.Module,
    terms: Terms,
    spec: Spec,
    leaves: Sequence[Tensor],
    paths: Sequence[str],
    scan: Scan,
    dynamic: Sequence[Sequence[int]],
    numbers: Numbers | None = None,
    lines: bool = False,
) -> Captured:
    """Export `module` called with the nest `spec` around `leaves`.

    Parameters
    ----------
    module
        Left as it was: buffers, gradients, attributes and the random state.
    terms
        Say what of its result the graph gives.
    spec, leaves, paths
        The flattened (args, kwargs) and the name of each leaf.
    scan
        The module's tensors.
    dynamic
        For each leaf the axes whose size is left symbolic.
    numbers
        What is left open in the nest, if anything.
    lines
        Whether to note which line of the user's each node comes from.

    Raises
    ------
    NotExportable
        With the cause, if PyTorch cannot trace the module.
    """
    if nn.Module.__call__ is not _symbolic_trace._orig_module_call:
        raise NotRunnable("the method __call__ of nn.Module is replaced, which a trace goes around")
    if scan.fingerprint.renewed is not None:  # which evaluates parametrizations less often than later calls do
        raise NotInitialized(f"its {scan.fingerprint.renewed} makes the list of its weights anew")
    parameters, buffers = _unique_names(module, scan)
    watch = Watch(module, plain_leaves(spec), any(dynamic) or numbers is not None)
    arguments = spec if numbers is None else with_numbers(spec, iter(numbers.symbols))
    with autocast_region.none() as region:
        trace = Trace(module, terms, arguments, leaves, scan, [*paths, *parameters, *buffers], region, watch)
        tensors = apart([*map(_example, leaves), *scan.parameters, *scan.buffers])
        program, calls = _exported(trace, tensors, dynamic, lines)
    dissolve_regions(program.graph_module, torch.is_grad_enabled())
    outside = _outside(program, watch)
    captured = Captured(
        program,
        [*paths, *parameters, *[f"outside_{i}" for i in range(len(outside))], *buffers],
        len(leaves),
        len(parameters),
        len(buffers),
        trace.out_spec,
        trace.writes,
        trace.rebound,
        watch,
        outside=outside,
        calls=calls,
        numbers=numbers,
        lines=lines,
    )
    check_changes(program.graph_module)
    given, _ = captured.placeholders()
    captured.layouts = _layouts(program, watch, leaves, given)
    captured.aliases, captured.hidden = find_aliases(program.graph, given, captured.results()[0], len(buffers))
    return captured


def _exported(
    trace: Trace, tensors: list[Tensor], dynamic: Sequence[Sequence[int]], lines: bool
) -> tuple[ExportedProgram, list[PythonCall]]:
    """What torch.export makes of a call, of whose tensors the first have `dynamic` axes; its custom functions."""
    shapes = [{a: Dim.AUTO for a in axes} for axes in dynamic] + [{}] * (len(tensors) - len(dynamic))
    environments: set[Any] = set()
    try:
        with (
            unhooked(),
            as_python_has_them(),
            _paths_noted(trace.module),
            sdpa_kernel(SDPBackend.MATH),
            kept_whole() as calls,
            remembered() as environments,
            _stack_traces(lines),
            _no_code(),
            _functions_left(),
            one_step_for_all(),
            left_as_traced(),
            trace.undone(),  # left first: what a class had when it was met may be what those above have put there
        ):
            program = torch.export.export(
                _Lift(trace.run), (tensors,), dynamic_shapes=(shapes,) if any(dynamic) else None, strict=False
            )
    except NotExportable:
        raise
    except Exception as error:
        if trace.watch.refusal is not None:
            raise trace.watch.refusal from error
        raise ForwardRaised(f"torch.export failed: {type(error).__name__}: {first_lines(error)}") from error
    finally:
        let_go(environments)
    return program, calls


def _outside(program: ExportedProgram, watch: Watch) -> list[Tensor]:
    """The tensors that the forward has read somewhere and that the graph uses."""
    constants = {memory_of(t) for t in program.constants.values() if isinstance(t, Tensor)}
    return list({memory_of(t): t for t in watch.tensors.values() if memory_of(t) in constants}.values())


def _layouts(
    program: ExportedProgram, watch: Watch, leaves: Sequence[Tensor], given: Sequence[fx.Node]
) -> list[Layout]:
    """How the user's tensors lay of which that matters; `given` are the graph's inputs, those first."""
    n_user = len(leaves)
    laid_out = laid_out_by(program.graph)
    watch.asks_layout |= not laid_out.isdisjoint(given[n_user:])
    watch.asks_layout |= not watch.not_copied.isdisjoint(changed_memory(program.graph))
    return [
        (i, look, look(t))
        for i, (t, node) in enumerate(zip(leaves, given[:n_user], strict=True))
        for look in _looks(watch, node in laid_out)
    ]


def _looks(watch: Watch, decides: bool) -> Sequence[Callable[[Tensor], tuple[int, ...]]]:
    """How to look at the way an argument lies in memory, if a call where it lies otherwise may be another."""
    if watch.asks_layout or decides:
        return (layout,)
    return (looseness,) if watch.asks_looseness else ()


def apart(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, those that share memory with an earlier one copied: a graph serves calls where they do not."""
    seen: set[int] = set()
    found = []
    for t in tensors:
        if not isinstance(t, Tensor):
            found.append(t)
            continue
        shares = t.untyped_storage()._cdata in seen
        found.append(t.detach().clone().requires_grad_(t.requires_grad) if shares else t)
        seen.add(t.untyped_storage()._cdata)
    return found


def _example(t: Tensor) -> Tensor:
    """A tensor that stands for an argument."""
    example = t.detach().requires_grad_(t.requires_grad)
    return nn.Parameter(example, t.requires_grad) if type(t) is nn.Parameter else example
