"""Ops that write over their arguments: the ops that return what they write, and writes that PyTorch refuses."""

import itertools
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ..errors import NotExportable
from ..options import logger
from .translations.registry import aten


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


_PARTS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
_ASSIGNED = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor}


def assign_parts(graph: fx.Graph) -> None:
    """Have ``whole[1:] = value`` make a new whole, where that has neither gradients nor other views that are read.

    So models shift labels to what a decoder reads.
    """
    nodes: list[Any] = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        chain = _chain(node) if node.target in _ASSIGNED else []
        if len(chain) < 2 or not _is_alone(chain, graph, position[node], position):
            continue
        op = functional(node.target)
        assert op is not None
        with graph.inserting_before(node):
            value = graph.call_function(op, node.args, node.kwargs)
            value.meta = dict(node.meta)
            values = [value]
            for part, whole in itertools.pairwise(chain):
                value = graph.call_function(_PARTS[part.target], (whole, value, *part.args[1:]))
                value.meta = {**node.meta, "val": whole.meta["val"]}
                values.append(value)
        for old, new in zip(chain, values, strict=True):
            for user in [u for u in old.users if position.get(u, 0) > position[node]]:
                user.replace_input_with(old, new)
        node.replace_all_uses_with(values[0])
        graph.erase_node(node)
        position |= dict.fromkeys(values, position[node])


def _chain(node: Any) -> list[Any]:
    """What the node writes to, what that is a part of, and so on to what is no part."""
    chain = [node.args[0]]
    while chain[-1].target in _PARTS and not chain[-1].kwargs:
        chain.append(chain[-1].args[0])
    return chain


def _is_alone(chain: list[Any], graph: fx.Graph, at: int, position: dict[Any, int]) -> bool:
    """Whether the graph makes the whole, of integers, and goes on to compute with nothing else in its memory."""
    whole = chain[-1]
    made = isinstance(whole.target, OpOverload) and all(r.alias_info is None for r in whole.target._schema.returns)
    if not made or whole.meta["val"].is_floating_point() or whole.meta["val"].is_complex():
        return False
    memory = whole.meta["val"].untyped_storage()._cdata
    for node in graph.nodes:
        val = node.meta.get("val")
        if not isinstance(val, Tensor) or val.layout is not torch.strided or val.untyped_storage()._cdata != memory:
            continue
        is_other = node not in chain and position[node] < at  # later ones are of the new whole
        if node.op == "placeholder" or any(u.op == "output" or (is_other and position[u] > at) for u in node.users):
            return False
    return True


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
        shape, stride = [_number(s) for s in value.shape], [_number(s) for s in value.stride()]
        return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
    return _number(value)


def _number(value: Any) -> Any:
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _is_sized(node: fx.Node) -> bool:
    """Whether the sizes of all operands are known, and do not depend on values."""
    values = [n.meta.get("val") for n in node.all_input_nodes]
    return None not in [_number(s) for v in values if isinstance(v, Tensor) for s in v.shape]


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
