"""Gradients of a backward: computed all together, or as far as they are taken."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import _C
from .asked import Asked
from .backwards import Mask
from .lowering.ancestry import Operand

if TYPE_CHECKING:
    from .function import Call

Gradients = Sequence[Tensor | None]
Given = tuple[list[Tensor], Gradients, Gradients, bool, Tensor | None, bytes | None]  # to a backward of a plan

NOTHING: contextlib.nullcontext[Collection[Operand]] = contextlib.nullcontext(())


class Uses(NamedTuple):
    """Before which step of a plan a backward has used something for the last time, if at all; see :meth:`_C.Plan.uses`.

    Attributes
    ----------
    inputs, gradients
        By input: what it reads of that, and this or the gradient.
    outputs, output_gradients
        By output: that, and its gradient.
    """

    inputs: list[int]
    gradients: list[int]
    outputs: list[int]
    output_gradients: list[int]


class Computed:
    """The gradients of a backward that has run.

    Parameters
    ----------
    results
        By input.
    """

    def __init__(self, results: list[Tensor | None]) -> None:
        self.results = results

    def take(self, inputs: Sequence[int]) -> list[Tensor | None]:
        """Those of these inputs, which are then nobody else's."""
        taken = [self.results[i] for i in inputs]
        for i in inputs:
            self.results[i] = None
        return taken

    def end(self) -> None:
        """Nothing more is wanted."""


class Coming:
    """The gradients of a backward, computed as far as they are taken.

    So what autograd does with some, such as to exchange them between processes, goes on beside the rest. What is given
    is not used any more, nor is the input itself, which may change.

    Parameters
    ----------
    call
        The call, opened, whose plan has this backward.
    mask, grads
        The outputs that it goes back from, and their gradients.
    keep
        Whether another one may follow.
    asked
        The inputs whose gradients are asked for.
    """

    def __init__(self, call: "Call", mask: Mask, grads: Gradients, keep: bool, asked: Asked) -> None:
        self._call, self._mask, self._asked = call, mask, asked
        self._back = call.runner.backward(call.planned, mask, asked)
        call.check(self._back)
        self._uses = call.planned.uses(mask)
        self._grads, self._keep = grads, keep
        self._begun: _C.Backward | None = None
        self._step = 0  # of the plan, come to so far
        self._none: set[Operand] = set()

    def take(self, inputs: Sequence[int]) -> list[Tensor | None]:
        """Those of these inputs, which are then nobody else's."""
        call, back, uses = self._call, self._back, self._uses
        runner = call.runner
        wanted = [i for i in inputs if i in back.reached]
        step = max([self._step, *[uses.gradients[i] for i in wanted]])
        if self._begun is None:
            self._begin(step)
        else:
            call.check_unchanged(
                [i for i in back.inputs if uses.inputs[i] > self._step],
                [i for i in back.outputs if uses.outputs[i] > self._step],
            )
        assert self._begun is not None
        with runner.callbacks.noting() if runner.callbacks.ops else NOTHING as none:
            found = dict(zip(wanted, as_it_is(runner.callbacks.device, self._begun.take, wanted), strict=True))
        self._step = step
        self._none.update(none)
        reached = runner.reached(self._mask, self._none, self._asked) if self._none else back.reached
        return [call.gradient(i, found.get(i), reached) for i in inputs]

    def _begin(self, step: int) -> None:
        """Begin what runs to before this step first; of gradients that are read later, others may change theirs."""
        call, plan = self._call, self._call.planned.plan
        assert call.run is not None
        ends = self._uses.output_gradients
        grads = [g.clone() if g is not None and end > step else g for g, end in zip(self._grads, ends, strict=True)]
        self._begun = plan.begin(call.run, *call.given(grads, self._keep, self._back))

    def end(self) -> None:
        """Nothing more is wanted."""
        if self._begun is not None:
            self._begun.end()


def as_it_is(device: torch.device, run: Callable[..., Any], *args: Any) -> Any:
    """Call `run` outside of autocast: the graph has its casts, and some kernels are PyTorch's own ops."""
    if not torch.is_autocast_enabled(device.type):
        return run(*args)
    torch.set_autocast_enabled(device.type, False)
    try:
        return run(*args)
    finally:
        torch.set_autocast_enabled(device.type, True)
