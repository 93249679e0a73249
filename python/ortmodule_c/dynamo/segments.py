"""Splits one of TorchDynamo's graphs at calls that no graph of ours can hold, so that what is between them still can.

Such a call holds functions, those of a custom ``autograd.Function``, a hook, the branches of ``torch.cond``; or tensors
of a kind that we have not, such as complex ones; or it is inside a transform of ``torch.func``. PyTorch makes it, on
tensors that autograd connects with those before and after it.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import HigherOrderOperator
from torch.fx.passes.split_module import split_module
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ..capture.regions import ENTER_AUTOCAST, EXIT_AUTOCAST
from ..dtypes import holds
from ..report import FallbackReport
from ..stack import users_line_in
from .batches import BEGINS, LOAD, called, change_of_depth
from .fx_capture import acts, on_stand_ins

Make = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}


def checkpointed(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `body` now, and again in backward; PyTorch's op for it lets the second run draw other random numbers."""
    own, theirs = tag_activation_checkpoint.divide_kwargs(kwargs)
    own.setdefault("use_reentrant", False)
    context = getattr(body, "meta", {}).get("_checkpoint_context_fn")
    if context is not None:
        own["context_fn"] = context
    closed = _Closed(body, args)
    return checkpoint(closed, *closed.given, **own, **theirs)


class _Closed:
    """A body that has those of its arguments to itself that need no gradient, as a block has its buffers.

    A checkpoint saves its arguments, and PyTorch would not give them back once they have changed: TorchDynamo makes
    arguments of running statistics too, which change whenever the body runs. Any other must stay as it is.
    """

    def __init__(self, body: Callable[..., Any], args: Sequence[Any]) -> None:
        self.body = body
        self.kept: dict[int, Tensor] = {
            i: arg
            for i, arg in enumerate(args)
            if isinstance(arg, Tensor) and not arg.requires_grad and not arg.is_inference()
        }
        self.given = [arg for i, arg in enumerate(args) if i not in self.kept]
        self.unchanged: dict[int, int] | None = None  # versions of what the first run has left as it is

    def __call__(self, *given: Any, **kwargs: Any) -> Any:
        rest = iter(given)
        args = [self.kept[i] if i in self.kept else next(rest) for i in range(len(self.kept) + len(given))]
        if self.unchanged is None:
            before = {i: arg._version for i, arg in self.kept.items()}
            result = self.body(*args, **kwargs)
            self.unchanged = {i: version for i, version in before.items() if self.kept[i]._version == version}
            return result
        for i, version in self.unchanged.items():
            if self.kept[i]._version != version:
                raise RuntimeError(
                    f"argument {i} of a checkpointed function has been modified by an inplace operation: it is at "
                    f"version {self.kept[i]._version}; expected version {version}"
                )
        return self.body(*args, **kwargs)


def draw_alike(graph: fx.GraphModule) -> None:
    """Have checkpoints in the graph, and in those inside it, draw the same random numbers in both runs."""
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            found = [n for n in module.graph.nodes if n.target is tag_activation_checkpoint]
            for node in found:
                node.target = checkpointed
            if found:
                module.recompile()


def split(graph: fx.GraphModule, examples: Sequence[Any], make: Make, report: FallbackReport) -> fx.GraphModule | None:
    """The graph with callables made by `make` in the place of what is between such calls; None if there are none.

    Parameters
    ----------
    graph
        Left as it is.
    examples
        What it is called with, without elements.
    make
        Given a graph and what it is called with, a callable that does the same.
    report
        Where is told what PyTorch computes.
    """
    numbers = _numbers(graph)
    if numbers is None:
        return None
    parts = split_module(graph, None, lambda node: numbers.get(node, 0), keep_original_order=True)  # type: ignore[arg-type]
    todo: list[_Place] = []
    with on_stand_ins(examples):
        _Parts(parts, todo, report).run(*_leaves(examples))
    for place in todo:
        place.fill(make)
    return parts


@dataclass
class _Place:
    """Where a graph is to be exchanged for a callable, and what it is called with there."""

    holder: fx.GraphModule
    name: str
    examples: list[Any]

    def fill(self, make: Make) -> None:
        graph = getattr(self.holder, self.name)
        function = make(graph, self.examples)
        function.meta = graph.meta  # type: ignore[attr-defined]
        delattr(self.holder, self.name)
        object.__setattr__(self.holder, self.name, function)


