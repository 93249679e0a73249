"""Runs in PyTorch what has no kernel: what the C core calls for TorchCall nodes."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..capture.export import quiet
from ..capture.recurrent import one_step_for_all
from ..dtypes import BY_TEXT, DTYPES
from ..errors import NotExportable
from .ancestry import Operand
from .draft import Type
from .traced_types import TracedTypes


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
    traced
        What the tracer told of its types, if it knew them.
    """

    name: str
    run: Callable[[Sequence[Tensor]], list[Tensor]]
    grads: tuple[bool, ...]
    traced: TracedTypes | None


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
        self._types: dict[tuple[int, tuple[tuple[int, ...], ...]], list[Type]] = {}
        self._here = _Here()

    @contextlib.contextmanager
    def noting(self) -> Iterator[set[Operand]]:
        """Gives the operands for which backwards that this thread runs within it find that there is no gradient."""
        outer, self._here.none = self._here.none, set()
        try:
            yield self._here.none
        finally:
            self._here.none = outer

    def _plainly(self) -> torch.autocast:
        """Without autocast, as the graph has its casts."""
        return torch.autocast(self.device.type, enabled=False)

    def infer(self, index: int, types: list[Type]) -> list[Type]:
        """Output types for input types, which the tracer told, or by running on tensors without elements."""
        op = self.ops[index]
        found = op.traced.results_for(types) if op.traced is not None else None
        if found is None:
            found = self._found(op, types)
        self._types[index, tuple([shape for _, shape in types])] = found
        return found

    def _found(self, op: TorchOp, types: list[Type]) -> list[Type]:
        try:
            with quiet(), one_step_for_all(), FakeTensorMode(), torch.no_grad(), self._plainly():
                results = op.run([torch.empty(shape, dtype=BY_TEXT[text], device=self.device) for text, shape in types])
        except Exception as error:
            raise NotExportable(f"the types of the results of {op.name} cannot be found: {error}") from error
        return [_type(t) for t in results]

    def forward(self, index: int, inputs: list[Tensor]) -> tuple[list[Tensor], object]:
        """Run an op; the second result is what :meth:`backward` needs.

        Inputs are borrowed from memory that is used again, so what autograd keeps are copies.
        """
        op = self.ops[index]
        with torch.set_grad_enabled(any(op.grads)), self._plainly():
            own = [t.clone().requires_grad_(grad) for t, grad in zip(inputs, op.grads, strict=True)]
            outputs = op.run(own)
        expected = self._types[index, tuple([tuple(t.shape) for t in inputs])]
        for got, promised in zip(map(_type, outputs), expected, strict=True):
            if got != promised:  # PyTorch's stand-in for the op is not exact
                raise NotExportable(f"{op.name} gives {got}, traced as {promised}")
        return [t.detach().contiguous() for t in outputs], (own, outputs)

    def backward(self, index: int, state: object, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients of all inputs, None where none flows."""
        inputs: list[Tensor]
        outputs: list[Tensor]
        inputs, outputs = state  # type: ignore[misc]
        wanted = [t for t in inputs if t.requires_grad]
        reached = [(o, g.clone()) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        if not wanted or not reached:
            return [None] * len(inputs)
        found: Any = torch.autograd.grad(
            [o for o, _ in reached], wanted, [g for _, g in reached], allow_unused=True, retain_graph=True
        )
        by_id = {id(t): g for t, g in zip(wanted, found, strict=True)}
        self._here.none |= {(index, i) for i, t in enumerate(inputs) if by_id.get(id(t)) is None}
        return [None if by_id.get(id(t)) is None else by_id[id(t)].contiguous() for t in inputs]
