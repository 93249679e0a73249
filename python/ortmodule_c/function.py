"""The one `torch.autograd.Function` through which a whole module runs."""

import copy
import functools
import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import _C
from .aliases import Step
from .errors import NotExportable, NotRunnable, ORTModuleError
from .fallback import Host
from .lowering import Lowered
from .process import noting_lock, tracing_lock

Mask = tuple[bool, ...]
_GONE = torch.empty(0)  # in the place of a tensor that was given away


_MOST_BACKWARDS = 4  # that one plan serves


class Habits:
    """Which outputs gradients came back for, and whether several backwards ever followed one forward.

    What was met once is expected from then on: a forward that has to be repeated reads parameters as they are then.
    """

    def __init__(self, guess: Sequence[Mask]) -> None:
        self._guess = tuple(guess[:_MOST_BACKWARDS])
        self._met: dict[Mask, None] = {}  # the latest last
        self._several = len(guess) > 1

    def note(self, mask: Mask, several: bool) -> None:
        """A backward was asked for."""
        with noting_lock:
            self._several = several or (self._several and bool(self._met))
            self._met.pop(mask, None)
            self._met[mask] = None
            if len(self._met) > _MOST_BACKWARDS:
                del self._met[next(iter(self._met))]

    def expected(self) -> tuple[tuple[Mask, ...], bool]:
        """The backwards to be ready for, and whether several may follow one forward."""
        with noting_lock:
            return tuple(sorted(self._met)) or self._guess, self._several


class Runner:
    """Runs one graph: picks plans, draws seeds, remembers which output gradients came back.

    Parameters
    ----------
    session
        The C session of the graph.
    lowered
        What the graph's inputs and outputs mean.
    watcher
        Called with each plan before it runs.
    """

    def __init__(self, session: _C.Session, lowered: Lowered, watcher: Callable[[_C.Plan], None] | None = None) -> None:
        self.session = session
        self.watcher = watcher
        self.host: Host = lowered.host
        self.results = lowered.results
        self.updates = lowered.updates
        self.differentiable = lowered.differentiable
        self.ancestry = lowered.ancestry
        self.reaches = lowered.reaches
        self.saved = [self.ancestry.saved(self.ancestry.whole(r)) for r in lowered.reaches]
        self.depends = lowered.depends
        self.watched = [(k, through) for k, through in enumerate(lowered.watched) if through]
        self.n_results = len(lowered.differentiable) - len(lowered.updates)
        self.arena_bytes = 0  # of the largest plan used
        self.habits = Habits(_guesses(lowered.differentiable, lowered.ranks))
        self.foreseen = self.habits.expected()
        # What a repeated forward reads; with one gradient that can come back, it is never repeated.
        repeatable = sum(lowered.differentiable) > 1
        self.read_again = _either(lowered.depends, lowered.differentiable) if repeatable else 0

    def prepare(self, inputs: Sequence[Tensor]) -> "Call":
        """A call with the graph's inputs, planned; NotExportable if there can be no plan."""
        self._check_apart(inputs)
        grad = torch.is_grad_enabled()
        call = Call(self, inputs, tuple([grad and t.requires_grad for t in inputs]))
        if call.trains:
            if any([t.is_inference() for t in inputs]):  # what of them gradients need, PyTorch knows
                raise NotRunnable("an inference tensor is given to what trains")
            # A checkpoint that runs forward again within a backward has to find the tensors of the first time.
            if not _hooked() or torch._C._current_graph_task_id() < 0:
                self.foreseen = self.habits.expected()
            call.plan_for(*self.foreseen)
        else:
            call.plan_for(())
        return call

    def run(self, call: "Call") -> list[Tensor]:
        """The module's results, connected to autograd."""
        inputs = call.inputs
        if call.trains:
            outputs = _Run.apply(call, *[t for t, g in zip(inputs, call.in_grads, strict=True) if g])
        else:
            with torch.no_grad():
                outputs = call.forward()
        tensors = [inputs[i] if source == "input" else outputs[i] for source, i, _ in self.results]
        results = [_aliased(t, steps, inputs) for t, (_, _, steps) in zip(tensors, self.results, strict=True)]
        if call.trains:
            call.watching = [_Watch(results[k], through) for k, through in self.watched if results[k].requires_grad]
        return results

    def _check_apart(self, inputs: Sequence[Tensor]) -> None:
        """NotExportable if an input that is to be changed shares memory with another, or has elements that do."""
        if not self.updates:
            return
        memories = Counter(map(_memory, inputs))
        for t in (inputs[i] for i in self.updates):
            if memories[_memory(t)] > 1 or _overlaps(t):
                raise NotExportable(
                    f"the forward changes a tensor of shape {tuple(t.shape)} that shares memory with another"
                )


