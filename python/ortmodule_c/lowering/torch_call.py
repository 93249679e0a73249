"""A node that PyTorch runs: the values it is given, the function that calls the op on them, and what becomes of it."""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ..capture import custom_function
from ..capture.autocast import WITHIN
from ..capture.autocast_region import Region, within
from ..capture.numbers import Term, is_number
from ..dtypes import decoded, encoded, holds
from ..errors import NeedsStatic, NotExportable
from ..symbolic import SYMBOLIC, geometry
from .builder import Builder
from .draft import MAX_RANK, Carried, Type, Val, type_of
from .traced_types import TracedTypes, traced_types
from .translations.registry import aten

# Ops whose schema does not tell that they change running statistics, their arguments 3 and 4, where argument 5 is true.
CHANGES_STATISTICS = {
    aten.batch_norm.default,
    aten.instance_norm.default,
    aten.native_batch_norm.default,
    aten._batch_norm_impl_index.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
}
# Ops that read an operand's memory and not its elements in their order.
_READS_MEMORY = {aten.as_strided.default, aten.as_strided_scatter.default, aten.as_strided_copy.default}

Run = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass
class TorchCall:
    """One call of an op by PyTorch.

    Attributes
    ----------
    name
        The op, or the custom function.
    run
        Computes the results that are read, then the operands that are written over, from the tensors given.
    given
        The operands, first as the node has them, so that gradients find them there; then what carries numbers and
        sizes.
    types, dtypes
        What `run` gives, in the call that is exported for, as the core has it, and of which dtypes that is.
    traced
        What the tracer told of the types of the operands and of what `run` gives, if it knew them.
    used
        Which results of the node are read.
    written
        Which operands the op writes over.
    spec
        The structure of the node's results.
    """

    name: str
    run: Run
    given: list[Val]
    types: list[Type]
    dtypes: list[torch.dtype]
    traced: TracedTypes | None
    used: list[int]
    written: list[int]
    spec: pytree.TreeSpec

    def results(self, b: Builder, made: Sequence[Val]) -> Any:
        """The results of the node, None where they are not read, of the values that `run` has become."""
        made = [v if dtype is v.dtype else Carried(v, dtype) for v, dtype in zip(made, self.dtypes, strict=True)]
        found: list[Val | None] = [None] * self.spec.num_leaves
        for i, value in zip(self.used, made, strict=False):
            found[i] = value
        for i, value in zip(self.written, made[len(self.used) :], strict=True):
            b.overwrite(self.given[i], value)
        return pytree.tree_unflatten(found, self.spec)


def torch_call(b: Builder, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> TorchCall:
    """The call of a node's op on values.

    Raises
    ------
    NeedsStatic
        If sizes are open that it cannot be given.
    NotExportable
        If its results or operands are such as no graph holds.
    """
    op = b.op
    fakes, out_spec = pytree.tree_flatten(node.meta["val"])
    used = used_results(node, len(fakes))
    _check_results(op, [fakes[i] for i in used])
    if op in _READS_MEMORY:
        order = _order_in_memory(node.args[0].meta["val"])  # type: ignore[union-attr]
        if (
            order is None
            or isinstance(args[0], Carried)
            or (op is not aten.as_strided.default and order != sorted(order))
        ):
            raise NotExportable(f"{op} depends on how its operand lies in memory")
        args = (b.transpose(args[0], order), *args[1:])
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda v: isinstance(v, Val))
    operands = [v for v in leaves if isinstance(v, Val)]
    written = [i for i, v in enumerate(operands) if op in CHANGES_STATISTICS and args[5] and v in args[3:5]]
    if op is custom_function.op():
        name, extra, run = _of_function(b, custom_function.python_call(args[1]), len(operands))
    else:
        name, (extra, run) = str(op), _of_op(b, leaves, spec)
        if WITHIN in node.meta:
            run = _within(node.meta[WITHIN], run)
        if torch.Tag.nondeterministic_seeded in op.tags:
            run = _drawing(node, len(operands), run)
    overwritten = [operands[i] for i in written]
    types = [*[type_of(fakes[i]) for i in used], *[v.type for v in overwritten]]
    given = [*operands, *extra]
    gives = [*[(fakes[i].dtype, fakes[i].shape) for i in used], *[(v.dtype, v.shape) for v in overwritten]]
    traced = traced_types([(v.dtype, v.shape) for v in given], gives)
    chosen = _chosen(run, [v.dtype for v in given], used, written)
    return TorchCall(name, chosen, given, types, [d for d, _ in gives], traced, used, written, out_spec)


def _chosen(run: Run, dtypes: Sequence[torch.dtype], used: list[int], written: list[int]) -> Run:
    """What is read of the results for operands of these dtypes, all as the core holds them."""

    def chosen(tensors: Sequence[Tensor]) -> list[Tensor]:
        own = [t if t.dtype is dtype else decoded(t, dtype) for t, dtype in zip(tensors, dtypes, strict=True)]
        results = run(own)
        return [encoded(t) for t in (*[results[i] for i in used], *[own[i] for i in written])]

    return chosen


