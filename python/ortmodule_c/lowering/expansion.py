"""What PyTorch composes an op of, as a graph."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ..capture.numbers import is_number, unmarked
from ..errors import NeedsStatic, Unsupported
from ..options import logger
from ..symbolic import SYMBOLIC, hint
from .translations.registry import EXACTLY_DECOMPOSED, is_composite


def expanded(node: fx.Node, op: OpOverload) -> tuple[fx.GraphModule, list[int]]:
    """The graph of the ops that PyTorch composes `op` of, called as `node` calls it.

    An op with a kernel or a derivative of its own is not what its decomposition computes: where values are
    infinite or equal they part.

    Returns
    -------
    tuple
        The graph, and which leaves of the node's arguments its placeholders are.

    Raises
    ------
    Unsupported
        If there is none that computes what PyTorch would have computed.
    NeedsStatic
        If the op has symbolic sizes and no tensor.
    """
    composite = is_composite(op)
    of_integers = is_of_integers(node)
    exact = op in EXACTLY_DECOMPOSED or of_integers
    if (not composite and not (exact and op in decomposition_table)) or _is_taken_apart_by_python(op):
        raise Unsupported("no translation")
    nodes, spec = pytree.tree_flatten((node.args, node.kwargs))
    fakes = [n.meta["val"] if isinstance(n, fx.Node) else unmarked(n) for n in nodes]
    where = [i for i, f in enumerate(fakes) if isinstance(f, (Tensor, *SYMBOLIC)) and not is_number(f)]

    def call(*given: Any) -> Any:
        leaves = list(fakes)
        for i, value in zip(where, given, strict=True):
            leaves[i] = value
        a, k = pytree.tree_unflatten(leaves, spec)
        return op(*a, **k)

    operands = [fakes[i] for i in where]
    inner = _traced(call, operands, op, {} if composite else {op: decomposition_table[op]})
    body = [n for n in inner.graph.nodes if n.op == "call_function" and not isinstance(n.meta.get("val"), SYMBOLIC)]
    by_way_of_floats = not composite and op not in EXACTLY_DECOMPOSED and not all(map(is_of_integers, body))
    if by_way_of_floats or any(n.target is op for n in body):
        raise Unsupported("no translation")
    if of_integers and not _has_kernel_for(call, operands):
        raise Unsupported("PyTorch does not compute it, though its decomposition can be")
    return inner, where


def _traced(
    call: Callable[..., Any], operands: Sequence[Any], op: OpOverload, table: dict[OpOverload, Callable[..., Any]]
) -> fx.GraphModule:
    mode = next((f.fake_mode for f in operands if isinstance(f, FakeTensor)), None)
    if mode is None:
        raise NeedsStatic(f"{op} of sizes alone")
    try:
        # Decompositions that Python has for autograd would be taken before PyTorch's own formulas.
        with mode, torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            return make_fx(call, decomposition_table=table, tracing_mode=_tracing_mode(operands))(*operands)
    except Exception as error:
        logger.debug("%s cannot be expanded", op, exc_info=True)
        raise Unsupported("no translation") from error


def is_of_integers(node: fx.Node) -> bool:
    """Whether all tensors a node reads and makes are of integers or bools, on which there is one way to compute."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
    return not any(t.is_floating_point() or t.is_complex() for t in tensors)


def _has_kernel_for(call: Callable[..., Any], operands: Sequence[Any]) -> bool:
    """Whether PyTorch computes `call` on such dtypes, of which a decomposition may take more."""
    try:
        with torch.no_grad():
            call(*map(_stand_in, operands))
    except Exception:
        logger.debug("PyTorch refuses what is decomposed", exc_info=True)
        return False
    return True


def _is_taken_apart_by_python(op: OpOverload) -> bool:
    """Whether Python has a decomposition of its own for a composite op, other than that into ops with kernels."""
    exact = any(op.overloadpacket == e.overloadpacket for e in EXACTLY_DECOMPOSED)
    return DispatchKey.Autograd in op.py_kernels and not exact


def _tracing_mode(operands: Sequence[Any]) -> Literal["real", "symbolic"]:
    sizes = [size for v in operands for size in (v.shape if isinstance(v, Tensor) else (v,))]
    return "symbolic" if any(isinstance(s, SYMBOLIC) for s in sizes) else "real"


def _stand_in(operand: Any) -> Any:
    """A tensor of ones or a number in place of an operand, of the sizes met while tracing."""
    if isinstance(operand, Tensor):
        return torch.ones((), dtype=operand.dtype).expand([_stand_in(size) for size in operand.shape])
    return hint(operand)