def _guesses(differentiable: Sequence[bool], ranks: Sequence[int]) -> list[Mask]:
    """The backwards that a first step may have: of each loss and of all, and of all outputs if the first is no loss."""
    n = len(differentiable)
    losses = [i for i in range(n) if differentiable[i] and ranks[i] == 0]
    sets = [[i] for i in losses[: _MOST_BACKWARDS - 1]] + ([losses] if len(losses) > 1 else [])
    if True not in differentiable or not losses or losses[0] != differentiable.index(True):
        sets = [[i for i in range(n) if differentiable[i]], *sets]
    return [tuple([i in of for i in range(n)]) for of in sets[:_MOST_BACKWARDS]]


class _Watch:
    """Sees whether somebody wants the gradient of a result from which autograd goes through that of others.

    All outputs come from one node: what is asked for would be without the part that comes from the other outputs.
    """

    def __init__(self, result: Tensor, through: int) -> None:
        self._through = through
        self._result = weakref.ref(result)  # it holds the node that holds this
        result.register_hook(lambda grad: grad).remove()
        self._hooks = result._backward_hooks  # they stay when the result goes

    def check(self, mask: Mask) -> None:
        """ORTModuleError if a backward for these outputs would not give what is asked for."""
        result = self._result()
        asked = self._hooks or (result is not None and result.retains_grad)
        if asked and any(m and self._through >> i & 1 for i, m in enumerate(mask)):
            raise ORTModuleError(
                "ORTModule cannot give the gradient of an output, to a hook or for retain_grad(), where other outputs "
                "are computed from it; use .module for that"
            )


