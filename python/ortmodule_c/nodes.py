"""The nodes of one call in autograd's graph.

One node does where there is one output. Of several, autograd would go on, from a backward for some, to inputs that
others alone are computed of: it would call hooks there, on the other outputs, and functions before them, with None. So
there is then a node for each output, which takes its gradient, and one for each set of inputs that the same outputs are
computed of, which gives theirs. Autograd calls the latest first of those that are ready, and so those of outputs, made
last, before those of inputs, of which the first one computes for all.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from .asked import goes_on_to, inputs_asked_of
from .backwards import Mask, only
from .errors import ORTModuleError

if TYPE_CHECKING:
    from .function import Call
    from .results import Results

Gradients = list[Tensor | None]

_AS_IT_IS: contextlib.nullcontext[None] = contextlib.nullcontext()
_MOST_AT_ONCE = 64  # backwards of threads, and those within others, through the nodes of one call


def connected(call: Call, results: Results) -> Results:
    """Run the forward of a call that trains; its results, as autograd knows them."""
    runner = call.runner
    if runner.is_one:
        results.outputs = list(_apply(_Run, call, *itertools.compress(results.inputs, call.in_grads)))
        return results
    with torch.no_grad():
        results.outputs = call.start()
    sets = runner.sets(call.in_grads)
    held = _Held(call, sets, results.outputs)
    marks = [_apply(_Inputs, held, n, *[results.inputs[i] for i in s.inputs]) for n, s in enumerate(sets)]
    for k in runner.order:
        leads_to = [n for n, s in enumerate(sets) if s.outputs >> k & 1]
        if leads_to:
            made_of = [results[j] for j in runner.made_of[k]]
            results.outputs[k] = _apply(_Output, held, k, leads_to, *[marks[n] for n in leads_to], *made_of)
    return results


def _apply(function: Any, *args: Any) -> Any:
    """Call a function of autograd's. What `apply` of Python adds is for tensors of transforms of functions."""
    return (function.apply if torch._C._are_functorch_transforms_active() else _PLAINLY[function])(*args)


@dataclass(frozen=True, slots=True)
class Set:
    """Inputs that the same outputs are computed of.

    Attributes
    ----------
    inputs
        By position.
    outputs
        Their bits.
    """

    inputs: tuple[int, ...]
    outputs: int


