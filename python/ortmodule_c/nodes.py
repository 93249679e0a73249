"""The nodes of one call in autograd's graph.

One node does where there is one output, whose gradients go on all together. Of several outputs, autograd would go on,
from a backward for some, to inputs that others alone are computed of: it would call hooks there, on the other outputs,
and functions before them, with None. So there is then a node for each output, which takes its gradient, and one for
each set of inputs that the same outputs are computed of, which gives theirs; and more sets where somebody waits for
gradients, each of which is to go on before the next. Autograd calls the latest first of those that are ready, and so
those of outputs, made last, before those of inputs, of which the first one begins the backward for all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .asked import goes_on_to, inputs_asked_of
from .backwards import Mask, only
from .coming import Computed
from .errors import ORTModuleError

if TYPE_CHECKING:
    from .coming import Coming
    from .function import Call
    from .results import Results

Gradients = list[Tensor | None]

_AS_IT_IS: contextlib.nullcontext[None] = contextlib.nullcontext()
_FIRST = 1 << 20  # bytes of the gradients that go on first; as in DistributedDataParallel
_OF_HOOKS = 1 << 20  # and of those that go on together, where hooks wait for them


def connected(call: Call, results: Results) -> Results:
    """Run the forward of a call that trains; its results, as autograd knows them."""
    runner = call.runner
    call.together = going_on_early(itertools.compress(results.inputs, call.in_grads))
    if runner.is_one and call.together is None:
        results.outputs = list(_apply(_Run, call, *itertools.compress(results.inputs, call.in_grads)))
        return results
    with torch.no_grad():
        outputs = call.start()
    nodes = runner.nodes_of(call, results.inputs)
    held = _Held(call, nodes.sets, len(outputs))
    results.outputs = outputs
    marks = [_apply(_Inputs, held, n, *[results.inputs[i] for i in s.inputs]) for n, s in enumerate(nodes.sets)]
    for k, leads_to, made_of in nodes.outputs:
        into = [marks[n] for n in leads_to]
        if made_of:
            into += [results[j] for j in made_of]
        held.result = outputs[k]
        outputs[k] = _apply(_Output, held, k, *into)
    return results


def going_on_early(tensors: Iterable[Tensor]) -> int | None:
    """How many bytes of these tensors' gradients are to go on together, before the others; None: all of them at once.

    They are exchanged between processes, or something is done with each as soon as it has come to its tensor.
    """
    parallel = DistributedDataParallel._get_active_ddp_module()
    if parallel is not None and parallel.require_backward_grad_sync:
        return int(parallel.bucket_bytes_cap)
    hooks: Any = operator.attrgetter("_post_accumulate_grad_hooks")
    return _OF_HOOKS if any(map(hooks, tensors)) else None


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


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of the calls that want gradients of the same inputs.

    Attributes
    ----------
    sets
        Those of inputs.
    outputs
        The outputs that have a node, each with the sets that it leads to and the results that it is made of; in an
        order in which those come before it.
    """

    sets: Sequence[Set]
    outputs: Sequence[tuple[int, Sequence[int], Sequence[int]]]

    def divided(self, order: Sequence[int], nbytes: Sequence[int], together: int) -> Nodes:
        """These with more sets: a few inputs each, one after the other in the order in which their gradients are there.

        Parameters
        ----------
        order
            By input, a number that is larger the later its gradient comes.
        nbytes
            Of each input.
        together
            Bytes of gradients that a set has at least, but for the first one, which is to go on soon.
        """
        parts: list[tuple[int, Set, int]] = []  # when it is there, and of which set
        for n, s in enumerate(self.sets):
            least, rest = min(together, _FIRST), sorted(s.inputs, key=order.__getitem__)
            while rest:
                sizes = itertools.accumulate(nbytes[i] for i in rest)
                end = next((k for k, size in enumerate(sizes, 1) if size >= least), len(rest))
                parts.append((order[rest[end - 1]], Set(tuple(rest[:end]), s.outputs), n))
                least, rest = together, rest[end:]
        parts.sort(key=operator.itemgetter(0), reverse=True)  # autograd calls first what is made last
        of = [n for _, _, n in parts]
        outputs = [(k, [p for p, n in enumerate(of) if n in leads_to], made) for k, leads_to, made in self.outputs]
        return Nodes([s for _, s, _ in parts], outputs)


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
            asked = inputs_asked_of(ctx, call.planned.wanted)
            inputs, found, is_left = call.go_back(grads, asked, call.opened())
        assert isinstance(found, Computed)  # as this node gives all of them
        ctx.call = call if is_left else None
        return (None, *_final(itertools.compress(found.results, call.in_grads), _origins(inputs, call.in_grads, grads)))


class _Backward:
    """What one backward through the nodes of a call has come to so far; autograd holds it as long as it goes on.

    Attributes
    ----------
    grads
        By output.
    given, called
        The bits of the outputs that have one, and of those whose nodes were called.
    left
        The nodes of inputs that are still to be called, by set; None before anything was computed.
    results, made_of
        Gradients for those, computed or to come, and the bits of the outputs that they are made of.
    origins
        What they are computed of.
    is_complete
        Whether the nodes of all outputs had been called when those were computed.
    opened
        The call with what saved-tensor hooks gave back, if more may be computed.
    """

    __slots__ = (
        "__weakref__",
        "called",
        "given",
        "grads",
        "is_complete",
        "left",
        "made_of",
        "opened",
        "origins",
        "results",
    )

    def __init__(self, n_outputs: int) -> None:
        self.grads: Gradients = [None] * n_outputs
        self.given = self.called = self.made_of = 0
        self.left: dict[int, weakref.ref[Any]] | None = None
        self.results: Computed | Coming | None = None
        self.origins: Sequence[Tensor] = ()
        self.is_complete = False
        self.opened: Call | None = None

    def __call__(self) -> None:
        """Do nothing, at the end of the backward."""