@dataclass(eq=False)
class Call:
    """One forward, and what its backwards or repeating it take."""

    runner: Runner
    inputs: Sequence[Tensor]
    in_grads: Mask
    dense: list[Tensor] = field(init=False)  # as the graph read them
    plan: _C.Plan = field(init=False)
    run: _C.Run | None = None
    outputs: dict[int, Tensor] = field(init=False)  # that backwards read
    versions: list[int] = field(init=False)  # of the inputs
    output_versions: dict[int, int] = field(init=False)
    seed: int = 0
    host_state: Tensor | None = None
    stowed: list[int] | None = None  # the inputs that went through saved-tensor hooks, if any are active
    packed: Tensor | None = None  # what the run holds, back from them
    retain: bool = False  # the run serves several backwards
    begun: bool = False  # there was a backward
    freed: int = 0  # what saved tensors for backwards that did not retain them
    watching: list[_Watch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dense = [_dense(t) for t in self.inputs]

    @property
    def trains(self) -> bool:
        """Whether autograd may come back for gradients."""
        return any(self.in_grads) and any(self.runner.differentiable)

    def plan_for(self, out_grads: Sequence[Mask], retain: bool = False) -> None:
        """Choose the plan and, at the first time, draw the seed; NotExportable if there can be none."""
        self.retain = retain
        try:
            with tracing_lock:
                self.plan = self.runner.session.plan(self.dense, self.in_grads, *out_grads, retain=retain)
        except (NotImplementedError, ValueError) as error:
            raise NotExportable(str(error)) from error
        if self.runner.watcher is not None:
            self.runner.watcher(self.plan)
        if self.plan.random and not self.seed:
            self.seed = int(torch.randint(1, 2**63 - 1, ()))
        if self.runner.host.random and self.host_state is None:
            self.host_state = torch.get_rng_state()

    def forward(self) -> list[Tensor]:
        """Run forward and bring the module's buffers up to date; all outputs of the graph."""
        runner = self.runner
        outputs, self.run = self.plan.forward(self.dense, self.seed)
        runner.arena_bytes = max(runner.arena_bytes, self.plan.arena_bytes)
        self.versions = [_version(t) for t in self.inputs]
        if runner.updates:
            read = {i for inputs in self.plan.reads_inputs for i in inputs}
            for i in runner.updates:
                if i in read or runner.read_again >> i & 1:  # of backward or of a repeated forward
                    self.dense[i] = self.dense[i].clone()
            torch._foreach_copy_([self.inputs[i] for i in runner.updates], outputs[runner.n_results :])
        # Aliases: the outputs themselves will hold the node that holds this call.
        self.outputs = {i: outputs[i].detach() for of in self.plan.reads_outputs for i in of}
        self.output_versions = {i: _version(t) for i, t in self.outputs.items()}
        return outputs

    def stow(self, ctx: Any, outputs: Sequence[Tensor]) -> None:
        """Give what backward needs to saved-tensor hooks, which may keep, move or drop it."""
        assert self.run is not None
        read = {i for of in self.plan.reads_inputs for i in of}
        self.stowed = [i for i, t in enumerate(self.inputs) if i in read or not t.is_leaf]
        updated = set(self.runner.updates)
        tensors = [(self.dense if i in updated else self.inputs)[i] for i in self.stowed]
        ctx.save_for_backward(self.run.pack(), *tensors, *[outputs[i] for i in self.outputs])
        gone = set(self.stowed)
        self.inputs = [_GONE if i in gone else t for i, t in enumerate(self.inputs)]
        self.dense = [_GONE if i in gone else t for i, t in enumerate(self.dense)]
        self.outputs = dict.fromkeys(self.outputs, _GONE)

    def unstowed(self, packed: Tensor, *saved: Tensor) -> "Call":
        """With what the hooks gave back, which they have checked for changes."""
        assert self.stowed is not None
        call = copy.copy(self)
        call.packed, call.inputs, call.dense = packed, list(self.inputs), list(self.dense)
        call.versions = list(self.versions)
        for i, t in zip(self.stowed, saved, strict=False):
            call.inputs[i], call.dense[i], call.versions[i] = t, _dense(t), _version(t)
        call.outputs = dict(zip(self.outputs, saved[len(self.stowed) :], strict=True))
        call.output_versions = {i: _version(t) for i, t in call.outputs.items()}
        return call

    def release(self, mask: Mask) -> "Call | None":
        """Let go of what a backward that did not retain it has read; what serves other backwards, or None."""
        self.freed |= _either(self.runner.saved, mask)
        alive = [
            d and not saved & self.freed for d, saved in zip(self.runner.differentiable, self.runner.saved, strict=True)
        ]
        if self.stowed is not None or not any(alive):
            return None
        if not self.retain and self.run is not None:  # nobody was seen to come back: the arena is freed
            if self.plan.forward_bytes:
                self.run = None
            else:
                self.run.pack()
        return self

    def backward(self, mask: Mask, grads: Sequence[Tensor | None], keep: bool) -> list[Tensor | None]:
        """Gradients of the graph's inputs, None where there is none."""
        plan = self.plan
        if mask not in plan.out_grads or self.run is None:
            depends = _either(self.runner.depends, mask)
            self._check([i for i in range(len(self.inputs)) if depends >> i & 1], ())
            return self._again(mask, grads)
        number = plan.out_grads.index(mask)
        self._check(plan.reads_inputs[number], plan.reads_outputs[number])
        outputs = [self.outputs.get(i) for i in range(len(grads))]
        return plan.backward(self.run, self.dense, outputs, grads, keep, self.packed)

    def _check(self, inputs: Iterable[int], outputs: Iterable[int]) -> None:
        """Raise as PyTorch does if what backward reads was changed in place since."""
        updated = set(self.runner.updates)  # of these a copy is read
        pairs = [(self.inputs[i], self.versions[i]) for i in inputs if i not in updated]
        pairs += [(self.outputs[i], self.output_versions[i]) for i in outputs]
        for t, version in pairs:
            if _version(t) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{t.type()} {list(t.shape)}] is at version {t._version}; expected version {version} instead."
                )

    def _again(self, mask: Mask, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Repeat the forward, from the buffers it began with, for a plan that serves these output gradients."""
        call = copy.copy(self)
        call.plan_for([mask])
        with torch.random.fork_rng(devices=[], enabled=self.host_state is not None):
            if self.host_state is not None:
                torch.set_rng_state(self.host_state)
            outputs, run = call.plan.forward(call.dense, call.seed)
        assert run is not None
        return call.plan.backward(run, call.dense, outputs, grads)


class _Run(torch.autograd.Function):
    """Forward and backward of a whole graph.

    What backward needs is held by the call, and let go of as autograd lets go of saved tensors. Only where
    saved-tensor hooks are active it is saved as tensors.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *_tensors: Tensor) -> tuple[Tensor, ...]:
        runner = call.runner
        outputs = call.forward()
        results = outputs[: runner.n_results]
        if _hooked():
            call.stow(ctx, outputs)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o, d in zip(results, runner.differentiable, strict=False) if not d])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        functorch = torch._C._functorch
        if torch._C._are_functorch_transforms_active() or any(
            functorch.is_legacy_batchedtensor(g) for g in grads if g is not None
        ):
            raise ORTModuleError("ORTModule cannot run backward for a batch of gradients (vmap, is_grads_batched)")
        create_graph = torch.is_grad_enabled()
        with torch.no_grad():
            inputs, results = _Run._backward(ctx, grads)
        if create_graph:
            origins = [*inputs, *[g for g in grads if g is not None]]
            results = _Final.apply(len(origins), *origins, *results)
        return (None, *results)

    @staticmethod
    def _backward(ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[list[Tensor], list[Tensor | None]]:
        """The inputs that want a gradient, and their gradients."""
        held: Call | None = ctx.call
        given: list[Tensor | None] = [None if g is None else _dense(g) for g in grads]
        if held is None or held.stowed is not None or held.freed & _either(held.runner.saved, _given(given)):
            saved = ctx.saved_tensors  # raises where they are freed
        assert held is not None
        call = held if held.stowed is None else held.unstowed(*saved)
        runner = held.runner
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        wanted = [t for t, g in zip(call.inputs, call.in_grads, strict=True) if g]
        given += [None] * len(runner.updates)
        mask = _given(given)
        results: list[Tensor | None] = [None] * len(call.inputs)
        if any(mask):
            for watch in held.watching:
                watch.check(mask)
            runner.habits.note(mask, keep or held.begun)
            with runner.host.noting() as none:
                results = call.backward(mask, given, keep)
            _fill(call, runner.ancestry.inputs(_either(runner.reaches, mask), none), results)
            held.begun = True
            if not keep:
                ctx.call = held.release(mask)
        return wanted, [g for g, is_wanted in zip(results, call.in_grads, strict=True) if is_wanted]


def _given(grads: Sequence[Tensor | None]) -> Mask:
    return tuple([g is not None for g in grads])


def _either(bits: Sequence[int], chosen: Sequence[bool]) -> int:
    """The bits of the chosen ones together."""
    return functools.reduce(operator.or_, itertools.compress(bits, chosen), 0)


def _fill(call: Call, reached: int, results: list[Tensor | None]) -> None:
    """Give every input that autograd reaches a gradient, and no other one."""
    for i in [i for i, is_wanted in enumerate(call.in_grads) if is_wanted]:
        if not reached >> i & 1:
            results[i] = None
        elif results[i] is None:  # what led there was found to be 0
            results[i] = torch.zeros_like(call.inputs[i])


class _Final(torch.autograd.Function):
    """Gradients made of inputs and of gradients of outputs, which cannot be differentiated again."""

    @staticmethod
    def forward(_ctx: Any, n_origins: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[n_origins:]

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise ORTModuleError("ORTModule cannot differentiate its gradients again; use .module for double backward")


def _hooked() -> bool:
    """Whether saved-tensor hooks are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _memory(t: Tensor) -> int:
    """Where a tensor lies; of one without memory, what changes in place are counted with."""
    storage = t.untyped_storage()
    return storage.data_ptr() or storage._cdata


def _overlaps(t: Tensor) -> bool:
    """Whether some elements are repeated in memory."""
    return any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True))


def _aliased(t: Any, steps: Sequence[Step], inputs: Sequence[Tensor]) -> Any:
    for step in steps:
        t = step(t, inputs)
    return t


def _dense(t: Tensor) -> Tensor:
    """The elements in row-major order, as they are and not as views with a pending sign would have them."""
    return t if t.is_contiguous() and not t.is_neg() else t.resolve_neg().contiguous()
