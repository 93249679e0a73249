"""What autograd remembers of tensors: regions without gradients, and changes in place that concern several histories.

Aliases made by `detach` share memory but not what autograd remembers. In a graph a change in place becomes a new value
of every alias, with one history. So a change is refused where aliases with different histories are read after it and
one of them has gradients.
"""

import copy
import itertools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from ..dtypes import differentiable
from ..errors import NeedsStatic, NotExportable, NotRunnable
from ..lowering.in_place import functional
from ..lowering.translations import TABLE
from ..lowering.translations.registry import aten, is_composite
from ..options import logger
from ..symbolic import geometry
from . import custom_function
from .reach import unhooked

UNGRADED = "ortmodule_c.ungraded"  # marks nodes that ran with gradients disabled
IMPLIED = "ortmodule_c.implied"  # marks the `detach` of what such nodes read
# What shares memory with its operand, copies it or is refused, by how that lies in memory.
VIEWS_OR_COPIES = ("contiguous", "flatten", "ravel", "reshape", "reshape_as", "unflatten", "view", "view_as")
_CONVERT = ("to", "_to_copy")  # to a memory format, which the operand may have
_DETACHES = {aten.detach.default, aten.detach_.default}
_PARTS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
_ASSIGNED = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor}


def _is_made(node: fx.Node) -> bool:
    """Whether a node reads of its operand no more than the shape."""
    name = getattr(node.target, "_opname", "")
    return name.endswith("_like") or name.startswith("new_")


def made_by(node: fx.Node) -> fx.Node:
    """The node of which another takes one of several results, or that node itself."""
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, fx.Node)
    return source


def written(node: fx.Node) -> list[fx.Node]:
    """The operands that a node changes in place."""
    if not isinstance(node.target, OpOverload):
        return []
    found: list[fx.Node] = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, fx.Node)]
    return found


def is_written(node: fx.Node) -> bool:
    """Whether a node's value is its first operand, changed in place."""
    return isinstance(node.meta.get("val"), Tensor) and bool(node.args) and written(node) == [node.args[0]]


def storage(node: fx.Node) -> int | None:
    """What tensors that share memory have in common."""
    val = node.meta.get("val")
    return val.untyped_storage()._cdata if isinstance(val, Tensor) else None


def read_by(node: fx.Node) -> list[fx.Node]:
    """The tensors a node reads; one taken from several results reads what their op read."""
    found = node.all_input_nodes
    several = node.target is operator.getitem and storage(found[0]) is None
    return read_by(found[0]) if several else found


@dataclass(eq=False)
class _History:
    """Of a tensor and its views.

    Attributes
    ----------
    grad
        Whether autograd reaches some input from it.
    hidden
        Whether it is an alias, without history, of a tensor with gradients that was made where they were disabled.
    """

    grad: bool
    hidden: bool = False


def check_changes(module: fx.GraphModule) -> None:
    """Refuse changes in place that a graph cannot follow, or that PyTorch refuses.

    Raises
    ------
    NotExportable
        With the cause.
    NotRunnable
        If PyTorch refuses it: no graph may take it then.
    NeedsStatic
        If it depends on open sizes.
    """
    _check_histories(module.graph)
    _check_overlaps(module.graph)
    _check_saved(module)