class _Held:
    """A call as its nodes hold it, for as long as backwards may come, and those that are under way."""

    __slots__ = "_backwards", "_call", "_in_grads", "_n_outputs", "marks", "outputs", "result", "sets"

    def __init__(self, call: Call, sets: Sequence[Set], n_outputs: int) -> None:
        self.result: Any = None  # of the node of an output that is made now
        self.sets = sets
        # Nodes of sets and of outputs, which hold this.
        self.marks: list[weakref.ref[Any]] = []
        self.outputs: dict[int, weakref.ref[Any]] = {}
        self._in_grads = call.in_grads
        self._n_outputs = n_outputs
        self._call: Call | None = call
        self._backwards: dict[int, weakref.ref[_Backward]] = {}

    def take(self, k: int, grad: Tensor | None) -> None:
        """Take the gradient of an output, whose node is called."""
        now = self._now() or self._begun()
        now.called |= 1 << k
        if grad is None:
            return
        now.grads[k] = grad
        now.given |= 1 << k
        # Refuse to go on, if somebody wants the gradient of another one that this is made of.
        for watch in self._call.watching if self._call is not None else ():
            watch.check(only((k,), self._n_outputs))

    def _now(self) -> _Backward | None:
        """The backward that calls a node now, if it has called another one before."""
        found = self._backwards.get(torch._C._current_graph_task_id())
        return None if found is None else found()

    def _begun(self) -> _Backward:
        for number, old in [*self._backwards.items()]:
            if old() is None:  # it has ended, perhaps in an error
                self._backwards.pop(number, None)
        now = _Backward(self._n_outputs)
        torch.autograd.Variable._execution_engine.queue_callback(now)
        self._backwards[torch._C._current_graph_task_id()] = weakref.ref(now)
        return now

    def give(self, n: int, ctx: Any) -> tuple[Tensor | None, ...]:
        """The gradients of a set of inputs, whose node is called."""
        now, of_set = self._now(), self.sets[n]
        if now is None:
            raise ORTModuleError("ORTModule's gradients of inputs are computed from those of outputs only")
        if now.left is None or of_set.outputs & (now.made_of ^ now.given):
            self._compute(now, ctx)
        assert now.left is not None and now.results is not None
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
            results = now.results.take(of_set.inputs)
        del now.left[n]
        origins = now.origins
        if now.is_complete and not now.left:
            now.results.end()
            now.grads, now.results, now.origins = [], None, ()
        return _final(results, origins)

    def _compute(self, now: _Backward, ctx: Any) -> None:
        """What all nodes of inputs that are still to be called will give."""
        call = _still_held(ctx, self._call, now.grads)
        left = enumerate(self.marks) if now.left is None else now.left.items()
        now.left = {n: mark for n, mark in left if goes_on_to(mark())}
        asked: list[int] = []
        is_all = True
        for n, s in enumerate(self.sets):
            if s.outputs & now.given:
                of_set = inputs_asked_of(now.left[n](), s.inputs) if n in now.left else ()
                is_all = is_all and of_set is None
                asked += s.inputs if of_set is None else of_set
        now.is_complete = not self._others_follow(now)
        opened = now.opened or call.opened()
        now.opened = None if now.is_complete else opened
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
            inputs, now.results, is_left = call.go_back(
                now.grads, None if is_all else tuple(sorted(asked)), opened, others_follow=not now.is_complete
            )
        self._call = call if is_left else None
        now.origins = _origins(inputs, self._in_grads, now.grads)
        now.made_of = now.given

    def _others_follow(self, now: _Backward) -> bool:
        """Whether nodes of outputs are still to be called, as those of a queue of another device may be.

        One whose gradient is asked for is not called for that; one that leads to what is called is.
        """
        reached = functools.reduce(operator.or_, [self.sets[n].outputs for n in now.left or ()], 0) & ~now.called
        return any(reached >> k & 1 and goes_on_to(node()) for k, node in self.outputs.items())


class _Inputs(torch.autograd.Function):
    """The node of a set of inputs; what it returns is a mark, for nodes of outputs to lead to it."""

    @staticmethod
    def forward(ctx: Any, held: _Held, n: int, *tensors: Tensor) -> Tensor:
        ctx.held, ctx.n = held, n
        ctx.set_materialize_grads(False)
        held.marks.append(weakref.ref(ctx))
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
    def forward(ctx: Any, held: _Held, k: int, *marks_and_results: Tensor) -> Tensor:
        ctx.held, ctx.k, ctx.nothing = held, k, (None,) * (2 + len(marks_and_results))
        ctx.set_materialize_grads(False)
        held.outputs[k] = weakref.ref(ctx)
        result, held.result = held.result, None
        return result

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:
        _check_no_batch((grad,))
        ctx.held.take(ctx.k, grad)
        return ctx.nothing


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
