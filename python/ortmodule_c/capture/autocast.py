"""What has to be done to a graph with regions of autocast before it is made functional."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import NotExportable, first_lines
from ..lowering.in_place import functional
from ..lowering.translations import TABLE
from ..lowering.translations.registry import aten, has_kernel, is_composite
from .history import AUTOCAST, body_of, written


def out_of_place(program: fx.GraphModule) -> None:
    """Write what a composite op changes in place as a copy of what the op without that gives, if that has an entry.

    What is changed in place PyTorch would take apart otherwise.
    """
    for graph, _ in _graphs(program, None):
        for node in graph.nodes:
            op = node.target
            if not isinstance(op, OpOverload) or not is_composite(op) or written(node) != list(node.args[:1]):
                continue
            other = functional(op)
            if other not in TABLE:
                continue
            with graph.inserting_before(node):
                new = graph.call_function(other, node.args, node.kwargs)
            new.meta = copy.copy(node.meta)
            node.target, node.args, node.kwargs = aten.copy_.default, (node.args[0], new), {}


def take_apart(program: fx.GraphModule) -> None:
    """Replace composite ops in a region of autocast that it reaches in their parts only by these, cast as it does.

    What makes a graph functional keeps such ops whole, or takes them apart outside of the region.

    Raises
    ------
    NotExportable
        If it cannot be told what one is composed of.
    """
    for graph, region in _graphs(program, None):
        for node in list(graph.nodes):
            op = node.target
            if region is None or not isinstance(op, OpOverload) or has_kernel(op, "AutocastCPU"):
                continue
            if not is_composite(op):
                continue
            parts = _parts(node, region, enabled=True)
            hidden = next((part for part, _ in parts if op not in TABLE and _hides_others(part)), None)
            if hidden is not None:
                raise NotExportable(f"{op} is composed of what {hidden} computes in a region of autocast")
            if parts != _parts(node, region, enabled=False):
                _inline(graph, node, region)


Region = tuple[str, torch.dtype]


def _graphs(program: fx.GraphModule, region: Region | None) -> Iterator[tuple[fx.Graph, Region | None]]:
    """The graph and those of regions in it, each with the autocast that is on there."""
    yield program.graph, region
    for node in program.graph.nodes:
        if getattr(node.target, "__name__", "") == AUTOCAST:
            device, dtype, enabled, *_ = node.args
            yield from _graphs(body_of(program, node), (device, dtype) if enabled else None)


def _called(node: fx.Node) -> Any:
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs))
    op: Any = node.target
    return op(*args, **kwargs)


def _parts(node: fx.Node, region: Region, enabled: bool) -> list[Any]:
    """The ops that a node is composed of, each with the dtypes of its results; without autocast perhaps why of none."""
    device, dtype = region
    with torch.no_grad(), torch.autocast(device, dtype, enabled=enabled, cache_enabled=False), _Noting() as noting:
        try:
            _called(node)
        except Exception as error:
            if enabled:
                cause = f"{node.target} cannot be taken apart in a region of autocast: {first_lines(error)}"
                raise NotExportable(cause) from error
            return [error]
    return noting.calls


def _hides_others(op: OpOverload) -> bool:
    """Whether an op may be computed by others, which autocast reaches, though it has a derivative of its own."""
    is_view = any(r.alias_info is not None for r in op._schema.returns)
    explicit = has_kernel(op, "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return explicit and not has_kernel(op, "CPU") and not is_view and op not in TABLE


class _Noting(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.calls.append((func, [t.dtype for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]))
        return results


def _inline(graph: fx.Graph, node: fx.Node, region: Region) -> None:
    """Replace a node by what it is composed of."""
    device, dtype = region
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    values = [n.meta["val"] for n in given]
    op: Any = node.target

    def call(*operands: Any) -> Any:
        left = iter(operands)
        args, kwargs = pytree.tree_unflatten([next(left) if isinstance(v, fx.Node) else v for v in leaves], spec)
        return op(*args, **kwargs)

    mode = next(v.fake_mode for v in values if isinstance(v, FakeTensor))
    with mode, torch.no_grad(), torch.autocast(device, dtype, cache_enabled=False):
        inner = make_fx(call)(*values)
    copies: dict[fx.Node, fx.Node] = dict(zip(inner.graph.find_nodes(op="placeholder"), given, strict=True))
    with graph.inserting_before(node):
        for part in inner.graph.nodes:
            if part.op == "call_function":
                copies[part] = graph.node_copy(part, copies.__getitem__)
                copies[part].meta = {**node.meta, "val": part.meta["val"]}
            elif part.op not in ("placeholder", "output"):
                raise NotExportable(f"{op} in a region of autocast is composed with a constant")
    result = inner.graph.output_node().args[0]
    if not isinstance(result, fx.Node):
        raise NotExportable(f"{op} in a region of autocast gives several tensors")
    node.replace_all_uses_with(copies[result])
    graph.erase_node(node)