def _check_histories(graph: fx.Graph) -> None:
    """Refuse what the values of a graph cannot tell about histories: see the head of this file."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    last_read = {n: position[user] for user in graph.nodes for n in read_by(user)}
    sharing: dict[int, list[fx.Node]] = {}
    histories: dict[fx.Node, _History] = {}
    for node in graph.nodes:
        operands = [n for n in read_by(node) if n in histories]
        grad = any(histories[n].grad for n in operands)
        leaves = [n for n in operands if histories[n].hidden and not node.meta.get(UNGRADED)]
        if leaves:
            raise NotExportable(f"a view of a tensor that requires grad, {leaves[0].name}, was made without gradients")
        for changed in written(node):
            live = {histories[changed]} if changed in histories else set()
            for n in sharing.get(storage(changed) or 0, ()):
                if n.op == "placeholder" or last_read.get(n, -1) > position[node]:
                    live.add(histories[n])
            if node.target is aten.detach_.default and (grad or changed.op == "placeholder"):
                raise NotExportable("the forward detaches a tensor in place")
            if len(live) > 1 and (grad or any(h.grad for h in live)):
                raise NotExportable(f"{node.target} changes in place a tensor with an alias of another history")
            for h in live:
                h.grad |= grad
            if any(str(stride) == "0" and str(size) != "1" for size, stride in zip(*_layout(changed), strict=True)):
                raise NotExportable(f"{node.target} changes in place a tensor whose elements share memory")
        val = node.meta.get("val")
        if not isinstance(val, Tensor):
            continue
        if is_written(node) and str(_layout(node)) != str(_layout(node.args[0])):
            raise NotExportable(f"{node.target} changes the shape of a tensor in place")
        memory = storage(node)
        aliased = [n for n in operands if storage(n) == memory]
        if node.op == "placeholder":
            histories[node] = _History(val.requires_grad and differentiable(val))
        elif aliased and node.target not in _DETACHES:
            histories[node] = histories[aliased[0]]
        else:
            of = histories[aliased[0]] if aliased and node.meta.get(IMPLIED) else None
            histories[node] = _History(
                grad and differentiable(val) and node.target not in _DETACHES and not _is_made(node),
                of is not None and (of.grad or of.hidden),
            )
        sharing.setdefault(memory or 0, []).append(node)


def is_view_or_copy(node: fx.Node) -> bool:
    """Whether what a node gives is a view or a copy by how its operand lies in memory."""
    name = getattr(node.target, "_opname", "")
    return name in VIEWS_OR_COPIES or (name in _CONVERT and node.kwargs.get("memory_format") is not None)


def changed_memory(graph: fx.Graph) -> set[int | None]:
    """What a graph writes, by memory."""
    return {storage(n) for node in graph.nodes for n in written(node)}


def laid_out_by(graph: fx.Graph) -> set[fx.Node]:
    """What decides, by how it lies in memory, whether something that is written is a view of another or a copy."""
    changed = changed_memory(graph)
    either = [node for node in graph.nodes if is_view_or_copy(node)]
    found = {node for node in either if any(storage(n) in changed for n in (node, *read_by(node)))}
    unseen = [*found]
    while unseen:
        operands = {
            n for n in unseen.pop().all_input_nodes if isinstance(n.meta.get("val"), (Tensor, list, tuple))
        } - found
        found |= operands
        unseen += operands
    return found


def _check_overlaps(graph: fx.Graph) -> None:
    """Refuse to change elements that are read at the same time through another view.

    PyTorch raises there, or what it gives depends on its order of elements; a graph reads all of them before.
    """
    for node in graph.nodes:
        for changed in written(node):
            for read in read_by(node):
                if storage(read) == storage(changed) and _overlap(changed.meta["val"], read.meta["val"]):
                    raise NotRunnable(f"{node.target} changes in place what it reads through another view")


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one memory have elements in common, but not each the same at the same place."""
    places = [(*t.shape, *t.stride(), t.storage_offset()) for t in (a, b)]
    if a.dtype != b.dtype:
        return True
    if str(places[0]) == str(places[1]):
        return False
    if any(isinstance(n, SymInt) for place in places for n in place):
        raise NeedsStatic("a tensor is changed in place by a view of it")
    cells = torch.zeros(a.untyped_storage().nbytes() // a.itemsize, dtype=torch.bool, device="cpu")
    cells.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(cells.as_strided(b.shape, b.stride(), b.storage_offset()).any())


class _AsWritten(fx.Interpreter):
    """Runs a graph whose regions without gradients were put in place, and custom functions with their own."""

    def run_node(self, n: fx.Node) -> Any:
        with torch.set_grad_enabled(not n.meta.get(UNGRADED)):
            return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is custom_function.op():  # of which autograd would warn
            return custom_function.python_call(args[1])(args[0])
        return super().call_function(target, args, kwargs)


def _check_saved(module: fx.GraphModule) -> None:
    """Refuse what has no gradient in PyTorch, as it changes in place what was saved for one.

    PyTorch is asked, on tensors without values; other refusals of it are not of this kind.
    """
    given = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    changed = [w.meta["val"] for n in module.graph.nodes for w in written(n) if not n.meta.get(UNGRADED)]
    trains = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given)
    if not (trains and any(map(differentiable, changed))):
        return
    try:
        with unhooked(), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            leaves = [_like(v) if isinstance(v, Tensor) else _hint(v) for v in given]
            trained = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
            arguments = [t.view_as(t) if isinstance(t, Tensor) else t for t in leaves]
            results = [y for y in pytree.tree_leaves(_AsWritten(module).run(*arguments)) if isinstance(y, Tensor)]
            reached = [y for y in results if y.requires_grad]
            torch.autograd.grad(reached, trained, [torch.ones_like(y) for y in reached], allow_unused=True)
    except Exception as error:
        if "modified by an inplace operation" in str(error):
            raise NotRunnable("the forward changes in place what its gradients need") from error
        logger.debug("what is saved was not asked", exc_info=True)


