"""What PyTorch differentiates an op for, asked of PyTorch itself."""

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from .history import unhooked
from .options import logger

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
Reached = list[frozenset[int]]  # for each result, the positions of the operands that autograd reaches from it


class Reach:
    """Remembers the answers: models are made of equal layers."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Reached | None] = {}

    def __call__(
        self, op: OpOverload, arguments: Any, wanted: Sequence[bool], backward: bool = False
    ) -> Reached | None:
        """What autograd reaches from the results of a call.

        Parameters
        ----------
        op
            The op.
        arguments
            Its (args, kwargs); tensors stand for their shapes and dtypes.
        wanted
            For each tensor among the arguments, in their order, whether it requires grad in the module.
        backward
            Ask the backward, which reaches an operand and then may find that it has no gradient to give.

        Returns
        -------
        list of frozenset of int or None
            For each tensor among the results the positions among the tensors of the arguments, or None if the op
            does not run on tensors without elements.
        """
        leaves, spec = pytree.tree_flatten(arguments)
        leaves = [_number(v) for v in leaves]
        key = (op, spec, tuple(map(_described, leaves)), tuple(wanted), backward)
        if key not in self._known:
            try:
                self._known[key] = _ask(op, leaves, spec, wanted, backward)
            except Exception:
                logger.warning("PyTorch does not say what %s differentiates: taken to be all its operands", op)
                logger.debug("what it says instead", exc_info=True)
                self._known[key] = None
        return self._known[key]


def _number(value: Any) -> Any:
    """A size as the number it had when the module was traced."""
    return value.node.hint if isinstance(value, _SYMBOLIC) else value


def _geometry(t: Tensor) -> tuple[list[int], list[int]]:
    return [_number(s) for s in t.shape], [_number(s) for s in t.stride()]


def _described(value: Any) -> Hashable:
    return (str(_geometry(value)), value.dtype) if isinstance(value, Tensor) else (type(value), repr(value))


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Autograd as it is outside of all modes, seen by nobody's saved-tensor hooks."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        unhooked(),
    ):
        yield


def _ask(op: OpOverload, leaves: list[Any], spec: pytree.TreeSpec, wanted: Sequence[bool], backward: bool) -> Reached:
    operands: list[Tensor] = []
    given = list(leaves)
    with _plainly(), FakeTensorMode():
        for i, value in enumerate(leaves):
            if isinstance(value, Tensor):
                t = torch.empty_strided(*_geometry(value), dtype=value.dtype)
                given[i] = t.requires_grad_(wanted[len(operands)])
                operands.append(t)
        args, kwargs = pytree.tree_unflatten(given, spec)
        results = [t for t in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(t, Tensor)]
        origins = [_with_gradients(t, operands) if backward else _origins(t) for t in results]
    return [frozenset(i for i, t in enumerate(operands) if id(t) in found) for found in origins]


def _origins(t: Tensor) -> set[int]:
    """Ids of the tensors that autograd computes gradients of from that of `t`."""
    if not t.requires_grad:
        return set()
    found = {id(t)}
    seen: set[Any] = set()
    todo: list[Any] = [t.grad_fn]
    while todo:
        function = todo.pop()
        if function is not None and function not in seen:
            seen.add(function)
            found.add(id(getattr(function, "variable", None)))
            todo.extend(f for f, _ in function.next_functions)
    return found


def _with_gradients(t: Tensor, operands: list[Tensor]) -> set[int]:
    """Ids of the operands that the backward from `t` has gradients for."""
    leaves = [o for o in operands if o.requires_grad]
    if not t.requires_grad or not leaves:
        return set()
    found = torch.autograd.grad(t, leaves, torch.empty_like(t), retain_graph=True, allow_unused=True)
    return {id(o) for o, g in zip(leaves, found, strict=True) if g is not None}
