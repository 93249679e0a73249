"""Results that share memory with an input or with one another.

A graph gives each result memory of its own. Where eager's caller would see one tensor change with another, a result is
made after the run instead, by the ops that lead to it from the input or from the other result.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ..errors import NeedsStatic, NotExportable
from .history import is_view_or_copy, is_written, made_by, storage, written

Inputs = Sequence[Tensor]  # of the graph
Step = Callable[[Any, Inputs], Any]
_MOST_KNOWN = 256
_MOST_COMPARED = 1 << 22  # elements of memory within which views are compared one by one


@dataclass(frozen=True)
class Alias:
    """How a result is made of another tensor.

    Attributes
    ----------
    source, position
        An "input" of the graph or another "result", and which.
    steps
        Functions applied one after the other; each gets the graph's inputs too, of whose sizes its arguments may be.
        Aliases by way of the same view begin with the same ones.
    """

    source: str
    position: int
    steps: tuple[Step, ...]


def find_aliases(
    graph: fx.Graph, inputs: Sequence[fx.Node], results: Sequence[Any], n_buffers: int
) -> tuple[list[Alias | None], list[fx.Node]]:
    """What each of the module's results is an alias of, and tensors wanted as results besides, of which some are views.

    Parameters
    ----------
    inputs
        User tensors, parameters and buffers.
    results
        Those of the module, then the buffers, which it may have changed.

    Raises
    ------
    NotExportable
        If memory is shared in a way that cannot be repeated.
    NeedsStatic
        If repeating it takes symbolic sizes.
    """
    return _Finder(graph, inputs, results, n_buffers).find()


def _is_dense(node: fx.Node) -> bool:
    """Whether a tensor lies as results of graphs do; not, where that hangs on open sizes."""
    val = node.meta["val"]
    steps = itertools.accumulate(reversed(val.shape), operator.mul, initial=1)
    pairs = zip(reversed(val.shape), reversed(val.stride()), steps, strict=False)
    return all(str(size) == "1" or str(stride) == str(step) for size, stride, step in pairs)


class _Finder:
    def __init__(self, graph: fx.Graph, inputs: Sequence[fx.Node], results: Sequence[Any], n_buffers: int) -> None:
        nodes = [self._itself(r) if isinstance(r, fx.Node) else None for r in results]
        self._results = nodes[: len(nodes) - n_buffers]
        first_buffer = len(inputs) - n_buffers
        self._sizes = {  # the input and axis that a symbol is the size of
            size.node.expr: (i, axis)
            for i, n in enumerate(inputs)
            for axis, size in enumerate(n.meta["val"].shape)
            if isinstance(size, torch.SymInt)
        }
        finals = nodes[len(nodes) - n_buffers :]
        self._inputs = {n: i for i, n in enumerate([*inputs[:first_buffer], *finals])}
        self._changed = {storage(n) for node in graph.nodes for n in written(node)}
        self._known_steps: dict[fx.Node, tuple[Step, ...]] = {}
        self._taken = {storage(n) for n in graph.nodes if n.op in ("placeholder", "get_attr")} - {None}
        self._taken |= {storage(n) for n in finals if n is not None}

    def find(self) -> tuple[list[Alias | None], list[fx.Node]]:
        found = self._aliases(self._results)
        hidden: list[fx.Node] = []
        own = [
            n
            for n, alias in zip(self._results, found, strict=True)
            if n is not None and alias is None and storage(n) is not None
        ]
        for i, node in enumerate(own):
            if storage(node) in self._taken:
                raise NotExportable("a result of the forward shares memory with an input or attribute")
            for other in own[:i]:
                if storage(node) == storage(other) and not _apart(node, other):
                    root = self._root(node)
                    if root is not self._root(other):
                        raise NotExportable("results of the forward share memory and are no views of one tensor")
                    hidden += [] if root in hidden else [root]
        return (self._aliases([*self._results, *hidden])[: len(found)], hidden) if hidden else (found, [])

    def _aliases(self, results: Sequence[fx.Node | None]) -> list[Alias | None]:
        firsts: dict[fx.Node, int] = {}
        for k, node in enumerate(results):
            if node is not None:
                firsts.setdefault(node, k)
        return [None if n is None else self._alias(k, n, firsts) for k, n in enumerate(results)]

    def _root(self, node: fx.Node) -> fx.Node:
        base = self._base(node)
        return node if base is None else self._root(base)

    def _alias(self, result: int, node: fx.Node, firsts: dict[fx.Node, int]) -> Alias | None:
        path: list[fx.Node] = []  # from the result towards what it is a view of
        found: tuple[str, int, int] | None = None
        while True:
            if node in self._inputs:
                found = "input", self._inputs[node], len(path)
            elif firsts.get(node, result) != result:
                found = "result", firsts[node], len(path)
            base = None if node in self._inputs else self._base(node)
            if base is None:
                break
            path.append(node)
            node = base
        if found is None:
            return None
        source, position, length = found
        of = [*path, node][length]
        either = [n for n in path[:length] if storage(n) == storage(of) and is_view_or_copy(made_by(n))]
        if source == "result" and either and not _is_dense(of):
            op = made_by(either[0]).target
            raise NotExportable(f"a result is a view by {op} of another, which does not lie densely")
        return Alias(source, position, tuple(step for n in reversed(path[:length]) for step in self._steps_of(n)))

    def _steps_of(self, node: fx.Node) -> tuple[Step, ...]:
        """The same for all results that are made by way of a node."""
        if node not in self._known_steps:
            self._known_steps[node] = tuple(self._steps(node))
        return self._known_steps[node]

    def _steps(self, node: fx.Node) -> Iterator[Step]:
        op = made_by(node)
        arguments = pytree.tree_map_only(fx.Node, lambda n: n.meta.get("val"), (op.args[1:], op.kwargs))
        leaves, spec = pytree.tree_flatten(arguments)
        symbols = sorted(set().union(*map(_symbols, leaves)), key=str)
        if not self._sizes.keys() >= set(symbols):
            raise NeedsStatic(f"{op.target} makes a result")
        places = [self._sizes[s] for s in symbols]
        target: Any = op.target

        @functools.lru_cache(_MOST_KNOWN)
        def reckon(*sizes: int) -> Any:
            known = dict(zip(symbols, map(sympy.Integer, sizes), strict=True))
            return pytree.tree_unflatten([_reckoned(v, known) for v in leaves], spec)

        def step(t: Any, inputs: Inputs) -> Any:
            args, kwargs = reckon(*[inputs[i].shape[axis] for i, axis in places])
            return target(t, *args, **kwargs)

        yield step
        if op is not node:
            yield lambda parts, _inputs: parts[node.args[1]]

    def _itself(self, node: fx.Node) -> fx.Node:
        """The node that made a tensor, not one that changed it."""
        while is_written(node):
            (node,) = written(node)
        return node

    def _base(self, node: fx.Node) -> fx.Node | None:
        """What a node is a view of; of an input also what would be one if the strides were others."""
        op = made_by(node)
        if not isinstance(op.target, OpOverload) or not op.args or not isinstance(op.args[0], fx.Node):
            return None
        source = op.args[0]
        if storage(node) is None or storage(source) is None:
            return None
        if storage(node) != storage(source):
            may_share = any(r.alias_info is not None for r in op.target._schema.returns)
            same_dtype = node.meta["val"].dtype == source.meta["val"].dtype
            if not may_share or not same_dtype or {storage(source), storage(node)} & self._changed:
                return None
            if self._root(source) not in self._inputs:
                return None
        return self._itself(source)


def _symbols(value: Any) -> set[sympy.Symbol]:
    """Those that an argument depends on."""
    if isinstance(value, Tensor):
        return set().union(*map(_symbols, value.shape))
    return value.node.expr.free_symbols if isinstance(value, torch.SymInt) else set()


def _reckoned(value: Any, known: dict[sympy.Symbol, sympy.Integer]) -> Any:
    """An argument of a view op for these sizes; of other tensors it reads shape and dtype alone."""
    if isinstance(value, Tensor):
        return torch.empty((), dtype=value.dtype).expand([_reckoned(size, known) for size in value.shape])
    return int(value.node.expr.xreplace(known)) if isinstance(value, torch.SymInt) else value


def _apart(a: fx.Node, b: fx.Node) -> bool:
    """Whether two views of the same memory have no element in common."""
    if a.target is b.target is operator.getitem and a.args[0] is b.args[0]:
        return a.args[1] != b.args[1]
    geometry = [(t.shape, t.stride(), t.storage_offset()) for t in (a.meta["val"], b.meta["val"])]
    if any(isinstance(v, torch.SymInt) for v in pytree.tree_leaves(geometry)):
        raise NeedsStatic("results of the forward share memory")
    ends = [offset + sum((d - 1) * s for d, s in zip(shape, stride, strict=True)) for shape, stride, offset in geometry]
    if 0 in (*geometry[0][0], *geometry[1][0]) or ends[0] < geometry[1][2] or ends[1] < geometry[0][2]:
        return True
    if max(ends) >= _MOST_COMPARED:
        return False
    places = torch.arange(max(ends) + 1)
    used = [places.as_strided(*g).flatten() for g in geometry]
    return not torch.isin(*used).any()
