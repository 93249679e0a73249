"""Ops that write over their arguments: those that return it, those that PyTorch refuses, who sees what is written."""

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ..errors import NeedsFunctional, NotExportable
from ..options import logger
from ..symbolic import geometry, hint


def written(op: OpOverload) -> list[str]:
    """Names of the arguments that the op writes over."""
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def functional(op: OpOverload) -> OpOverload | None:
    """The op of the same arguments that returns what `op` writes, over its first argument or those for results."""
    arguments, names = op._schema.arguments, written(op)
    name = op._schema.name.split("::")[1]
    if names == [arguments[0].name] and name.endswith("_"):
        name = name[:-1]
    elif all(a.kwarg_only for a in arguments if a.name in names):
        arguments = [a for a in arguments if a.name not in names]
    else:
        return None
    packet = getattr(getattr(torch.ops, op.namespace), name, None)
    for overload in packet.overloads() if packet is not None else []:
        found: OpOverload = getattr(packet, overload)
        if _described(found._schema.arguments) == _described(arguments) and not written(found):
            return found
    return None


def fits(node: fx.Node, op: OpOverload) -> bool:
    """Whether what the functional `op` returns has the dtypes of what `node` writes over."""
    return all(r.dtype == t.dtype for r, t in zip(_results(node, op), _targets(node), strict=False))


def refuse_misfits(graph: fx.Graph) -> None:
    """Refuse a graph in which something is written that PyTorch does not let be written.

    Tracing runs without elements, where not all ops compare shapes and dtypes.

    Raises
    ------
    NotExportable
        If so.
    """
    for node in graph.nodes:
        op = functional(node.target) if isinstance(node.target, OpOverload) and written(node.target) else None
        if op is None or not _is_sized(node):
            continue
        for result, target in zip(_results(node, op), _targets(node), strict=False):
            # Results are cast in place by all ops, into their `out` by some.
            castable = torch.can_cast(result.dtype, target.dtype) if _in_place(node, op) else fits(node, op)
            if result.shape != target.shape or not castable:
                raise NotExportable(f"{node.target} writes {_kind(result)} over {_kind(target)}")


def _in_place(node: fx.Node, op: OpOverload) -> bool:
    """Whether the node writes over an operand of the functional `op`, not over an ``out`` of its own."""
    assert isinstance(node.target, OpOverload)
    return len(op._schema.arguments) == len(node.target._schema.arguments)


def _described(arguments: list[Any]) -> list[tuple[str, str]]:
    """Names and types; the first has another name in some ops that change it, and is given by position."""
    return [(a.name if i else "", str(a.type)) for i, a in enumerate(arguments)]


def _kind(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments by name, tensors without elements in their place, sizes as they were when traced."""
    assert isinstance(node.target, OpOverload)
    names = [a.name for a in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return pytree.tree_map(_stand_in, given)


def _stand_in(value: Any) -> Any:
    value = value.meta["val"] if isinstance(value, fx.Node) else value
    if isinstance(value, Tensor):
        return torch.empty_strided(*geometry(value), dtype=value.dtype, device="meta")
    return hint(value)


def _is_sized(node: fx.Node) -> bool:
    """Whether the sizes of all operands are known, and do not depend on values."""
    values = [n.meta.get("val") for n in node.all_input_nodes]
    return None not in [hint(s) for v in values if isinstance(v, Tensor) for s in v.shape]


def _targets(node: fx.Node) -> list[Tensor]:
    given = _arguments(node)
    assert isinstance(node.target, OpOverload)
    return [t for name in written(node.target) for t in pytree.tree_leaves(given[name])]


def _results(node: fx.Node, op: OpOverload) -> list[Tensor]:
    """What `op` returns for the node's arguments, nothing if that is not known."""
    taken = {a.name for a in op._schema.arguments}
    try:
        result = op(**{name: value for name, value in _arguments(node).items() if name in taken})
    except Exception:
        logger.debug("%s does not run without elements", op, exc_info=True)
        return []
    return [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]


class Memory:
    """Which nodes share memory, so that a change of one is seen through the others."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {n: i for i, n in enumerate(graph.nodes)}
        self._sharing: dict[int, list[fx.Node]] = {}

    def add(self, node: fx.Node) -> None:
        val = node.meta.get("val")
        if isinstance(val, Tensor) and val.layout is torch.strided:
            self._sharing.setdefault(val.untyped_storage()._cdata, []).append(node)

    def same_elements(self, changed: fx.Node, at: fx.Node) -> list[fx.Node]:
        """The nodes that are the same tensor as `changed`; NeedsFunctional if another view of it is read after `at`."""
        val = changed.meta["val"]
        same = []
        for node in self._sharing.get(val.untyped_storage()._cdata, [changed]):
            other = node.meta["val"]
            if _geometry(other) == _geometry(val):
                same.append(node)
            elif any(self._position[u] > self._position[at] for u in node.users) or node.op == "placeholder":
                raise NeedsFunctional(str(at.target))
        return same


def _geometry(t: Tensor) -> tuple[Any, ...]:
    places = (str(tuple(t.shape)), str(t.stride()), str(t.storage_offset()))
    return (*places, t.dtype, t.is_conj(), t.is_neg())