class _Run(torch.autograd.Function):
    """Forward and backward of a whole graph.

    What backward needs is held by the call, and let go of as autograd lets go of saved tensors. Only where
    saved-tensor hooks are active it goes through them as tensors.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *_tensors: Tensor) -> tuple[Tensor, ...]:
        results = call.start()
        ctx.call = call
        ctx.set_materialize_grads(False)
        if call.runner.undifferentiable:
            ctx.mark_non_differentiable(*[results[k] for k in call.runner.undifferentiable])
        return tuple(results)

    @staticmethod
    @torch._disable_dynamo  # which would trace what autograd calls within a forward that asks for gradients
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _check_no_batch(grads)
        call = _still_held(ctx, ctx.call, grads)
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
            inputs, results, is_left = call.go_back(grads, inputs_asked_of(ctx, call.planned.wanted))
        ctx.call = call if is_left else None
        return (None, *_final(itertools.compress(results, call.in_grads), _origins(inputs, call.in_grads, grads)))


@dataclass(eq=False, slots=True)
class _Backward:
    """What one backward through the nodes of a call has come to so far.

    Attributes
    ----------
    grads
        By output.
    leads_to
        The nodes of inputs that are still to be called, by set.
    results
        Gradients for those, and the bits of the outputs that they are made of.
    origins
        What they are computed of.
    is_complete
        Whether all outputs that it comes to were there when those were computed.
    """

    grads: dict[int, Tensor | None] = field(default_factory=dict)
    leads_to: dict[int, weakref.ref[Any]] = field(default_factory=dict)  # which hold what holds this
    results: dict[int, tuple[Gradients, int]] = field(default_factory=dict)
    origins: Sequence[Tensor] = ()
    is_complete: bool = False


class _Held:
    """A call as its nodes hold it, for as long as backwards may come, and those that are under way."""

    def __init__(self, call: Call, sets: Sequence[Set], results: Sequence[Tensor]) -> None:
        self.results = dict(enumerate(results))  # that no node has given yet
        self.sets = sets
        self.outputs: dict[int, weakref.ref[Any]] = {}  # their nodes, which hold this
        self._in_grads = call.in_grads
        self._n = len(results)
        self._call: Call | None = call
        self._backwards: dict[int, _Backward] = {}

    def now(self) -> _Backward:
        """The backward that calls the nodes now."""
        number = torch._C._current_graph_task_id()
        if number not in self._backwards:
            for old in [*self._backwards][:-_MOST_AT_ONCE]:  # which ended in an error
                del self._backwards[old]
            self._backwards[number] = _Backward()
        return self._backwards[number]

    def check(self, k: int) -> None:
        """Refuse to go on from an output, if somebody wants the gradient of another one that it is made of."""
        for watch in self._call.watching if self._call is not None else ():
            watch.check(only((k,), self._n))

    def give(self, n: int, ctx: Any) -> tuple[Tensor | None, ...]:
        """The gradients of a set of inputs, whose node is called."""
        now, outputs = self.now(), self.sets[n].outputs
        if n not in now.results or now.results[n][1] != outputs & _bits(now.grads):
            self._compute(now, ctx)
        results, _ = now.results.pop(n)
        del now.leads_to[n]
        if not now.leads_to and now.is_complete:
            del self._backwards[torch._C._current_graph_task_id()]
        return _final(results, now.origins)

    def _compute(self, now: _Backward, ctx: Any) -> None:
        """What all nodes of inputs that are still to be called will give."""
        grads, given = [now.grads.get(k) for k in range(self._n)], _bits(now.grads)
        call = _still_held(ctx, self._call, grads)
        reached = {i for s in self.sets if s.outputs & given for i in s.inputs}
        asked: set[int] = set()
        for n, node in now.leads_to.items():
            of_set = inputs_asked_of(node(), self.sets[n].inputs)
            asked.update(reached.intersection(self.sets[n].inputs if of_set is None else of_set))
        # As those of a queue of another device may.
        now.is_complete = not any(k not in now.grads and goes_on_to(node()) for k, node in self.outputs.items())
        gradients_of = None if asked == reached else tuple(sorted(asked))
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
            inputs, results, is_left = call.go_back(grads, gradients_of, others_follow=not now.is_complete)
        self._call = call if is_left else None
        now.origins = _origins(inputs, self._in_grads, grads)
        now.results = {
            n: ([results[i] for i in self.sets[n].inputs], self.sets[n].outputs & given) for n in now.leads_to
        }


class _Inputs(torch.autograd.Function):
    """The node of a set of inputs; what it returns is a mark, for nodes of outputs to lead to it."""

    @staticmethod
    def forward(ctx: Any, held: _Held, n: int, *tensors: Tensor) -> Tensor:
        ctx.held, ctx.n = held, n
        ctx.set_materialize_grads(False)
        return tensors[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, _mark: None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.held.give(ctx.n, ctx))


class _Output(torch.autograd.Function):
    """The node of an output, which leads to those of the inputs, and of other outputs, that it is computed of.

    What goes through another output goes past its node, which is called for what asks there to be refused.
    """

    @staticmethod
    def forward(ctx: Any, held: _Held, k: int, leads_to: Sequence[int], *_marks_and_results: Tensor) -> Tensor:
        ctx.held, ctx.k, ctx.leads_to = held, k, leads_to
        ctx.set_materialize_grads(False)
        held.outputs[k] = weakref.ref(ctx)
        return held.results.pop(k)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:
        _check_no_batch((grad,))
        now = ctx.held.now()
        now.grads[ctx.k] = grad
        if grad is not None:
            ctx.held.check(ctx.k)
        for n, (node, _) in zip(ctx.leads_to, ctx.next_functions, strict=False):
            if goes_on_to(node):
                now.leads_to[n] = weakref.ref(node)
        return (None,) * (3 + len(ctx.next_functions))


class _Final(torch.autograd.Function):
    """Gradients made of inputs and of gradients of outputs, which cannot be differentiated again."""

    @staticmethod
    def forward(_ctx: Any, n_origins: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[n_origins:]

    @staticmethod
    @torch._disable_dynamo
    def backward(_ctx: Any, *_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise ORTModuleError("ORTModule cannot differentiate its gradients again; use .module for double backward")


_NODES: tuple[Any, ...] = (_Run, _Inputs, _Output)
_PLAINLY = {function: super(torch.autograd.Function, function).apply for function in _NODES}


def _final(results: Iterable[Tensor | None], origins: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """These results, which whoever wants to differentiate again finds to be made of something."""
    return tuple(_Final.apply(len(origins), *origins, *results)) if torch.is_grad_enabled() else tuple(results)


def _origins(inputs: Sequence[Tensor], in_grads: Mask, grads: Sequence[Tensor | None]) -> Sequence[Tensor]:
    if not torch.is_grad_enabled():
        return ()
    return [*itertools.compress(inputs, in_grads), *[g for g in grads if g is not None]]


def _bits(grads: dict[int, Tensor | None]) -> int:
    """Those of the outputs that have gradients."""
    return sum(1 << k for k, grad in grads.items() if grad is not None)


def _still_held(ctx: Any, call: Call | None, grads: Sequence[Tensor | None]) -> Call:
    """The call, if what a backward of these gradients needs is not freed; else raises as PyTorch does."""
    if call is None or call.is_freed(grads):
        _ = ctx.saved_tensors  # raises, if this node's are freed
        _raise_second_time()
    return call


def _raise_second_time() -> NoReturn:
    """Raise what PyTorch raises of a node whose saved tensors are freed."""
    with torch.enable_grad():
        once = torch.ones((), requires_grad=True).square()
    once.backward()
    once.backward()
    raise AssertionError


def _check_no_batch(grads: Sequence[Tensor | None]) -> None:
    batched = torch._C._are_functorch_transforms_active()
    for g in grads:
        batched = batched or (g is not None and torch._C._functorch.is_legacy_batchedtensor(g))
    if batched:
        raise ORTModuleError("ORTModule cannot run backward for a batch of gradients (vmap, is_grads_batched)")