def _numbers(graph: fx.GraphModule) -> dict[fx.Node, int] | None:
    """In which part each node is; None if all are in one, or a region, such as one without gradients, would be cut."""
    numbers: dict[fx.Node, int] = {}
    part, last, graded, depth, transforms = 0, False, torch.is_grad_enabled(), 0, 0
    for node in graph.graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        taken_from = node.args[0] if node.target is operator.getitem else None
        change = change_of_depth(node)
        apart = transforms + change > 0 or change < 0
        apart = apart or _is_apart(node) or (isinstance(taken_from, fx.Node) and _is_apart(taken_from))
        transforms += change
        if node.target is torch._C._set_grad_enabled:
            graded = node.args[0]
        depth += (node.target is ENTER_AUTOCAST) - (node.target is EXIT_AUTOCAST)
        if apart and (depth or graded != torch.is_grad_enabled()):
            return None
        if not apart and acts(node):
            return None
        part += apart != last
        last = apart
        numbers[node] = part
    return numbers if part else None


def _is_apart(node: fx.Node) -> bool:
    begins = change_of_depth(node) > 0 or called(node) == LOAD
    return bool(begins or _holds_functions(node) or node.target in _HOOKS or _foreign(node))


def _holds_functions(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) or node.target is checkpointed


def _foreign(node: fx.Node) -> str:
    """What a node takes or gives that no graph of ours can hold, or nothing."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return ""
    for value in tree_leaves([n.meta.get("example_value") for n in (*node.all_input_nodes, node)]):
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            return f"there are no kernels for layout {value.layout}"
        if isinstance(value, Tensor) and not holds(value):
            return f"there are no kernels for {value.dtype}"
    return ""


def _told(node: fx.Node) -> tuple[str, str]:
    """What is said of a node that PyTorch runs: its name, and why, or nothing."""
    if node.target is operator.getitem or node.target in _HOOKS:
        return "", ""
    if called(node).endswith(BEGINS[0]):
        return called(node).removesuffix(BEGINS[0]).lstrip("_"), "it transforms functions"
    if isinstance(node.target, HigherOrderOperator) and node.target.name() not in _HOOKS:
        return node.target.name(), "it holds functions of its own"
    return called(node), _foreign(node)


def _leaves(examples: Sequence[Any]) -> list[Any]:
    return [e.detach().requires_grad_(e.requires_grad) if isinstance(e, Tensor) else e for e in examples]


class _WithNumbers(fx.Interpreter):
    """Runs a graph that is given numbers where Dynamo gives them as tensors."""

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = target == "item" and not isinstance(args[0], Tensor)
        return args[0] if number else super().call_method(target, args, kwargs)


class _Parts(fx.Interpreter):
    """Runs the parts on tensors without elements, and finds those that can be graphs of ours."""

    def __init__(self, parts: fx.GraphModule, todo: list[_Place], report: FallbackReport) -> None:
        super().__init__(parts)
        self._parts, self._todo, self._report = parts, todo, report

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        part: fx.GraphModule = getattr(self._parts, target)
        if any(map(_is_apart, part.graph.nodes)):
            return _Calls(part, self._todo, self._report).run(*args)
        self._todo.append(_Place(self._parts, target, _leaves(args)))
        return _WithNumbers(part).run(*args)


class _Calls(_WithNumbers):
    """Runs a part that PyTorch runs, and finds the bodies of checkpoints in it."""

    def __init__(self, part: fx.GraphModule, todo: list[_Place], report: FallbackReport) -> None:
        super().__init__(part)
        self._part, self._todo, self._report = part, todo, report

    def run_node(self, n: fx.Node) -> Any:
        if n.target is not checkpointed:
            name, why = _told(n)
            if why:
                self._report.add(f"{name} at {users_line_in(n.meta.get('stack_trace') or '')}", why)
            return super().run_node(n)
        body, *args = self.fetch_args_kwargs_from_env(n)[0]
        reference: Any = n.args[0]
        self._todo.append(_Place(self._part, reference.target, _leaves(args)))
        return _WithNumbers(body).run(*args)
