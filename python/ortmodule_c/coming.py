"""Gradients of a backward: computed all together, or as far as they are taken."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .asked import Asked
from .backwards import Mask
from .lowering.ancestry import Operand

if TYPE_CHECKING:
    from .function import Call

Gradients = Sequence[Tensor | None]
Given = tuple[list[Tensor], Gradients, Gradients, bool, Tensor | None, bytes | None]  # to a backward of a plan

NOTHING: contextlib.nullcontext[Collection[Operand]] = contextlib.nullcontext(())


class Computed:
    """The gradients of a backward that has run.

    Parameters
    ----------
    results
        By input.
    """

    def __init__(self, results: list[Tensor | None]) -> None:
        self._results = results

    def take(self, inputs: Sequence[int]) -> list[Tensor | None]:
        """Those of these inputs, which are then nobody else's."""
        taken = [self._results[i] for i in inputs]
        for i in inputs:
            self._results[i] = None
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

    def __init__(self, call: "Call", mask: Mask, grads: Sequence[Tensor | None], keep: bool, asked: Asked) -> None:
        planned = call.planned
        assert call.run is not None
        self._call, self._mask, self._asked = call, mask, asked
        self._back = call.runner.backward(planned, mask, asked)
        call.check(self._back)
        self._inputs_used, self._outputs_used = planned.plan.last_use(planned.plan.out_grads.index(mask))
        self._step = 0  # of the plan, come to so far
        self._none: set[Operand] = set()
        self._begun = planned.plan.begin(call.run, *call.given(grads, keep, self._back))

    def take(self, inputs: Sequence[int]) -> list[Tensor | None]:
        """Those of these inputs, which are then nobody else's."""
        call, back = self._call, self._back
        runner = call.runner
        if self._step:
            call.check_unchanged(
                [i for i in back.inputs if self._inputs_used[i] > self._step],
                [i for i in back.outputs if self._outputs_used[i] > self._step],
            )
        wanted = [i for i in inputs if i in back.reached]
        with runner.callbacks.noting() if runner.callbacks.ops else NOTHING as none:
            found = dict(zip(wanted, as_it_is(runner.callbacks.device, self._begun.take, wanted), strict=True))
        self._step = max([self._step, *[self._inputs_used[i] for i in wanted]])
        self._none.update(none)
        reached = runner.reached(self._mask, self._none, self._asked) if self._none else back.reached
        return [call.gradient(i, found.get(i), reached) for i in inputs]

    def end(self) -> None:
        """Nothing more is wanted."""
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