def _of_function(b: Builder, call: custom_function.PythonCall, n: int) -> tuple[str, list[Val], Run]:
    """The name of a custom function, what carries its numbers, and the application to `n` tensors before those."""

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        numbers = None if any(isinstance(t, FakeTensor) for t in tensors) else [t.item() for t in tensors[n:]]
        return call(tensors[:n], numbers)

    return call.name, [b.draft.number(v.node.term) for v in call.numbers], run


def _of_op(b: Builder, leaves: Sequence[Any], spec: pytree.TreeSpec) -> tuple[list[Val], Run]:
    """What carries the numbers and sizes among the arguments of an op, and the call of the op behind its operands."""
    op = b.op
    terms = [v.node.term for v in leaves if is_number(v)]
    sizes = [v for v in leaves if isinstance(v, SYMBOLIC) and not is_number(v)]
    n_behind = len(terms) + bool(sizes)
    kinds = [_kind(v) for v in leaves]
    plain = [None if kind else v for v, kind in zip(leaves, kinds, strict=True)]

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        n = len(tensors) - n_behind
        given: dict[str, Iterator[Any]] = {
            "operand": iter(tensors[:n]),
            "number": map(_number, tensors[n:], terms),
            "size": iter(tensors[-1].shape[1:] if n_behind > len(terms) else ()),
        }
        values = [next(given[kind]) if kind else v for v, kind in zip(plain, kinds, strict=True)]
        args, kwargs = pytree.tree_unflatten(values, spec)
        return [t for t in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(t, Tensor)]

    carriers = [b.draft.number(term) for term in terms]
    return [*carriers, *([_carrier(b, sizes)] if sizes else [])], run


def _within(region: Region, run: Run) -> Run:
    """The call in its region of autocast."""

    def in_region(tensors: Sequence[Tensor]) -> list[Tensor]:
        with within(region):
            return run(tensors)

    return in_region


def _drawing(node: fx.Node, n: int, run: Run) -> Run:
    """The call on `n` operands that lie in memory as those of the node do: numbers are drawn in that order."""
    nodes = [v for v in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(v, fx.Node)]
    orders = [_order_of_likes(v.meta["val"]) for v in nodes if isinstance(v.meta["val"], Tensor)]
    if len(orders) != n or all(order == sorted(order) for order in orders):
        return run

    def in_order(tensors: Sequence[Tensor]) -> list[Tensor]:
        lying = [t.permute(o).contiguous().permute(_inverse(o)) for t, o in zip(tensors, orders, strict=False)]
        return run([*lying, *tensors[n:]])

    return in_order


def _order_of_likes(t: Tensor) -> list[int]:
    """The order of dims in which a new tensor like this one is dense."""
    return _outermost_first(geometry(torch.empty_like(t))[1])


def _outermost_first(strides: Sequence[int]) -> list[int]:
    return sorted(range(len(strides)), key=strides.__getitem__, reverse=True)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _kind(leaf: Any) -> str:
    """Where an argument is found in a call; nowhere if it is the same in all."""
    if is_number(leaf):
        return "number"
    return "operand" if isinstance(leaf, Val) else "size" if isinstance(leaf, SYMBOLIC) else ""


def _number(t: Tensor, term: Term) -> Any:
    return term.value if isinstance(t, FakeTensor) else t.item()


def _carrier(b: Builder, sizes: list[Any]) -> Val:
    """A tensor without elements whose dims but the first are these sizes."""
    if len(sizes) >= MAX_RANK or not all(isinstance(s, torch.SymInt) and s.node.expr.is_nonnegative for s in sizes):
        raise NeedsStatic(f"{b.op} of {sizes} runs in PyTorch")
    return b.expand(b.tensor(torch.zeros(0, *[1] * len(sizes), dtype=torch.bool), "sizes"), (0, *sizes))


def _order_in_memory(t: Tensor) -> list[int] | None:
    """The order of dims in which a tensor is dense and all of its memory, as a tensor is that PyTorch is given."""
    n_bytes, offset = t.untyped_storage().nbytes(), t.storage_offset()
    if any(isinstance(v, torch.SymInt) for v in (n_bytes, offset, *t.shape, *t.stride())):
        raise NeedsStatic("how a tensor lies in memory is asked")
    order = _outermost_first(t.stride())
    whole = offset == 0 and n_bytes == t.numel() * t.element_size()
    return order if whole and t.permute(order).is_contiguous() else None


def used_results(node: fx.Node, n: int) -> list[int]:
    """Which of the `n` results of a node are read; what PyTorch says of the others need not hold."""
    values = node.meta["val"]
    is_flat = isinstance(values, (list, tuple)) and not any(isinstance(v, (list, tuple)) for v in values)
    if not is_flat or any(u.target is not operator.getitem for u in node.users):
        return list(range(n))
    return sorted({u.args[1] for u in node.users if u.users and isinstance(u.args[1], int)}) or [0]


def _check_results(op: OpOverload, fakes: list[Any]) -> None:
    if torch.Tag.dynamic_output_shape in op.tags:
        raise NotExportable(f"the size of the result of {op} depends on the data")
    for f in fakes:
        if not isinstance(f, Tensor) or not holds(f) or f.layout is not torch.strided:
            raise NotExportable(f"{op} returns what no graph can hold")
        for size in f.shape:
            if isinstance(size, torch.SymInt) and any(str(s).startswith("u") for s in size.node.expr.free_symbols):
                raise NotExportable(f"the size of the result of {op} depends on the data")
