"""Runs in PyTorch what has no kernel: what the C core calls for TorchCall nodes."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ..capture.export import quiet
from ..capture.recurrent import one_step_for_all
from ..dtypes import BY_TEXT, DTYPES, row_major
from ..errors import NotExportable
from .ancestry import Operand
from .draft import Type
from .traced_types import TracedTypes

_PLANS = 16  # of a session, each with one set of types for an op


@dataclass(frozen=True)
class TorchOp:
    """One TorchCall node.

    Attributes
    ----------
    name
        The ATen op or the custom function.
    run
        Computes the output tensors from the input tensors.
    grads
        Which inputs gradients flow to.
    written
        The inputs that it writes over.
    traced
        What the tracer told of its types, if it knew them.
    is_pytorchs
        Whether what it keeps of its inputs and gradients is what autograd saves.
    """

    name: str
    run: Callable[[Sequence[Tensor]], list[Tensor]]
    grads: tuple[bool, ...]
    written: Sequence[int]
    traced: TracedTypes | None
    is_pytorchs: bool


def _type(t: Tensor) -> Type:
    return DTYPES[t.dtype][0], tuple(t.shape)


class _Here(threading.local):
    """What the backwards of this thread note."""

    def __init__(self) -> None:
        self.none: set[Operand] = set()


class Callbacks:
    """The TorchCall nodes of one graph, by their number; they run on its device."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.ops: list[TorchOp] = []
        self._results: dict[int, Callable[[tuple[Type, ...]], list[Type]]] = {}
        self._here = _Here()

    @contextlib.contextmanager
    def noting(self) -> Iterator[set[Operand]]:
        """Gives the operands for which backwards that this thread runs within it find that there is no gradient."""
        outer, self._here.none = self._here.none, set()
        try:
            yield self._here.none
        finally:
            self._here.none = outer

    def infer(self, index: int, types: Sequence[Type]) -> list[Type]:
        """Output types for input types: kept for as many of these as there may be plans, and found again for others."""
        results = self._results.get(index)
        if results is None:
            found = functools.partial(_results, self.ops[index], self.device)
            results = self._results.setdefault(index, functools.lru_cache(_PLANS)(found))
        return results(tuple(types))

    def forward(self, index: int, inputs: list[Tensor]) -> tuple[list[Tensor], object]:
        """Run an op; the second result is what :meth:`backward` needs.

        Inputs are borrowed from memory that is used again, so what autograd keeps are copies.
        """
        op, trains = self.ops[index], any(self.ops[index].grads)
        saved_alone = op.is_pytorchs and (not trains or _takes_hooks())
        kept = op.written if saved_alone else range(len(inputs))
        own = [t.clone() if i in kept else t for i, t in enumerate(inputs)]
        saving = _copies_of(inputs) if saved_alone and trains else contextlib.nullcontext()
        with torch.set_grad_enabled(trains), _plainly(self.device), saving:
            outputs = op.run([t.requires_grad_() if grad else t for t, grad in zip(own, op.grads, strict=True)])
        expected = self.infer(index, list(map(_type, inputs)))
        for got, promised in zip(map(_type, outputs), expected, strict=True):
            if got != promised:  # PyTorch's stand-in for the op is not exact
                raise NotExportable(f"{op.name} gives {got}, traced as {promised}")
        return [row_major(t.detach()) for t in outputs], (list(map(_edge, own)), list(map(_edge, outputs)))

    def backward(self, index: int, state: object, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients of all inputs, None where none flows."""
        inputs: list[GradientEdge | None]
        outputs: list[GradientEdge | None]
        inputs, outputs = state  # type: ignore[misc]
        given = grads if self.ops[index].is_pytorchs else [None if g is None else g.clone() for g in grads]
        reached = [(edge, g) for edge, g in zip(outputs, given, strict=True) if edge is not None and g is not None]
        wanted = [edge for edge in inputs if edge is not None]
        if not wanted or not reached:
            return [None] * len(inputs)
        found = iter(
            torch.autograd.grad(
                [edge for edge, _ in reached], wanted, [g for _, g in reached], allow_unused=True, retain_graph=True
            )
        )
        results = [None if edge is None else next(found) for edge in inputs]
        self._here.none |= {(index, i) for i, g in enumerate(results) if g is None}
        return [None if g is None else row_major(g) for g in results]


def _results(op: TorchOp, device: torch.device, types: tuple[Type, ...]) -> list[Type]:
    """Output types for input types, which the tracer told, or else PyTorch is asked."""
    told = op.traced.results_for(types) if op.traced is not None else None
    return _found(op, device, types) if told is None else told


def _found(op: TorchOp, device: torch.device, types: tuple[Type, ...]) -> list[Type]:
    """The same by running the op on tensors without elements."""
    try:
        with quiet(), one_step_for_all(), FakeTensorMode(), torch.no_grad(), _plainly(device):
            results = op.run([torch.empty(shape, dtype=BY_TEXT[text], device=device) for text, shape in types])
    except Exception as error:
        raise NotExportable(f"the types of the results of {op.name} cannot be found: {error}") from error
    return [_type(t) for t in results]


def _plainly(device: torch.device) -> torch.autocast:
    """Without autocast, as the graph has its casts."""
    return torch.autocast(device.type, enabled=False)


def _takes_hooks() -> bool:
    """Whether nobody else has hooks on what is saved, nor forbids them."""
    allowed: bool = _autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return allowed and _autograd._top_saved_tensors_default_hooks(True) is None


def _copies_of(borrowed: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Has autograd save copies of what it saves of these tensors."""
    memory = {t.untyped_storage().data_ptr() for t in borrowed}
    copies: dict[Any, Tensor] = {}

    def saved(t: Tensor) -> Tensor:
        place = t.untyped_storage().data_ptr()
        if place not in memory:
            return t.detach()  # a result that its own node saved as it is would never be freed
        view = (place, t.dtype, t.shape, t.stride(), t.storage_offset(), t.is_conj(), t.is_neg())
        if view not in copies:
            copies[view] = t.detach().clone()
        return copies[view]

    return saved_tensors_hooks(saved, lambda t: t)


def _edge(t: Tensor) -> GradientEdge | None:
    """Where a gradient of it comes to, if any does."""
    return get_gradient_edge(t) if t.requires_grad else None
