"""Whose gradients a backward is asked for."""

import functools
import itertools
import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.utils.hooks import unserializable_hook

from .backwards import Mask
from .errors import ORTModuleError

Asked = tuple[int, ...] | None  # inputs, by position; None stands for all that want a gradient


def inputs_asked_of(node: Any, wanting: Sequence[int]) -> Asked:
    """The inputs that autograd goes on to from a node of ours, in the backward that runs now.

    `wanting` are those that want a gradient, in the order in which the node was given them.
    """
    goes_on = [goes_on_to(following) for following, _ in node.next_functions]
    return None if all(goes_on) else tuple(itertools.compress(wanting, goes_on))


def goes_on_to(node: Any) -> bool:
    """Whether the backward that runs now comes to a node; None is one that is gone."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it is a leaf's, whose gradient torch.autograd.grad is asked for
        return True


class Watch:
    """Sees whether somebody wants the gradient of a result from which autograd goes through that of others.

    Autograd does not go through one output to another: what is asked for would lack what comes from the others.
    """

    def __init__(self, result: Tensor, through: int, later: Sequence[Tensor]) -> None:
        self._through = through
        self._result = weakref.ref(result)  # it holds the node that holds this
        edges = [(weakref.ref(t.grad_fn), t.output_nr) for t in later if t.grad_fn is not None]
        result.register_hook(_RefuseAsInput(self._result, edges))
        self._hooks = result._backward_hooks  # they stay when the result goes

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
    """A hook of a result, which refuses a backward that is called for its gradient and comes to others made of it.

    Parameters
    ----------
    result
        That result.
    later
        Nodes of the others, and which of their outputs they are.
    """

    def __init__(self, result: weakref.ref[Tensor], later: Sequence[tuple[weakref.ref[Any], int]]) -> None:
        self._result = result
        self._later = later

    @torch._disable_dynamo
    def __call__(self, _grad: Tensor | None) -> None:
        result = self._result()
        if result is None:
            return
        edge = get_gradient_edge(result)
        for roots, inputs in _backwards():
            asked = any(t is result or (isinstance(t, GradientEdge) and t[:2] == edge[:2]) for t in inputs)
            if asked and _leads_to(roots, {(node(), number) for node, number in self._later}):
                raise ORTModuleError(_BETWEEN_OUTPUTS)


_Sources = Sequence[Tensor | GradientEdge]


def _backwards() -> Iterator[tuple[_Sources, _Sources]]:
    """Where the backwards that run now begin, and whose gradients they are asked for.

    Those of a GPU call hooks in a thread of autograd's.
    """
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None and frame.f_code is not _engine_run_backward.__code__:
            frame = frame.f_back
        if frame is not None:
            yield frame.f_locals["t_outputs"], frame.f_locals["args"][3]


def _leads_to(roots: _Sources, edges: Collection[tuple[Any, int]]) -> bool:
    """Whether autograd comes from there to any of these outputs of nodes."""
    sources = [t if isinstance(t, GradientEdge) else get_gradient_edge(t) for t in roots]
    pending: list[tuple[Any, int]] = [(edge.node, edge.output_nr) for edge in sources]
    met = set(pending)
    while pending:
        node, number = pending.pop()
        if (node, number) in edges:
            return True
        new = {following for following in node.next_functions if following[0] is not None} - met
        met |= new
        pending += new
    return False