def _like(t: Tensor) -> Tensor:
    return torch.empty_strided(*geometry(t), dtype=t.dtype, requires_grad=t.requires_grad)


def _hint(n: Any) -> Any:
    return n.node.hint if isinstance(n, SymInt) else n


def out_of_place(graph: fx.Graph) -> None:
    """Write what a composite op changes in place as a copy of what the op without that gives, if that has an entry.

    What is changed in place PyTorch would take apart otherwise.
    """
    for node in graph.nodes:
        op = node.target
        if op is aten.fill_diagonal_.default:
            _fill_diagonal(graph, node)
        if not isinstance(op, OpOverload) or not is_composite(op) or written(node) != list(node.args[:1]):
            continue
        other = functional(op)
        if other not in TABLE:
            continue
        with graph.inserting_before(node):
            new = graph.call_function(other, node.args, node.kwargs)
        new.meta = copy.copy(node.meta)
        node.target, node.args, node.kwargs = aten.copy_.default, (node.args[0], new), {}


def _fill_diagonal(graph: fx.Graph, node: fx.Node) -> None:
    """Have a view of the diagonal of a matrix filled, which gradients know, and not one by strides."""
    matrix, value, wrap = *node.args[:2], (*node.args, False)[2]
    assert isinstance(matrix, fx.Node)
    if wrap or matrix.meta["val"].dim() != 2:
        return
    with graph.inserting_before(node):
        diagonal = graph.call_function(aten.diagonal.default, (matrix,))
    diagonal.meta = {**node.meta, "val": matrix.meta["val"].diagonal()}
    node.replace_all_uses_with(matrix)
    node.target, node.args, node.kwargs = aten.fill_.Scalar, (diagonal, value), {}
    node.meta["val"] = diagonal.meta["val"]


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
    if not made or differentiable(whole.meta["val"]):
        return False
    for node in graph.nodes:
        if storage(node) != storage(whole):
            continue
        is_other = node not in chain and position[node] < at  # later ones are of the new whole
        if node.op == "placeholder" or any(u.op == "output" or (is_other and position[u] > at) for u in node.users):
            return False
    return True


def check_functional(graph: fx.Graph) -> None:
    """Refuse changes in place that PyTorch does not follow when it makes a graph functional.

    It goes by schemas: a tensor returned as it is by an op whose schema tells of no alias is taken for another. And it
    takes what lies between the windows of `unfold` for zeros.
    """
    changed = {storage(n) for node in graph.nodes for n in written(node)}
    for node in graph.nodes:
        op = made_by(node).target
        told = isinstance(op, OpOverload) and any(r.alias_info is not None for r in op._schema.returns)
        told = (told and op is not aten.unfold.default) or op is aten.lift_fresh_copy.default
        memory = storage(node)
        if not told and memory in changed and any(storage(n) == memory for n in read_by(node)):
            raise NotExportable(f"what {op} makes shares memory with a tensor that is changed in place")


def _layout(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    val = node.meta["val"]
    return tuple(val.shape), tuple(val.stride())
