"""What PyTorch differentiates an op for, asked of PyTorch itself."""

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from ..options import logger
from ..symbolic import described, geometry, hint
from .recurrent import TAKEN_APART, one_step_for_all


@dataclass(frozen=True)
class Reached:
    """What autograd goes through from one result of a call.

    Attributes
    ----------
    operands
        Positions of the operands that it comes to.
    saves
        Whether anything on the way saves tensors, which are gone after a backward that does not retain them.
    saved
        Positions of the operands, and after them of the results, whose memory is saved: they may not change until then.
    """

    operands: frozenset[int]
    saves: bool
    saved: frozenset[int] = frozenset()


class Reach:
    """Remembers the answers: models are made of equal layers."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[Reached] | None] = {}

    def __call__(self, op: OpOverload, arguments: Any, wanted: Sequence[bool]) -> list[Reached] | None:
        """What autograd goes through from the results of a call.

        Parameters
        ----------
        op
            The op.
        arguments
            Its (args, kwargs); tensors stand for their shapes and dtypes.
        wanted
            For each tensor among the arguments, in their order, whether it requires grad in the module.

        Returns
        -------
        list of Reached or None
            For each tensor among the results, or None if the op does not run on tensors without elements.
        """
        leaves, spec = pytree.tree_flatten(arguments)
        leaves = [hint(v) for v in leaves]
        key = (op, spec, tuple(map(described, leaves)), tuple(wanted))
        if any(None in geometry(v)[0] for v in leaves if isinstance(v, Tensor)):
            return None  # of a size that depends on values
        if key not in self._known:
            try:
                self._known[key] = _ask(op, leaves, spec, wanted)
            except DynamicOutputShapeException:
                self._known[key] = None  # of results whose sizes depend on values: no graph will hold them
            except Exception:
                logger.info("PyTorch does not say what %s differentiates: taken to be all its operands", op)
                logger.debug("what it says instead", exc_info=True)
                self._known[key] = None
        return self._known[key]


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


def _ask(op: OpOverload, leaves: list[Any], spec: pytree.TreeSpec, wanted: Sequence[bool]) -> list[Reached]:
    operands: list[Tensor] = []
    given = list(leaves)
    one_step = one_step_for_all() if op in TAKEN_APART else contextlib.nullcontext()
    with _plainly(), FakeTensorMode(), one_step:
        for i, value in enumerate(leaves):
            if isinstance(value, Tensor):
                t = torch.empty_strided(*geometry(value), dtype=value.dtype)
                given[i] = t.requires_grad_(wanted[len(operands)])
                operands.append(t)
        args, kwargs = pytree.tree_unflatten(given, spec)
        results = [t for t in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(t, Tensor)]
        return [_from(t, operands, results) for t in results]


def _from(t: Tensor, operands: Sequence[Tensor], results: Sequence[Tensor]) -> Reached:
    if not t.requires_grad:
        return Reached(frozenset(), False)
    found = {id(t)}
    seen: set[Any] = set()
    todo: list[Any] = [t.grad_fn]
    while todo:
        function = todo.pop()
        if function is not None and function not in seen:
            seen.add(function)
            found.add(id(getattr(function, "variable", None)))
            todo.extend(f for f, _ in function.next_functions)
    saved = [s for function in seen for s in saved_tensors(function)]
    return Reached(
        frozenset(i for i, o in enumerate(operands) if id(o) in found), bool(saved), among(saved, [*operands, *results])
    )


def saved_tensors(function: Any) -> list[Tensor]:
    """The tensors that a node of autograd's saves."""
    if isinstance(function, BackwardCFunction):
        return [t for t in function.saved_tensors if t is not None]
    saved = [getattr(function, name) for name in dir(function) if name.startswith("_saved_")]
    return [t for t in pytree.tree_leaves(saved) if isinstance(t, Tensor)]


def among(saved: Sequence[Tensor], tensors: Sequence[Tensor]) -> frozenset[int]:
    """Positions of the tensors whose memory some of the saved ones share."""
    memories = {memory(t) for t in saved} - {None}
    return frozenset(i for i, t in enumerate(tensors) if memory(t) in memories)


def memory(t: Any) -> int | None:
    """What tensors that share memory have in common; None of what has no memory of its own."""
    return t.untyped_storage()._cdata if isinstance(t, Tensor) and t.layout is torch.strided else None


@contextlib.contextmanager
def unhooked() -> Iterator[None]:
    """Takes away the hooks on what autograd saves; with any, it does not look whether that was changed."""
    taken = []
    while (hooks := _autograd._top_saved_tensors_default_hooks(False)) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    try:
        yield
    finally:
        for hooks in reversed(taken):
            _autograd._push_saved_tensors_default_hooks(*hooks)
