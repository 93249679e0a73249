"""Writes into a graph what `with torch.no_grad()` and `with torch.autocast(...)` in the forward make of its nodes.

A trace notes where such regions begin and end as nodes of their own. PyTorch makes of each a node that holds a graph,
and loses a region without gradients within one of autocast; here the graph stays as it was traced: what a region
without gradients reads is detached, and what autocast casts is cast.
"""

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ..dtypes import differentiable
from ..errors import NotExportable
from ..lowering.translations.registry import aten
from .autocast import Autocast
from .autocast_region import Region
from .history import IMPLIED, UNGRADED, is_written, written

SET_GRADIENTS = torch._C._set_grad_enabled
ENTER_AUTOCAST, EXIT_AUTOCAST = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast


# Passes of torch.export, in modules of their names, and what they make of regions.
_PASSES = ("replace_set_grad_with_hop_pass", "replace_autocast_with_hop_pass")
_GRAPHS = {"wrap_with_set_grad_enabled", "wrap_with_autocast"}


@contextlib.contextmanager
def left_as_traced() -> Iterator[None]:
    """Within it torch.export leaves regions as they were traced, in this thread.

    There is no interface to it: two passes are exchanged. A PyTorch without them makes graphs of regions, which
    :func:`dissolve_regions` refuses.
    """
    with contextlib.ExitStack() as stack:
        for name in _PASSES:
            with contextlib.suppress(ImportError):
                module = importlib.import_module(f"torch._export.passes.{name}")
                if (original := getattr(module, name, None)) is not None:
                    stack.callback(setattr, module, name, original)
                    setattr(module, name, _elsewhere(original))
        yield


def _elsewhere(original: Callable[..., Any]) -> Callable[..., Any]:
    """A pass in other threads than this, nothing in this one."""
    thread = threading.get_ident()

    def left(graph: Any, signature: Any) -> Any:
        return (graph, signature) if threading.get_ident() == thread else original(graph, signature)

    return left


def dissolve_regions(module: fx.GraphModule, graded: bool) -> None:
    """Write into the nodes of all regions what these make of them.

    Parameters
    ----------
    module
        The graph as traced.
    graded
        Whether gradients were enabled when the module was called.

    Raises
    ------
    NotExportable
        If gradients are enabled where the caller has disabled them, or if PyTorch has made a graph of a region.
    """
    graph = module.graph
    autocast, entered = Autocast(), dict[fx.Node, tuple[str, torch.dtype, bool]]()
    region: Region = ()
    ungraded, aliases = False, dict[fx.Node, fx.Node]()
    for node in list(graph.nodes):
        if node.target is SET_GRADIENTS:
            if node.args[0] and not graded:
                raise NotExportable("the forward enables gradients where its caller has disabled them")
            ungraded, aliases = graded and not node.args[0], {}
        elif node.target is ENTER_AUTOCAST:
            entered[node] = node.args[:3]
            region = _innermost(entered.values())
        elif node.target is EXIT_AUTOCAST:
            del entered[node.args[0]]
            region = _innermost(entered.values())
        elif getattr(node.target, "__name__", "") in _GRAPHS:
            raise NotExportable(f"torch.export of PyTorch {torch.__version__} makes a graph of a region, {node.target}")
        elif node.op == "call_function":
            _within(node, ungraded, aliases)
            if region:
                autocast.reach(node, region)
    for node in reversed(graph.nodes):
        if node.target in (SET_GRADIENTS, ENTER_AUTOCAST, EXIT_AUTOCAST):
            graph.erase_node(node)
    module.recompile()


def _innermost(entered: Iterable[tuple[str, torch.dtype, bool]]) -> Region:
    """Where autocast is on within regions, the outermost first: for each type of device the last."""
    last = {of_device[0]: of_device for of_device in entered}
    return tuple(of_device for of_device in last.values() if of_device[-1])


def _within(node: fx.Node, ungraded: bool, aliases: dict[fx.Node, fx.Node]) -> None:
    """Let a node be what it is where gradients are disabled, or where they are not."""
    node.meta[UNGRADED] = ungraded
    if not ungraded:
        return
    if is_written(node):  # as it was made elsewhere
        for changed in written(node):
            node.replace_all_uses_with(changed)
    node.args = fx.map_arg(node.args, lambda n: _detached(n, node, aliases))
    node.kwargs = fx.map_arg(node.kwargs, lambda n: _detached(n, node, aliases))


def _detached(value: fx.Node, at: fx.Node, aliases: dict[fx.Node, fx.Node]) -> fx.Node:
    """What a node reads of a value where gradients are disabled."""
    val = value.meta.get("val")
    if not isinstance(val, Tensor) or not differentiable(val):
        return value
    if value not in aliases:
        with at.graph.inserting_before(at):
            alias = at.graph.call_function(aten.detach.default, (value,))
        alias.meta = {**value.meta, "val": val.detach(), UNGRADED: True, IMPLIED: True}
        aliases[value] = alias
    return aliases[value]
