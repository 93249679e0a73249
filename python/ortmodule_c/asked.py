"""Whose gradients a backward is asked for."""

import functools
import itertools
import sys
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils.hooks import unserializable_hook

from .backwards import Mask
from .errors import ORTModuleError

Asked = tuple[int, ...] | None  # inputs, by position; None stands for all that want a gradient


def inputs_asked_of(node: Any, wanting: Sequence[int]) -> Asked:
    """The inputs that autograd goes on to from a node of ours, in the backward that runs now.

    `wanting` are those that want a gradient, in the order in which the node was given them.
    """
    goes_on = [_goes_on_to(following) for following, _ in node.next_functions]
    return None if all(goes_on) else tuple(itertools.compress(wanting, goes_on))


def _goes_on_to(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it is a leaf's, whose gradient torch.autograd.grad is asked for
        return True


class Watch:
    """Sees whether somebody wants the gradient of a result from which autograd goes through that of others.

    All outputs come from one node: what is asked for would be without the part that comes from the other outputs.
    """

    def __init__(self, result: Tensor, through: int, later: Sequence[Tensor]) -> None:
        self._through = through
        self._result = weakref.ref(result)  # it holds the node that holds this
        result.register_hook(lambda grad: grad).remove()
        self._hooks = result._backward_hooks  # they stay when the result goes
        for other in later:
            other.register_hook(_RefuseAsInput(self._result))

    def check(self, mask: Mask) -> None:
        """ORTModuleError if a backward for these outputs would not give what is asked for."""
        result = self._result()
        asked = any(map(_reads, (self._hooks or {}).values())) or (result is not None and result.retains_grad)
        if asked and any(m and self._through >> i & 1 for i, m in enumerate(mask)):
            raise ORTModuleError(_BETWEEN_OUTPUTS)


def _reads(hook: Any) -> bool:
    """Whether a hook of an output is for the sake of its gradient; those of FSDP only tell that backward begins."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    defined_in = getattr(function, "__module__", None) or ""
    return not isinstance(hook, _RefuseAsInput) and not defined_in.startswith("torch.distributed.fsdp.")


_BETWEEN_OUTPUTS = (
    "ORTModule cannot give the gradient of an output, to a hook, for retain_grad() or torch.autograd.grad, where other "
    "outputs are computed from it; use .module for that"
)


@unserializable_hook
class _RefuseAsInput:
    """A hook for what is computed from a result, which refuses a backward that was called for the result's gradient.

    A hook runs even where no function does, as nothing but that gradient is wanted.
    """

    def __init__(self, result: weakref.ref[Tensor]) -> None:
        self._result = result

    @torch._disable_dynamo
    def __call__(self, grad: Tensor | None) -> None:
        if grad is not None and any(t is self._result() for t in _inputs_of_backwards()):
            raise ORTModuleError(_BETWEEN_OUTPUTS)


def _inputs_of_backwards() -> Iterator[Tensor]:
    """Whose gradients the backwards that run now are asked for: those of a GPU call hooks in a thread of autograd's."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None and frame.f_code is not _engine_run_backward.__code__:
            frame = frame.f_back
        if frame is not None:
            yield from frame.f_locals["args"][3]
