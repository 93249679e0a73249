"""What autocast makes of an op, asked of PyTorch: which operands it casts, or what it casts of the op's parts."""

import contextlib
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..lowering.translations import TABLE
from ..lowering.translations.registry import aten, has_kernel, is_composite
from ..options import logger
from ..symbolic import described, geometry, hint
from . import recurrent
from .autocast_region import Region, off, within

Casts = list[torch.dtype | None]  # of each leaf among an op's arguments, None where it stays as it is
WITHIN = "ortmodule_c.autocast"  # the region of a node that PyTorch has to run there

_KEY = "AutocastCPU"
_PYTORCHS = {"aten", "prims", "prim", "ortmodule_c"}  # namespaces; of these it is known what they do
_RECURRENT = {op.overloadpacket for op in recurrent.OPS}


class Autocast:
    """Writes into a graph what autocast does. Remembers it: models are made of equal layers.

    An op of which it reaches the parts alone is taken apart; where that cannot be, PyTorch runs it in its region.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Casts | None] = {}

    def reach(self, node: fx.Node, region: Region) -> None:
        """Let a node give what it gives in a region."""
        op = node.target
        if not isinstance(op, OpOverload):
            return
        if not (has_kernel(op, _KEY) or is_composite(op)):
            if op.namespace not in _PYTORCHS:  # what it calls, or asks, is reached
                node.meta[WITHIN] = region
            return
        if op.overloadpacket in _RECURRENT:  # whose parts are as many as there are steps
            node.meta[WITHIN] = region
            return
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        values = [hint(v.meta["val"] if isinstance(v, fx.Node) else v) for v in leaves]
        key = (op, region, spec, *map(described, values))
        if key not in self._known:
            with FakeTensorMode():
                self._known[key] = _asked(op, values, spec, region)
        casts = self._known[key]
        if casts is None:
            if not _take_apart(node, region):
                node.meta[WITHIN] = region
            return
        leaves = [v if to is None else _cast(node, v, to) for v, to in zip(leaves, casts, strict=True)]
        node.args, node.kwargs = pytree.tree_unflatten(leaves, spec)


def _cast(node: fx.Node, operand: fx.Node, dtype: torch.dtype) -> fx.Node:
    """An operand of a node in another dtype."""
    val = operand.meta["val"]
    with node.graph.inserting_before(node), torch.no_grad():
        cast = node.graph.call_function(aten._to_copy.default, (operand,), {"dtype": dtype})
        cast.meta = {**node.meta, "val": val.to(dtype)}
    return cast


def _asked(op: OpOverload, values: list[Any], spec: pytree.TreeSpec, region: Region) -> Casts | None:
    """What of its arguments are cast before an op is computed as it is elsewhere; None if it is not.

    The values stand for tensors of their sizes, and nothing is computed.
    """
    leaves = [
        torch.empty_strided(*geometry(v), dtype=v.dtype, device=v.device) if isinstance(v, Tensor) else v
        for v in values
    ]
    try:
        noting = _noted(op, leaves, spec, region)
    except Exception:
        return None
    if not has_kernel(op, _KEY) and op not in TABLE and any(_hides_others(part) for part, _ in noting.parts):
        return None
    casts: Casts = [None] * len(leaves)
    for n in range(len(noting.casts) + 1 if has_kernel(op, _KEY) else 1):  # the fewest, as an op casts by itself too
        for of, to in noting.casts[:n]:
            casts = [to if v is of else known for v, known in zip(leaves, casts, strict=True)]
        given = [v if to is None else v.to(to) for v, to in zip(leaves, casts, strict=True)]
        with contextlib.suppress(Exception):  # not of these dtypes
            if _noted(op, given, spec, off(region)).parts == noting.parts[n:]:
                return casts
    return None


def _noted(op: OpOverload, leaves: list[Any], spec: pytree.TreeSpec, region: Region) -> "_Noting":
    """What is called by an op in a region."""
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    with torch.no_grad(), within(region), _Noting() as noting:
        op(*args, **kwargs)
    return noting


def _hides_others(op: OpOverload) -> bool:
    """Whether an op may be computed by others, which autocast reaches, though it has a derivative of its own."""
    is_view = any(r.alias_info is not None for r in op._schema.returns)
    explicit = has_kernel(op, "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return explicit and not has_kernel(op, "CPU") and not is_view and op not in TABLE


class _Noting(TorchDispatchMode):
    """Notes what is called: ops with the dtypes of their results, and what is cast before all else."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[Any, list[torch.dtype]]] = []
        self.casts: list[tuple[Tensor, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # asks a tensor for its device
            return results
        if func is aten._to_copy.default and len(self.casts) == len(self.parts):
            self.casts.append((args[0], results.dtype))
        self.parts.append((func, [t.dtype for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]))
        return results


def _take_apart(node: fx.Node, region: Region) -> bool:
    """Replace a node by what it is composed of in a region; whether that can be."""
    graph = node.graph
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    values = [n.meta["val"] for n in given]
    op: Any = node.target

    def call(*operands: Any) -> Any:
        left = iter(operands)
        args, kwargs = pytree.tree_unflatten([next(left) if isinstance(v, fx.Node) else v for v in leaves], spec)
        return op(*args, **kwargs)

    mode = next(v.fake_mode for v in values if isinstance(v, FakeTensor))
    try:
        with mode, torch.no_grad(), within(region):
            inner = make_fx(call)(*values)
    except Exception:
        logger.debug("%s cannot be taken apart", op, exc_info=True)
        return False
    parts = inner.graph.find_nodes
    result = inner.graph.output_node().args[0]
    if not isinstance(result, fx.Node) or parts(op="get_attr"):
        return False
    calls = [n for n in inner.graph.nodes if n.op == "call_function"]
    if op not in TABLE and any(_hides_others(n.target) for n in calls):
        return False
    copies: dict[fx.Node, fx.Node] = dict(zip(parts(op="placeholder"), given, strict=True))
    with graph.inserting_before(node):
        for part in calls:
            copies[part] = graph.node_copy(part, copies.__getitem__)
            copies[part].meta = {**node.meta, "val": part.meta["val"]}
    if copies[result] not in given:
        copies[result].meta["val"] = node.meta["val"]  # with which others share memory
    node.replace_all_uses_with(copies[result])
    graph.erase_node(node)
    return True
